"""Products with weights of few bits, which are widened where they are multiplied."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.weights.quantised import QuantisedPart, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """A weight of few bits on a device, made by `Ops.upload_quantised`.

    The value of row `o` and column `i` is `code[o, i] * scale[o // block_rows, i // block_columns]`. How codes and
    scales lie in memory is the device's own; models read `format` and `shape` alone.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    """`[out, in]`, or `[matrices, out, in]`."""
    codes: Array
    scales: Array
    block_rows: int
    """Rows that share a scale."""
    block_columns: int
    """Columns that share a scale."""


Weight: TypeAlias = Array | QuantisedWeight
"""Of the compute dtype, or of few bits."""


class QuantisedOps(Protocol):
    """Products with weights of few bits, which are widened where they are multiplied."""

    def upload_quantised(self, *parts: QuantisedPart, num_matrices: int | None = None) -> QuantisedWeight:
        """Brings parts of one format, which lie below each other, to the device.

        Args:
            parts: one or more, with as many columns each.
            num_matrices: None gives one matrix `[out, in]`; a number, so many of equal height, `[matrices, out, in]`.

        Raises:
            WeightDtypeError: codes or scales in a dtype that the format does not have.
            ValueError: parts that do not fit each other, or scales that do not cover their codes.
        """
        ...

    def upload_widened(self, *parts: QuantisedPart) -> Array:
        """What parts of one format, below each other, stand for: `[out, in]` in the compute dtype, there at once.

        For matrices that a model takes apart; otherwise `upload_quantised` keeps them small. It may be read within
        `loading`.

        Raises:
            WeightDtypeError: codes or scales in a dtype that the format does not have.
            ValueError: parts that do not fit each other, or scales that do not cover their codes.
        """
        ...

    def quantised_linear(self, x: Array, weight: QuantisedWeight) -> Array:
        """`x [T, in] @ weight [out, in].T`: `[T, out]`."""
        ...
