"""Compiles the kernels that an older GPU has so that a newer one runs them: `__CUDA_ARCH__` is the older one's.

    python3 tools/device/older_gpu.py FOLDER [--capability 8.0] [--runs-on 9.0] [--jobs N]
    OPENINFER_TEST_AS_CAPABILITY=8.0 OPENINFER_TEST_CUBINS=FOLDER pytest packages/openinfer-kernels/tests -m gpu
    python3 tools/device/sanitize.py memcheck --as-capability 8.0 --cubins FOLDER

Writes FOLDER/STEM.cubin for each source that is for the older GPU. Needs nvcc.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from source_packages import folders

sys.path[:0] = folders()

from openinfer_kernels.cubins import architecture_of, sources  # noqa: E402
from openinfer_kernels.cubins.sources import FLAGS, Source  # noqa: E402


def compiled(source: Source, folder: Path, virtual: str, real: str) -> str:
    """The stem of a source that has been compiled; raises `SystemExit` with the compiler's message."""
    command = ["nvcc", "-cubin", "-O3", f"-gencode=arch={virtual},code={real}", *FLAGS]
    command += ["-I", str(source.root), "-o", str(folder / f"{source.stem}.cubin"), str(source.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{source.stem}: {done.stderr[:2000]}")
    return source.stem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capability", default="8.0", help="of the older GPU")
    parser.add_argument("--runs-on", default="9.0", help="of the GPU that is here")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    major, minor = map(int, given.capability.split("."))
    virtual, real = f"compute_{major}{minor}", "sm_" + given.runs_on.replace(".", "")
    with ThreadPoolExecutor(given.jobs) as pool:
        made = [
            pool.submit(compiled, source, given.folder, virtual, real)
            for source in sources(architecture_of(major, minor))
        ]
        print(f"{len([each.result() for each in made])} sources for {virtual}, on {real}")


if __name__ == "__main__":
    main()
