"""`CudaWorker` with several block tables, without a GPU: its kernels run on the host, all else is the worker's own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("windowed_worker_on_host.py")


def test_every_layer_sees_its_own_tokens_in_blocks_that_are_used_again() -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the host with")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "equal\n"
