"""`LateRows`: what a drafter reads of steps of one token a row, kept until it is shown several of them at once.

A drafter's products of one token cost what they read of its weights, and those of sixteen cost the same.
`csrc/sampling/drafters.cu`.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.step_inputs import DecodeInputs, MixedInputs
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 128
_PARTS = 8  # of one launch


class _Parts(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_void_p * _PARTS),)


class _LateRows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "token_ids")),
        *((name, ctypes.c_int) for name in ("slots", "depth", "row_bytes")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "query_starts", "positions", "block_tables")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_columns")),
    )


class LateRows:
    """Token ids, and some vectors of each, of the last `depth` tokens of sequence slots; queued on the current stream.

    Args:
        device: whose.
        max_num_seqs: sequence slots.
        depth: tokens.
        like: `[T, h]`, one of the vectors; empty: there are ids alone.
    """

    def __init__(self, device: Device, *, max_num_seqs: int, depth: int, like: Sequence[Array]) -> None:
        self._kernels = {name: device.kernel("drafters", f"drafters_{name}") for name in ("put_late", "take_late")}
        self._shapes = [(part.shape[1], part.dtype) for part in like]
        if len(set(self._shapes)) > 1:
            raise ArrayMismatchError(f"vectors of {self._shapes} are not alike")
        row_bytes = 0 if not like else like[0].shape[1] * like[0].dtype.itemsize
        if row_bytes % VECTOR_BYTES:
            raise ArrayMismatchError(f"vectors of {row_bytes} bytes: {VECTOR_BYTES} are copied at once")
        self._ids = cupy.zeros((max_num_seqs, depth), np.int32)
        self._parts = None
        if like:
            self._parts = cupy.zeros((len(like), max_num_seqs, depth, like[0].shape[1]), like[0].dtype)
        parts = None if self._parts is None else address(self._parts)
        self._given = _LateRows(parts, address(self._ids), max_num_seqs, depth, row_bytes)

    def put(self, inputs: DecodeInputs, parts: Sequence[Array]) -> None:
        """Keeps a decode step: its ids, and `parts`, `[R, h]` each."""
        num_rows = inputs.rows.shape[1]
        if [(part.shape[1], part.dtype) for part in parts] != self._shapes:
            raise ArrayMismatchError(f"{len(parts)} vectors of a token, and {len(self._shapes)} are kept")
        for part in parts:
            require(part, part.dtype, ndim=2, what="what a drafter reads")
        for first in range(0, max(1, len(parts)), _PARTS):
            some = parts[first : first + _PARTS]
            pointers = _Parts((ctypes.c_void_p * _PARTS)(*map(address, some)))
            arguments = [
                pointers,
                self._given,
                inputs.token_ids,
                inputs.rows[0],
                inputs.batch.positions,
                ctypes.c_int(first),
            ]
            self._kernels["put_late"]((num_rows, max(1, len(some)), 1), (_THREADS, 1, 1), arguments)

    def take(self, inputs: MixedInputs) -> tuple[Array, tuple[Array, ...]]:
        """Of the tokens of a batch, each among the last of its slot: ids `[T]`, and vectors `[T, h]` each."""
        batch, num_tokens = inputs.batch, len(inputs.token_ids)
        num_rows, table = len(batch.context_lens), batch.block_tables[0]
        token_ids = cupy.empty(num_tokens, np.int32)
        parts = [cupy.empty((len(self._shapes), num_tokens, width), dtype) for width, dtype in self._shapes[:1]]
        step = _Step(
            *map(address, (inputs.record[:num_rows], batch.query_starts, batch.positions, table)),
            num_rows,
            table.shape[1],
        )
        arguments = [self._given, step, parts[0] if parts else None, token_ids]
        self._kernels["take_late"]((num_tokens, max(1, len(self._shapes)), 1), (_THREADS, 1, 1), arguments)
        return token_ids, tuple(parts[0]) if parts else ()
