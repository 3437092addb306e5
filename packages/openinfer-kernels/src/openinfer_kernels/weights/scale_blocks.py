"""Parts of quantised weights brought to one grid of scales, whichever device they are for.

A checkpoint's blocks may be cut: the last ones of a matrix, and where ranks cut it inside a block. A common divisor of
all heights and places gives a smaller block that fits everywhere, and larger scales are repeated over it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.errors import WeightDtypeError
from openinfer_kernels.weights.quantised import BLOCKS, QuantisedPart, WeightFormat

_CODE_DTYPES = {
    WeightFormat.FP8_BLOCKS: ("uint8",),
    WeightFormat.INT4_GROUPS: ("int32", "uint32"),
    WeightFormat.FP4_GROUPS: ("uint8", "int8"),
}
_SCALE_DTYPES = {
    WeightFormat.FP8_BLOCKS: ("float32", "uint8"),
    WeightFormat.INT4_GROUPS: ("uint16",),
    WeightFormat.FP4_GROUPS: ("uint8",),
}
_E8M0_NAN = 255
_E8M0_BIAS = 127


def stacked_shape(parts: Sequence[QuantisedPart], num_matrices: int | None) -> tuple[int, ...]:
    """The shape of parts below each other, in columns rather than codes.

    Raises:
        WeightDtypeError: codes or scales in a dtype that their format does not have.
        ValueError: the parts do not fit each other, or scales do not cover their codes.
    """
    for part in parts:
        _require_readable(part)
    kinds = {(part.format, part.shape[1]) for part in parts}
    if len(kinds) != 1:
        listed = ", ".join(f"{part.format} {list(part.shape)}" for part in parts) or "nothing"
        raise ValueError(f"parts of one quantised weight must have one format and as many columns; given was {listed}")
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if num_matrices is None:
        return rows, columns
    if num_matrices < 1 or rows % num_matrices:
        raise ValueError(f"{rows} rows cannot be {num_matrices} matrices of equal height")
    return num_matrices, rows // num_matrices, columns


def common_block(parts: Sequence[QuantisedPart], shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the largest block that no scale of any part changes within."""
    block_rows, block_columns = BLOCKS[parts[0].format]
    rows = math.gcd(block_rows, shape[-2], *(size for part in parts for size in (part.first_row, part.shape[0])))
    return rows, math.gcd(block_columns, shape[-1], *(part.first_column for part in parts))


def scales_of(part: QuantisedPart, block: tuple[int, int]) -> NDArray[Any]:
    """The scale of each `block` of a part, `[rows / block rows, columns / block columns]`, as it is stored."""
    rows, columns = _block_indices(part, block)
    return part.scales[rows[:, None], columns]


def float32_scales(scales: NDArray[Any]) -> NDArray[np.float32]:
    """Scales as float32: which holds BF16 (uint16 bits) and E8M0 (uint8) exactly."""
    if scales.dtype == np.float32:
        return scales
    if scales.dtype == np.uint16:
        return (scales.astype(np.uint32) << 16).view(np.float32)
    powers = np.ldexp(np.float32(1), np.minimum(scales, _E8M0_NAN - 1).astype(np.int32) - _E8M0_BIAS)
    return np.where(scales == _E8M0_NAN, np.float32(np.nan), powers).astype(np.float32)


def _block_indices(part: QuantisedPart, block: tuple[int, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows and columns in the grid of `part.scales` of each block."""
    places = (
        (first + np.arange(0, size, step)) // stored
        for first, size, step, stored in zip(
            (part.first_row, part.first_column), part.shape, block, BLOCKS[part.format], strict=True
        )
    )
    rows, columns = places
    return rows, columns


def _require_readable(part: QuantisedPart) -> None:
    codes, scales = _code_dtype(part), str(part.scales.dtype)
    if codes not in _CODE_DTYPES[part.format] or scales not in _SCALE_DTYPES[part.format]:
        raise WeightDtypeError(
            f"{part.format} codes of dtype {codes} with scales of dtype {scales} were uploaded; possible are codes in "
            f"{' or '.join(_CODE_DTYPES[part.format])} with scales in {' or '.join(_SCALE_DTYPES[part.format])}"
        )
    needed = tuple(
        -(-(first + size) // block)
        for first, size, block in zip((part.first_row, part.first_column), part.shape, BLOCKS[part.format], strict=True)
    )
    if any(have < need for have, need in zip(part.scales.shape, needed, strict=True)):
        raise ValueError(
            f"scales {list(part.scales.shape)} do not cover {part.format} codes of {list(part.shape)} values that "
            f"begin at row {part.first_row} and column {part.first_column}: {list(needed)} are needed"
        )


def _code_dtype(part: QuantisedPart) -> str:
    itemsize = getattr(part.codes, "itemsize", 0)
    found = getattr(part.codes, "dtype", None)
    return str(found) if found is not None else {1: "uint8", 4: "int32"}.get(itemsize, "unknown")
