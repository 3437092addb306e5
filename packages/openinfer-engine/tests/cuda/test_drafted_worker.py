"""`CudaWorker` with a drafter, without a GPU: its kernels run on the host, and all else is the worker's own code."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("drafted_worker_on_host.py")


@pytest.mark.parametrize(("family", "ranks"), [("qwen3", 1), ("qwen3_5", 1), ("qwen3", 2)])
def test_drafts_change_nothing_that_a_request_gets(family: str, ranks: int) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the host with")
    command = [sys.executable, str(SCRIPT), family, str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "equal\n"
