"""Causal attention over a paged cache: rows alike are gathered and multiplied together.

Rows are put into groups that have the same number of query tokens and contexts of similar length: all decode rows of a
step become a few batched products, and a chunk of a prompt is a group of its own. A group's keys and values are gathered
once; its queries are cut into tiles, so that the scores of a tile stay in the processor's cache and no tile multiplies
with keys that none of its tokens can see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.ops import AttentionBatch

_GATHERED_TOKENS = 1 << 15
_SCORES_AT_ONCE = 1 << 19
_PADDED_CONTEXT = 1.25
_PADDED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows that are computed together."""

    rows: NDArray[np.intp]
    starts: NDArray[Any]
    """`[rows]` first token of each."""
    contexts: NDArray[Any]
    """`[rows]` context length of each, ascending."""
    num_queries: int
    """Query tokens of each row."""


@np.errstate(over="ignore", invalid="ignore")
def paged_attention(
    q: NDArray[Any], kv_cache: NDArray[Any], *, layer: int, batch: AttentionBatch, scale: float
) -> NDArray[Any]:
    """Attention of `q [T, H, D]` over `kv_cache [blocks, layers, 2, K, B, D]`: `[T, H * D]`."""
    out = np.empty((q.shape[0], q.shape[1] * q.shape[2]), q.dtype)
    for group in _row_groups(batch):
        keys, values = _gather(kv_cache[:, layer], batch.block_tables, group)
        _attend(out, q, keys, values, group, scale)
    return out


def _row_groups(batch: AttentionBatch) -> Iterator[_RowGroup]:
    num_queries = np.diff(batch.query_starts)
    order = np.lexsort((batch.context_lens, num_queries))
    sizes, contexts = num_queries[order].tolist(), batch.context_lens[order].tolist()
    first = 0
    for index in range(1, len(sizes) + 1):
        if index < len(sizes) and sizes[index] == sizes[first] and _fits(contexts, first, index):
            continue
        rows = order[first:index]
        yield _RowGroup(rows, batch.query_starts[rows], batch.context_lens[rows], sizes[first])
        first = index


def _fits(contexts: list[int], first: int, index: int) -> bool:
    """Whether row `index` is near enough to the group's shortest row, and the group small enough, to be added."""
    longest = contexts[index]
    near = longest <= contexts[first] * _PADDED_CONTEXT + _PADDED_TOKENS
    return near and longest * (index - first + 1) <= _GATHERED_TOKENS


def _gather(
    layer_cache: NDArray[Any], block_tables: NDArray[Any], group: _RowGroup
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values `[rows, K, padded tokens, D]`; what lies beyond a row's context is zero."""
    num_kv_heads, block_tokens, head_dim = layer_cache.shape[2:]
    num_blocks = -(-int(group.contexts[-1]) // block_tokens)
    blocks = block_tables[group.rows, None, :num_blocks]
    heads = np.arange(num_kv_heads)[:, None]
    shape = (len(group.rows), num_kv_heads, num_blocks * block_tokens, head_dim)
    keys = layer_cache[blocks, 0, heads].reshape(shape)
    values = layer_cache[blocks, 1, heads].reshape(shape)
    for index, context in enumerate(group.contexts.tolist()):
        keys[index, :, context:] = 0.0
        values[index, :, context:] = 0.0
    return keys, values


def _attend(
    out: NDArray[Any],
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    group: _RowGroup,
    scale: float,
) -> None:
    num_rows, num_kv_heads = keys.shape[:2]
    head_dim = q.shape[2]
    num_per_kv_head = q.shape[1] // num_kv_heads
    longest = int(group.contexts[-1])
    tile = max(1, _SCORES_AT_ONCE // (num_rows * q.shape[1] * longest))
    for start in range(0, group.num_queries, tile):
        size = min(tile, group.num_queries - start)
        seen = longest - group.num_queries + start + size
        tokens = group.starts[:, None] + np.arange(start, start + size)
        queries = q[tokens] * np.float32(scale)
        by_head = queries.reshape(num_rows, size, num_kv_heads, num_per_kv_head, head_dim).transpose(
            0, 2, 3, 1, 4
        )
        scores = by_head.reshape(num_rows, num_kv_heads, -1, head_dim) @ keys[:, :, :seen].swapaxes(2, 3)
        limits = (group.contexts - group.num_queries + start)[:, None] + np.arange(size)
        _hide_later(scores.reshape(num_rows, num_kv_heads * num_per_kv_head, size, seen), limits)
        mixed = _softmax_product(scores, values[:, :, :seen])
        mixed = mixed.reshape(num_rows, num_kv_heads, num_per_kv_head, size, head_dim).transpose(
            0, 3, 1, 2, 4
        )
        out[tokens] = mixed.reshape(num_rows, size, -1)


def _hide_later(scores: NDArray[Any], limits: NDArray[Any]) -> None:
    """Sets `scores [rows, heads, queries, keys]` of keys after position `limits [rows, queries]` to -inf."""
    first = int(limits.min()) + 1
    if first < scores.shape[3]:
        later = np.arange(first, scores.shape[3]) > limits[:, None, :, None]
        np.copyto(scores[..., first:], -np.inf, where=later)


def _softmax_product(scores: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """`softmax(scores) @ values`, divided at the end; `scores` are overwritten."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = scores @ values
    out /= scores.sum(axis=-1, keepdims=True)
    return out
