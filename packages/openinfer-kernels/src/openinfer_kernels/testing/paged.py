"""Cases of attention over a paged cache: rows whose blocks lie scattered, and nothing but NaN everywhere else."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from openinfer_kernels.ops import AttentionBatch, HostArray, PagedCache

_UNUSED_BLOCK = 0


@dataclass(slots=True, kw_only=True)
class PagedCase:
    """Rows in a paged cache, and the same keys and values unpaged; all in host memory, float32."""

    batch: AttentionBatch
    kv_cache: HostArray
    """`[blocks, layers, 2, K, B, D]`; NaN wherever no row's context is."""
    contexts: list[HostArray]
    """Per row `[layers, 2, K, context, D]`."""
    table: int = 0
    """The block table that has the rows' blocks; those before it name others."""

    def cache(self, layer: int) -> PagedCache:
        """One layer, as operators take it."""
        return PagedCache(data=self.kv_cache, layer=layer, table=self.table, is_first_layer=layer == 0)

    def behind_window(self, window: int) -> AttentionBatch:
        """The batch where blocks before the window of a row's first token are void: their entries name one of NaN."""
        tables, block_tokens = [each.copy() for each in self.batch.block_tables], self.kv_cache.shape[4]
        for row, (context, queries) in enumerate(
            zip(self.batch.context_lens.tolist(), np.diff(self.batch.query_starts).tolist(), strict=True)
        ):
            first_seen = max(0, context - queries + 1 - window)
            tables[self.table][row, : first_seen // block_tokens] = _UNUSED_BLOCK
        return replace(self.batch, block_tables=tuple(tables))

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return len(self.batch.positions)


def make_paged_case(
    rng: np.random.Generator,
    rows: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    num_layers: int = 2,
    table: int = 0,
) -> PagedCase:
    """A case of `(context tokens, query tokens)` rows; a row's context includes its query tokens.

    Args:
        rng: what is drawn from.
        rows: see above.
        num_kv_heads: `K`.
        head_dim: `D`.
        block_tokens: `B`.
        num_layers: of the cache.
        table: the number of the block table; those before it name the wrong blocks.
    """
    num_blocks = [-(-context // block_tokens) for context, _ in rows]
    total = sum(num_blocks) + 3
    free = rng.permutation(np.arange(_UNUSED_BLOCK + 1, total)).tolist()
    shape = (num_layers, 2, num_kv_heads)
    kv_cache = np.full((total, *shape, block_tokens, head_dim), np.nan, np.float32)
    block_tables = rng.integers(0, total, size=(len(rows), max(num_blocks) + 2), dtype=np.int32)
    positions: list[int] = []
    slots: list[int] = []
    contexts: list[HostArray] = []
    for row, (context, queries) in enumerate(rows):
        block_tables[row, : num_blocks[row]] = [free.pop() for _ in range(num_blocks[row])]
        contexts.append(rng.normal(size=(*shape, context, head_dim)).astype(np.float32))
        for position in range(context):
            block, offset = int(block_tables[row, position // block_tokens]), position % block_tokens
            kv_cache[block, :, :, :, offset] = contexts[row][:, :, :, position]
            if position >= context - queries:
                positions.append(position)
                slots.append(block * block_tokens + offset)
    query_tokens = [queries for _, queries in rows]
    other_tables = [rng.integers(0, total, size=block_tables.shape, dtype=np.int32) for _ in range(table)]
    other_slots = [np.arange(len(slots), dtype=np.int64) % block_tokens for _ in range(table)]  # of the unused block
    batch = AttentionBatch(
        positions=np.array(positions, np.int32),
        query_starts=np.cumsum([0, *query_tokens]).astype(np.int32),
        context_lens=np.array([context for context, _ in rows], np.int32),
        block_tables=(*other_tables, block_tables),
        cache_slots=(*other_slots, np.array(slots, np.int64)),
        max_query_tokens=max(query_tokens),
        max_context_tokens=max(context for context, _ in rows),
    )
    return PagedCase(batch=batch, kv_cache=kv_cache, contexts=contexts, table=table)


def make_batch(num_tokens: int) -> AttentionBatch:
    """A batch of one row of so many tokens, the first of its sequence: for products, which ask of no cache."""
    positions, context = np.arange(num_tokens, dtype=np.int32), np.array([num_tokens], np.int32)
    return AttentionBatch(
        positions=positions,
        query_starts=np.append(np.int32(0), context),
        context_lens=context,
        block_tables=(np.zeros((1, 1), np.int32),),
        cache_slots=(positions.astype(np.int64),),
        max_query_tokens=num_tokens,
        max_context_tokens=num_tokens,
    )


def make_state_case(
    rng: np.random.Generator, rows: Sequence[tuple[int, int]], shape: tuple[int, ...], *, num_layers: int = 2
) -> tuple[AttentionBatch, HostArray]:
    """A batch of `(context tokens, query tokens)` rows with recurrent states, and these: `[slots, layers, *shape]`.

    Slots lie scattered; those of rows that begin their sequence, and unused ones, hold nothing but NaN.
    """
    batch = make_paged_case(rng, rows, num_kv_heads=1, head_dim=1, block_tokens=16).batch
    slots = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
    state = np.full((len(rows) + 2, num_layers, *shape), np.nan, np.float32)
    for slot, (context, queries) in zip(slots.tolist(), rows, strict=True):
        if context > queries:
            state[slot] = rng.normal(size=(num_layers, *shape))
    return replace(batch, state_slots=slots), state
