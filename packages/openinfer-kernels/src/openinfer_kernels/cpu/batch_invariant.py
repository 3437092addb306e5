"""The operators whose results depend on the other rows of a step, computed so that they do not.

A library multiplies matrices of different sizes by different orders of sums. Here every product has one shape: tokens
are taken `TOKENS` at a time, whatever the step brings, and keys `KEYS` at a time, from multiples of `KEYS` in their
sequence. What is missing is zero. So the bits of a token's result depend on its own sequence alone: not on other rows,
not on how a prompt is cut into chunks, not on what of it was cached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.cache_formats import read_cache
from openinfer_kernels.cpu.attention.indexer import index_scores
from openinfer_kernels.cpu.attention.paged import check_first_key
from openinfer_kernels.cpu.attention.window import window_attention
from openinfer_kernels.cpu.gemm.linear import linear, soft_cap
from openinfer_kernels.cpu.gemm.lora import lora_expand, lora_expand_swiglu, lora_shrink
from openinfer_kernels.cpu.gemm.quantised import (
    dequantised,
    grouped_linear,
    weight_linear,
    weight_linear_geglu,
    weight_linear_swiglu,
)
from openinfer_kernels.cpu.linear_attention.gated_delta_rule import gated_delta_rule
from openinfer_kernels.cpu.mla.latent_attention import latent_queries, latent_values
from openinfer_kernels.cpu.moe.experts import experts
from openinfer_kernels.cpu.norm.hyper_connections import hyper_head, hyper_read
from openinfer_kernels.cpu.ops import CpuOps
from openinfer_kernels.latent_forms import LatentShape
from openinfer_kernels.ops import AttentionBatch, LinearWeight, PagedCache, QuantisedWeight

_BlockReader: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]
"""From ids of blocks to what they hold, in the compute dtype: `[blocks, 2, K, B, D]`."""

TOKENS = 8
KEYS = 64


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Which keys a query sees, and what becomes of its scores."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: NDArray[Any] | None = None
    """`[H]`"""
    first_key: int = 0
    """Positions before it are hidden."""

    def first_seen(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return self.first_key if self.window is None else max(0, position + 1 - self.window)

    def hidden(self, keys: NDArray[Any], queries: NDArray[Any]) -> NDArray[Any]:
        """Of keys and queries at these positions, whether the query does not see the key."""
        later = (keys > queries) | (keys < self.first_key)
        return later if self.window is None else later | (keys <= queries - self.window)


_PLAIN = _Scoring()


def _sliced_linear(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None) -> NDArray[Any]:
    slices = _slices(x)
    out = np.empty((*slices.shape[:2], weight.shape[0]), x.dtype)
    for index, tokens in enumerate(slices):
        out[index] = linear(tokens, weight)
    sliced = out.reshape(-1, weight.shape[0])[: len(x)]
    if bias is not None:
        sliced += bias
    return sliced


def _sliced_logits(hidden: NDArray[Any], head: LinearWeight) -> NDArray[Any]:
    return _sliced_linear(hidden, dequantised(head) if isinstance(head, QuantisedWeight) else head)


def _slices(x: NDArray[Any]) -> NDArray[Any]:
    """`x [T, ...]` as `[slices, TOKENS, ...]`, zeros after the last."""
    missing = -len(x) % TOKENS
    padded = np.concatenate((x, np.zeros((missing, *x.shape[1:]), x.dtype))) if missing else x
    return padded.reshape(-1, TOKENS, *x.shape[1:])


def _paged_attention(
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
    check_first_key(first_key, window=window)
    scoring = _Scoring(window, soft_cap, sinks, first_key)
    table = batch.block_tables[cache.table]
    read, block_tokens = partial(read_cache, cache), cache.data.shape[4]
    return _attend_rows(q, read, table, block_tokens=block_tokens, batch=batch, scale=scale, scoring=scoring)


@np.errstate(over="ignore", invalid="ignore")
def _latent_attention(
    q: NDArray[Any],
    cache: PagedCache,
    *,
    kv_b_proj: NDArray[Any],
    batch: AttentionBatch,
    scale: float,
    first_key: int = 0,
) -> NDArray[Any]:
    """Attention over latents, which are one head's keys and, but for their rotated part, its values."""
    data = cache.in_compute_dtype()
    shape = LatentShape.of(q.shape, data.shape, kv_b_proj.shape)
    by_head = kv_b_proj.reshape(shape.num_heads, -1, shape.latent_dim)
    queries = np.concatenate([latent_queries(tokens, by_head, shape) for tokens in _slices_by_head(q)], axis=1)
    both = np.broadcast_to(data[:, cache.layer], (len(data), 2, *data.shape[3:]))
    table = batch.block_tables[cache.table]
    tokens = queries.swapaxes(0, 1)[: len(q)]
    check_first_key(first_key, window=None)
    scoring, size = _Scoring(first_key=first_key), both.shape[3]
    mixed = _attend_rows(tokens, both.__getitem__, table, block_tokens=size, batch=batch, scale=scale, scoring=scoring)
    latents = mixed.reshape(len(q), shape.num_heads, -1)[..., : shape.latent_dim]
    values = np.concatenate([latent_values(tokens, by_head, shape) for tokens in _slices_by_head(latents)], axis=1)
    return values.swapaxes(0, 1)[: len(q)].reshape(len(q), -1)


def _slices_by_head(x: NDArray[Any]) -> NDArray[Any]:
    """`x [T, H, n]` as `[slices, H, TOKENS, n]`, zeros after the last."""
    return np.ascontiguousarray(_slices(x).swapaxes(1, 2))


@np.errstate(over="ignore", invalid="ignore")
def _attend_rows(
    q: NDArray[Any],
    read: _BlockReader,
    block_table: NDArray[Any],
    *,
    block_tokens: int,
    batch: AttentionBatch,
    scale: float,
    scoring: _Scoring = _PLAIN,
) -> NDArray[Any]:
    """Attention of `q [T, H, D]` over blocks `[blocks, 2, K, B, D]` as `read` gives them: `[T, H * D]`; row by row."""
    out = np.empty((q.shape[0], q.shape[1] * q.shape[2]), q.dtype)
    scaled = q * np.float32(scale)
    starts = batch.query_starts.tolist()
    for row, context in enumerate(batch.context_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        first_position = context - (tokens.stop - tokens.start)
        seen_from = scoring.first_seen(first_position)
        keys, values = _gather(read, block_table[row], context, seen_from=seen_from, block_tokens=block_tokens)
        for begin, queries in enumerate(_slices(scaled[tokens])):
            first = tokens.start + begin * TOKENS
            size = min(TOKENS, tokens.stop - first)
            seen = first_position + begin * TOKENS + np.arange(TOKENS)
            out[first : first + size] = _attend(queries, keys, values, seen, scoring)[:size]
    return out


def _gather(
    read: _BlockReader, block_table: NDArray[Any], context: int, *, seen_from: int, block_tokens: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """A row's keys and values, each `[tiles, K, KEYS, D]`, zeros after its context and before position `seen_from`."""
    first_block = seen_from // block_tokens
    stored = read(block_table[first_block : -(-context // block_tokens)])
    num_kv_heads, head_dim = stored.shape[2], stored.shape[4]
    both = stored.transpose(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
    padded = np.zeros((2, num_kv_heads, context + -context % KEYS, head_dim), stored.dtype)
    skipped = first_block * block_tokens
    padded[:, :, seen_from:context] = both[:, :, seen_from - skipped : context - skipped]
    tiles = padded.reshape(2, num_kv_heads, -1, KEYS, head_dim).transpose(0, 2, 1, 3, 4)
    keys, values = np.ascontiguousarray(tiles)
    return keys, values


def _attend(
    queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], seen: NDArray[Any], scoring: _Scoring
) -> NDArray[Any]:
    """Attention of `queries [TOKENS, H, D]`, query `i` seeing positions up to `seen[i]`: `[TOKENS, H * D]`.

    Tiles of keys are added one after the other under a running maximum, as in Milakov and Gimelshein 2018, "Online
    normalizer calculation for softmax", algorithm 3. A tile that a query does not see at all adds zeros to it.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    rows = np.ascontiguousarray(queries.swapaxes(0, 1)).reshape(num_kv_heads, -1, num_tokens, head_dim)
    mixed = np.zeros_like(rows)  # [K, H / K, TOKENS, D]
    top, weight = _before_the_first_tile(rows, scoring.sinks)
    first_tile = scoring.first_seen(int(seen[0])) // KEYS
    num_tiles = int(seen[-1]) // KEYS + 1  # of which there are fewer where the last queries are padding
    for index in range(first_tile, min(num_tiles, len(keys))):
        scores = rows @ keys[index][:, None].swapaxes(2, 3)
        if scoring.soft_cap is not None:
            soft_cap(scores, cap=scoring.soft_cap)
        # Products are always of whole tiles: what a query must not see is masked, not left out.
        np.copyto(scores, -np.inf, where=scoring.hidden(index * KEYS + np.arange(KEYS), seen[:, None]))
        highest = np.maximum(top, scores.max(axis=-1, keepdims=True))
        factor = np.exp(top - highest)
        np.exp(scores - highest, out=scores)
        mixed = mixed * factor + scores @ values[index][:, None]
        weight = weight * factor + scores.sum(axis=-1, keepdims=True)
        top = highest
    mixed /= weight
    return mixed.reshape(num_heads, num_tokens, head_dim).swapaxes(0, 1).reshape(num_tokens, -1)


def _before_the_first_tile(rows: NDArray[Any], sinks: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Running maximum and sum of `rows [K, H / K, TOKENS, D]`: those of the sinks alone, `[K, H / K, TOKENS, 1]`."""
    shape = (*rows.shape[:3], 1)
    if sinks is None:
        # Not -inf: a query whose window begins in a later tile would subtract it from itself.
        return np.full(shape, np.finfo(rows.dtype).min, rows.dtype), np.zeros(shape, rows.dtype)
    return np.broadcast_to(sinks.reshape(*rows.shape[:2], 1, 1), shape), np.ones(shape, rows.dtype)


class BatchInvariantCpuOps(CpuOps):
    """`CpuOps` with results that are the same, bit for bit, in any batch; a product of one token is one of eight."""

    linear = staticmethod(partial(weight_linear, multiply=_sliced_linear))
    logits = staticmethod(_sliced_logits)
    linear_swiglu = staticmethod(partial(weight_linear_swiglu, multiply=_sliced_linear))
    linear_geglu = staticmethod(partial(weight_linear_geglu, multiply=_sliced_linear))
    grouped_linear = staticmethod(partial(grouped_linear, multiply=_sliced_linear))
    lora_shrink = staticmethod(partial(lora_shrink, multiply=_sliced_linear))
    lora_expand = staticmethod(partial(lora_expand, multiply=_sliced_linear))
    lora_expand_swiglu = staticmethod(partial(lora_expand_swiglu, multiply=_sliced_linear))
    experts = staticmethod(partial(experts, multiply=_sliced_linear))
    hyper_read = staticmethod(partial(hyper_read, multiply=_sliced_linear))
    hyper_head = staticmethod(partial(hyper_head, multiply=_sliced_linear))
    paged_attention = staticmethod(_paged_attention)
    latent_attention = staticmethod(_latent_attention)  # absorbed, however long a row is
    gated_delta_rule = staticmethod(partial(gated_delta_rule, chunk_tokens=1))  # chunks begin where a row does
    index_scores = staticmethod(partial(index_scores, tokens_at_once=1))
    window_attention = staticmethod(partial(window_attention, tokens_at_once=1))
