"""Runs every test that needs a GPU, of all packages, on a machine with one; says what ran, and what was skipped.

    python3 tools/device/check_gpu.py [PYTEST ARGUMENT ...]

Uses that machine's own Python, CuPy, cuda-bindings, ml_dtypes, hypothesis and pytest; nothing has to be installed (see
`source_packages.py`). Nothing may be skipped for want of a GPU: that is a failure here.
"""

import subprocess
import sys
import time

from source_packages import ROOT, environment

MARK = "mark.gpu"

FACTS = """
import time
began = time.perf_counter()
from openinfer_kernels.cuda import CudaOps
imported = time.perf_counter()
ops = CudaOps()
opened = time.perf_counter()
CudaOps().close()
d = ops.device
print(f"{d.name}, {d.architecture}, {d.num_multiprocessors} multiprocessors, L2 {d.l2_bytes >> 20} MiB")
print(f"import {imported - began:.2f} s, CudaOps {opened - imported:.2f} s, again {time.perf_counter() - opened:.2f} s")
"""


def main() -> int:
    variables = environment()
    if subprocess.run([sys.executable, "-c", FACTS], env=variables, cwd=ROOT, check=False).returncode:
        print("check_gpu: FAILED: the CUDA operators cannot be made")
        return 1
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", *marked(), "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *sys.argv[1:]], env=variables, cwd=ROOT, check=False)
    print(f"check_gpu: {'passed' if done.returncode == 0 else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return done.returncode


def marked() -> list[str]:
    """Files with tests that need a GPU; a whole folder where its `conftest.py` marks what a fixture is made of."""
    found: list[str] = []
    for folder in sorted([*ROOT.glob("packages/*/tests"), *ROOT.glob("examples/*/tests")]):
        conftest = folder / "conftest.py"
        if conftest.exists() and MARK in conftest.read_text("utf-8"):
            found.append(str(folder))
        else:
            found += [str(file) for file in sorted(folder.rglob("test_*.py")) if MARK in file.read_text("utf-8")]
    return found


if __name__ == "__main__":
    sys.exit(main())
