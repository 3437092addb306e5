"""Sums over ranks of one machine in one kernel, for arrays of decode steps: `csrc/comm/one_shot.cu` says how."""

import ctypes
from collections.abc import Sequence

import numpy as np

from openinfer_kernels.cuda.comm.peer_buffers import PeerBuffers
from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.ops import Array

_THREADS = 256


class OneShot:
    """One rank's end. Everything runs on CuPy's current stream and may be captured.

    Args:
        device: this rank's.
        rank: this rank.
        size: ranks, at most `MAX_RANKS`.
        most_bytes: of an array.
    """

    def __init__(self, device: Device, *, rank: int, size: int, most_bytes: int) -> None:
        self._reduce = {
            np.dtype(dtype): device.kernel("one_shot", f"one_shot_all_reduce_{np.dtype(dtype).name}")
            for dtype in (bfloat16, np.float32)
        }
        self._most_bytes = most_bytes
        self._buffers = PeerBuffers(rank=rank, size=size, slot_bytes=most_bytes)

    @property
    def handle(self) -> bytes:
        """What the other ranks open this rank's memory by; `HANDLE_BYTES` of `peer_buffers` long."""
        return self._buffers.handle

    @property
    def address(self) -> int:
        """Where this rank's memory begins, for ranks of the same process."""
        return self._buffers.address

    def connect_addresses(self, addresses: Sequence[int]) -> None:
        """As `connect`, where all ranks are in one process."""
        self._buffers.connect_addresses(addresses)

    def connect(self, handles: Sequence[bytes]) -> None:
        """Opens the memory of all ranks, in order; no rank may call a collective before all have connected."""
        self._buffers.connect(handles)

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
        grid = (-(-vectors // _THREADS), 1, 1)
        arguments = [array, array, self._buffers.group, ctypes.c_int64(vectors)]
        self._reduce[array.dtype](grid, (_THREADS, 1, 1), arguments, overlap=True)

    def abort(self) -> None:
        """Ends kernels that wait for another rank; from any thread. What they leave is of no use."""
        self._buffers.abort()

    def close(self) -> None:
        """Frees the memory, when no kernel runs and no graph is left. Idempotent."""
        self._buffers.close()
