"""Weights on their way to the device: threads copy pages into pinned buffers, the copy engine takes them from there.

    checkpoint's pages (memory map) ──thread──► pinned buffer ──copy engine──► place in the weight's array

One thread copies 5 to 9 GB/s out of the page cache, the copy engine takes 55, so a dozen threads with two buffers each
keep it busy. Pieces are cut while they are copied: rows of several tensors go below each other, and columns of a
tensor into rows of their own, without a copy of it in between.
"""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.ops import Array, HostArray

THREADS = 12
BUFFER_BYTES = 4 << 20
"""Small, as pinning costs 0.5 s per GB and a piece should be in a cache of the CPU when the copy engine takes it."""
_BUFFERS = 2
"""Per thread: one is filled while the other is taken."""
_BUFFERS_OF_TASK = 8
"""That a thread fills one after the other before it asks for more to do, which takes the interpreter."""
_TO_DEVICE = 1
"""`cudaMemcpyHostToDevice`."""

Progress = Callable[[int], None]
"""Called with the bytes that were copied since the last call, from any thread."""
Convert = Callable[[Array, Array], None]
"""Brings what is on the device into the array that it is for, on the current stream; called by several threads."""
Check = Callable[[HostArray], None]
"""Looks at what goes to the device, while a cache of the CPU has it; raises what ends the load."""


class Uploads:
    """A set of uploads in flight.

    Args:
        device: the target.
        convert: for parts that are not BF16.
        progress: told what arrives.
    """

    def __init__(self, device: Device, *, convert: Convert, progress: Progress) -> None:
        self._device = device
        self._convert = convert
        self._progress = progress
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="openinfer-upload", initializer=device.use)
        self._lanes: list[_Lane] = []
        self._own = threading.local()
        self._pending: list[Future[None]] = []

    def add(self, host: HostArray, out: Array, convert: Convert | None = None, check: Check | None = None) -> None:
        """Queues the copy of `host` into `out`, of the same shape, after what the current stream has been given.

        Neither may be touched until the end.

        Args:
            host: float32, float16, or uint16 for BF16 bits; any strides. With `convert`, whatever that reads.
            out: BF16, or what `convert` writes; contiguous.
            convert: in the place of what float32 and float16 take.
            check: of every piece, contiguous.
        """
        # Contiguous arrays are cut anywhere, also inside their rows.
        if host.flags.c_contiguous:
            host, out = host.reshape(-1), out.reshape(-1)
        row_bytes = max(1, host[:1].nbytes)
        if row_bytes > BUFFER_BYTES:
            for row, place in zip(host, out, strict=True):
                self.add(row, place, convert, check)
            return
        rows = BUFFER_BYTES // row_bytes
        # The memory of `out` may have been that of a temporary, which kernels of this stream have yet to read.
        before = cupy.cuda.Event(disable_timing=True)
        before.record()
        for begin in range(0, len(host), rows * _BUFFERS_OF_TASK):
            task = slice(begin, begin + rows * _BUFFERS_OF_TASK)
            work = _Task(host=host[task], out=out[task], rows=rows, before=before, convert=convert, check=check)
            self._pending.append(self._threads.submit(self._copy, work))

    def finish(self) -> None:
        """Waits for everything that was added; raises what a copy raised."""
        pending, self._pending = self._pending, []
        for copied in pending:
            copied.result()
        for lane in self._lanes:
            lane.stream.synchronize()

    def close(self) -> None:
        """Drops what has not begun, waits for the rest and frees the buffers."""
        self._threads.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def _copy(self, task: "_Task") -> None:
        lane = self._lane()
        with lane.stream:
            lane.stream.wait_event(task.before)
            for begin in range(0, len(task.host), task.rows):
                self._copy_rows(lane, task, slice(begin, begin + task.rows))
        self._progress(task.host.nbytes)

    def _copy_rows(self, lane: "_Lane", task: "_Task", rows: slice) -> None:
        host, out, convert = task.host[rows], task.out[rows], task.convert
        buffer = lane.next_buffer()
        staged = buffer.memory[: host.nbytes].view(host.dtype).reshape(host.shape)
        np.copyto(staged, host)
        if task.check is not None:
            task.check(staged)
        if host.dtype == np.uint16 and convert is None:
            _send(staged, out, lane.stream)
        else:
            on_device = cupy.empty(host.shape, host.dtype)
            _send(staged, on_device, lane.stream)
            (convert or self._convert)(on_device, out)
        # The buffer may be filled again once the stream has come to here.
        buffer.taken.record(lane.stream)

    def _lane(self) -> "_Lane":
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = _Lane()
            self._lanes.append(lane)
        return lane


@dataclass(frozen=True, slots=True)
class _Task:
    """What a thread copies before it asks for more to do: `rows` of `host` at a time."""

    host: HostArray
    out: Array
    rows: int
    before: Any
    """The event of the caller's stream that its copies wait for."""
    convert: Convert | None
    check: Check | None


@dataclass(slots=True)
class _Buffer:
    memory: HostArray
    address: int
    taken: Any
    """The event after its last copy."""


class _Lane:
    """One thread's stream and pinned buffers; not from CuPy's pool, which would keep them for good."""

    def __init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def next_buffer(self) -> _Buffer:
        """The buffer whose last copy is longest ago, once the device has taken it."""
        if self._turn == len(self._buffers):  # pinning takes a while: the second one while the first is on its way
            self._buffers.append(_pinned_buffer())
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer.taken.synchronize()
        return buffer

    def close(self) -> None:
        self.stream.synchronize()
        for buffer in self._buffers:
            buffer.memory = np.empty(0, np.uint8)
            cupy.cuda.runtime.freeHost(buffer.address)
        self._buffers.clear()


def _pinned_buffer() -> _Buffer:
    address = cupy.cuda.runtime.hostAlloc(BUFFER_BYTES, 0)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * BUFFER_BYTES).from_address(address))
    return _Buffer(memory, address, cupy.cuda.Event(disable_timing=True))


def _send(staged: HostArray, out: Any, stream: Any) -> None:
    cupy.cuda.runtime.memcpyAsync(address(out), staged.ctypes.data, staged.nbytes, _TO_DEVICE, stream.ptr)
