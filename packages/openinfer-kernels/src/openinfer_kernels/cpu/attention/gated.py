"""What gated attention does around the attention itself: split the projection, norm and rotate, gate the output."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.qk_norm_rope_append import append, rotate
from openinfer_kernels.cpu.norm.rms_norm import zero_centred_rms_norm
from openinfer_kernels.ops import AttentionBatch, PagedCache


@np.errstate(over="ignore", invalid="ignore")
def gated_qk_norm_rope_append(
    projected: NDArray[Any],
    *,
    q_norm: NDArray[Any],
    k_norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    cache: PagedCache,
    batch: AttentionBatch,
) -> NDArray[Any]:
    num_kv_heads, head_dim = cache.data.shape[3], q_norm.shape[0]
    heads = projected.reshape(len(projected), -1, head_dim)
    queries_gates, k, v = np.split(heads, [heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads], axis=1)
    cos = rope[0][batch.positions][:, None, :]
    sin = rope[1][batch.positions][:, None, :]
    k = _rotate_first(zero_centred_rms_norm(k, k_norm, eps=eps), cos, sin)
    append(cache, k, v, batch)
    return _rotate_first(zero_centred_rms_norm(queries_gates[:, ::2], q_norm, eps=eps), cos, sin)


@np.errstate(over="ignore", invalid="ignore")
def output_gate(attended: NDArray[Any], projected: NDArray[Any], *, head_dim: int) -> NDArray[Any]:
    pairs = projected[:, : 2 * attended.shape[1]].reshape(len(projected), -1, 2, head_dim)
    gate = pairs[:, :, 1].reshape(attended.shape)
    return attended / (1.0 + np.exp(-gate))


def _rotate_first(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """Rotates as many of the first dimensions of `x [T, heads, D]` as the table has, in place."""
    rotated = 2 * cos.shape[-1]
    x[..., :rotated] = rotate(x[..., :rotated], cos, sin)
    return x
