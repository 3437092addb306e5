"""Giving memory of this machine back to the system, while what points to it stays where it is."""

import contextlib
import ctypes
import gc
import mmap
import sys

import numpy as np

from openinfer_core.process.resident import settle_memory
from openinfer_kernels import Array

CAN_GIVE_BACK = sys.platform == "linux"
"""Elsewhere the system promises neither zeros nor that the pages go."""


def give_back(array: Array) -> None:
    """Frees the pages of an array, whose numbers are all zero afterwards; on Linux alone.

    Args:
        array: C-contiguous, in private memory of this process: not of a file, not shared.

    Raises:
        OSError: the system does not take them.
    """
    host = np.asarray(array)
    begin, end = host.ctypes.data, host.ctypes.data + host.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    flat = host.reshape(-1).view(np.uint8)
    if last <= first:
        flat[:] = 0
        return
    flat[: first - begin] = 0
    flat[last - begin :] = 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(first, last - first, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the pages of the KV cache cannot be given back")


def settle() -> None:
    """Garbage goes, also what was there when the process began, and with it its pages."""
    with contextlib.suppress(AttributeError):
        gc.unfreeze()
    settle_memory()
