"""Sums over ranks of one machine in one kernel, for arrays of decode steps: `csrc/comm/one_shot.cu` says how.

Each rank makes its end, tells the others its `handle`, and connects to theirs; CUDA's inter-process memory handles do
the rest, over NVLink or PCIe, without multicast.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address, fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import check
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy, driver
from openinfer_kernels.errors import CudaCallError
from openinfer_kernels.ops import Array

MAX_RANKS = 8
HANDLE_BYTES = 64
# With three, a buffer is empty before another rank writes to it again, and no rank waits for that: see the source.
_NUM_BUFFERS = 3
_STATE_BYTES = 32
# Bits that no sender writes: -0 in float32, 0 and -0 in a pair of BF16; senders send zeros for them.
_EMPTY = 0x80000000
_THREADS = 256


class _Group(ctypes.Structure):
    """`Group` of the source."""

    _fields_ = [
        ("buffers", ctypes.c_void_p * MAX_RANKS),
        ("state", ctypes.c_void_p),
        ("is_aborted", ctypes.c_void_p),
        ("slot", ctypes.c_int64),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
    ]


class OneShot:
    """One rank's end. Everything runs on CuPy's current stream and may be captured.

    Args:
        device: this rank's.
        rank: this rank.
        size: ranks, at most `MAX_RANKS`.
        most_bytes: of an array.
    """

    def __init__(self, device: Device, *, rank: int, size: int, most_bytes: int) -> None:
        runtime = cupy.cuda.runtime
        self._reduce = {
            np.dtype(dtype): device.kernel("one_shot", f"one_shot_all_reduce_{np.dtype(dtype).name}")
            for dtype in (bfloat16, np.float32)
        }
        self._most_bytes = most_bytes
        self._rank = rank
        buffer_bytes = _NUM_BUFFERS * size * most_bytes
        self._own: int = runtime.malloc(buffer_bytes)  # CuPy's pool may not hand out the beginning of an allocation
        self._opened: list[int] = []
        self._state: Array = cupy.zeros(_STATE_BYTES, np.uint8)
        # In host memory, where `abort` can write while kernels that wait for another rank read it.
        pinned: Any = cupy.cuda.alloc_pinned_memory(4)
        self._is_aborted = np.frombuffer(pinned, np.uint32, 1)
        self._is_aborted[0] = 0
        stream = cupy.cuda.get_current_stream()
        check(driver.cuMemsetD32Async(self._own, _EMPTY, buffer_bytes // 4, stream.ptr))
        # Other ranks may write as soon as they have connected: the buffers must be empty by then.
        stream.synchronize()
        self._group = _Group(
            state=address(self._state),
            is_aborted=self._is_aborted.ctypes.data,
            slot=most_bytes // VECTOR_BYTES,
            rank=rank,
            size=size,
        )
        self._group.buffers[rank] = self._own

    @property
    def handle(self) -> bytes:
        """What the other ranks open this rank's memory by; `HANDLE_BYTES` long."""
        return bytes(cupy.cuda.runtime.ipcGetMemHandle(self._own))

    @property
    def address(self) -> int:
        """Where this rank's memory begins, for ranks of the same process."""
        return self._own

    def connect_addresses(self, addresses: Sequence[int]) -> None:
        """As `connect`, where all ranks are in one process."""
        for rank, pointer in enumerate(addresses):
            self._group.buffers[rank] = pointer

    def connect(self, handles: Sequence[bytes]) -> None:
        """Opens the memory of all ranks, in order; no rank may call a collective before all have connected."""
        for rank, handle in enumerate(handles):
            if rank == self._rank:
                continue
            try:
                pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise CudaCallError(f"this GPU cannot reach the memory of rank {rank}'s: {error}") from error
            self._opened.append(pointer)
            self._group.buffers[rank] = pointer

    def fits(self, array: Array) -> bool:
        """Whether an array can be summed here: BF16 or float32, whole vectors of 16 bytes, not too long."""
        return (
            array.dtype in self._reduce
            and 0 < array.nbytes <= self._most_bytes
            and array.nbytes % VECTOR_BYTES == 0
            and array.flags.c_contiguous
            and fits_vectors(array)
        )

    def all_reduce(self, array: Array) -> None:
        vectors = array.nbytes // VECTOR_BYTES
        grid, arguments = (-(-vectors // _THREADS), 1, 1), [array, array, self._group, ctypes.c_int64(vectors)]
        self._reduce[array.dtype](grid, (_THREADS, 1, 1), arguments, overlap=True)

    def abort(self) -> None:
        """Ends kernels that wait for another rank; from any thread. What they leave is of no use."""
        self._is_aborted[0] = 1

    def close(self) -> None:
        """Frees the memory, when no kernel runs and no graph is left. Idempotent."""
        runtime = cupy.cuda.runtime
        for pointer in self._opened:
            runtime.ipcCloseMemHandle(pointer)
        self._opened.clear()
        if self._own:
            runtime.free(self._own)
            self._own = 0
