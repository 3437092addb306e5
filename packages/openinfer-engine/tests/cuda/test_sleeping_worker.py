"""`CudaWorker` that sleeps, without a GPU: its kernels run on the host, and what it asks of its memory is noted."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sleeping_worker_on_host.py")


def test_worker_answers_after_its_memory_was_away_and_runs_nothing_without_weights() -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the host with")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "equal\n"
