"""`DraftSpans`: where drafts stand that no step has computed yet, on the device. `csrc/sampling/drafters.cu`.

block table of a slot     [b0, b1, b2]        the drafter's KV of positions up to length - 2
span                      [b0, b1, s0, s1]    s0 begins with a copy of what b2 has; new positions lie in s0 and s1
"""

import ctypes
from dataclasses import dataclass

import numpy as np

from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch

_THREADS = 128
_COPIES = 8  # blocks of threads that copy one block of KV


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlocks:
    """The pool's last blocks, which no sequence has."""

    pool: Array
    """`[blocks, ...]`, all of it."""
    first: int
    per_row: int
    block_tokens: int
    begin_bytes: int
    """Of what a block has for the drafter: it lies in one piece."""
    num_bytes: int


class _SpanBlocks(ctypes.Structure):
    _fields_ = (
        ("pool", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_bytes", "begin", "bytes")),
        *((name, ctypes.c_int) for name in ("first", "per_row", "block_tokens")),
    )


class DraftSpans:
    """Makes the batches that a drafter computes its drafts with; queued on CuPy's current stream.

    Args:
        device: whose.
        tables: `[slots, max_blocks]` int32, the block tables of sequence slots.
        blocks: of spans.
        max_context_tokens: of a sequence and its drafts.
        most: spans of one step, and new positions of each.
    """

    def __init__(
        self, device: Device, tables: Array, blocks: SpanBlocks, *, max_context_tokens: int, most: tuple[int, int]
    ) -> None:
        self._kernels = {name: device.kernel("drafters", f"drafters_{name}") for name in ("spans", "place")}
        self._tables = tables
        self._blocks = blocks
        self._max_context_tokens = max_context_tokens
        # Made here, as nothing can be brought from the host in a capture, and any number of rows may come there first.
        spans, positions = most
        firsts = np.arange(spans + 1, dtype=np.int32) * np.arange(1, positions + 1, dtype=np.int32)[:, None]
        self._starts_of_tokens = cupy.asarray(np.arange(spans * positions + 1, dtype=np.int32))
        self._starts_of_spans = cupy.asarray(firsts)
        block_bytes = blocks.pool[0].nbytes
        if blocks.begin_bytes % VECTOR_BYTES or blocks.num_bytes % VECTOR_BYTES or block_bytes % VECTOR_BYTES:
            raise ArrayMismatchError("KV of a drafter that lies at no multiple of 16 bytes")
        self._given = _SpanBlocks(
            address(blocks.pool),
            block_bytes,
            blocks.begin_bytes,
            blocks.num_bytes,
            blocks.first,
            blocks.per_row,
            blocks.block_tokens,
        )

    def tables_of(self, slots: Array, lengths: Array) -> tuple[Array, Array]:
        """`[n]` first new positions and `[n, columns]` block tables of `slots [n]`, from `lengths - 1` on."""
        count, columns = len(slots), self._tables.shape[1] + self._blocks.per_row
        tables, starts = cupy.empty((count, columns), np.int32), cupy.empty(count, np.int32)
        arguments = [
            self._given,
            self._tables,
            ctypes.c_int(self._tables.shape[1]),
            slots,
            lengths,
            tables,
            ctypes.c_int(columns),
            starts,
        ]
        self._kernels["spans"]((count, _COPIES, 1), (_THREADS, 1, 1), arguments)
        return starts, tables

    def batch(self, starts: Array, tables: Array, *, first: int, count: int, whole: bool) -> AttentionBatch:
        """`count` tokens of each span from its `first` new position on; `whole`: each sees all of them."""
        spans, columns = tables.shape
        tokens = spans * count
        rows = tokens if whole else spans
        positions, ends = cupy.empty(tokens, np.int32), cupy.empty(rows, np.int32)
        cache_slots = cupy.empty(tokens, np.int64)
        row_tables = cupy.empty((tokens, columns), np.int32) if whole else tables
        numbers = [ctypes.c_int(each) for each in (columns, self._blocks.block_tokens, first, count, int(whole))]
        arguments = [starts, tables, *numbers, positions, ends, cache_slots, row_tables]
        self._kernels["place"]((tokens, 1, 1), (_THREADS, 1, 1), arguments)
        return AttentionBatch(
            positions=positions,
            query_starts=self._starts_of(rows, 1 if whole else count),
            context_lens=ends,
            block_tables=(row_tables,),
            cache_slots=(cache_slots,),
            max_query_tokens=1 if whole else count,
            max_context_tokens=self._max_context_tokens,
            block_tokens=self._blocks.block_tokens,
        )

    def _starts_of(self, rows: int, count: int) -> Array:
        starts = self._starts_of_tokens if count == 1 else self._starts_of_spans[count - 1]
        return starts[: rows + 1]
