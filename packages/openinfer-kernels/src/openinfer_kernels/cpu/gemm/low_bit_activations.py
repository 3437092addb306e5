"""W8A8 in NumPy: activations are rounded to codes, and their values multiplied in float32."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.gemm.linear import geglu, swiglu
from openinfer_kernels.cpu.gemm.quantised import weight_linear
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.quantised import LinearWeight, QuantisedWeight
from openinfer_kernels.weights.low_bit_activations import (
    FP8_ROWS,
    LARGEST,
    SMALLEST_MAXIMUM,
    PromptSteps,
    group_columns,
)
from openinfer_kernels.weights.quantised import Code

_E4M3_FRACTION = 3
_E4M3_LEAST_EXPONENT = -6
_ROWS_AT_ONCE = 4096
"""Bounds the memory beside a vocabulary of 150,000 rows."""


class LowBitProducts:
    """Products of prompts' steps with quantised activations; of all others as they are."""

    def __init__(self, steps: PromptSteps) -> None:
        self._steps = steps

    def linear(
        self, x: NDArray[Any], weight: LinearWeight, batch: AttentionBatch, bias: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        if isinstance(weight, QuantisedWeight) and self._steps.include(len(x), batch):
            x = rounded_activations(x, weight)
        return weight_linear(x, weight, batch, bias)

    def linear_swiglu(self, x: NDArray[Any], gate_up: LinearWeight, batch: AttentionBatch) -> NDArray[Any]:
        return swiglu(self.linear(x, gate_up, batch))

    def linear_geglu(self, x: NDArray[Any], gate_up: LinearWeight, batch: AttentionBatch) -> NDArray[Any]:
        return geglu(self.linear(x, gate_up, batch))


@np.errstate(over="ignore", invalid="ignore")
def rounded_activations(x: NDArray[Any], weight: QuantisedWeight) -> NDArray[np.float32]:
    """What the codes of `x [T, in]` stand for, `[T, in]`, in a product with `weight`; `x` where it has no such one."""
    group = group_columns(weight.format, weight.shape, (weight.block_rows, weight.block_columns))
    if group is None:
        return x
    code, groups = weight.format.code, x.reshape(len(x), -1, group)
    scales = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.float32(SMALLEST_MAXIMUM))
    scales /= np.float32(LARGEST[code])
    quotients = groups / scales
    rounded = _nearest_e4m3(quotients) if code is Code.E4M3 else np.rint(quotients)
    return (rounded * scales).reshape(x.shape)


def quantise_rows(matrix: NDArray[np.float32]) -> QuantisedWeight:
    """`matrix [out, in]` in E4M3 with a scale per row: `max |w| / 448`; codes are nearest, ties to even."""
    codes, scales = np.empty(matrix.shape, np.uint8), np.empty((len(matrix), 1), np.float32)
    for begin in range(0, len(matrix), _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        largest = np.maximum(np.abs(matrix[some]).max(axis=1, keepdims=True), np.float32(SMALLEST_MAXIMUM))
        scales[some] = largest / np.float32(LARGEST[Code.E4M3])
        codes[some] = e4m3_codes(matrix[some] / scales[some])
    return QuantisedWeight(
        format=FP8_ROWS,
        shape=matrix.shape,
        codes=codes,
        scales=scales,
        block_rows=1,
        block_columns=matrix.shape[1],
    )


def e4m3_codes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest code of each value, ties to even; what is beyond 448 becomes 448, and NaN stays one."""
    most = np.float32(LARGEST[Code.E4M3])
    is_nan = np.isnan(values)
    multiples, exponents = _multiples(np.where(is_nan, most, np.clip(values, -most, most)))
    # A multiple of 16 is 8 of the next exponent: the sum carries, as it does from the largest subnormal number.
    codes = (exponents - _E4M3_LEAST_EXPONENT << _E4M3_FRACTION) + multiples.astype(np.int32) + is_nan
    return (codes | np.signbit(values).astype(np.int32) << 7).astype(np.uint8)


def _nearest_e4m3(values: NDArray[np.float32]) -> NDArray[np.float32]:
    multiples, exponents = _multiples(values)
    sizes = np.ldexp(multiples, exponents - _E4M3_FRACTION)
    # `minimum` keeps a NaN, which belongs to one request.
    return np.copysign(np.minimum(sizes, np.float32(LARGEST[Code.E4M3])), values)


def _multiples(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Each size as a multiple of `2^(exponent - 3)`, rounded, with the exponents that E4M3 has."""
    sizes = np.abs(values)
    # 448 is below 2^9: larger exponents would only make larger steps of what is cut off anyway.
    exponents = np.clip(np.frexp(sizes)[1] - 1, _E4M3_LEAST_EXPONENT, 8)
    exponents[sizes == 0] = _E4M3_LEAST_EXPONENT  # `frexp` calls it 0
    return np.rint(np.ldexp(sizes, _E4M3_FRACTION - exponents)), exponents
