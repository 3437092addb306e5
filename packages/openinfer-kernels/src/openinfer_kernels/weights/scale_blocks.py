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
from openinfer_kernels.weights.code_values import E4M3_VALUES, E8M0_VALUES
from openinfer_kernels.weights.quantised import QuantisedPart, RandomCodes, ScaleType

_SCALE_DTYPES = {
    ScaleType.F32: np.dtype(np.float32),
    ScaleType.F16: np.dtype(np.float16),
    ScaleType.BF16: np.dtype(np.uint16),
    ScaleType.E8M0: np.dtype(np.uint8),
    ScaleType.E4M3: np.dtype(np.uint8),
}


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
        listed = ", ".join(f"{part.format}: {list(part.shape)}" for part in parts) or "nothing"
        raise ValueError(f"parts of one quantised weight must have one format and as many columns; given was {listed}")
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if num_matrices is None:
        return rows, columns
    if num_matrices < 1 or rows % num_matrices:
        raise ValueError(f"{rows} rows cannot be {num_matrices} matrices of equal height")
    return num_matrices, rows // num_matrices, columns


def common_block(parts: Sequence[QuantisedPart], shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the largest block that no scale of any part changes within."""
    group_rows, group_columns = parts[0].format.groups
    heights = (part.shape[0] for part in parts)
    # A group of all rows or columns begins anywhere: gcd(0, n) is n.
    rows = math.gcd(0, shape[-2], *heights)
    if group_rows is not None:
        rows = math.gcd(group_rows, rows, *(part.first_row for part in parts))
    if group_columns is None:
        return rows, shape[-1]
    return rows, math.gcd(group_columns, shape[-1], *(part.first_column for part in parts))


def of_blocks(part: QuantisedPart, grid: NDArray[Any], block: tuple[int, int]) -> NDArray[Any]:
    """What `grid`, the scales of a part or an array like them, has for each `block` of the part, as it is stored.

    `[rows / block rows, columns / block columns]`.
    """
    rows, columns = _block_indices(part, block)
    return grid[rows[:, None], columns]


def float32_scales(part: QuantisedPart, block: tuple[int, int]) -> NDArray[np.float32]:
    """The scale of each `block` as float32, which holds every type exactly; a global scale is in it, rounded once."""
    scales = of_blocks(part, part.scales, block)
    match part.format.scales:
        case ScaleType.F32 | ScaleType.F16:
            found = scales.astype(np.float32, copy=False)
        case ScaleType.BF16:
            found = (scales.astype(np.uint32) << 16).view(np.float32)
        case ScaleType.E8M0:
            found = E8M0_VALUES[scales]
        case ScaleType.E4M3:
            found = E4M3_VALUES[scales]
    if part.format.global_scale:
        found = (found.astype(np.float64) * part.global_scale).astype(np.float32)
    return found


def _block_indices(part: QuantisedPart, block: tuple[int, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows and columns in the grid of `part.scales` of each block."""
    places = [
        np.zeros(size // step, np.intp) if group is None else (first + np.arange(0, size, step)) // group
        for first, size, step, group in zip(
            (part.first_row, part.first_column), part.shape, block, part.format.groups, strict=True
        )
    ]
    return places[0], places[1]


def _require_readable(part: QuantisedPart) -> None:
    codes, scales, wanted = _code_dtype(part), part.scales.dtype, _SCALE_DTYPES[part.format.scales]
    if codes.kind not in "iu" or scales != wanted:
        raise WeightDtypeError(
            f"codes of dtype {codes} with scales of dtype {scales} were uploaded as {part.format}; possible are codes "
            f"of integers with scales of dtype {wanted}"
        )
    needed = tuple(
        1 if group is None else -(-(first + size) // group)
        for first, size, group in zip((part.first_row, part.first_column), part.shape, part.format.groups, strict=True)
    )
    if any(have < need for have, need in zip(part.scales.shape, needed, strict=True)):
        raise ValueError(
            f"scales {list(part.scales.shape)} do not cover codes of {list(part.shape)} values, {part.format}, that "
            f"begin at row {part.first_row} and column {part.first_column}: {list(needed)} are needed"
        )
    _require_companions(part)


def _require_companions(part: QuantisedPart) -> None:
    """Zero points and minimums are there where the format has them, one per scale."""
    for name, grid, wanted, kinds in (
        ("zero points", part.zero_points, part.format.zero_points, "u"),
        ("minimums", part.minimums, part.format.minimums, "f"),
    ):
        if (grid is not None) != wanted or (grid is not None and grid.shape != part.scales.shape):
            found = "none" if grid is None else str(list(grid.shape))
            raise ValueError(f"{part.format} takes {name} {'as its scales' if wanted else 'never'}; given was {found}")
        if grid is not None and grid.dtype.kind not in kinds:
            raise WeightDtypeError(f"{name} of dtype {grid.dtype} were uploaded")


def _code_dtype(part: QuantisedPart) -> np.dtype[Any]:
    return np.dtype(np.uint8) if isinstance(part.codes, RandomCodes) else part.codes.dtype
