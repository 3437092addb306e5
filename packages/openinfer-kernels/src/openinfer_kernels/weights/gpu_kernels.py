"""Which kernel of a GPU multiplies a quantised weight: a function of its format, known before anything is loaded.

Needs no package of CUDA, so that a plan for a GPU that is not here says what a start there would do.
"""

import math
from enum import StrEnum
from typing import NamedTuple

from openinfer_kernels.weights.quantised import Code, ScaleType, WeightFormat

GROUP = 32
"""Columns within which no scale may change for a kernel that multiplies codes."""
_NVFP4_GROUP = 16
"""The same for E2M1 with scales of E4M3."""


_ROWS = 8
"""That come in wholes."""
_EXPERT_ROWS = 128
"""The same of an expert in tiles: 64 of its gate, and 64 of up."""
TILE_ROWS = 32
TILE_COLUMNS = 128
_PAIR_ROWS = 2 * TILE_ROWS
"""Rows of two tiles, which lie among each other."""
_VECTOR_BYTES = 16
"""Of which what follows the codes of a tile is a multiple."""


class Way(StrEnum):
    """How a quantised weight lies on a GPU, and what multiplies it."""

    TILES = "tiles"
    """In tiles, by `lowbit_gemm`, which dequantises in registers; on Hopper."""
    EXPERT_TILES = "tiles of experts"
    """In tiles, several matrices, by `lowbit_experts`, which does so too; on Hopper."""
    ROWS = "rows"
    """In rows, by `grouped_gemm` where tokens are few; else dequantised to BF16 in memory at each product."""
    TILES_DEQUANTISED = "tiles, dequantised"
    """In tiles, and dequantised to BF16 in memory at each product: as small, and slower than BF16."""
    BF16 = "bf16"
    """Dequantised once, when it is loaded: as large and as fast as a plain weight."""


def way_of(
    weight_format: WeightFormat,
    block: tuple[int, int],
    shape: tuple[int, ...],
    *,
    has_lowbit: bool,
    grouped: bool = False,
) -> Way:
    """How a weight is held.

    Args:
        weight_format: its format.
        block: rows and columns within which no scale changes, as it is cut for this rank.
        shape: `[out, in]`, or `[matrices, out, in]`.
        has_lowbit: whether `lowbit_gemm` may multiply it: on Hopper, and not with batch invariance, as its sums depend
            on how many tokens there are.
        grouped: whether several matrices each have a piece of every token, for `Ops.grouped_linear`.
    """
    if len(shape) == 3 and has_lowbit and not grouped and expert_tiles_hold(weight_format, block, shape):
        return Way.EXPERT_TILES
    in_tiles = len(shape) == 2 and tiles_hold(weight_format, block, shape)
    if in_tiles and has_lowbit:
        return Way.TILES
    if rows_hold(weight_format, block, shape):
        return Way.ROWS
    return Way.TILES_DEQUANTISED if in_tiles else Way.BF16


def rows_hold(weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Whether a weight may be in the rows of `csrc/gemm/weight_formats.cuh`."""
    return rows_kernels(weight_format) is not None and _are_whole(block, shape)


def tiles_hold(weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Whether a matrix may be in the tiles of `csrc/lowbit/lowbit_tiles.cuh`."""
    if _is_nvfp4(weight_format):
        return _are_whole(block, shape, group=_NVFP4_GROUP)
    if not _are_whole(block, shape) or (weight_format.minimums and weight_format.code is not Code.INT4):
        return False
    if weight_format.code.bits == 8:  # their scales are float32 there, which holds every type
        return True
    powers_alone = weight_format.code is Code.E2M1
    in_16_bits = (ScaleType.E8M0,) if powers_alone else (ScaleType.BF16, ScaleType.F16, ScaleType.E8M0)
    return weight_format.scales in in_16_bits and not weight_format.global_scale


def expert_tiles_hold(weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Whether experts may be in these tiles: whole ones of each, and a code that has kernels."""
    if not tiles_hold(weight_format, block, shape) or shape[-2] % _EXPERT_ROWS:
        return False
    match tiles_kernels(weight_format):
        case "fp4" | "int4":
            return True
        case "fp8":  # the sums of whole tiles alone are scaled
            return block[1] % TILE_COLUMNS == 0 or block[1] == shape[-1]
        case _:
            return False


def tiles_kernels(weight_format: WeightFormat) -> str:
    """The name of the kernels of a format that tiles hold: `lowbit_gemm_NAME`."""
    if weight_format.minimums:
        return "int4_min"
    if _is_nvfp4(weight_format):
        return "nvfp4"
    return {Code.E4M3: "fp8", Code.INT8: "int8", Code.INT4: "int4", Code.E2M1: "fp4"}[weight_format.code]


class TileLayout(NamedTuple):
    """Of the tiles of a matrix: bytes of each part, as `csrc/lowbit/lowbit_tiles.cuh` has them."""

    tile_rows: int
    """Tiles along the rows."""
    chunks: int
    """Along the columns."""
    groups: int
    """In the columns of a tile."""
    scale_rows: int
    """Scales of a group: one for each row of a tile, or one for all."""
    code_bytes: int
    scale_bytes: int
    """Of one scale."""
    scales_bytes: int
    """Of all scales, to the end of a vector."""
    zeros_bytes: int
    """Of zero points, or of what minimums add."""
    factor_rows: int
    """Rows of NVFP4, each of which has a factor in float32 besides."""

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + self.scales_bytes + self.zeros_bytes

    @property
    def num_bytes(self) -> int:
        """Of all tiles, and of factors."""
        return self.tile_rows * self.chunks * self.tile_bytes + 4 * self.factor_rows


def tile_layout(weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, int]) -> TileLayout:
    """How a matrix that `tiles_hold` says they hold lies in tiles."""
    rows, columns = shape
    width = TILE_COLUMNS if block[1] == columns else math.gcd(TILE_COLUMNS, block[1])
    groups, scale_rows = TILE_COLUMNS // width, 1 if block[0] % _PAIR_ROWS == 0 else TILE_ROWS
    scale_bytes = 4 if weight_format.code.bits == 8 else 2
    has_zeros = weight_format.zero_points or weight_format.minimums
    return TileLayout(
        tile_rows=-(-rows // _PAIR_ROWS) * 2,
        chunks=-(-columns // TILE_COLUMNS),
        groups=groups,
        scale_rows=scale_rows,
        code_bytes=TILE_ROWS * TILE_COLUMNS * weight_format.code.bits // 8,
        scale_bytes=scale_bytes,
        scales_bytes=-(-groups * scale_rows * scale_bytes // _VECTOR_BYTES) * _VECTOR_BYTES,
        zeros_bytes=groups * TILE_ROWS * 2 if has_zeros else 0,
        factor_rows=rows if tiles_kernels(weight_format) == "nvfp4" else 0,
    )


def rows_kernels(weight_format: WeightFormat) -> str | None:
    """The name of the kernels that multiply rows of codes, `grouped_gemm_NAME`; None: there are none."""
    scales = weight_format.scales
    plain = not (weight_format.zero_points or weight_format.minimums or weight_format.global_scale)
    match weight_format.code:
        case Code.E4M3 if plain:
            return "fp8"
        case Code.INT4 if plain and scales is ScaleType.BF16:
            return "int4"
        case Code.E2M1 if plain and scales is ScaleType.E8M0:
            return "fp4"
        case _:
            return None


def _is_nvfp4(weight_format: WeightFormat) -> bool:
    """Sizes of codes, and of codes times scales, fit into BF16; what else multiplies a row is its own factor."""
    return weight_format.code is Code.E2M1 and weight_format.scales is ScaleType.E4M3


def _are_whole(block: tuple[int, int], shape: tuple[int, ...], *, group: int = GROUP) -> bool:
    return not (block[1] % group or shape[-1] % GROUP or shape[-2] % _ROWS)


def described_way(way: Way, weight_format: WeightFormat) -> str:
    """For people: which kernel multiplies, or what is done where there is none."""
    match way:
        case Way.TILES:
            return f"lowbit_gemm_{tiles_kernels(weight_format)}, dequantised to BF16 first for many tokens"
        case Way.EXPERT_TILES:
            return f"lowbit_experts_{tiles_kernels(weight_format)}"
        case Way.ROWS:
            return f"grouped_gemm_{rows_kernels(weight_format)}, dequantised to BF16 first for many tokens"
        case Way.TILES_DEQUANTISED:
            return "no kernel on this GPU, dequantised to BF16 at each product, which is slower than BF16"
        case Way.BF16:
            return "no kernel on this GPU, dequantised to BF16 when loaded, which takes a BF16 model's memory"
