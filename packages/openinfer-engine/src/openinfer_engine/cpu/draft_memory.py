"""`CpuDraftMemory`: the KV of a drafter in the pool of a CPU's rank, and blocks for what its drafts add.

    block table of a row      [b0, b1, b2]        the drafter's KV of positions up to length - 2
    span                      [b0, b1, s0, s1]    s0 begins with a copy of what b2 has; new positions lie in s0 and s1

The blocks `s` are the pool's last ones, which no scheduler knows. So what drafts compute from drafts never lies in a
block that is sealed, shared or moved, and drafting needs no room in the blocks of a sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from openinfer_engine.drafters.contract import DraftSpan
from openinfer_engine.drafters.requirements import SPAN_ROWS
from openinfer_engine.model import KvLayers
from openinfer_engine.worker.block_tables import BlockTables
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_kernels import Array, AttentionBatch, HostArray, Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlocks:
    """The pool's last blocks."""

    first: int
    """The block after those that the scheduler knows."""
    per_row: int
    groups: tuple[str, ...]
    """Paged groups of the drafter."""


class CpuDraftMemory:
    """Implements `DraftMemory`: positions are known to the host."""

    def __init__(
        self, pool: KvPool, tables: BlockTables, *, states: Mapping[str, Array], blocks: SpanBlocks, ops: Ops
    ) -> None:
        self.layers: KvLayers = pool.layers
        self.states = states
        self.max_rows = SPAN_ROWS
        self._tables = tables
        self._blocks = blocks
        self._ops = ops
        self._caches = [cache for group in blocks.groups for cache in pool.layers[group]]

    def span(self, slots: Array, lengths: Array) -> DraftSpan:
        host_slots, starts = self._ops.download(slots), self._ops.download(lengths).astype(np.int64) - 1
        block_tokens = self._tables.block_size_tokens
        known = starts // block_tokens
        per_row = self._blocks.per_row
        own = self._blocks.first + np.arange(len(starts))[:, None] * per_row + np.arange(per_row)
        tables = np.zeros((len(starts), int(known.max(initial=0)) + per_row), np.int32)
        table = self._tables.of_slots(host_slots)
        width = min(tables.shape[1], table.shape[1])
        tables[:, :width] = table[:, :width]
        begun = np.flatnonzero(starts % block_tokens)
        self._copy(tables[begun, known[begun]], own[begun, 0])
        np.put_along_axis(tables, known[:, None] + np.arange(per_row), own.astype(np.int32), axis=1)
        states = slots, self.states
        return _CpuSpan(starts, tables, states, block_tokens=block_tokens, ops=self._ops)

    def _copy(self, sources: HostArray, targets: HostArray) -> None:
        for cache in self._caches:
            cache.data[targets, cache.layer] = cache.data[sources, cache.layer]
            if (scales := cache.scales) is not None:
                scales[targets, cache.layer] = scales[sources, cache.layer]


class _CpuSpan:
    def __init__(
        self,
        starts: HostArray,
        tables: HostArray,
        states: tuple[Array, Mapping[str, Array]],
        *,
        block_tokens: int,
        ops: Ops,
    ) -> None:
        self._starts = starts
        self._slots, self._states = states
        self._tables = tables
        self._block_tokens = block_tokens
        self._ops = ops

    def rows(self, first: int, count: int) -> AttentionBatch:
        positions = (self._starts[:, None] + first + np.arange(count)).ravel()
        ends = self._starts + first + count
        query_starts = np.arange(len(ends) + 1) * count
        batch = self._batch(np.repeat(self._tables, count, axis=0), positions, ends, query_starts, self._tables)
        return replace(batch, state_slots=self._slots, states=self._states)

    def whole(self, count: int) -> AttentionBatch:
        positions = (self._starts[:, None] + np.arange(count)).ravel()
        tables = np.repeat(self._tables, count, axis=0)
        ends = np.repeat(self._starts + count, count)
        return self._batch(tables, positions, ends, np.arange(len(ends) + 1), tables)

    def _batch(
        self,
        tables_of_tokens: HostArray,
        positions: HostArray,
        ends: HostArray,
        query_starts: HostArray,
        tables: HostArray,
    ) -> AttentionBatch:
        ops, block_tokens = self._ops, self._block_tokens
        places, offsets = np.divmod(positions, block_tokens)
        blocks = tables_of_tokens[np.arange(len(positions)), places].astype(np.int64)
        return AttentionBatch(
            positions=ops.upload(positions.astype(np.int32)),
            query_starts=ops.upload(query_starts.astype(np.int32)),
            context_lens=ops.upload(ends.astype(np.int32)),
            block_tables=(ops.upload(tables),),
            cache_slots=(ops.upload(blocks * block_tokens + offsets),),
            max_query_tokens=int(np.diff(query_starts).max(initial=1)),
            max_context_tokens=int(ends.max(initial=1)),
            block_tokens=block_tokens,
        )
