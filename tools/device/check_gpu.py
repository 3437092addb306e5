"""Runs every test that needs a GPU, of all packages, on a machine with one; says what ran, and what was skipped.

    python3 tools/device/check_gpu.py [--processes N] [PYTEST ARGUMENT ...]

With `--processes` N run at once (pytest-xdist), but for the tests marked `whole_gpu`, which follow alone.
Uses that machine's own Python, CuPy, cuda-bindings, ml_dtypes, hypothesis and pytest; nothing has to be installed (see
`source_packages.py`). Nothing may be skipped for want of a GPU: that is a failure here.
"""

import argparse
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
    parser = argparse.ArgumentParser(description="Runs every test that needs a GPU.")
    parser.add_argument("--processes", type=int, default=1)
    options, given = parser.parse_known_args()
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", *marked(), "-q", "-p", "no:cacheprovider", *given]
    # xdist refuses to run next to pytest-benchmark's timings
    spread = ["-p", "no:benchmark", "-n", str(options.processes), "--dist", "loadfile"] if options.processes > 1 else []
    runs = [[*command, *spread, "-m", "gpu and not whole_gpu"], [*command, "-m", "gpu and whole_gpu"]]
    codes = [subprocess.run(run, env=variables, cwd=ROOT, check=False).returncode for run in runs]
    passed = not any(codes)
    print(f"check_gpu: {'passed' if passed else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return 0 if passed else 1


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
