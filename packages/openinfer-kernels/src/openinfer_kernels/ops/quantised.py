"""A weight matrix as a model holds it: of the compute dtype, or quantised."""

from dataclasses import dataclass
from typing import TypeAlias

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.weights.quantised import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """A quantised weight on a device, made by `Ops.upload_quantised`.

    The value of row `o` and column `i` is that of `code[o, i]`, as `WeightFormat` says, with
    `scale[o // block_rows, i // block_columns]` and the zero point or minimum in the same place. How codes and scales
    lie in memory is the device's own; models read `format` and `shape` alone.
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
    zero_points: Array | None = None
    minimums: Array | None = None


LinearWeight: TypeAlias = Array | QuantisedWeight
"""A weight matrix, or a stack of them: of the compute dtype, or quantised. Models hand it to operators, which ask."""
