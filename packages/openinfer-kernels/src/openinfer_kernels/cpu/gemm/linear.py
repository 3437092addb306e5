"""Products with weights stored `[out, in]`, and what follows them element by element.

Overflow and NaN pass through without a warning: they belong to one request, which the sampler reports, not to
the step.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Multiply: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
"""`x [T, in]`, `weight [out, in]` -> `x @ weight.T`."""
_GELU_CUBIC = 0.044715
_GELU_SLOPE = math.sqrt(2 / math.pi)


@np.errstate(over="ignore", invalid="ignore")
def linear(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None) -> NDArray[Any]:
    out = x @ weight.T
    if bias is not None:
        out += bias
    return out


def logits(hidden: NDArray[Any], head: NDArray[Any]) -> NDArray[Any]:
    return linear(hidden, head)


@np.errstate(over="ignore", invalid="ignore")
def swiglu(both: NDArray[Any]) -> NDArray[Any]:
    """`silu(gate) * up` for `both [T, 2 F]`, gate before up: `[T, F]`."""
    width = both.shape[-1] // 2
    gate, up = both[:, :width], both[:, width:]
    out = np.negative(gate)
    # `silu(g)` is `g / (1 + exp(-g))`. Where `exp` overflows to infinity the quotient below is zero, which is right.
    np.exp(out, out=out)
    out += 1.0
    np.divide(gate, out, out=out)
    out *= up
    return out


@np.errstate(over="ignore", invalid="ignore")
def geglu(gate_up: NDArray[Any]) -> NDArray[Any]:
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    # `(1 + tanh(u)) / 2` is `1 / (1 + exp(-2 u))`, in which nothing cancels where u is far below zero.
    out = gate * gate
    out *= -2.0 * _GELU_SLOPE * _GELU_CUBIC
    out -= 2.0 * _GELU_SLOPE
    out *= gate
    np.exp(out, out=out)
    out += 1.0
    np.divide(gate, out, out=out)
    out *= up
    return out


@np.errstate(over="ignore", invalid="ignore")
def soft_cap(logits: NDArray[Any], *, cap: float) -> None:
    logits /= np.float32(cap)
    np.tanh(logits, out=logits)
    logits *= np.float32(cap)
