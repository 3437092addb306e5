"""An engine process whose parent is killed ends by itself, whatever it is doing, and leaves nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.parametrize("behaviour", ["serve", "build forever", "hang in a step"])
def test_engine_whose_parent_is_killed_ends(behaviour: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CHILDREN), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(CHILDREN / "parent.py"), behaviour]
    # The engine inherits the parent's standard error: its end of file says that both are gone.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == b"ready\n", parent.stderr.read()
        assert len(list(tmp_path.iterdir())) == 1
        parent.kill()
        errors = parent.communicate(timeout=60)[1]
    assert b"Fatal Python error" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", [b"", b'{"token": "secr'])
def test_engine_whose_parent_ends_before_it_has_said_what_to_build_ends_in_silence(said: bytes) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CHILDREN)}
    command = [sys.executable, "-P", "-m", "faulty_engine"]
    ended = subprocess.run(command, input=said, capture_output=True, env=environment, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")
