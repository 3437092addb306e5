"""How much memory a process holds, and giving back what it no longer needs."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_OWN_MAPPING_BYTES, _KEPT_BYTES = 4 << 20, 8 << 20


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


def return_freed_memory() -> None:
    """For the start of a process whose arrays come and go: those of 4 MiB and more go back when they are freed.

    glibc raises what it gives a mapping of its own by the largest array that was ever freed, up to 32 MiB, and what it
    keeps of each heap by twice that: a thread's heap then keeps as much as its largest step took, which `malloc_trim`
    does not give back either. Elsewhere nothing is set.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
