"""Rows of data-parallel ranks of one machine on their way to experts and back: `csrc/comm/expert_rows.cu` says how."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from openinfer_kernels.cuda.comm.peer_buffers import HANDLE_BYTES as BUFFER_HANDLE_BYTES
from openinfer_kernels.cuda.comm.peer_buffers import PeerBuffers
from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, ExpertChoice

HANDLE_BYTES = 2 * BUFFER_HANDLE_BYTES
_THREADS = 256
_MOST_CHOSEN = 32
# Of a launch, whose blocks are on the device at once: none waits for a place while others wait for what it sends.
MOST_PLACES = 512
# Of rows of 2048 in BF16 with their choices 512; of their sums in float32 as many.
_ROWS_BYTES, _SUMS_BYTES = 9 << 18, 5 << 20
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class _Sizes(ctypes.Structure):
    """`Sizes` of the source."""

    _fields_ = [(name, ctypes.c_int) for name in ("tokens", "places", "first", "chosen", "experts", "row_vectors")]


class ExpertRows:
    """One rank's end. Everything runs on CuPy's current stream and may be captured.

    Args:
        device: this rank's, which is the current one.
        rank: this rank.
        size: ranks, at most `MAX_RANKS`.
    """

    def __init__(self, device: Device, *, rank: int, size: int) -> None:
        self._size = size
        self._dispatch = device.kernel("expert_rows", "dispatch_expert_rows")
        self._combine = device.kernel("expert_rows", "combine_expert_rows")
        self._rows = PeerBuffers(rank=rank, size=size, slot_bytes=_ROWS_BYTES)
        with ExitStack() as undo:
            undo.callback(self._rows.close)
            self._sums = PeerBuffers(rank=rank, size=size, slot_bytes=_SUMS_BYTES)
            undo.pop_all()

    @property
    def handle(self) -> bytes:
        """What the other ranks open this rank's memory by; `HANDLE_BYTES` long."""
        return self._rows.handle + self._sums.handle

    def connect(self, handles: Sequence[bytes]) -> None:
        """Opens the memory of all ranks, in order; no rank may send before all have connected.

        Raises:
            CudaCallError: this GPU cannot reach the memory of another rank's.
        """
        self._rows.connect([each[:BUFFER_HANDLE_BYTES] for each in handles])
        self._sums.connect([each[BUFFER_HANDLE_BYTES:] for each in handles])

    @property
    def addresses(self) -> tuple[int, int]:
        """Where this rank's memory begins, for ranks of the same process."""
        return self._rows.address, self._sums.address

    def connect_addresses(self, addresses: Sequence[tuple[int, int]]) -> None:
        """As `connect`, where all ranks are in one process and on one GPU."""
        self._rows.connect_addresses([rows for rows, _ in addresses])
        self._sums.connect_addresses([sums for _, sums in addresses])

    @staticmethod
    def fits(rows: Array, choice: ExpertChoice) -> bool:
        """Whether rows of this width with so many choices can be exchanged here; on every rank the same."""
        width, chosen = rows.shape[1], choice.ids.shape[1]
        return (
            rows.dtype == bfloat16
            and width * rows.itemsize % VECTOR_BYTES == 0
            and 0 < chosen <= _MOST_CHOSEN
            and _row_bytes(width, chosen) <= _ROWS_BYTES
            and _sum_bytes(width) <= _SUMS_BYTES
        )

    def dispatch(
        self, rows: Array, choice: ExpertChoice, *, shared: Array, places: int, experts: int
    ) -> tuple[Array, Array, Array, Array]:
        """Rows, ids, weights and `shared` of all ranks, `[size * places, ...]`, for this rank's.

        Of other ranks' rows those are zeros that chose none of this rank's experts; `shared` is this rank's alone.

        Args:
            rows: `[T, h]` BF16, `T <= places`.
            choice: theirs.
            shared: `[T, h]` BF16.
            places: as on every rank.
            experts: of each rank.
        """
        tokens, width = rows.shape
        chosen = choice.ids.shape[1]
        for array, dtype, what in (
            (rows, bfloat16, "rows"),
            (choice.ids, _INT32, "the ids of experts"),
            (choice.weights, _FLOAT32, "the weights of experts"),
            (shared, bfloat16, "what shared experts made"),
        ):
            require(array, dtype, ndim=2, what=what)
        if (
            not self.fits(rows, choice)
            or not 0 <= tokens <= places
            or experts < 1
            or not (choice.ids.shape == choice.weights.shape == (tokens, chosen) and shared.shape == rows.shape)
            or not fits_vectors(rows, shared)
        ):
            raise ArrayMismatchError(
                f"rows {rows.shape} of {places} places, choices {choice.ids.shape} and {choice.weights.shape} of "
                f"{experts} experts a rank, shared {shared.shape}"
            )
        count = self._size * places
        found = cupy.empty((count, width), bfloat16), cupy.empty((count, chosen), np.int32)
        found += cupy.empty((count, chosen), np.float32), cupy.empty((count, width), bfloat16)
        given: list[Any] = [rows, choice.ids, choice.weights, shared, *found]
        vectors, most = width * rows.itemsize // VECTOR_BYTES, _ROWS_BYTES // _row_bytes(width, chosen)
        for first, blocks in _pieces(places, most):
            sizes = _Sizes(tokens, places, first, chosen, experts, vectors)
            self._dispatch((blocks, 1, 1), (_THREADS, 1, 1), [*given, self._rows.group, sizes], overlap=True)
        return found

    def combine(self, parts: Array, all_ids: Array, *, tokens: int, experts: int) -> Array:
        """`[tokens, h]` float32 of this rank's rows: the sum of all ranks' `parts`, in order of ranks.

        Args:
            parts: `[size * places, h]` float32, what this rank's experts made of the rows of `dispatch`.
            all_ids: of `dispatch`.
            tokens: this rank's rows.
            experts: of each rank.
        """
        require(parts, _FLOAT32, ndim=2, what="the sums of experts")
        require(all_ids, _INT32, ndim=2, what="the ids of experts")
        (count, width), chosen = parts.shape, all_ids.shape[1]
        places = count // self._size
        is_whole = places * self._size == count == len(all_ids)
        if not is_whole or not 0 <= tokens <= places or not fits_vectors(parts):
            raise ArrayMismatchError(f"sums {parts.shape}, choices {all_ids.shape}, {tokens} rows")
        out = cupy.empty((tokens, width), np.float32)
        vectors, most = width * _FLOAT32.itemsize // VECTOR_BYTES, _SUMS_BYTES // _sum_bytes(width)
        for first, blocks in _pieces(places, most):
            sizes = _Sizes(tokens, places, first, chosen, experts, vectors)
            arguments: list[Any] = [parts, all_ids, out, self._sums.group, sizes]
            self._combine((blocks, 1, 1), (_THREADS, 1, 1), arguments, overlap=True)
        return out

    def abort(self) -> None:
        """Ends kernels that wait for another rank; from any thread. What they leave is of no use."""
        self._rows.abort()
        self._sums.abort()

    def close(self) -> None:
        """Frees the memory, when no kernel runs and no graph is left. Idempotent."""
        self._rows.close()
        self._sums.close()


def _row_bytes(width: int, chosen: int) -> int:
    """Of a row and its choice on their way."""
    header = -(-2 * chosen * _INT32.itemsize // VECTOR_BYTES) * VECTOR_BYTES
    return header + width * bfloat16.itemsize


def _sum_bytes(width: int) -> int:
    """Of a row's sum on its way."""
    return VECTOR_BYTES + width * _FLOAT32.itemsize


def _pieces(places: int, most: int) -> Iterator[tuple[int, int]]:
    """First place and number of places of each launch."""
    most = min(most, MOST_PLACES)
    return ((first, min(most, places - first)) for first in range(0, places, most))
