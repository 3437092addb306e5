"""What a start that fails leaves behind: one line, exit code 2, no process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openinfer.models import find_model_dir

DEADLINE_S = 30.0


def serve(*flags: str, model: str = "tiny") -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "openinfer.commands.main", "serve", "--model", model, "--port", "0", *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=sys.platform != "win32"
    )


def test_a_start_without_tokenizer_ends_with_one_line_although_the_engine_has_started(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_model_dir("tiny"), folder)
    (folder / "tokenizer.json").unlink()
    with serve(model=str(folder)) as process:
        out, log = process.communicate(timeout=DEADLINE_S)  # which ends when no process has the pipes any more
    assert process.returncode == 2
    assert out == ""
    assert sum("no tokenizer.json" in line for line in log.splitlines()) == 1
    assert "Traceback" not in log


def test_a_wrong_parser_name_ends_a_start_with_one_line() -> None:
    with serve("--tool-parser", "hermse") as process:
        _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    (told,) = [line for line in log.splitlines() if "openinfer.engine: the engine started" not in line]
    assert told.startswith("openinfer serve: no installed package offers 'hermse'")


def test_an_engine_whose_parent_is_gone_ends_in_silence() -> None:
    """As it happens when the frontend finds a mistake before the engine's process has said where it listens."""
    reading, writing = os.pipe()
    command = [sys.executable, "-P", "-m", "openinfer_engine.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        os.close(reading)
        launch = {"token": "secret", "spec": {}, "link": "tcp"}
        _, log = process.communicate(json.dumps(launch).encode() + b"\n", timeout=DEADLINE_S)
    assert (process.returncode, log) == (1, b"")


def engine_imports(pid: int) -> bool:
    """Whether the engine's process, a child of this one, has begun to import."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return any(
        b"openinfer_engine.child" in Path(f"/proc/{child}/cmdline").read_bytes()
        and "numpy" in Path(f"/proc/{child}/maps").read_text()
        for child in children
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finding the engine's process needs Linux' /proc")
def test_ctrl_c_while_the_engine_starts_ends_all_processes_in_silence() -> None:
    with serve() as process:
        deadline = time.monotonic() + DEADLINE_S
        while not engine_imports(process.pid):
            assert time.monotonic() < deadline
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the engine's process gets it too
        _, log = process.communicate(timeout=DEADLINE_S)
    # A shell says 130 either way. CPython run with `-m` remembers a KeyboardInterrupt that comes in the middle of
    # `exec`, by which dataclasses are made at import, and ends by the signal although the exception was caught.
    assert process.returncode in {130, -signal.SIGINT}
    assert "Traceback" not in log
