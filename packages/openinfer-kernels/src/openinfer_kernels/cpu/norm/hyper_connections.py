"""Hyper-connections: Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections", eq. 8; all in float32."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.gemm.linear import Multiply, linear
from openinfer_kernels.cpu.norm.rms_norm import inverse_rms
from openinfer_kernels.ops.hyper_connections import HyperMix, HyperWeights


def hyper_streams(x: NDArray[Any], num_streams: int) -> NDArray[Any]:
    return np.repeat(x[:, None], num_streams, axis=1)


@np.errstate(over="ignore", invalid="ignore")
def hyper_read(
    residual: NDArray[Any],
    weights: HyperWeights,
    *,
    eps: float,
    mix_eps: float,
    num_iterations: int,
    multiply: Multiply = linear,
) -> tuple[NDArray[Any], HyperMix]:
    n = residual.shape[1]
    projected = multiply(_flat(residual), weights.fn) * inverse_rms(_flat(residual), eps=eps)
    pre, post, mixing = np.split(projected, [n, 2 * n], axis=1)
    pre_base, post_base, mixing_base = np.split(weights.base, [n, 2 * n])
    read = _sigmoid(pre * weights.scale[0] + pre_base) + np.float32(mix_eps)
    write = 2 * _sigmoid(post * weights.scale[1] + post_base)
    logits = (mixing * weights.scale[2] + mixing_base).reshape(-1, n, n)
    mix = HyperMix(post=write, mixing=doubly_stochastic(logits, mix_eps=mix_eps, num_iterations=num_iterations))
    return _read(residual, read), mix


@np.errstate(over="ignore", invalid="ignore")
def hyper_write(y: NDArray[Any], residual: NDArray[Any], mix: HyperMix) -> None:
    mixed = np.einsum("tjk,tjh->tkh", mix.mixing, residual)
    mixed += mix.post[:, :, None] * y[:, None]
    residual[...] = mixed


@np.errstate(over="ignore", invalid="ignore")
def hyper_add(x: NDArray[Any], residual: NDArray[Any]) -> None:
    residual += x[:, None]


@np.errstate(over="ignore", invalid="ignore")
def hyper_head(
    residual: NDArray[Any],
    fn: NDArray[Any],
    base: NDArray[Any],
    scale: NDArray[Any],
    *,
    eps: float,
    mix_eps: float,
    multiply: Multiply = linear,
) -> NDArray[Any]:
    projected = multiply(_flat(residual), fn) * inverse_rms(_flat(residual), eps=eps)
    return _read(residual, _sigmoid(projected * scale[0] + base) + np.float32(mix_eps))


def doubly_stochastic(logits: NDArray[Any], *, mix_eps: float, num_iterations: int) -> NDArray[Any]:
    """`softmax` of the rows of `logits [T, n, n]`, then columns and rows divided by their sums in turn."""
    # Less the largest of each row, so that no exponential overflows.
    mixing = np.exp(logits - logits.max(axis=2, keepdims=True))
    mixing /= mixing.sum(axis=2, keepdims=True)
    mixing += np.float32(mix_eps)
    mixing /= mixing.sum(axis=1, keepdims=True) + np.float32(mix_eps)
    for _ in range(num_iterations - 1):
        mixing /= mixing.sum(axis=2, keepdims=True) + np.float32(mix_eps)
        mixing /= mixing.sum(axis=1, keepdims=True) + np.float32(mix_eps)
    return mixing


def _flat(residual: NDArray[Any]) -> NDArray[Any]:
    return residual.reshape(len(residual), -1)


def _read(residual: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """`sum_i weights[i] residual[i]`, streams in order."""
    return np.einsum("ti,tih->th", weights, residual)


def _sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    return 1.0 / (1.0 + np.exp(-x))
