"""The arrays that a step's model and sampler read, filled on the device by `steps.SlotState`.

DecodeInputs   one token per row, sizes fixed: what a captured step reads and writes
MixedInputs    prefill chunks and decode rows, made for one step
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.slot_record import ROW_COLUMNS
from openinfer_kernels.ops import (
    Array,
    AttentionBatch,
    Bias,
    HostArray,
    KeptInputs,
    Penalties,
    SamplingBatch,
    TokenMask,
)
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES

MASK_LINE = 3
DECODE_LINES = 4
"""Of `DecodeInputs.rows`, without the one of adapters."""
MIXED_LINES = 6
"""Of `MixedInputs.record`: slots, first positions, tokens, host ids of them, first token in the step, first host id."""


class _ModelInputs(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "positions", "context_lens", "block_tables", "cache_slots")
        ),
        *((name, ctypes.c_int) for name in ("num_rows", "num_tokens", "table_columns")),
    )


class _SampledRows(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ROW_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMemory:
    """What the batches of all steps of a rank have in common: fields of `AttentionBatch`."""

    block_tokens: int = 0
    num_tables: int = 1
    """Block tables of a row."""
    caches: Mapping[str, Array] = field(default_factory=dict[str, Array])
    states: Mapping[str, Array] | None = None
    """None for a model that has none."""
    kept: KeptInputs | None = None
    """Where mixed batches keep inputs of rows with drafts; None where their states take in all tokens."""

    def fields(self, slots: Array) -> dict[str, Any]:
        """As a batch takes them, with `slots [R]` of its rows, which the host writes as they are."""
        states = {} if self.states is None else {"states": self.states, "state_slots": slots}
        return {"block_tokens": self.block_tokens, "caches": self.caches, **states}

    def tables(self, *, num_rows: int, num_tokens: int, max_blocks: int) -> dict[str, Any]:
        """Block tables and cache slots as a batch takes them: each lies behind the one before."""
        block_tables = cupy.zeros((self.num_tables, num_rows, max_blocks), np.int32)  # what no row uses is a block, too
        cache_slots = cupy.empty((self.num_tables, num_tokens), np.int64)
        return {"block_tables": tuple(block_tables), "cache_slots": tuple(cache_slots)}


_NOTHING = BatchMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """How rows are sampled, `[R]` each."""

    slots: Array
    """int32; -1 where a row is not sampled."""
    columns: Mapping[str, Array]
    """Of a `SamplingBatch`, by name."""

    @classmethod
    def make(cls, num_rows: int, *, slots: Array | None = None) -> "SampledRows":
        """Arrays without contents, but for `slots` if given."""
        return cls(
            slots=cupy.empty(num_rows, np.int32) if slots is None else slots,
            columns={name: cupy.empty(num_rows, dtype) for name, dtype in COLUMN_DTYPES.items()},
        )

    def batch(
        self,
        num_token_ids: int,
        *,
        changes: tuple[Bias, Penalties] | None = None,
        token_mask: TokenMask | None = None,
    ) -> SamplingBatch:
        bias, penalties = (None, None) if changes is None else changes
        return SamplingBatch(
            num_token_ids=num_token_ids,
            bias=bias,
            penalties=penalties,
            token_mask=token_mask,
            **self.columns,
        )

    def pointers(self) -> _SampledRows:
        return _SampledRows(*(address(self.columns[name]) for name in ROW_COLUMNS))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """A step of one token per row, which its slot sampled last."""

    rows: Array
    """`[DECODE_LINES, R]` int32, the only thing the host writes: slots (-1 for padding), positions, whether the row
    samples, and the row that the token mask of that number is for. With adapters one more: adapter slots, or -1."""
    token_ids: Array
    batch: AttentionBatch
    sampled: SampledRows

    @classmethod
    def make(
        cls,
        num_rows: int,
        *,
        max_blocks: int,
        max_context_tokens: int,
        memory: BatchMemory = _NOTHING,
        has_adapters: bool = False,
    ) -> "DecodeInputs":
        """Arrays for steps of so many rows.

        Args:
            num_rows: R.
            max_blocks: of the longest context.
            max_context_tokens: of the longest context.
            memory: of the rank.
            has_adapters: whether rows may use adapters.
        """
        rows: Any = cupy.asarray(np.full((DECODE_LINES + has_adapters, num_rows), -1, np.int32))
        batch = AttentionBatch(
            positions=cupy.zeros(num_rows, np.int32),
            query_starts=cupy.asarray(np.arange(num_rows + 1, dtype=np.int32)),
            context_lens=cupy.zeros(num_rows, np.int32),
            max_query_tokens=1,
            max_context_tokens=max_context_tokens,
            adapter_slots=rows[DECODE_LINES] if has_adapters else None,
            **memory.tables(num_rows=num_rows, num_tokens=num_rows, max_blocks=max_blocks),
            **memory.fields(rows[0]),
        )
        return cls(
            rows=rows,
            token_ids=cupy.zeros(num_rows, np.int32),
            batch=batch,
            sampled=SampledRows.make(num_rows),
        )

    def without_adapters(self) -> "DecodeInputs":
        """The same arrays, for steps that use none."""
        return replace(self, batch=replace(self.batch, adapter_slots=None))

    def model_inputs(self) -> _ModelInputs:
        return _model_inputs(self.token_ids, self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInputs:
    """A mixed batch: rows of any length; rows and tokens after the last one are padding."""

    record: Array
    """`[MIXED_LINES * R + T]` int32, the only thing the host writes: see `mixed_record`. With adapters `T` more."""
    token_ids: Array
    batch: AttentionBatch

    @classmethod
    def make(
        cls,
        num_rows: int,
        num_tokens: int,
        *,
        max_blocks: int,
        longest: tuple[int, int],
        chunk_context_tokens: int | None = None,
        record: Array | None = None,
        memory: BatchMemory = _NOTHING,
        has_adapters: bool = False,
    ) -> "MixedInputs":
        """Arrays for steps of so many rows and tokens.

        Args:
            num_rows: R.
            num_tokens: T.
            max_blocks: of the longest context.
            longest: tokens of the longest chunk and of the longest context, at most.
            chunk_context_tokens: as in `AttentionBatch`.
            record: where it is already.
            memory: of the rank.
            has_adapters: whether tokens may use adapters, whose slots are then in the record.
        """
        if record is None:
            record = cupy.asarray(padding_record(num_rows, num_tokens, has_adapters=has_adapters))
        place: Any = record
        batch = AttentionBatch(
            positions=cupy.empty(num_tokens, np.int32),
            query_starts=cupy.empty(num_rows + 1, np.int32),
            context_lens=cupy.empty(num_rows, np.int32),
            max_query_tokens=longest[0],
            max_context_tokens=longest[1],
            chunk_context_tokens=chunk_context_tokens,
            adapter_slots=place[MIXED_LINES * num_rows + num_tokens :] if has_adapters else None,
            kept=memory.kept,
            kept_rows=None if memory.kept is None else cupy.zeros(num_rows, np.int32),
            **memory.tables(num_rows=num_rows, num_tokens=num_tokens, max_blocks=max_blocks),
            **memory.fields(place[:num_rows]),
        )
        return cls(record=place, token_ids=cupy.empty(num_tokens, np.int32), batch=batch)

    def without_adapters(self) -> "MixedInputs":
        """The same arrays, for steps that use none."""
        return replace(self, batch=replace(self.batch, adapter_slots=None))

    def model_inputs(self) -> _ModelInputs:
        return _model_inputs(self.token_ids, self.batch)


def padding_record(num_rows: int, num_tokens: int, *, has_adapters: bool = False) -> HostArray:
    """`MixedInputs.record` of a step in which all is padding."""
    record = np.zeros(MIXED_LINES * num_rows + num_tokens * (1 + has_adapters), np.int32)
    record[:num_rows] = -1
    record[MIXED_LINES * num_rows + num_tokens :] = -1
    return record


def mixed_record(
    slots: HostArray,
    starts: HostArray,
    counts: HostArray,
    num_host_tokens: HostArray,
    host_ids: HostArray,
    *,
    sizes: tuple[int, int],
    adapter_slots: HostArray | None = None,
) -> HostArray:
    """`MixedInputs.record` of a mixed batch: columns of a step's plan, padded.

    Args:
        slots: `[r]`.
        starts: `[r]` first positions.
        counts: `[r]` tokens.
        num_host_tokens: `[r]` tokens whose ids the host sends: all, or all but the first, which is the slot's last id.
        host_ids: `[sum(num_host_tokens)]`.
        sizes: R and T of the record.
        adapter_slots: `[r]`, where the record has those of tokens.
    """
    num_rows, (padded_rows, padded_tokens) = len(slots), sizes
    record = padding_record(padded_rows, padded_tokens, has_adapters=adapter_slots is not None)
    lines = record[: MIXED_LINES * padded_rows].reshape(MIXED_LINES, padded_rows)
    ends = np.cumsum(counts)
    # Padding rows begin where the last row ends, so that they have no tokens.
    lines[4, num_rows:] = ends[-1]
    firsts = (ends - counts, np.cumsum(num_host_tokens) - num_host_tokens)
    for line, column in zip(lines, (slots, starts, counts, num_host_tokens, *firsts), strict=True):
        line[:num_rows] = column
    host_part = record[MIXED_LINES * padded_rows :]
    host_part[: len(host_ids)] = host_ids
    if adapter_slots is not None:
        host_part[padded_tokens:][: ends[-1]] = np.repeat(adapter_slots, counts)
    return record


def _model_inputs(token_ids: Array, batch: AttentionBatch) -> _ModelInputs:
    # The first of the tables, and of their cache slots, is where all of them begin: `BatchMemory.tables`.
    arrays = (token_ids, batch.positions, batch.context_lens, batch.block_tables[0], batch.cache_slots[0])
    return _ModelInputs(*map(address, arrays), len(batch.context_lens), len(token_ids), batch.block_tables[0].shape[1])
