"""Quantised weights in NumPy: codes stay as they are and are dequantised by table where they are multiplied."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.common.random_weight import random_codes
from openinfer_kernels.cpu.gemm.linear import Multiply, geglu, linear, swiglu
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.quantised import LinearWeight, QuantisedWeight
from openinfer_kernels.weights.quantised import QuantisedPart, RandomCodes, WeightFormat
from openinfer_kernels.weights.scale_blocks import common_block, float32_scales, scales_of, stacked_shape

_E4M3_NAN = 0x7F
_E4M3_BIAS = 7
_INT4_ZERO = 8
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def upload_quantised(*parts: QuantisedPart, num_matrices: int | None = None) -> QuantisedWeight:
    """The bytes of the codes `[..., out, bytes of a row]` and float32 scales."""
    shape = stacked_shape(parts, num_matrices)
    block_rows, block_columns = common_block(parts, shape)
    scales = np.concatenate([float32_scales(scales_of(part, (block_rows, block_columns))) for part in parts])
    codes = np.concatenate([_bytes_of(part) for part in parts])
    return QuantisedWeight(
        format=parts[0].format,
        shape=shape,
        codes=codes.reshape(*shape[:-1], -1),
        scales=scales.reshape(*shape[:-2], shape[-2] // block_rows, -1),
        block_rows=block_rows,
        block_columns=block_columns,
    )


def upload_dequantised(*parts: QuantisedPart) -> NDArray[np.float32]:
    return dequantised(upload_quantised(*parts))


@np.errstate(over="ignore", invalid="ignore")
def weight_linear(
    x: NDArray[Any],
    weight: LinearWeight,
    batch: AttentionBatch,
    bias: NDArray[Any] | None = None,
    *,
    multiply: Multiply = linear,
) -> NDArray[Any]:
    del batch
    if isinstance(weight, QuantisedWeight):
        if bias is not None:
            raise ValueError("a quantised weight has no bias")
        weight = dequantised(weight)
    out = multiply(x, weight)
    if bias is not None:
        out += bias
    return out


def weight_linear_swiglu(
    x: NDArray[Any], gate_up: LinearWeight, batch: AttentionBatch, *, multiply: Multiply = linear
) -> NDArray[Any]:
    return swiglu(weight_linear(x, gate_up, batch, multiply=multiply))


def weight_linear_geglu(
    x: NDArray[Any], gate_up: LinearWeight, batch: AttentionBatch, *, multiply: Multiply = linear
) -> NDArray[Any]:
    return geglu(weight_linear(x, gate_up, batch, multiply=multiply))


def grouped_linear(x: NDArray[Any], weight: LinearWeight, *, multiply: Multiply = linear) -> NDArray[Any]:
    pieces = np.split(x, weight.shape[0], axis=1)
    return np.concatenate([multiply(piece, matrix_of(weight, i)) for i, piece in enumerate(pieces)], axis=1)


def dequantised(weight: QuantisedWeight, matrix: int | None = None) -> NDArray[np.float32]:
    """The values of a weight `[out, in]`, or of one matrix of several."""
    codes = weight.codes if matrix is None else weight.codes[matrix]
    scales = weight.scales if matrix is None else weight.scales[matrix]
    values = _TABLES[weight.format][codes].reshape(*weight.shape[-2:])
    blocks = values.reshape(scales.shape[0], weight.block_rows, scales.shape[1], weight.block_columns)
    return (blocks * scales[:, None, :, None]).reshape(values.shape)


def matrix_of(weight: LinearWeight, index: int) -> NDArray[Any]:
    return dequantised(weight, index) if isinstance(weight, QuantisedWeight) else weight[index]


def _bytes_of(part: QuantisedPart) -> NDArray[np.uint8]:
    """The codes of a part, `[out, bytes of a row]`; a word's lowest byte first."""
    if isinstance(part.codes, RandomCodes):
        return random_codes(part.codes)
    codes = np.ascontiguousarray(part.codes)
    # Bytes of a word in the same order on every machine: tables are looked up byte by byte.
    return codes.astype(codes.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def _e4m3_values() -> NDArray[np.float32]:
    """All 256 values: sign, 4 bits of exponent, 3 of fraction; no infinities (Micikevicius et al. 2022, table 1)."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, (codes & 7) / 8
    sizes = np.where(
        exponents == 0, np.ldexp(fractions, 1 - _E4M3_BIAS), np.ldexp(1 + fractions, exponents - _E4M3_BIAS)
    )
    sizes[codes & 0x7F == _E4M3_NAN] = np.nan
    return np.where(codes & 0x80, -sizes, sizes).astype(np.float32)


def _pairs(values: NDArray[Any]) -> NDArray[np.float32]:
    """The two values of each byte `[256, 2]`, the low nibble first."""
    codes = np.arange(256)
    return values[np.stack([codes & 15, codes >> 4], axis=1)].astype(np.float32)


_TABLES = {
    WeightFormat.FP8_BLOCKS: _e4m3_values(),
    WeightFormat.INT4_GROUPS: _pairs(np.arange(16) - _INT4_ZERO),
    WeightFormat.FP4_GROUPS: _pairs(np.concatenate([_E2M1, -_E2M1])),
}
"""What each byte of codes stands for."""
