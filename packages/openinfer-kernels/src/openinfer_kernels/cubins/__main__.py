"""`python -m openinfer_kernels.cubins`: compiles all CUDA sources, for a wheel, for a cache, or as a check.

What the folder has under its key is not compiled again, unless a compiler is named: keys do not tell compilers apart.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openinfer_kernels.cubins.cache import build_cubins, cache_dir, cubin_in
from openinfer_kernels.cubins.compilers import Nvcc, Nvrtc, find_compiler
from openinfer_kernels.cubins.sources import ARCHITECTURES, sources
from openinfer_kernels.errors import KernelBuildError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 and prints the compiler's message where a source is refused."""
    parser = argparse.ArgumentParser(prog="python -m openinfer_kernels.cubins", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="folder for the cubins (default: the cache)")
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES, help="may be repeated (default: all)")
    parser.add_argument("--compiler", choices=("nvcc", "nvrtc"), help="default: nvcc where there is one, else NVRTC")
    options = parser.parse_args(argv)
    find = {"nvcc": Nvcc.find, "nvrtc": Nvrtc.find, None: find_compiler}[options.compiler]
    try:
        compiler = find()
        if compiler is None:
            raise KernelBuildError(f"{options.compiler} is not on this machine")
        for architecture in options.architecture or ARCHITECTURES:
            target: Path = options.out or cache_dir() / "cubins"
            chosen = sources(architecture)
            if options.compiler is None:
                chosen = [each for each in chosen if cubin_in(target, each, architecture) is None]
            if chosen:
                build_cubins(chosen, architecture, target=target, compiler=compiler)
    except KernelBuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
