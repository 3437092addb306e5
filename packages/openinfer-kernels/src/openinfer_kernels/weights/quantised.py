"""What a quantised weight is uploaded from: codes and scales of a checkpoint, or random codes that no host holds."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from numpy.typing import NDArray


class WeightFormat(StrEnum):
    """How checkpoints store quantised weights: codes, and a scale per block of them, which multiplies."""

    FP8_BLOCKS = "fp8_blocks"
    """E4M3 with a scale per block of 128 x 128: DeepSeek-V3, 2024, section 3.3."""
    INT4_GROUPS = "int4_groups"
    """Integers from -8 to 7, stored as 0 to 15, with a scale per 32 inputs: `pack-quantized` of compressed-tensors."""
    FP4_GROUPS = "fp4_groups"
    """E2M1 with a power of two per 32 inputs: OCP Microscaling Formats 1.0, 2023, MXFP4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCodes:
    """Random bytes in the shape of codes, or of a piece of them: a recipe, as `RandomWeight` is one.

    Bytes 4 i to 4 i + 3 of the whole tensor, counted row by row, are those of word `i % 4` of Philox-4x32-10 with the
    seed as key and `i // 4` as counter, the lowest first, each `& mask`.
    """

    seed: int
    """64 bits."""
    mask: int
    """Keeps codes that stand for no number, or for numbers too large, from coming up."""
    shape: tuple[int, int]
    """Of this piece."""
    itemsize: int
    """Bytes of a code: 1, or 4 for `INT4_GROUPS`."""
    row_length: int
    """Codes in a row of the whole tensor."""
    origin: int = 0
    """Where in the whole tensor this piece begins, in codes."""

    @classmethod
    def whole(cls, shape: tuple[int, int], *, seed: int, mask: int, itemsize: int) -> "RandomCodes":
        return cls(seed=seed, mask=mask, shape=shape, itemsize=itemsize, row_length=shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, begin: int, end: int) -> "RandomCodes":
        return replace(self, shape=(end - begin, self.shape[1]), origin=self.origin + begin * self.row_length)

    def columns(self, begin: int, end: int) -> "RandomCodes":
        return replace(self, shape=(self.shape[0], end - begin), origin=self.origin + begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedPart:
    """Rows of a quantised weight, as a checkpoint has them; arrays of any strides.

    FP8_BLOCKS: codes uint8 `[out, in]`, E4M3 bits; scales per 128 x 128, float32, or uint8 for E8M0.
    INT4_GROUPS: codes int32 `[out, in / 8]`, column `8 j + n` is nibble `n` of word `j`, the lowest bits nibble 0;
    scales `[out, in / 32]` uint16 for BF16 bits. Nibble `q` is `q - 8`.
    FP4_GROUPS: codes uint8 `[out, in / 2]`, the even column the low nibble; scales `[out, in / 32]` uint8 for E8M0.
    E8M0 byte `b` is `2^(b - 127)`; 255 is NaN.
    """

    format: WeightFormat
    codes: "NDArray[Any] | RandomCodes"
    scales: NDArray[Any]
    """The blocks that the codes touch, or more after them."""
    first_row: int = 0
    """Where in the grid of `scales` the first code stands: rows from the top of its first block."""
    first_column: int = 0
    """Columns from the left of its first block."""

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]`."""
        rows, columns = self.codes.shape
        return rows, columns * CODES_PER_ENTRY[self.format]


CODES_PER_ENTRY = {WeightFormat.FP8_BLOCKS: 1, WeightFormat.INT4_GROUPS: 8, WeightFormat.FP4_GROUPS: 2}
"""Columns in one number of `QuantisedPart.codes`."""
BLOCKS = {WeightFormat.FP8_BLOCKS: (128, 128), WeightFormat.INT4_GROUPS: (1, 32), WeightFormat.FP4_GROUPS: (1, 32)}
"""Rows and columns that share a scale in checkpoints."""
