"""What a quantised weight is uploaded from: codes and scales of a checkpoint, or random codes that no host holds."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from numpy.typing import NDArray


class Code(StrEnum):
    """What a quantised weight is stored as, before its scale."""

    E4M3 = "e4m3"
    """8 bits: 1 sign, 4 exponent, 3 fraction; no infinities (Micikevicius et al. 2022, "FP8 Formats for Deep
    Learning", table 1)."""
    E2M1 = "e2m1"
    """4 bits: ±0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats 1.0, 2023, section 5.3.3)."""
    INT8 = "int8"
    """0 to 255, from which a zero point is subtracted: 128 where none is stored."""
    INT4 = "int4"
    """0 to 15, from which a zero point is subtracted: 8 where none is stored."""

    @property
    def bits(self) -> int:
        return 8 if self in (Code.E4M3, Code.INT8) else 4

    @property
    def is_integer(self) -> bool:
        return self in (Code.INT8, Code.INT4)


class ScaleType(StrEnum):
    """What scales are stored in, and how NumPy holds it."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    """uint16."""
    E8M0 = "e8m0"
    """uint8; byte `b` is `2^(b - 127)`, 255 is NaN."""
    E4M3 = "e4m3"
    """uint8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a quantised weight is stored, as data: its codes, and what a group of them shares.

    With the scale `s` of a group, a weight of code `q` is

        q s               floats, and integers after 8 or 128 was subtracted
        (q - z) s         `zero_points`: `z` of the group
        q s + m           `minimums`: `m` of the group; `q` is not centred (ggml's Q4_1)
        q (s g)           `global_scale`: `g` of the matrix
    """

    code: Code
    group_rows: int | None
    """Rows that share a scale, counted from the top of the matrix; None: all of them."""
    group_columns: int | None
    """Columns that share a scale; None: all of them."""
    scales: ScaleType
    zero_points: bool = False
    minimums: bool = False
    global_scale: bool = False

    @property
    def groups(self) -> tuple[int | None, int | None]:
        return self.group_rows, self.group_columns

    def __str__(self) -> str:
        """For people: `int4 in groups of 1 x 128 with f16 scales and zero points`."""
        group = " x ".join("all" if each is None else str(each) for each in self.groups)
        further = {"zero points": self.zero_points, "minimums": self.minimums, "a global scale": self.global_scale}
        parts = [f"{self.scales} scales", *(name for name, there in further.items() if there)]
        return f"{self.code} in groups of {group} with {' and '.join(parts)}"


FP8_BLOCK_128 = WeightFormat(code=Code.E4M3, group_rows=128, group_columns=128, scales=ScaleType.F32)
"""DeepSeek-V3, 2024, section 3.3."""
INT4_GROUP_32 = WeightFormat(code=Code.INT4, group_rows=1, group_columns=32, scales=ScaleType.BF16)
"""`pack-quantized` of compressed-tensors, as Kimi-K2's experts."""
MXFP4 = WeightFormat(code=Code.E2M1, group_rows=1, group_columns=32, scales=ScaleType.E8M0)
"""OCP Microscaling Formats 1.0, 2023."""


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
    """Bytes of an entry: 1, or 4 where codes come in words."""
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
    """Rows of a quantised weight in one order of bits, whatever the checkpoint's; arrays of any strides.

    A row of codes is bytes, or whole little-endian words of them: one byte per column for codes of 8 bits; of 4 bits
    the even column is the low half of a byte, the odd one after it the high half.
    """

    format: WeightFormat
    codes: "NDArray[Any] | RandomCodes"
    """`[out, entries]`, of any integer dtype."""
    scales: NDArray[Any]
    """`[groups of rows, groups of columns]`, in the format's dtype: those that the codes touch, or more after them."""
    zero_points: NDArray[Any] | None = None
    """uint8, one per scale, where the format has them."""
    minimums: NDArray[Any] | None = None
    """float32 or float16, one per scale, where the format has them."""
    global_scale: float = 1.0
    """Multiplies every scale, where the format has one; in float64, so that a divisor can be held as its inverse."""
    first_row: int = 0
    """Where in the grid of `scales` the first code stands: rows from the top of its first group."""
    first_column: int = 0
    """Columns from the left of its first group."""
    name: str = ""
    """What a checkpoint calls the matrix, for messages."""

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]`."""
        rows, entries = self.codes.shape
        return rows, entries * self.codes.itemsize * 8 // self.format.code.bits

    def rows(self, begin: int, end: int) -> "QuantisedPart":
        """Some of its rows."""
        codes = self.codes.rows(begin, end) if isinstance(self.codes, RandomCodes) else self.codes[begin:end]
        return replace(self, codes=codes, first_row=self.first_row + begin)
