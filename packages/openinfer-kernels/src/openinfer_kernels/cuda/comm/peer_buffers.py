"""Memory of a rank that the other ranks of its machine write into: `csrc/comm/peers.cuh` says how.

Each rank makes its end, tells the others where it is, and connects to theirs, over NVLink or PCIe, without multicast:
ranks of other processes by CUDA's inter-process memory handles, those of the same one, on one GPU, by address.
"""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address
from openinfer_kernels.cuda.common.launch import check
from openinfer_kernels.cuda.common.libraries import cupy, driver
from openinfer_kernels.errors import CudaCallError
from openinfer_kernels.ops import Array

MAX_RANKS = 8
HANDLE_BYTES = 64
# With three, a buffer is empty before another rank writes to it again, and no rank waits for that: see the source.
_NUM_BUFFERS = 3
_STATE_BYTES = 32
# Bits that no sender writes: -0 in float32, 0 and -0 in a pair of BF16; senders send zeros for them.
_EMPTY = 0x80000000


class PeerGroup(ctypes.Structure):
    """`Group` of the source."""

    _fields_ = [
        ("buffers", ctypes.c_void_p * MAX_RANKS),
        ("state", ctypes.c_void_p),
        ("is_aborted", ctypes.c_void_p),
        ("slot", ctypes.c_int64),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
    ]


class PeerBuffers:
    """One rank's end, on the current device.

    Args:
        device: this rank's.
        rank: this rank.
        size: ranks, at most `MAX_RANKS`.
        slot_bytes: what each rank may send to each other one in a turn.
    """

    def __init__(self, *, rank: int, size: int, slot_bytes: int) -> None:
        self._rank = rank
        buffer_bytes = _NUM_BUFFERS * size * slot_bytes
        self._opened: list[int] = []
        self._state: Array = cupy.zeros(_STATE_BYTES, np.uint8)
        # In host memory, where `abort` can write while kernels that wait for another rank read it.
        pinned: Any = cupy.cuda.alloc_pinned_memory(4)
        self._is_aborted = np.frombuffer(pinned, np.uint32, 1)
        self._is_aborted[0] = 0
        # What other processes open has to be the beginning of an allocation, which CuPy's pool may not hand out.
        self._own: int = cupy.cuda.runtime.malloc(buffer_bytes)
        with ExitStack() as undo:
            undo.callback(self.close)  # the pool would free it by itself, the runtime does not
            self._empty(buffer_bytes)
            undo.pop_all()
        self.group = PeerGroup(
            state=address(self._state),
            is_aborted=self._is_aborted.ctypes.data,
            slot=slot_bytes // VECTOR_BYTES,
            rank=rank,
            size=size,
        )
        self.group.buffers[rank] = self._own

    def _empty(self, buffer_bytes: int) -> None:
        stream = cupy.cuda.get_current_stream()
        check(driver.cuMemsetD32Async(self._own, _EMPTY, buffer_bytes // 4, stream.ptr))
        # Other ranks may write as soon as they have connected: the buffers must be empty by then.
        stream.synchronize()

    @property
    def handle(self) -> bytes:
        """What ranks of other processes open this rank's memory by; `HANDLE_BYTES` long."""
        return bytes(cupy.cuda.runtime.ipcGetMemHandle(self._own))

    @property
    def address(self) -> int:
        """Where this rank's memory begins, for ranks of the same process."""
        return self._own

    def connect_addresses(self, addresses: Sequence[int]) -> None:
        """As `connect`, where all ranks are in one process."""
        for rank, pointer in enumerate(addresses):
            self.group.buffers[rank] = pointer

    def connect(self, handles: Sequence[bytes]) -> None:
        """Opens the memory of all ranks, in order; no rank may send before all have connected."""
        for rank, handle in enumerate(handles):
            if rank == self._rank:
                continue
            try:
                pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise CudaCallError(f"this GPU cannot reach the memory of rank {rank}'s: {error}") from error
            self._opened.append(pointer)
            self.group.buffers[rank] = pointer

    def abort(self) -> None:
        """Ends kernels that wait for another rank; from any thread. What they leave is of no use."""
        self._is_aborted[0] = 1

    def close(self) -> None:
        """Frees the memory, when no kernel runs and no graph is left. Idempotent."""
        for pointer in self._opened:
            cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._opened.clear()
        if self._own:
            cupy.cuda.runtime.free(self._own)
            self._own = 0
