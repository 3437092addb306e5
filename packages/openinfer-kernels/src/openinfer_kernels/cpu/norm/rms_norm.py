"""RMSNorm: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


@np.errstate(over="ignore", invalid="ignore")
def rms_norm(x: NDArray[Any], weight: NDArray[Any], *, eps: float) -> NDArray[Any]:
    out = x * inverse_rms(x, eps=eps)
    out *= weight
    return out


@np.errstate(over="ignore", invalid="ignore")
def add_rms_norm(x: NDArray[Any], residual: NDArray[Any], weight: NDArray[Any], *, eps: float) -> NDArray[Any]:
    residual += x
    return rms_norm(residual, weight, eps=eps)


@np.errstate(over="ignore", invalid="ignore")
def zero_centred_rms_norm(x: NDArray[Any], weight: NDArray[Any], *, eps: float) -> NDArray[Any]:
    return rms_norm(x, 1.0 + weight, eps=eps)


@np.errstate(over="ignore", invalid="ignore")
def add_zero_centred_rms_norm(
    x: NDArray[Any], residual: NDArray[Any], weight: NDArray[Any], *, eps: float
) -> NDArray[Any]:
    residual += x
    return zero_centred_rms_norm(residual, weight, eps=eps)


@np.errstate(over="ignore", invalid="ignore")
def gated_rms_norm(x: NDArray[Any], gate: NDArray[Any], weight: NDArray[Any], *, eps: float) -> NDArray[Any]:
    # The gate comes after the norm, which is of each head alone.
    heads = x.reshape(len(x), -1, len(weight))
    out = rms_norm(heads, weight, eps=eps).reshape(x.shape)
    out *= gate / (1.0 + np.exp(-gate))
    return out


def inverse_rms(x: NDArray[Any], *, eps: float) -> NDArray[Any]:
    """`1 / sqrt(mean(x^2) + eps)` over the last axis, which stays with length 1."""
    # `vecdot` makes no array of squares.
    scales = np.vecdot(x, x)[..., None]
    scales /= x.shape[-1]
    scales += eps
    np.sqrt(scales, out=scales)
    return np.reciprocal(scales, out=scales)
