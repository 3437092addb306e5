"""Matrices of a checkpoint, plain or of few bits: their tensors by name, and this rank's piece of them on a device."""

from collections.abc import Mapping
from dataclasses import dataclass

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import Cut, WeightSource
from openinfer_engine.weights.quantised import QuantisedMatrix, read_quantised
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Array, Ops, QuantisedPart, Weight, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix of a checkpoint."""

    name: str
    """Without `.weight`."""
    shape: tuple[int, int]
    """`[out, in]`"""
    format: WeightFormat | None = None
    """None: plain."""

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Its tensors, for `ModelDefinition.tensors`."""
        return {f"{self.name}.weight": self.shape} if self.format is None else self.quantised(self.format).tensors()

    def quantised(self, format: WeightFormat) -> QuantisedMatrix:  # noqa: A002 - the word of the field
        """Where codes and scales are."""
        if format is WeightFormat.FP8_BLOCKS:
            return QuantisedMatrix(
                format=format,
                shape=self.shape,
                codes=f"{self.name}.weight",
                scales=f"{self.name}.weight_scale_inv",
            )
        return QuantisedMatrix(
            format=format,
            shape=self.shape,
            codes=f"{self.name}.weight_packed",
            scales=f"{self.name}.weight_scale",
            declared_shape=f"{self.name}.weight_shape",
        )


class MatrixLoader:
    """Uploads this rank's pieces of matrices."""

    def __init__(self, weights: WeightSource, *, ops: Ops, communicator: Communicator) -> None:
        self._weights = weights
        self._ops = ops
        self._communicator = communicator

    def load(self, *matrices: Matrix, cut: Cut = Cut.WHOLE) -> Weight:
        """One or more of one format below each other, each cut alike."""
        if matrices[0].format is None:
            return self._plain(matrices, cut)
        return self._ops.upload_quantised(*self._parts(matrices, cut))

    def load_stack(self, *matrices: Matrix, num_matrices: int) -> Weight:
        """`[num_matrices, out, in]`, of as many in a row as make one."""
        if matrices[0].format is not None:
            return self._ops.upload_quantised(*self._parts(matrices, Cut.WHOLE), num_matrices=num_matrices)
        plain = self._plain(matrices, Cut.WHOLE)
        return plain.reshape(num_matrices, -1, plain.shape[1])

    def load_widened(self, matrix: Matrix, *, cut: Cut = Cut.WHOLE) -> Array:
        """In the compute dtype, however it is stored."""
        if matrix.format is None:
            return self._plain((matrix,), cut)
        return self._ops.upload_widened(*self._parts((matrix,), cut))

    def _plain(self, matrices: tuple[Matrix, ...], cut: Cut) -> Array:
        return self._ops.upload_weight(*(self._weights.read(f"{each.name}.weight", cut) for each in matrices))

    def _parts(self, matrices: tuple[Matrix, ...], cut: Cut) -> list[QuantisedPart]:
        return [
            read_quantised(self._weights, each.quantised(each.format), cut, self._communicator)
            for each in matrices
            if each.format is not None
        ]
