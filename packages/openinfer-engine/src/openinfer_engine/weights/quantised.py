"""Quantised matrices of a checkpoint: their tensors by name, and a rank's piece of one.

    matrix = QuantisedMatrix(format=..., shape=(out, in), codes="X.weight", scales="X.weight_scale_inv")
    matrix.tensors() ─► part of `ModelDefinition.tensors`
    read_quantised(weights, matrix, Cut.ROWS, communicator) ─► `Ops.upload_quantised`

Codes are cut; scales are read whole, as blocks of them may be cut in the middle, and the part says where it begins.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from openinfer_core import InvalidCheckpoint
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import Cut, WeightSource
from openinfer_engine.weights.checkpoint import share_of_rank
from openinfer_engine.weights.stored_tensor import RandomBytes, Repeated, StoredTensor
from openinfer_kernels import HostArray, QuantisedPart, WeightFormat
from openinfer_kernels.weights.quantised import BLOCKS, CODES_PER_ENTRY

_CODE_DTYPES = {
    WeightFormat.FP8_BLOCKS: ("F8_E4M3",),
    WeightFormat.INT4_GROUPS: ("I32",),
    WeightFormat.FP4_GROUPS: ("I8", "U8", "F4"),
}
_SCALE_DTYPES = {
    WeightFormat.FP8_BLOCKS: ("F32", "F8_E8M0"),
    WeightFormat.INT4_GROUPS: ("BF16",),
    WeightFormat.FP4_GROUPS: ("F8_E8M0",),
}
_MASKS = {WeightFormat.FP8_BLOCKS: 0xBF, WeightFormat.INT4_GROUPS: 0xFF, WeightFormat.FP4_GROUPS: 0xFF}
"""Of dummy codes: E4M3 below 2, so that none is NaN."""
_TYPICAL_CODES = {WeightFormat.FP8_BLOCKS: 0.598, WeightFormat.INT4_GROUPS: 4.637, WeightFormat.FP4_GROUPS: 2.926}
"""Root of the mean square of what these dummy codes stand for."""
_MATRIX_GAIN = 2.0
"""As of other dummy matrices: what a product with a normed vector spreads by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMatrix:
    """One quantised matrix of a checkpoint."""

    format: WeightFormat
    shape: tuple[int, int]
    """`[out, in]`, of values."""
    codes: str
    """Name of the tensor of codes."""
    scales: str
    """Name of the tensor of scales."""
    declared_shape: str | None = None
    """Name of a tensor `[2]` that repeats the shape, where there is one; it is compared."""

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Its tensors, for `ModelDefinition.tensors`."""
        rows, columns = self.shape
        block_rows, block_columns = BLOCKS[self.format]
        scale = _MATRIX_GAIN / math.sqrt(columns) / _TYPICAL_CODES[self.format]
        found = {
            self.codes: StoredTensor(
                shape=(rows, columns // CODES_PER_ENTRY[self.format]),
                dtypes=_CODE_DTYPES[self.format],
                dummy=RandomBytes(mask=_MASKS[self.format]),
            ),
            self.scales: StoredTensor(
                shape=(-(-rows // block_rows), -(-columns // block_columns)),
                dtypes=_SCALE_DTYPES[self.format],
                dummy=Repeated(values=(scale,)),
            ),
        }
        if self.declared_shape is not None:
            dummy = Repeated(values=self.shape)
            found[self.declared_shape] = StoredTensor(shape=(2,), dtypes=("I64", "I32"), dummy=dummy)
        return found


def read_quantised(
    weights: WeightSource, matrix: QuantisedMatrix, cut: Cut, communicator: Communicator
) -> QuantisedPart:
    """A rank's piece of a matrix.

    Raises:
        InvalidCheckpoint: it cannot be cut so, or says that it has another shape.
    """
    if matrix.declared_shape is not None:
        _check_shape(matrix, weights.read_stored(matrix.declared_shape))
    begin, _ = share_of_rank(matrix.shape, matrix.codes, cut, rank=communicator.rank, size=communicator.size)
    return QuantisedPart(
        format=matrix.format,
        codes=weights.read_stored(matrix.codes, cut),
        scales=weights.read_stored(matrix.scales),
        first_row=begin if cut is Cut.ROWS else 0,
        first_column=begin if cut is Cut.COLUMNS else 0,
    )


def _check_shape(matrix: QuantisedMatrix, declared: HostArray) -> None:
    if tuple(int(size) for size in declared) != matrix.shape:
        raise InvalidCheckpoint(
            f"{matrix.declared_shape} says {declared.tolist()}, and {matrix.codes} is read as {list(matrix.shape)}"
        )
