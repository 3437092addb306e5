"""RoPE of the last dimensions of a vector, in neighbouring pairs: Su et al. 2021, "RoFormer", eq. 34."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.norm.rms_norm import inverse_rms
from openinfer_kernels.ops import AttentionBatch


@np.errstate(over="ignore", invalid="ignore")
def norm_rope_tail(
    x: NDArray[Any], weight: NDArray[Any] | None, *, eps: float, rope: NDArray[Any], batch: AttentionBatch
) -> NDArray[Any]:
    normed = x * inverse_rms(x, eps=eps)
    if weight is not None:
        normed *= weight
    return rotate_tail(normed, batch.positions, rope)


def rope_tail(x: NDArray[Any], *, rope: NDArray[Any], batch: AttentionBatch) -> NDArray[Any]:
    return rotate_tail(x, batch.positions, rope)


@np.errstate(over="ignore", invalid="ignore")
def rotate_tail(
    x: NDArray[Any], positions: NDArray[Any], rope: NDArray[Any], *, direction: float = 1.0
) -> NDArray[Any]:
    """A copy of `x [T, ..., d]` with its last dimensions rotated by `positions [T]`; back, with `direction` -1."""
    shape = (len(x),) + (1,) * (x.ndim - 2) + (-1,)
    cos = rope[0][positions].reshape(shape)
    sin = rope[1][positions].reshape(shape) * np.float32(direction)
    out = x.copy()
    tail = out[..., out.shape[-1] - 2 * cos.shape[-1] :]
    even, odd = tail[..., ::2].copy(), tail[..., 1::2].copy()
    tail[..., ::2] = even * cos - odd * sin
    tail[..., 1::2] = even * sin + odd * cos
    return out
