"""Cubins: our CUDA sources, compiled. Found in the wheel, else in a cache, else compiled once into the cache.

    csrc/ROOM/NAME.cu ──► NAME.sm_90a.KEY.CONTENT.cubin   KEY: digest of the source, its headers, flags, architecture
                                                          CONTENT: digest of the file itself

    in a wheel      openinfer_kernels/cubins/prebuilt/    (a wheel built with OPENINFER_BUILD_CUBINS=1)
    in the cache    $OPENINFER_CACHE_DIR/cubins/, else ~/.cache/openinfer/cubins/

A file whose key is another one's belongs to other sources and is never read. Nothing is compiled at a request: the
CUDA module asks for all its cubins when it is made. Importing this needs the standard library alone, so that a build
hook can; `python -m openinfer_kernels.cubins` compiles everything, for wheels and for CI.
"""

from openinfer_kernels.cubins.cache import build_cubins, cache_dir, find_cubins, require_cubins
from openinfer_kernels.cubins.compilers import Compiler, Nvcc, Nvrtc, find_compiler
from openinfer_kernels.cubins.sources import ARCHITECTURES, Source, architecture_of, sources

__all__ = [
    "ARCHITECTURES",
    "Compiler",
    "Nvcc",
    "Nvrtc",
    "Source",
    "architecture_of",
    "build_cubins",
    "cache_dir",
    "find_compiler",
    "find_cubins",
    "require_cubins",
    "sources",
]
