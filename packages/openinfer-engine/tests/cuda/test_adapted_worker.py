"""`CudaWorker` with adapters, without a GPU: kernels of steps run on the host, all else is the worker's own code."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("adapted_worker_on_host.py")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_adapters_are_what_they_are_on_a_cpu_and_cost_batches_without_them_nothing(family: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the host with")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), family], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "equal\n"
