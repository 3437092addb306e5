"""What happens to Q, K and V between their projection and attention: norms, RoPE, and the write into the cache."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.cache_formats import write_cache
from openinfer_kernels.cpu.norm.rms_norm import inverse_rms
from openinfer_kernels.ops import AttentionBatch, PagedCache


@np.errstate(over="ignore", invalid="ignore")
def qk_norm_rope_append(
    qkv: NDArray[Any],
    *,
    q_norm: NDArray[Any],
    k_norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    cache: PagedCache,
    batch: AttentionBatch,
) -> NDArray[Any]:
    q, k, v = _heads(qkv, cache)
    cos, sin = _angles(rope, batch)
    append(cache, _norm_rope(k, k_norm, eps, cos, sin), v, batch)
    return _norm_rope(q, q_norm, eps, cos, sin)


@np.errstate(over="ignore", invalid="ignore")
def zero_centred_qk_norm_rope_append(
    qkv: NDArray[Any],
    *,
    q_norm: NDArray[Any],
    k_norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    cache: PagedCache,
    batch: AttentionBatch,
) -> NDArray[Any]:
    return qk_norm_rope_append(
        qkv,
        q_norm=1.0 + q_norm,
        k_norm=1.0 + k_norm,
        eps=eps,
        rope=rope,
        cache=cache,
        batch=batch,
    )


def rope_append(qkv: NDArray[Any], *, rope: NDArray[Any], cache: PagedCache, batch: AttentionBatch) -> NDArray[Any]:
    q, k, v = _heads(qkv, cache)
    cos, sin = _angles(rope, batch)
    append(cache, rotate(k, cos, sin), v, batch)
    return rotate(q, cos, sin)


def _heads(qkv: NDArray[Any], cache: PagedCache) -> list[NDArray[Any]]:
    """Q `[T, H, D]`, K and V `[T, K, D]` of `qkv [T, (H + 2 K) D]`."""
    num_kv_heads, head_dim = cache.data.shape[3], cache.data.shape[5]
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    return np.split(heads, [heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads], axis=1)


def _angles(rope: NDArray[Any], batch: AttentionBatch) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosines and sines of each token, `[T, 1, D / 2]`."""
    return rope[0][batch.positions][:, None, :], rope[1][batch.positions][:, None, :]


def append(cache: PagedCache, k: NDArray[Any], v: NDArray[Any], batch: AttentionBatch) -> None:
    """Writes `k` and `v`, each `[T, K, D]`, to the cache slots of their tokens; of one below 0 nowhere."""
    slots = batch.cache_slots[cache.table]
    if slots.min(initial=0) < 0:
        real = slots >= 0
        k, v, slots = k[real], v[real], slots[real]
    blocks, offsets = np.divmod(slots, cache.data.shape[4])
    write_cache(cache, 0, k, blocks, offsets)
    write_cache(cache, 1, v, blocks, offsets)


def _norm_rope(x: NDArray[Any], weight: NDArray[Any], eps: float, cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """RMSNorm over the last axis of `x [T, heads, D]`, then the rotation of the pairs `(i, i + D/2)`."""
    normed = x * inverse_rms(x, eps=eps)
    normed *= weight
    return rotate(normed, cos, sin)


def rotate(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """The rotation of the pairs `(i, i + n/2)` of `x [T, heads, n]` by `cos` and `sin`, each `[T, 1, n/2]`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty_like(x)
    np.subtract(first * cos, second * sin, out=out[..., :half])
    np.add(second * cos, first * sin, out=out[..., half:])
    return out
