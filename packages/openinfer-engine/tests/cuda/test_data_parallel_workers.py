"""Data-parallel ranks of `CudaWorker`s, without a GPU: their kernels run on the host, all else is the workers' own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("data_parallel_workers_on_host.py")


def test_ranks_replay_one_graph_and_say_what_ranks_on_a_cpu_say() -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the host with")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "equal\n"
