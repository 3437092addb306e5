"""`DevicePool`: a KV pool on a GPU, block by block, for whoever copies blocks to and from this machine's memory.

Each thread that copies has a stream of its own, so that copies run beside steps and beside each other. A thread sleeps
while it waits for its copy. Memory that is locked in place (`lock`) is copied at the speed of the bus; other memory
passes through a buffer of the driver's.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from openinfer_kernels.cuda.arrays import address
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.libraries import cupy
from openinfer_kernels.ops import Array

_TO_DEVICE, _TO_HOST = 1, 2
"""`cudaMemcpyKind`."""
_LOCK_THREADS = 8
_PAGE_BYTES = 4096


class DevicePool:
    """The blocks of a C-contiguous array `[num_blocks, ...]` on a GPU.

    Args:
        pool: stays where it is while anybody copies.
        device: that it is on.
    """

    is_on_device = True

    def __init__(self, pool: Array, device: Device) -> None:
        num_blocks: int = pool.shape[0]
        block_bytes: int = pool.nbytes // num_blocks
        begin = address(pool)
        copies = _Copies(device)
        self._device = device
        self._locked: list[int] = []
        self.blocks: Sequence[DevicePoolBlock] = [
            DevicePoolBlock(begin + index * block_bytes, block_bytes, copies) for index in range(num_blocks)
        ]

    def lock(self, memory: Sequence[memoryview]) -> None:
        """Locks memory in place for fast copies; its pages are all taken now.

        Args:
            memory: writable, of whole pages.
        """
        self._device.use()
        for piece in memory:
            _touch(piece)
            begin = _address_of(piece)
            cupy.cuda.runtime.hostRegister(begin, piece.nbytes, 0)
            self._locked.append(begin)

    def unlock(self) -> None:
        """Unlocks what was locked. Idempotent."""
        locked, self._locked = self._locked, []
        if locked:
            self._device.use()
        for begin in locked:
            cupy.cuda.runtime.hostUnregister(begin)


class DevicePoolBlock:
    """One block. Copies wait for their end, and for nothing else: what wrote the block has to be over."""

    __slots__ = ("_begin", "_copies", "nbytes")

    def __init__(self, begin: int, nbytes: int, copies: "_Copies") -> None:
        self._begin = begin
        self._copies = copies
        self.nbytes = nbytes

    def copy_to(self, host: memoryview) -> None:
        """Fills `host`, of `nbytes` bytes."""
        self._copies.run(_address_of(host), self._begin, self.nbytes, _TO_HOST)

    def copy_from(self, host: memoryview) -> None:
        """Fills the block from `host`, of `nbytes` bytes."""
        self._copies.run(self._begin, _address_of(host), self.nbytes, _TO_DEVICE)


class _Copies(threading.local):
    """Of each thread, a stream and the event that it waits for."""

    def __init__(self, device: Device) -> None:
        device.use()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._done = cupy.cuda.Event(block=True, disable_timing=True)

    def run(self, target: int, source: int, nbytes: int, kind: int) -> None:
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)
        self._done.record(self._stream)
        self._done.synchronize()


def _address_of(memory: memoryview) -> int:
    begin: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return begin


def _touch(memory: memoryview) -> None:
    """Takes every page, in several threads: the driver would take them one after the other."""
    pages = np.frombuffer(memory, np.uint8)[::_PAGE_BYTES]
    share = -(-len(pages) // _LOCK_THREADS)

    def touch(begin: int) -> None:
        pages[begin : begin + share] = 0

    with ThreadPoolExecutor(_LOCK_THREADS) as threads:
        list(threads.map(touch, range(0, len(pages), share)))
