"""Causal attention over a paged cache: rows alike are gathered and multiplied together.

Rows with the same number of query tokens and contexts of similar length form a group: the decode rows of a
step become a few batched products, and a chunk of a prompt is a group of its own. A group's keys and values
are gathered once and are small enough to stay in the processor's cache. Its queries are cut into tiles, for
the same reason, and so that no tile multiplies with keys that none of its tokens sees. Of a context, only the
blocks from the first one that the window of the row's first token reaches are there: positions and contexts
below are counted from that block on.

Shapes below: `N` rows of the group, `G = H / K` query heads per KV head, `S` query tokens, `C` context
tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.cache_formats import read_cache
from openinfer_kernels.cpu.gemm.linear import soft_cap
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import AttentionBatch, PagedCache

_KEY_NUMBERS_AT_ONCE = 1 << 16
_SCORES_AT_ONCE = 1 << 19
_LONGEST_OVER_SHORTEST = 1.25
_LONGEST_MINUS_SHORTEST = 32
_FEW_QUERIES = 16


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows that are computed together."""

    rows: NDArray[np.intp]
    starts: NDArray[Any]
    """`[N]` first token of each."""
    contexts: NDArray[Any]
    """`[N]` context length of each, ascending."""
    first_blocks: NDArray[Any] | None
    """`[N]` index in its context of the block that each begins with; None: with its first, as without a window."""
    num_queries: int
    """Query tokens of each row."""


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What becomes of products before they are weights."""

    window: int | None
    soft_cap: float | None
    sinks: NDArray[Any] | None
    """`[H]`"""
    first_key: int
    """Positions before it are hidden; 0 with a window."""


@np.errstate(over="ignore", invalid="ignore")
def paged_attention(
    q: NDArray[Any],
    cache: PagedCache,
    *,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: NDArray[Any] | None = None,
    first_key: int = 0,
) -> NDArray[Any]:
    batch = batch.token_rows or batch
    check_first_key(first_key, window=window)
    num_kv_heads, block_tokens, head_dim = cache.data.shape[3:]
    scoring = _Scoring(window, soft_cap, sinks, first_key)
    out = np.empty((q.shape[0], q.shape[1] * head_dim), q.dtype)
    most_tokens = _KEY_NUMBERS_AT_ONCE // (num_kv_heads * head_dim)
    for group in _row_groups(batch, window=window, block_tokens=block_tokens, max_tokens=most_tokens):
        keys, values = _gather(cache, batch.block_tables[cache.table], group, window=window)
        keys[:, :, :first_key] = values[:, :, :first_key] = 0.0
        for first, size in _query_tiles(group, num_heads=q.shape[1]):
            tokens = group.starts[:, None] + np.arange(first, first + size)
            last_seen = (group.contexts - group.num_queries)[:, None] + np.arange(first, first + size)
            seen = _seen_by(group, first, size, window=window)
            scaled = q[tokens] * np.float32(scale)
            out[tokens] = _attend(scaled, keys[:, :, seen], values[:, :, seen], last_seen - seen.start, scoring)
    return out


def check_first_key(first_key: int, *, window: int | None) -> None:
    """Raises `ArrayMismatchError` for what the operator does not offer."""
    if first_key < 0 or (first_key and window is not None):
        raise ArrayMismatchError(f"first_key {first_key} with a window of {window}: at least 0, and 0 with a window")


def _seen_by(group: _RowGroup, first: int, size: int, *, window: int | None) -> slice:
    """The keys that the `size` queries from `first` on of some row of a group see."""
    shortest, longest = int(group.contexts[0]) - group.num_queries, int(group.contexts[-1]) - group.num_queries
    return slice(0 if window is None else max(0, shortest + first + 1 - window), longest + first + size)


def _row_groups(
    batch: AttentionBatch, *, window: int | None, block_tokens: int, max_tokens: int
) -> Iterator[_RowGroup]:
    """All rows in groups of at most `max_tokens` padded context tokens; a longer row is alone."""
    num_queries = np.diff(batch.query_starts)
    first_blocks, all_contexts = None, batch.context_lens
    if window is not None:
        first_blocks = np.maximum(all_contexts - num_queries + 1 - window, 0) // block_tokens
        all_contexts = all_contexts - first_blocks * block_tokens
    order = np.lexsort((all_contexts, num_queries))
    sizes, contexts = num_queries[order].tolist(), all_contexts[order].tolist()
    first = 0
    for index in range(1, len(sizes) + 1):
        if index < len(sizes) and sizes[index] == sizes[first]:
            near = contexts[index] <= contexts[first] * _LONGEST_OVER_SHORTEST + _LONGEST_MINUS_SHORTEST
            if near and contexts[index] * (index - first + 1) <= max_tokens:
                continue
        rows = order[first:index]
        from_blocks = None if first_blocks is None else first_blocks[rows]
        yield _RowGroup(rows, batch.query_starts[rows], all_contexts[rows], from_blocks, sizes[first])
        first = index


def _query_tiles(group: _RowGroup, *, num_heads: int) -> Iterator[tuple[int, int]]:
    """First query and number of queries of each tile of a group."""
    tile = max(1, _SCORES_AT_ONCE // (len(group.rows) * num_heads * int(group.contexts[-1])))
    for first in range(0, group.num_queries, tile):
        yield first, min(tile, group.num_queries - first)


def _gather(
    cache: PagedCache, block_tables: NDArray[Any], group: _RowGroup, *, window: int | None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values, each `[N, K, padded C, D]`; what is not of a row's context, or before its windows, is zero."""
    num_kv_heads, block_tokens, head_dim = cache.data.shape[3:]
    num_blocks = -(-int(group.contexts[-1]) // block_tokens)
    blocks = _block_ids(block_tables, group, num_blocks)[:, None]
    heads = np.arange(int(num_kv_heads)).reshape(-1, 1)
    both = read_cache(cache, (blocks, np.arange(2).reshape(2, 1, 1, 1), heads))
    both = both.reshape(2, len(group.rows), num_kv_heads, num_blocks * block_tokens, head_dim)
    for index, context in enumerate(group.contexts.tolist()):
        # Blocks may hold anything beyond the context, NaN as well, and NaN times a weight of zero is NaN.
        both[:, index, :, context:] = 0.0
        if window is not None:
            both[:, index, :, : max(0, context - group.num_queries + 1 - window)] = 0.0
    return both[0], both[1]


def _block_ids(block_tables: NDArray[Any], group: _RowGroup, num_blocks: int) -> NDArray[Any]:
    """`[N, num_blocks]`; beyond a row's context, any."""
    if group.first_blocks is None:
        return block_tables[group.rows, :num_blocks]
    columns = group.first_blocks[:, None] + np.arange(num_blocks)
    # A row that begins later than others of its group may be given more blocks than its table has columns.
    return block_tables[group.rows[:, None], np.minimum(columns, block_tables.shape[1] - 1)]


def _attend(
    queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], last_seen: NDArray[Any], scoring: _Scoring
) -> NDArray[Any]:
    """Attention of `queries [N, S, H, D]`, query `s` seeing positions up to `last_seen [N, S]`: `[N, S, H * D]`."""
    num_rows, num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    split = queries.reshape(num_rows, num_queries, num_kv_heads, -1, head_dim)
    scores = _products(split.transpose(0, 2, 3, 1, 4).reshape(num_rows, num_kv_heads, -1, head_dim), keys)
    if scoring.soft_cap is not None:
        soft_cap(scores, cap=scoring.soft_cap)
    by_head = scores.reshape(num_rows, num_heads, num_queries, num_keys)
    _hide_later(by_head, last_seen)
    if scoring.window is not None:
        _hide_earlier(by_head, last_seen + 1 - scoring.window)
    by_head[..., : scoring.first_key] = -np.inf
    sinks = None
    if scoring.sinks is not None:  # [K, G S, 1]
        sinks = np.repeat(scoring.sinks, num_queries).reshape(num_kv_heads, -1, 1)
    mixed = _softmax_product(scores, values, sinks)
    mixed = mixed.reshape(num_rows, num_kv_heads, -1, num_queries, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(num_rows, num_queries, -1)


def _products(queries: NDArray[Any], keys: NDArray[Any]) -> NDArray[Any]:
    """`queries [N, K, G S, D] @ keys [N, K, C, D].T`: `[N, K, G S, C]`, contiguous.

    OpenBLAS takes three times as long for a product with few rows on the left as for the transposed one.
    """
    if queries.shape[2] < _FEW_QUERIES:
        return np.ascontiguousarray((keys @ queries.swapaxes(2, 3)).swapaxes(2, 3))
    return queries @ keys.swapaxes(2, 3)


def _hide_later(scores: NDArray[Any], last_seen: NDArray[Any]) -> None:
    """Sets `scores [N, H, S, C]` of keys after position `last_seen [N, S]` to -inf."""
    first = int(last_seen.min()) + 1
    if first < scores.shape[3]:
        later = last_seen[:, None, :, None] < np.arange(first, int(scores.shape[3]))
        np.copyto(scores[..., first:], -np.inf, where=later)


def _hide_earlier(scores: NDArray[Any], first_seen: NDArray[Any]) -> None:
    """Sets `scores [N, H, S, C]` of keys before position `first_seen [N, S]` to -inf."""
    end = int(first_seen.max())
    if end > 0:
        earlier = first_seen[:, None, :, None] > np.arange(min(end, scores.shape[3]))
        np.copyto(scores[..., :end], -np.inf, where=earlier)


def _softmax_product(scores: NDArray[Any], values: NDArray[Any], sinks: NDArray[Any] | None) -> NDArray[Any]:
    """`softmax(scores) @ values`, divided at the end; `scores` are overwritten."""
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    # No score is above zero then, so that no exponential overflows.
    scores -= highest
    np.exp(scores, out=scores)
    mixed = scores @ values
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - highest)
    mixed /= total
    return mixed
