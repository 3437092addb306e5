"""`DevicePool`: a KV pool on a GPU, block by block, for copies of blocks to and from this machine's memory.

Each thread that copies has a stream of its own, so that copies run during steps and during each other; it sleeps while
it waits for its batch. The GPU sums up what its blocks hold on the way (`csrc/common/block_sums.cu`): reading
gigabytes once more on the host would take longer than to copy them. Memory that is locked in place (`lock`) is copied
at the speed of the bus, many blocks in one call of the driver's: a call for each block of half a megabyte would keep
the interpreter from the thread that launches steps for as long as the bus takes. Other memory passes through a buffer
of the driver's, block by block, and locked memory goes so, too, where the driver is older than CUDA 12.8.

A tier's own memory on the GPU (`allocate`) is copied to and from in the same way.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import check
from openinfer_kernels.cuda.common.libraries import cupy, driver
from openinfer_kernels.errors import ArrayMismatchError, OutOfDeviceMemoryError
from openinfer_kernels.ops import Array, HostArray

_BATCH_BLOCKS = 128
_TOGETHER_SINCE = 12_080
"""The driver's version that has `cuMemcpyBatchAsync`."""
_SUM_BYTES = 16
_PIECES, _THREADS = 32, 256
"""What a block is cut into for its sum, and the threads of each; a step's kernels wait for pieces that run long."""


class _Way(NamedTuple):
    """Between blocks of the pool and other memory."""

    kind: int  # `cudaMemcpyKind`
    is_inward: bool  # into the pool


_FROM_HOST, _TO_HOST = _Way(1, is_inward=True), _Way(2, is_inward=False)
_FROM_TIER, _TO_TIER = _Way(3, is_inward=True), _Way(3, is_inward=False)


class DevicePool:
    """The blocks of a C-contiguous array `[num_blocks, ...]` on a GPU, and the pieces of slots of recurrent states.

    Args:
        pool: stays where it is while blocks are copied.
        device: that it is on.
        slots: C-contiguous `[slots, bytes]`, each slot a whole number of a block's size; None without.

    Raises:
        ArrayMismatchError: a block is no whole number of 16-byte pieces, or a slot no whole number of blocks.
    """

    is_on_device = True

    def __init__(self, pool: Array, device: Device, *, slots: Array | None = None) -> None:
        num_blocks: int = pool.shape[0]
        block_bytes: int = pool.nbytes // num_blocks
        slot_bytes: int = 0 if slots is None else slots.shape[1] * slots.dtype.itemsize
        # The kernel that sums up reads 16 bytes at a time.
        if block_bytes % _SUM_BYTES or address(pool) % _SUM_BYTES:
            raise ArrayMismatchError(f"KV blocks of {block_bytes} bytes; they must be whole pieces of {_SUM_BYTES}")
        if slot_bytes % block_bytes:
            raise ArrayMismatchError(f"slots of {slot_bytes} bytes; they must be whole blocks of {block_bytes}")
        device.use()
        device.kernel("block_sums", "block_sums")  # loads the module now, on this thread
        self._device = device
        self._locked: list[_Locked] = []
        self._copies = _OfThread(device, block_bytes, self._locked)
        mover = DeviceBlockMover(self._copies)
        self.blocks: Sequence[DevicePoolBlock] = _cut(address(pool), num_blocks, block_bytes, mover)
        self.states: Sequence[Sequence[DevicePoolBlock]] = [
            _cut(address(slots) + slot * slot_bytes, slot_bytes // block_bytes, block_bytes, mover)
            for slot in range(0 if slots is None else len(slots))
        ]

    @property
    def source(self) -> "DevicePool":
        return self

    def allocate(self, num_bytes: int) -> "DeviceTierMemory":
        """Memory of this GPU for a tier, beside the pool: other processes of this machine can open it.

        Raises:
            OutOfDeviceMemoryError: there is not so much.
        """
        self._device.use()
        return DeviceTierMemory(self._device, num_bytes, self._copies)

    def lock(self, memory: Sequence[memoryview]) -> None:
        """Locks memory in place for fast copies; pages that have not been written to yet are taken now, one by one.

        Args:
            memory: writable, of whole pages.
        """
        self._device.use()
        for piece in memory:
            begin = _address_of(piece)
            cupy.cuda.runtime.hostRegister(begin, piece.nbytes, 0)
            self._locked.append(_Locked(begin, begin + piece.nbytes))

    def unlock(self) -> None:
        """Idempotent."""
        if self._locked:
            self._device.use()
        while self._locked:
            cupy.cuda.runtime.hostUnregister(self._locked.pop().begin)


class _Locked(NamedTuple):
    """A piece of this machine's memory, by addresses."""

    begin: int
    end: int


class DevicePoolBlock:
    """One block, and what moves it."""

    __slots__ = ("address", "mover", "nbytes")

    def __init__(self, address: int, nbytes: int, mover: "DeviceBlockMover") -> None:
        self.address = address
        self.nbytes = nbytes
        self.mover = mover


def _cut(begin: int, count: int, nbytes: int, mover: "DeviceBlockMover") -> list[DevicePoolBlock]:
    return [DevicePoolBlock(begin + index * nbytes, nbytes, mover) for index in range(count)]


class DeviceBlockMover:
    """Copies blocks of one pool; any thread may call it. What wrote the blocks has to be over."""

    def __init__(self, copies: "_OfThread") -> None:
        self._copies = copies

    def copy_out(self, blocks: Sequence[DevicePoolBlock], into: Sequence[memoryview]) -> list[bytes]:
        """Copies blocks into this machine's memory; returns the sum of what each holds, 16 bytes."""
        return _copied(self._copies, blocks, [_address_of(host) for host in into], _TO_HOST)

    def copy_in(self, blocks: Sequence[DevicePoolBlock], content: Sequence[memoryview]) -> list[bytes]:
        """Copies this machine's memory into blocks; returns the sum of what each holds then, 16 bytes."""
        return _copied(self._copies, blocks, [_address_of(host) for host in content], _FROM_HOST)


class DeviceTierMemory:
    """Memory of a tier on the pool's GPU; copies are as a `DeviceBlockMover`'s.

    It is the driver's own allocation, not one of mapped pages: only such memory has a handle of CUDA IPC everywhere.

    Raises:
        OutOfDeviceMemoryError: there is not so much.
    """

    def __init__(self, device: Device, num_bytes: int, copies: "_OfThread") -> None:
        try:
            self.address: int = cupy.cuda.runtime.malloc(num_bytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise OutOfDeviceMemoryError(f"{num_bytes} bytes of GPU {device.index} for a tier: {error}") from error
        self._device = device
        self._copies = copies
        self._is_open = True

    @property
    def device(self) -> int:
        return self._device.index

    def use(self) -> None:
        """Makes the GPU the calling thread's."""
        self._device.use()

    def copy_out(self, blocks: Sequence[DevicePoolBlock], offsets_bytes: Sequence[int]) -> list[bytes]:
        """Copies blocks of the pool into this memory; returns the sum of what each holds, 16 bytes."""
        return _copied(self._copies, blocks, [self.address + offset for offset in offsets_bytes], _TO_TIER)

    def copy_in(self, blocks: Sequence[DevicePoolBlock], offsets_bytes: Sequence[int]) -> list[bytes]:
        """Copies this memory into blocks of the pool; returns the sum of what each holds then, 16 bytes."""
        return _copied(self._copies, blocks, [self.address + offset for offset in offsets_bytes], _FROM_TIER)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._device.use()
            cupy.cuda.runtime.free(self.address)


def _copied(copies: "_OfThread", blocks: Sequence[DevicePoolBlock], others: Sequence[int], way: _Way) -> list[bytes]:
    sums: list[bytes] = []
    for begin in range(0, len(blocks), _BATCH_BLOCKS):
        batch = slice(begin, begin + _BATCH_BLOCKS)
        sums += copies.copy([block.address for block in blocks[batch]], others[batch], way)
    return sums


class _OfThread(threading.local):
    """What each thread that copies has: a stream, an event to wait for, and places for addresses and sums."""

    def __init__(self, device: Device, block_bytes: int, locked: Sequence[_Locked]) -> None:
        device.use()
        self._bytes = block_bytes
        self._locked = locked
        self._has_batches: bool = check(driver.cuDriverGetVersion()) >= _TOGETHER_SINCE
        self._kernel = device.kernel("block_sums", "block_sums")
        self._stream = cupy.cuda.Stream(non_blocking=True)
        # Blocking: a thread that waits sleeps and leaves the processor to the others.
        self._done = cupy.cuda.Event(block=True, disable_timing=True)
        self._addresses, self._sums = _pinned(_BATCH_BLOCKS, 1), _pinned(_BATCH_BLOCKS, 2)
        with self._stream:
            self._device_addresses: Any = cupy.zeros(_BATCH_BLOCKS, np.uint64)
            self._device_sums: Any = cupy.zeros((_BATCH_BLOCKS, 2), np.uint64)
        self._stream.synchronize()

    def copy(self, blocks: Sequence[int], others: Sequence[int], way: _Way) -> list[bytes]:
        """Between blocks of the pool and as many other places, all by address; returns the sums of the blocks."""
        num_blocks = len(blocks)
        copy, stream = cupy.cuda.runtime.memcpyAsync, self._stream.ptr
        self._addresses[:num_blocks, 0] = blocks
        copy(address(self._device_addresses), self._addresses.ctypes.data, 8 * num_blocks, _FROM_HOST.kind, stream)
        # The pieces of a block add to its sum, which therefore begins at zero.
        cupy.cuda.runtime.memsetAsync(address(self._device_sums), 0, _SUM_BYTES * num_blocks, stream)
        runs = list(_runs(blocks, others, self._bytes))
        if len(runs) > 1 and self._has_batches and (way in (_FROM_TIER, _TO_TIER) or self._are_locked(others)):
            self._copy_together(runs, way)
        else:
            for block, other, nbytes in runs:
                target, source = (block, other) if way.is_inward else (other, block)
                copy(target, source, nbytes, way.kind, stream)
        with self._stream:
            arguments = (self._device_addresses, self._device_sums, ctypes.c_int(self._bytes // _SUM_BYTES))
            self._kernel((_PIECES, num_blocks, 1), (_THREADS, 1, 1), arguments)
        copy(self._sums.ctypes.data, address(self._device_sums), _SUM_BYTES * num_blocks, _TO_HOST.kind, stream)
        self._done.record(self._stream)
        self._done.synchronize()
        sums = self._sums[:num_blocks].tobytes()
        return [sums[begin : begin + _SUM_BYTES] for begin in range(0, len(sums), _SUM_BYTES)]

    def _are_locked(self, hosts: Sequence[int]) -> bool:
        """Whether all are in one locked piece."""
        begin, end = min(hosts), max(hosts) + self._bytes
        return any(piece.begin <= begin and end <= piece.end for piece in self._locked)

    def _copy_together(self, runs: Sequence[tuple[int, int, int]], way: _Way) -> None:
        pool = [driver.CUdeviceptr(block) for block, _, _ in runs]
        elsewhere = [driver.CUdeviceptr(other) for _, other, _ in runs]
        targets, sources = (pool, elsewhere) if way.is_inward else (elsewhere, pool)
        sizes = [nbytes for _, _, nbytes in runs]
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        check(driver.cuMemcpyBatchAsync(targets, sources, sizes, len(runs), [attributes], [0], 1, self._stream.ptr))


def _runs(blocks: Sequence[int], others: Sequence[int], nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Neighbours on both sides as one copy: begin of each, and bytes."""
    first = 0
    for index in range(1, len(blocks) + 1):
        steps = (index - first) * nbytes
        next_to_it = blocks[first] + steps, others[first] + steps
        if index == len(blocks) or (blocks[index], others[index]) != next_to_it:
            yield blocks[first], others[first], steps
            first = index


def _pinned(rows: int, columns: int) -> HostArray:
    memory: Any = cupy.cuda.alloc_pinned_memory(8 * rows * columns)
    return np.frombuffer(memory, np.uint64, rows * columns).reshape(rows, columns)


def _address_of(memory: memoryview) -> int:
    if memory.readonly:
        begin: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        return begin
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
