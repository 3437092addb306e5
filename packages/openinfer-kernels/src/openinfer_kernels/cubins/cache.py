"""Where cubins lie, and compiling those that are nowhere yet.

`STEM.ARCHITECTURE.KEY.CONTENT.cubin` has the digest of its own bytes in its name: a file that a fault has spoilt is
compiled anew, and two compilers that make different bytes never replace each other's file. A digest holds off no
forger, so a cache that others may write to is refused.
"""

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path

from openinfer_kernels.cubins.compilers import Compiler, find_compiler
from openinfer_kernels.cubins.progress import Progress
from openinfer_kernels.cubins.sources import DIGEST_BYTES, Source, sources
from openinfer_kernels.errors import KernelBuildError

_log = logging.getLogger("openinfer.kernels")
_ROOT = 0
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

    Of several processes that miss something one compiles, and the others wait for it: ranks and replicas start at once.

    Args:
        architecture: `sm_90a` and the like.
        compiler: finds one; not called where nothing is missing.

    Raises:
        KernelBuildError: there is no compiler, it refused a source, or others may write to the cache.
    """
    found = find_cubins(architecture)
    if not _missing(found, architecture):
        return found
    target = _cubins_of_cache()
    with _locked(target):
        missing = _missing(find_cubins(architecture), architecture)
        if missing:
            build_cubins(missing, architecture, target=target, compiler=compiler())
    return find_cubins(architecture)


def find_cubins(architecture: str) -> dict[str, Path]:
    """Stem -> cubin of every source that the wheel or the cache has for `architecture`; compiles nothing.

    Raises:
        KernelBuildError: others may write to the cache.
    """
    found: dict[str, Path] = {}
    folders = (PREBUILT, _cubins_of_cache())
    for source in sources(architecture):
        candidates = (cubin_in(folder, source, architecture) for folder in folders)
        path = next((each for each in candidates if each is not None), None)
        if path is not None:
            found[source.stem] = path
    return found


def cubin_in(folder: Path, source: Source, architecture: str) -> Path | None:
    """The cubin of a source in a folder; one whose bytes are not those that its name says is left out, and said."""
    key = source.cubin_key(architecture)
    for path in sorted(folder.glob(f"{key}.*.cubin")):
        if path.name == _cubin_name(key, path.read_bytes()):
            return path
        _log.warning("%s is not what was compiled, and is left alone: its bytes do not fit its name", path)
    return None


def _missing(found: Mapping[str, Path], architecture: str) -> list[Source]:
    return [source for source in sources(architecture) if source.stem not in found]


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Makes the folder, and lets one process in at a time; a process that ends has left."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: each compiles for itself, to the same files
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cubin_name(key: str, cubin: bytes) -> str:
    return f"{key}.{hashlib.blake2b(cubin, digest_size=DIGEST_BYTES).hexdigest()}.cubin"


def _cubins_of_cache() -> Path:
    """The folder of the cache, if there is one yet that this user alone fills.

    Raises:
        KernelBuildError: another user may have written what is in it.
    """
    folder = cache_dir() / "cubins"
    for path in (folder, *folder.glob("*.cubin")):
        if path.exists() and _is_of_others(path.stat()):
            raise KernelBuildError(
                f"{path} belongs to another user, or others may write to it, and kernels in it run as ours: remove it, "
                "or name another cache in OPENINFER_CACHE_DIR"
            )
    return folder


def _is_of_others(status: os.stat_result) -> bool:
    """Whether users other than root and this one may write; a group of a user's own has the user's number."""
    others = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
    return status.st_uid not in (os.geteuid(), _ROOT) or bool(status.st_mode & others)


def build_cubins(chosen: Sequence[Source], architecture: str, *, target: Path, compiler: Compiler) -> None:
    """Compiles sources into the folder `target`, several at a time, with a line of progress on the terminal.

    Each file appears under its name only when it is whole, so that processes may build the same ones at once.

    Raises:
        KernelBuildError: the compiler refused a source; the others that had begun are finished first.
    """
    target.mkdir(parents=True, exist_ok=True, mode=0o755)
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
    Path(partial.name).replace(target / _cubin_name(source.cubin_key(architecture), cubin))
    return time.perf_counter() - began
