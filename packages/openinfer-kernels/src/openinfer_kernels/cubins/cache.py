"""Where cubins lie, and compiling those that are nowhere yet."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from openinfer_kernels.cubins.compilers import Compiler, find_compiler
from openinfer_kernels.cubins.progress import Progress
from openinfer_kernels.cubins.sources import Source, sources

PREBUILT = Path(__file__).resolve().parent / "prebuilt"
"""What the wheel brought."""


def cache_dir() -> Path:
    """`OPENINFER_CACHE_DIR`, else `openinfer` in the user's cache folder; it may not exist yet."""
    given = os.environ.get("OPENINFER_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openinfer"


def require_cubins(architecture: str, *, compiler: Callable[[], Compiler] = find_compiler) -> dict[str, Path]:
    """Stem -> cubin of every source for `architecture`; compiles what neither wheel nor cache has.

    Args:
        architecture: `sm_90a` and the like.
        compiler: finds one; not called where nothing is missing.

    Raises:
        KernelBuildError: there is no compiler, or it refused a source.
    """
    found = find_cubins(architecture)
    missing = [source for source in sources(architecture) if source.stem not in found]
    if missing:
        build_cubins(missing, architecture, target=_cubins_of_cache(), compiler=compiler())
        found = find_cubins(architecture)
    return found


def find_cubins(architecture: str) -> dict[str, Path]:
    """Stem -> cubin of every source that the wheel or the cache has for `architecture`; compiles nothing."""
    found: dict[str, Path] = {}
    for source in sources(architecture):
        name = source.cubin_name(architecture)
        place = next((each for each in (PREBUILT, _cubins_of_cache()) if (each / name).is_file()), None)
        if place is not None:
            found[source.stem] = place / name
    return found


def _cubins_of_cache() -> Path:
    return cache_dir() / "cubins"


def build_cubins(chosen: Sequence[Source], architecture: str, *, target: Path, compiler: Compiler) -> None:
    """Compiles sources into the folder `target`, several at a time, with a line of progress on the terminal.

    Each file appears under its name only when it is whole, so that processes may build the same ones at once.

    Raises:
        KernelBuildError: the compiler refused a source; the others that had begun are finished first.
    """
    target.mkdir(parents=True, exist_ok=True)
    progress = Progress(f"compiling CUDA kernels for {architecture} ({compiler.name})", total=len(chosen))
    with ThreadPoolExecutor(max(1, min(len(chosen), os.cpu_count() or 1))) as threads, progress:
        started = {threads.submit(_build, source, architecture, target, compiler): source for source in chosen}
        for done in as_completed(started):
            progress.step(f"{started[done].stem} {done.result():.1f} s")


def _build(source: Source, architecture: str, target: Path, compiler: Compiler) -> float:
    began = time.perf_counter()
    cubin = compiler.compile(source, architecture)
    with tempfile.NamedTemporaryFile(dir=target, prefix=".partial-", delete=False) as partial:
        partial.write(cubin)
    Path(partial.name).chmod(0o644)
    Path(partial.name).replace(target / source.cubin_name(architecture))
    return time.perf_counter() - began
