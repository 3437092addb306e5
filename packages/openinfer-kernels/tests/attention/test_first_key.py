"""Attention from a later key on, on the CPU: what lies before it is seen by no token, whatever it is."""

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, PagedCache
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.errors import ArrayMismatchError

BLOCK_TOKENS, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
ROWS = [(9, 3), (2, 1), (70, 1), (6, 5)]
"""Context and query tokens; no query stands at position 0, which would see nothing."""


def make_case(rng):
    """A cache with NaN at the first position of each row, and queries."""
    tables = np.zeros((len(ROWS), 18), np.int32)
    data = rng.normal(size=(80, 1, 2, KV_HEADS, BLOCK_TOKENS, DIM)).astype(np.float32)
    free = iter(rng.permutation(80))
    for row, (context, _) in enumerate(ROWS):
        for place in range(-(-context // BLOCK_TOKENS)):
            tables[row, place] = next(free)
        data[tables[row, 0], :, :, :, 0] = np.nan
    counts = [queries for _, queries in ROWS]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    contexts = np.array([context for context, _ in ROWS], np.int32)
    batch = AttentionBatch(
        positions=np.concatenate([np.arange(context - queries, context) for context, queries in ROWS]).astype(np.int32),
        query_starts=starts,
        context_lens=contexts,
        block_tables=(tables,),
        cache_slots=(np.zeros(starts[-1], np.int64),),
        max_query_tokens=max(counts),
        max_context_tokens=int(contexts.max()),
    )
    q = rng.normal(size=(int(starts[-1]), HEADS, DIM)).astype(np.float32)
    return q, PagedCache(data=data, layer=0), batch


def naive(q, cache, batch, first_key):
    """In float64, token by token."""
    out = []
    for row, (context, queries) in enumerate(ROWS):
        both = cache.data[batch.block_tables[0][row], 0].astype(np.float64)  # [blocks, 2, K, B, D]
        keys, values = both.transpose(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)
        for token in range(queries):
            seen = slice(first_key, context - queries + token + 1)
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = keys[group, seen] @ q[batch.query_starts[row] + token, head] * 0.3
                weights = np.exp(scores - scores.max())
                out.append(weights / weights.sum() @ values[group, seen])
    return np.array(out).reshape(len(q), -1)


@pytest.mark.parametrize("ops", [CpuOps(), BatchInvariantCpuOps()], ids=["plain", "batch_invariant"])
def test_keys_before_the_first_are_seen_by_no_token(ops):
    q, cache, batch = make_case(np.random.default_rng(0))

    out = ops.paged_attention(q, cache, batch=batch, scale=0.3, first_key=1)

    np.testing.assert_allclose(out, naive(q, cache, batch, 1), atol=1e-5)


def test_first_key_with_a_window_or_below_0_is_refused():
    q, cache, batch = make_case(np.random.default_rng(0))
    for asked in ({"first_key": 1, "window": 4}, {"first_key": -1}):
        with pytest.raises(ArrayMismatchError, match="first_key"):
            CpuOps().paged_attention(q, cache, batch=batch, scale=0.3, **asked)
