"""Experts: each multiplies the tokens that chose it, and no other expert's weights are touched."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.gemm.linear import Multiply, linear, swiglu
from openinfer_kernels.cpu.gemm.quantised import matrix_of
from openinfer_kernels.ops.experts import ExpertChoice
from openinfer_kernels.ops.quantised import LinearWeight


@np.errstate(over="ignore", invalid="ignore")
def experts(
    x: NDArray[Any],
    choice: ExpertChoice,
    gate_up: LinearWeight,
    down: LinearWeight,
    *,
    first_expert: int = 0,
    limit: float | None = None,
    shared: NDArray[Any] | None = None,
    multiply: Multiply = linear,
) -> NDArray[Any]:
    own = choice.ids - first_expert
    terms = np.zeros((*own.shape, x.shape[1]), np.float32)
    for expert in np.unique(own[(own >= 0) & (own < gate_up.shape[0])]).tolist():
        tokens, places = np.nonzero(own == expert)
        gated = limited_swiglu(multiply(x[tokens], matrix_of(gate_up, expert)), limit=limit)
        terms[tokens, places] = multiply(gated, matrix_of(down, expert)) * choice.weights[tokens, places, None]
    out = np.zeros(x.shape, np.float32)
    # In the order of each token's choice, whichever experts came first above: the sum does not depend on the batch.
    for place in range(own.shape[1]):
        out += terms[:, place]
    return out if shared is None else out + shared


@np.errstate(over="ignore", invalid="ignore")
def limited_swiglu(gate_up: NDArray[Any], *, limit: float | None = None) -> NDArray[Any]:
    if limit is None:
        return swiglu(gate_up)
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    return swiglu(np.concatenate([np.minimum(gate, limit), np.clip(up, -limit, limit)], axis=1))
