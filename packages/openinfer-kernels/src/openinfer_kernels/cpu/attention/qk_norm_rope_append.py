"""What happens to Q, K and V between their projection and attention: norms, RoPE, and the write into the cache."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.norm.rms_norm import inverse_rms
from openinfer_kernels.ops import AttentionBatch


@np.errstate(over="ignore", invalid="ignore")
def qk_norm_rope_append(
    qkv: NDArray[Any],
    *,
    q_norm: NDArray[Any],
    k_norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    kv_cache: NDArray[Any],
    layer: int,
    batch: AttentionBatch,
) -> NDArray[Any]:
    q, k, v = _heads(qkv, kv_cache)
    cos, sin = _angles(rope, batch)
    append(kv_cache, layer, _norm_rope(k, k_norm, eps, cos, sin), v, batch.cache_slots)
    return _norm_rope(q, q_norm, eps, cos, sin)


@np.errstate(over="ignore", invalid="ignore")
def zero_centred_qk_norm_rope_append(
    qkv: NDArray[Any],
    *,
    q_norm: NDArray[Any],
    k_norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    kv_cache: NDArray[Any],
    layer: int,
    batch: AttentionBatch,
) -> NDArray[Any]:
    return qk_norm_rope_append(
        qkv,
        q_norm=1.0 + q_norm,
        k_norm=1.0 + k_norm,
        eps=eps,
        rope=rope,
        kv_cache=kv_cache,
        layer=layer,
        batch=batch,
    )


def rope_append(
    qkv: NDArray[Any], *, rope: NDArray[Any], kv_cache: NDArray[Any], layer: int, batch: AttentionBatch
) -> NDArray[Any]:
    q, k, v = _heads(qkv, kv_cache)
    cos, sin = _angles(rope, batch)
    append(kv_cache, layer, rotate(k, cos, sin), v, batch.cache_slots)
    return rotate(q, cos, sin)


def _heads(qkv: NDArray[Any], kv_cache: NDArray[Any]) -> list[NDArray[Any]]:
    """Q `[T, H, D]`, K and V `[T, K, D]` of `qkv [T, (H + 2 K) D]`."""
    num_kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[5]
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    return np.split(heads, [heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads], axis=1)


def _angles(rope: NDArray[Any], batch: AttentionBatch) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosines and sines of each token, `[T, 1, D / 2]`."""
    return rope[0][batch.positions][:, None, :], rope[1][batch.positions][:, None, :]


def append(kv_cache: NDArray[Any], layer: int, k: NDArray[Any], v: NDArray[Any], slots: NDArray[Any]) -> None:
    """Writes `k` and `v`, each `[T, K, D]`, to `slots [T]` (block id * B + offset; < 0 nowhere) of one layer."""
    if slots.min(initial=0) < 0:
        real = slots >= 0
        k, v, slots = k[real], v[real], slots[real]
    blocks, offsets = np.divmod(slots, kv_cache.shape[4])
    kv_cache[blocks, layer, 0, :, offsets] = k
    kv_cache[blocks, layer, 1, :, offsets] = v


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
