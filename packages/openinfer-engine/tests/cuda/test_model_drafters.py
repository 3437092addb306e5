"""`CudaWorker` with drafters that are models, without a GPU: they draft what they do on a CPU, whatever is accepted."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("model_drafters_on_host.py")


@pytest.mark.parametrize(
    "drafter", ["eagle3", "dflash", "dspark", "mtp", "draft-model", "deepseek-mtp", "deepseek-v4-mtp"]
)
def test_a_drafter_drafts_what_it_drafts_on_a_cpu(drafter: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the host with")
    command = [sys.executable, str(SCRIPT), drafter]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "equal\n"
