"""Attention over a paged cache of latents, row by row: the longer rows in the expanded form, the others absorbed.

Shapes below: `S` query tokens of a row, `C` context tokens, the other letters as in `openinfer_kernels.ops`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.paged import check_first_key
from openinfer_kernels.cpu.norm.rms_norm import rms_norm
from openinfer_kernels.latent_forms import LatentShape
from openinfer_kernels.ops import AttentionBatch, PagedCache

_SCORES_AT_ONCE = 1 << 19


@np.errstate(over="ignore", invalid="ignore")
def latent_norm_rope_append(
    q: NDArray[Any],
    latent: NDArray[Any],
    *,
    head_dim: int,
    norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    cache: PagedCache,
    batch: AttentionBatch,
) -> NDArray[Any]:
    latent_dim, rope_dim = len(norm), 2 * rope.shape[2]
    cos, sin = rope[0][batch.positions], rope[1][batch.positions]
    key = _rotate_pairs(latent[:, latent_dim:], cos, sin)
    entries = np.concatenate((rms_norm(latent[:, :latent_dim], norm, eps=eps), key), axis=1)
    data, slots = cache.in_compute_dtype(), batch.cache_slots[cache.table]
    real = slots >= 0
    blocks, offsets = np.divmod(slots[real], data.shape[4])
    data[blocks, cache.layer, 0, 0, offsets] = entries[real]
    out = np.array(q.reshape(len(q), -1, head_dim))
    out[..., -rope_dim:] = _rotate_pairs(out[..., -rope_dim:], cos[:, None], sin[:, None])
    return out


@np.errstate(over="ignore", invalid="ignore")
def latent_attention(
    q: NDArray[Any],
    cache: PagedCache,
    *,
    kv_b_proj: NDArray[Any],
    batch: AttentionBatch,
    scale: float,
    first_key: int = 0,
) -> NDArray[Any]:
    check_first_key(first_key, window=None)
    data = cache.in_compute_dtype()
    shape = LatentShape.of(q.shape, data.shape, kv_b_proj.shape)
    by_head = kv_b_proj.reshape(shape.num_heads, -1, shape.latent_dim)
    out = np.empty((len(q), shape.num_heads * shape.value_dim), q.dtype)
    scaled = q * np.float32(scale)
    starts = batch.query_starts.tolist()
    for row, context in enumerate(batch.context_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        latents = _gather(data[:, cache.layer, 0, 0], batch.block_tables[cache.table][row], context)
        form = _expanded if tokens.stop - tokens.start >= shape.least_expanded_tokens else _absorbed
        # Tokens before the first key see none, and are left out: they would be divided by 0.
        skipped = max(0, first_key - (context - (tokens.stop - tokens.start)))
        out[tokens][:skipped] = 0
        tokens, latents = slice(tokens.start + skipped, tokens.stop), latents[first_key:]
        if tokens.start >= tokens.stop:
            continue
        mixed = form(scaled[tokens].swapaxes(0, 1), latents, by_head, shape)  # [H, S, dv]
        out[tokens] = mixed.swapaxes(0, 1).reshape(tokens.stop - tokens.start, -1)
    return out


def latent_queries(q: NDArray[Any], by_head: NDArray[Any], shape: LatentShape) -> NDArray[Any]:
    """Queries over the latents, `[H, S, r + dr]`, of `q [H, S, dn + dr]`."""
    return np.concatenate((q[..., : shape.nope_dim] @ by_head[:, : shape.nope_dim], q[..., shape.nope_dim :]), axis=-1)


def latent_values(mixed: NDArray[Any], by_head: NDArray[Any], shape: LatentShape) -> NDArray[Any]:
    """`[H, S, dv]` for mixed latents `[H, S, r]`."""
    return mixed @ by_head[:, shape.nope_dim :].swapaxes(1, 2)


def _absorbed(q: NDArray[Any], latents: NDArray[Any], by_head: NDArray[Any], shape: LatentShape) -> NDArray[Any]:
    """`[H, S, dv]` over `latents [C, r + dr]`."""
    mixed = _attend(latent_queries(q, by_head, shape), latents[None], latents[None, :, : shape.latent_dim])
    return latent_values(mixed, by_head, shape)


def _expanded(q: NDArray[Any], latents: NDArray[Any], by_head: NDArray[Any], shape: LatentShape) -> NDArray[Any]:
    """`[H, S, dv]` over `latents [C, r + dr]`."""
    both = latents[:, : shape.latent_dim] @ by_head.swapaxes(1, 2)  # [H, C, dn + dv]
    shared = np.broadcast_to(latents[:, shape.latent_dim :], (shape.num_heads, len(latents), shape.rope_dim))
    keys = np.concatenate((both[..., : shape.nope_dim], shared), axis=-1)
    return _attend(q, keys, both[..., shape.nope_dim :])


def _gather(layer_cache: NDArray[Any], block_table: NDArray[Any], context: int) -> NDArray[Any]:
    """A row's entries, `[C, r + dr]`, of `layer_cache [blocks, B, r + dr]`."""
    blocks = block_table[: -(-context // layer_cache.shape[1])]
    return layer_cache[blocks].reshape(-1, layer_cache.shape[2])[:context]


def _attend(q: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Causal attention `[H, S, d]` of the last `S` positions, `q [H, S, D]`, over `keys [H or 1, C, D]`."""
    num_heads, num_queries = q.shape[:2]
    context = keys.shape[1]
    out = np.empty((num_heads, num_queries, values.shape[2]), q.dtype)
    tile = max(1, _SCORES_AT_ONCE // (num_heads * context))
    for first in range(0, num_queries, tile):
        last_seen = context - num_queries + np.arange(first, min(first + tile, num_queries))
        seen = int(last_seen[-1]) + 1
        scores = q[:, first : first + tile] @ keys[:, :seen].swapaxes(1, 2)
        np.copyto(scores, -np.inf, where=np.arange(seen) > last_seen[:, None])
        # No score is above zero then, so that no exponential overflows.
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        weights = scores.sum(axis=-1, keepdims=True)
        out[:, first : first + tile] = scores @ values[:, :seen] / weights
    return out


def _rotate_pairs(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """The rotation of the pairs `(2 i, 2 i + 1)` of `x [..., dr]` by `cos` and `sin`, each `[..., dr / 2]`."""
    first, second = x[..., ::2], x[..., 1::2]
    return np.stack((first * cos - second * sin, second * cos + first * sin), axis=-1).reshape(x.shape)
