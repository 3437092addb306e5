"""Quantised matrices in the tiles of `csrc/lowbit/lowbit_tiles.cuh`, which has their order.

Codes come to the device in the rows of a checkpoint, in pieces and from any thread; a kernel puts each piece where it
belongs, and another one the scales and zero points.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.memory import Memory
from openinfer_kernels.errors import WeightValueError
from openinfer_kernels.ops import Array, QuantisedWeight
from openinfer_kernels.weights.bfloat16 import rounded_bits
from openinfer_kernels.weights.code_values import E4M3_VALUES
from openinfer_kernels.weights.gpu_kernels import TILE_ROWS, TileLayout, tile_layout, tiles_kernels
from openinfer_kernels.weights.quantised import Code, QuantisedPart, ScaleType, WeightFormat
from openinfer_kernels.weights.scale_blocks import float32_scales, of_blocks

_STEM = "lowbit_tiles"
_THREADS = 128
_INT4_OFFSET = 128
"""Tiles hold 128 + zero point."""
_MIDDLE_OF_INT4 = np.float32(8)
_SCALES_OF_NVFP4 = 2.0**64
"""Tiles hold scales times this: what else a shifted code of E2M1 is too small by, a row's factor has."""
_FACTORS_OF_NVFP4 = 2.0**62
_MOST_SCALES = {Code.E4M3: 128, Code.E2M1: 4}
"""Kernels multiply scales of E4M3 by 2^120, and those of E2M1 by 2^126, which BF16 has room for."""


class _Arrangement(NamedTuple):
    """Of the codes in a tile."""

    name: str
    """In the names of kernels."""
    unit_bytes: int
    """Of codes that a thread arranges."""


_NIBBLES = _Arrangement("nibbles", 8)
_ARRANGEMENTS = {
    "fp8": _Arrangement("fp8", 4),
    "int8": _Arrangement("bytes", 4),
    "int4": _NIBBLES,
    "int4_min": _NIBBLES,
    "fp4": _NIBBLES,
    "nvfp4": _NIBBLES,
}
"""By the name of kernels, which `tiles_kernels` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledWeight(QuantisedWeight):
    """Quantised matrices, below each other: `codes [tiles along the rows, along the columns, bytes of a tile]` hold
    their scales.
    """

    kernels: str
    groups: int
    """In the columns of a tile."""
    scale_rows: int
    """Scales of a group: one for each row of a tile, or one for all."""
    zeros: int
    """Where in a tile zero points begin, or what a code of 8 stands for where there are minimums; 0: neither."""
    float16_scales: bool
    factors: Array | None = None
    """Of NVFP4: what a row's sums are multiplied with, float32 `[rows]`."""

    @property
    def tile_bytes(self) -> int:
        return self.codes.shape[2]

    @property
    def num_chunks(self) -> int:
        """Tiles along the columns."""
        return self.codes.shape[1]

    @property
    def scales_are_bf16(self) -> bool:
        """Whether each scale is a BF16 number, as those of official FP8 models are: fewer instructions dequantise."""
        return self.format.scales in (ScaleType.BF16, ScaleType.E8M0) and not self.format.global_scale

    @property
    def sums_may_be_scaled(self) -> bool:
        """Whether codes may be multiplied and the sums of a tile's columns scaled: codes are exact in BF16."""
        inexact = self.format.minimums or (self.format.code is Code.INT8 and self.zeros)
        return self.groups == 1 and not inexact


class LowbitTiles:
    """Makes the tiles of one device, and matrices of BF16 out of them."""

    def __init__(self, device: Device, memory: Memory) -> None:
        self._memory = memory
        self._arrangements = {
            each: device.kernel(_STEM, f"arrange_tiles_{each.name}") for each in _ARRANGEMENTS.values()
        }
        self._scales = {bytes_: device.kernel(_STEM, f"arrange_scales_{8 * bytes_}") for bytes_ in (2, 4)}
        self._dequantise = {kernels: device.kernel(_STEM, f"dequantise_tiles_{kernels}") for kernels in _ARRANGEMENTS}

    def empty(self, weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...]) -> TiledWeight:
        """Tiles without anything in them; `fill_scales` and `place` write all that is read."""
        kernels, (rows, columns) = tiles_kernels(weight_format), shape
        layout = tile_layout(weight_format, block, (rows, columns))
        tiles = cupy.empty((layout.tile_rows, layout.chunks, layout.tile_bytes), np.uint8)
        return TiledWeight(
            format=weight_format,
            shape=shape,
            codes=tiles,
            scales=tiles,
            block_rows=block[0],
            block_columns=block[1],
            kernels=kernels,
            groups=layout.groups,
            scale_rows=layout.scale_rows,
            zeros=layout.code_bytes + layout.scales_bytes if layout.zeros_bytes else 0,
            float16_scales=layout.scale_bytes == 2 and weight_format.scales is ScaleType.F16,
            factors=cupy.empty(rows, np.float32) if layout.factor_rows else None,
        )

    def place(self, weight: TiledWeight, *, first_row: int) -> "Place":
        """Puts the codes of a part into the tiles, whose rows begin at `first_row`."""
        arrangement = _ARRANGEMENTS[weight.kernels]
        return Place(self._arrangements[arrangement], weight, first_row, arrangement.unit_bytes)

    def fill_scales(self, weight: TiledWeight, parts: tuple[QuantisedPart, ...]) -> None:
        block = weight.block_rows, weight.block_columns
        layout = tile_layout(weight.format, block, (math.prod(weight.shape[:-1]), weight.shape[-1]))
        scales = np.concatenate([_stored_scales(part, block, layout) for part in parts])
        self._fill(weight, scales, offset=layout.code_bytes, rows=weight.scale_rows)
        if weight.factors is not None:
            factors = np.concatenate([_factors(part) for part in parts])
            weight.factors.set(factors)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if weight.zeros:
            stored = _stored_middles if weight.format.minimums else _stored_zeros
            self._fill(weight, stored(parts, block), offset=weight.zeros, rows=TILE_ROWS)

    def dequantised(self, weight: TiledWeight) -> Array:
        """The matrix in BF16, rounded once."""
        out = cupy.empty(weight.shape, bfloat16)
        tile_rows, chunks, tile_bytes = weight.codes.shape
        flat = math.prod(weight.shape[:-1]), weight.shape[-1]
        sizes = *flat, tile_bytes, weight.groups, int(weight.float16_scales), weight.scale_rows, weight.zeros
        factors = [] if weight.factors is None else [weight.factors]
        arguments = [weight.codes, out, *map(ctypes.c_int, sizes), *factors]
        self._dequantise[weight.kernels]((chunks, tile_rows, 1), (_THREADS, 1, 1), arguments, overlap=True)
        return out

    def _fill(self, weight: TiledWeight, values: NDArray[Any], *, offset: int, rows: int) -> None:
        tile_rows, chunks, tile_bytes = weight.codes.shape
        count = tile_rows * chunks * weight.groups * rows
        sizes = offset, rows, weight.groups, *weight.shape, weight.block_rows, weight.block_columns, chunks, tile_bytes
        arguments = [
            self._memory.upload(values),
            weight.codes,
            ctypes.c_int64(count),
            *map(ctypes.c_int, sizes),
        ]
        self._scales[values.itemsize]((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), arguments)
        self._memory.tell(values.nbytes)


class Place:
    """Puts pieces of a part's codes into the tiles; from any thread.

    A piece is told by its target: views of the tiles stand for the rows of the part, as if these lay there one after
    the other from the first byte on. Nothing is written to where a view points.
    """

    def __init__(self, kernel: Kernel, weight: TiledWeight, first_row: int, unit_bytes: int) -> None:
        self._kernel = kernel
        self._weight = weight
        self._first_row = first_row
        self._unit_bytes = unit_bytes
        self._row_bytes = weight.shape[1] * weight.format.code.bits // 8

    def view(self, num_rows: int) -> Array:
        """Of the words of so many rows."""
        words = self._row_bytes // 4
        return self._weight.codes.reshape(-1)[: num_rows * self._row_bytes].view(np.uint32).reshape(num_rows, words)

    def __call__(self, words: Array, out: Array) -> None:
        tiles = self._weight.codes
        first = address(out) - address(tiles)
        sizes = self._row_bytes, self._first_row, tiles.shape[1], tiles.shape[2]
        arguments = [words, tiles, ctypes.c_int64(first), ctypes.c_int64(words.nbytes), *map(ctypes.c_int, sizes)]
        if words.size:
            grid = (-(-words.nbytes // (self._unit_bytes * _THREADS)), 1, 1)
            self._kernel(grid, (_THREADS, 1, 1), arguments)


def _stored_scales(part: QuantisedPart, block: tuple[int, int], layout: TileLayout) -> NDArray[Any]:
    """The scale of each block as tiles hold it: float32, or 16 bits as they are, those of E8M0 and E4M3 as BF16."""
    if layout.scale_bytes == 4:
        scales = float32_scales(part, block)
        if part.format.code is Code.E4M3:
            _require_moderate(scales, part)
        return scales
    if part.format.scales is ScaleType.E4M3:
        scales = E4M3_VALUES[of_blocks(part, part.scales, block)]
        return _upper_halves(scales * np.float32(_SCALES_OF_NVFP4))
    if part.format.scales is ScaleType.E8M0:
        scales = float32_scales(part, block)
        if part.format.code is Code.E2M1:
            _require_moderate(scales, part)
        return _upper_halves(scales)
    return of_blocks(part, part.scales, block).view(np.uint16)


def _factors(part: QuantisedPart) -> NDArray[np.float32]:
    """Of each row; the scale of the matrix is rounded once."""
    return np.full(part.shape[0], part.global_scale * _FACTORS_OF_NVFP4, np.float32)


def _require_moderate(scales: NDArray[np.float32], part: QuantisedPart) -> None:
    largest, code = np.abs(scales).max(initial=0), part.format.code
    if not largest < _MOST_SCALES[code]:
        named = f"{part.name}: " if part.name else ""
        raise WeightValueError(
            f"{named}a scale of {code.name} is {largest:g} in size; kernels take less than {_MOST_SCALES[code]}"
        )


def _stored_zeros(parts: tuple[QuantisedPart, ...], block: tuple[int, int]) -> NDArray[Any]:
    zeros = np.concatenate([of_blocks(part, np.asarray(part.zero_points), block) for part in parts])
    if parts[0].format.code is Code.INT4:
        return _upper_halves(zeros.astype(np.float32) + _INT4_OFFSET)
    return zeros.astype(np.float16).view(np.uint16)


def _stored_middles(parts: tuple[QuantisedPart, ...], block: tuple[int, int]) -> NDArray[Any]:
    """The minimum plus eight scales: what a code of 8 stands for, the nearest BF16 of it."""
    minimums = np.concatenate([of_blocks(part, np.asarray(part.minimums), block) for part in parts])
    scales = np.concatenate([float32_scales(part, block) for part in parts])
    return rounded_bits(np.asarray(minimums.astype(np.float32) + _MIDDLE_OF_INT4 * scales, np.float32))


def _upper_halves(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of BF16 numbers that are held in float32."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
