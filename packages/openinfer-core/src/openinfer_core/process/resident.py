"""How much memory a process holds, and giving back what it no longer needs."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """Bytes of this process; 0 where the system does not say (not Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError):
        return 0


def settle_memory() -> None:
    """For the end of a start: garbage goes, what is left is not looked through again, freed pages go back.

    glibc keeps freed pages for later; after a start there is no later. Elsewhere the allocator is left alone.
    """
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
