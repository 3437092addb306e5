"""`HostCopy`: a copy of device memory in pinned memory of this machine, at the speed of the bus.

Pinning takes longer than the copy by far, most of it for taking pages one by one. Pages of 2 MiB, taken by several
threads, are there sooner; they stay pinned from the first copy on, so that later ones are as fast as the bus.
"""

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.ops import HostArray

_TO_DEVICE, _TO_HOST = 1, 2
"""`cudaMemcpyKind`."""
_THREADS = 8
_PAGE_BYTES = 4096
_TAKEN_BYTES = 64 << 20
"""That a thread takes at once."""
_COPIED_BYTES = 1 << 30
"""Of one copy, at most."""


class HostCopy:
    """One copy, for one GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: HostArray = np.empty(0, np.uint8)
        self._saved_bytes = 0
        self._restoring: Any = None  # the stream of the last copy back

    def save(self, address: int, nbytes: int) -> None:
        """Copies device memory, after which it may be written to.

        Raises:
            MemoryError: the host has not as much.
        """
        if self._memory.size < nbytes:
            self.close()
            self._memory = _pinned(nbytes)
        self._saved_bytes = nbytes
        stream = cupy.cuda.get_current_stream()
        self._copy(address, _TO_HOST, stream)
        stream.synchronize()

    def begin_restore(self, address: int) -> None:
        """Begins to copy it back, to any address, next to all other work: `Device.synchronize` waits for it."""
        self._restoring = cupy.cuda.Stream(non_blocking=True)
        self._copy(address, _TO_DEVICE, self._restoring)

    def close(self) -> None:
        """Frees the pages; idempotent."""
        memory, self._memory = self._memory, np.empty(0, np.uint8)
        if memory.size:
            self._device.use()
            cupy.cuda.runtime.hostUnregister(memory.ctypes.data)

    def _copy(self, address: int, kind: int, stream: Any) -> None:
        host = self._memory.ctypes.data
        for begin in range(0, self._saved_bytes, _COPIED_BYTES):
            nbytes = min(_COPIED_BYTES, self._saved_bytes - begin)
            places = (address + begin, host + begin) if kind == _TO_DEVICE else (host + begin, address + begin)
            cupy.cuda.runtime.memcpyAsync(*places, nbytes, kind, stream.ptr)


def _pinned(nbytes: int) -> HostArray:
    """`[nbytes]` uint8 of its own pages; raises `MemoryError`."""
    try:
        pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes / (1 << 30):.1f} GiB of memory cannot be had for the weights") from error
    with suppress(OSError):  # a system without large pages takes longer
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="openinfer-pages") as threads:
        list(threads.map(_take, (memory[begin : begin + _TAKEN_BYTES] for begin in range(0, nbytes, _TAKEN_BYTES))))
    try:
        cupy.cuda.runtime.hostRegister(memory.ctypes.data, nbytes, 0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(
            f"{nbytes / (1 << 30):.1f} GiB of memory cannot be pinned for the weights: {error}"
        ) from error
    return memory


def _take(pages: Any) -> None:
    pages[::_PAGE_BYTES] = 0
