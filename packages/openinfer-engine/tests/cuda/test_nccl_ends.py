"""The end of a group over NCCL, without a GPU: nothing of it is left to run into the interpreter's end."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("nccl_ends_on_host.py")


def test_nothing_of_a_broken_group_outlives_its_close() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ended\n"
