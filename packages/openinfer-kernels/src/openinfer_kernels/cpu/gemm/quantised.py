"""Quantised weights in NumPy: codes stay as they are and are dequantised by table where they are multiplied."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.common.random_weight import random_codes
from openinfer_kernels.cpu.gemm.linear import Multiply, geglu, linear, logits, swiglu
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.quantised import LinearWeight, QuantisedWeight
from openinfer_kernels.weights.code_values import E2M1_VALUES, E4M3_VALUES, pairs, require_numbers
from openinfer_kernels.weights.quantised import Code, QuantisedPart, RandomCodes, WeightFormat
from openinfer_kernels.weights.scale_blocks import common_block, float32_scales, of_blocks, stacked_shape


def upload_quantised(*parts: QuantisedPart, num_matrices: int | None = None, grouped: bool = False) -> QuantisedWeight:
    """The bytes of the codes `[..., out, bytes of a row]`, and float32 scales, zero points and minimums."""
    del grouped
    shape = stacked_shape(parts, num_matrices)
    block = block_rows, block_columns = common_block(parts, shape)
    grid = *shape[:-2], shape[-2] // block_rows, -1

    def of_parts(grids: list[NDArray[Any] | None]) -> NDArray[np.float32] | None:
        found = [of_blocks(part, each, block) for part, each in zip(parts, grids, strict=True) if each is not None]
        return np.concatenate(found).astype(np.float32).reshape(grid) if found else None

    codes = np.concatenate([_bytes_of(part) for part in parts])
    if parts[0].format.code is Code.E4M3:
        require_numbers(codes)
    return QuantisedWeight(
        format=parts[0].format,
        shape=shape,
        codes=codes.reshape(*shape[:-1], -1),
        scales=np.concatenate([float32_scales(part, block) for part in parts]).reshape(grid),
        zero_points=of_parts([part.zero_points for part in parts]),
        minimums=of_parts([part.minimums for part in parts]),
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


def head_logits(hidden: NDArray[Any], head: LinearWeight) -> NDArray[Any]:
    return logits(hidden, dequantised(head) if isinstance(head, QuantisedWeight) else head)


def grouped_linear(x: NDArray[Any], weight: LinearWeight, *, multiply: Multiply = linear) -> NDArray[Any]:
    pieces = np.split(x, weight.shape[0], axis=1)
    return np.concatenate([multiply(piece, matrix_of(weight, i)) for i, piece in enumerate(pieces)], axis=1)


def dequantised(weight: QuantisedWeight, matrix: int | None = None) -> NDArray[np.float32]:
    """The values of a weight `[out, in]`, or of one matrix of several; in float32, in the order `WeightFormat` says."""

    def grid_of(grid: NDArray[Any]) -> NDArray[Any]:
        return (grid if matrix is None else grid[matrix])[:, None, :, None]

    codes, scales = weight.codes if matrix is None else weight.codes[matrix], grid_of(weight.scales)
    shape = (scales.shape[0], weight.block_rows, scales.shape[2], weight.block_columns)
    blocks = _table_of(weight.format)[codes].reshape(shape)
    if weight.zero_points is not None:
        blocks = blocks - grid_of(weight.zero_points)
    blocks = blocks * scales
    if weight.minimums is not None:
        blocks = blocks + grid_of(weight.minimums)
    return blocks.reshape(*weight.shape[-2:])


def matrix_of(weight: LinearWeight, index: int) -> NDArray[Any]:
    return dequantised(weight, index) if isinstance(weight, QuantisedWeight) else weight[index]


def _bytes_of(part: QuantisedPart) -> NDArray[np.uint8]:
    """The codes of a part, `[out, bytes of a row]`; a word's lowest byte first."""
    if isinstance(part.codes, RandomCodes):
        return random_codes(part.codes)
    codes = np.ascontiguousarray(part.codes)
    # Bytes of a word in the same order on every machine: tables are looked up byte by byte.
    return codes.astype(codes.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def _table_of(weight_format: WeightFormat) -> NDArray[np.float32]:
    """What each byte of codes stands for."""
    centred = not (weight_format.zero_points or weight_format.minimums)
    return _CENTRED[weight_format.code] if centred else _RAW[weight_format.code]


_RAW = {
    Code.E4M3: E4M3_VALUES,
    Code.E2M1: pairs(E2M1_VALUES),
    Code.INT8: np.arange(256, dtype=np.float32),
    Code.INT4: pairs(np.arange(16)),
}
_CENTRED = _RAW | {Code.INT8: _RAW[Code.INT8] - 128, Code.INT4: _RAW[Code.INT4] - 8}
"""Integers without their zero point."""
