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
    wanted = {source: source.cubin_name(architecture) for source in sources(architecture)}
    cache = cache_dir() / "cubins"
    missing = [
        source for source, name in wanted.items() if not any((place / name).is_file() for place in (PREBUILT, cache))
    ]
    if missing:
        build_cubins(missing, architecture, target=cache, compiler=compiler())
    return {
        source.stem: next(place / name for place in (PREBUILT, cache) if (place / name).is_file())
        for source, name in wanted.items()
    }


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
    """Seconds that it took."""
    began = time.perf_counter()
    cubin = compiler.compile(source, architecture)
    with tempfile.NamedTemporaryFile(dir=target, prefix=".partial-", delete=False) as partial:
        partial.write(cubin)
    Path(partial.name).chmod(0o644)
    Path(partial.name).replace(target / source.cubin_name(architecture))
    return time.perf_counter() - began
