"""Runs the GPU tests of openinfer-kernels on a machine with a GPU, and prints a short summary.

    python3 tools/device/check_kernels.py [PYTEST ARGUMENT ...]

Uses that machine's own CuPy, cuda-bindings, ml_dtypes and pytest; wheels carried in `.whl/` (nvmath-python) are
installed beside them, into a folder of their own. Nothing may be skipped for want of a GPU: that is a failure here.
"""

import glob
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages" / "openinfer-kernels"
SITE = Path(tempfile.gettempdir()) / "openinfer-site"

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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SITE), str(PACKAGE / "src")])}
    install_wheels()
    facts = subprocess.run([sys.executable, "-c", FACTS], env=environment, cwd=ROOT, check=False)
    if facts.returncode:
        print("check_kernels: FAILED: the CUDA operators cannot be made")
        return 1
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", str(PACKAGE / "tests"), "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *sys.argv[1:]], env=environment, cwd=ROOT, check=False)
    print(f"check_kernels: {'passed' if done.returncode == 0 else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return done.returncode


def install_wheels() -> None:
    wheels = glob.glob(str(ROOT / ".whl" / "*.whl"))
    if wheels and not SITE.exists():
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(SITE)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)


if __name__ == "__main__":
    sys.exit(main())
