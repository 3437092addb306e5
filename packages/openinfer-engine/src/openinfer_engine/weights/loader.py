"""`WeightLoader`: a rank's weights, from the tensors of a checkpoint to arrays and weight matrices on its device."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
from numpy.typing import DTypeLike

from openinfer_core import InvalidCheckpoint
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.lora.arena import AdaptedPiece, AdaptedSource, piece_of, piece_of_stack
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.fused import matrices_of_stack, pad_rows, rows_of_rank, stacked_rows_of_rank, with_zeros
from openinfer_engine.weights.quantised import StoredMatrix, read_quantised
from openinfer_kernels import Array, LinearWeight, Ops, QuantisedPart, WeightPart, WeightValueError
from openinfer_kernels.ops.lora import AddedBy


class WeightLoader:
    """Uploads one rank's share of weights, each cut across the ranks as the model says."""

    def __init__(self, weights: WeightSource, *, ops: Ops, communicator: Communicator) -> None:
        self._weights = weights
        self._ops = ops
        self._communicator = communicator
        self._adapters = weights.arena if isinstance(weights, AdaptedSource) else None

    def plain(self, *names: str, shard: Shard = Shard.WHOLE) -> Array:
        """Tensors below each other, in the compute dtype."""
        return self._ops.upload_weight(*(self._weights.read(name, shard) for name in names))

    def padded(self, *names: str, multiple: int) -> Array:
        """Whole tensors below each other, in the compute dtype, and rows of zeros up to a multiple."""
        *parts, last = (self._weights.read(name) for name in names)
        return self._ops.upload_weight(*parts, *with_zeros(last, -sum(map(len, [*parts, last])) % multiple))

    def float32(self, name: str, shard: Shard = Shard.WHOLE) -> Array:
        """One tensor, whatever it is stored in."""
        return self._ops.upload_float32(self._weights.read(name, shard))

    def stored(self, name: str, dtype: DTypeLike | None = None) -> Array:
        """A whole `StoredTensor`, in its own dtype unless another is named: a table of ids."""
        return self._ops.upload(np.ascontiguousarray(self._weights.read_stored(name), dtype))

    def stored_float32(self, name: str) -> Array:
        """A whole `StoredTensor` of float32 or BF16, in float32."""
        return self._ops.upload_float32(self._weights.read_stored(name))

    def linear(
        self,
        *matrices: StoredMatrix | str,
        shard: Shard = Shard.WHOLE,
        whole: Sequence[StoredMatrix] = (),
        added_by: AddedBy | None = None,
    ) -> LinearWeight:
        """`[out, in]`: matrices of one format below each other, cut alike, and below them some that are not cut.

        A name alone is that of a plain matrix, without `.weight`. `added_by`: the operator to which the model hands
        the product, as it is and before it asks for any other, so that it may add what adapters do.

        Raises:
            InvalidCheckpoint: the matrices are stored in several formats, of which one product cannot be made.
        """
        parts = [(_named(each), shard) for each in matrices] + [(each, Shard.WHOLE) for each in whole]
        all_of_it = [each for each, _ in parts]
        if _is_plain(all_of_it):
            weight = self._ops.upload_weight(*(self._weights.read(f"{each.name}.weight", at) for each, at in parts))
        else:
            weight = self._upload(all_of_it, self._parts(parts))
        rank, size = self._communicator.rank, self._communicator.size
        return self._adapted(weight, [piece_of(each, at, rank=rank, size=size) for each, at in parts], added_by)

    def stack(
        self, *matrices: StoredMatrix, num_matrices: int, shard: Shard = Shard.WHOLE, grouped: bool = False
    ) -> LinearWeight:
        """`[num_matrices, out, in]`, of as many in a row as make one; raises as `linear`.

        `grouped` ones are for `Ops.grouped_linear`, others for `Ops.experts`.
        """
        if _is_plain(matrices):
            plain = self.plain(*(f"{each.name}.weight" for each in matrices), shard=shard)
            return plain.reshape(num_matrices, -1, plain.shape[1])
        parts = self._parts((each, shard) for each in matrices)
        return self._upload(matrices, parts, num_matrices=num_matrices, grouped=grouped)

    def of_stack(self, name: str, matrices: range, *below: StoredMatrix, num_matrices: int) -> Array:
        """`[num_matrices, out, in]`: some of a plain tensor `[E, out, in]`, then further plain ones, whole."""
        if below and not _is_plain(below):
            raise InvalidCheckpoint(f"{name} is plain and multiplied as one with {below[0].name}, which is quantised")
        some = matrices_of_stack(self._weights.read(name), matrices)
        further = (self._weights.read(f"{each.name}.weight") for each in below)
        rows = self._ops.upload_weight(*(part for part in (some, *further) if len(part)))
        return rows.reshape(num_matrices, -1, rows.shape[1])

    def stacked(self, name: str, heights: Sequence[int]) -> Array:
        """This rank's rows of each of several arrays of such heights, which lie below each other in one tensor."""
        return self._ops.upload_weight(*self._stacked_parts(name, heights))

    def stacked_linear(
        self, stacked: StoredMatrix | str, heights: Sequence[int], *below: StoredMatrix | str
    ) -> LinearWeight:
        """The same of a matrix, and below it further ones, cut by rows; names and errors as in `linear`."""
        first_of_all, *others = all_of_it = [_named(each) for each in (stacked, *below)]
        rank, size = self._communicator.rank, self._communicator.size
        pieces = [piece_of_stack(first_of_all, heights, rank=rank, size=size)]
        pieces += [piece_of(each, Shard.COLUMN_PARALLEL, rank=rank, size=size) for each in others]
        if _is_plain(all_of_it):
            further = (self._weights.read(f"{each.name}.weight", Shard.COLUMN_PARALLEL) for each in others)
            parts = self._stacked_parts(f"{first_of_all.name}.weight", heights)
            return self._adapted(self._ops.upload_weight(*parts, *further), pieces)
        whole = self._parts([(first_of_all, Shard.WHOLE)])[0]
        rows = (
            whole.rows(first + rank * height // size, first + (rank + 1) * height // size)
            for first, height in zip(accumulate(heights, initial=0), heights, strict=False)
        )
        further_parts = self._parts((each, Shard.COLUMN_PARALLEL) for each in others)
        return self._adapted(self._upload(all_of_it, [*rows, *further_parts]), pieces)

    def dequantised(self, matrix: StoredMatrix, shard: Shard = Shard.WHOLE) -> Array:
        """A matrix in the compute dtype, however it is stored: for a matrix that the model takes apart."""
        if matrix.format is None:
            return self.plain(f"{matrix.name}.weight", shard=shard)
        with _named_errors([matrix]):
            return self._ops.upload_dequantised(*self._parts([(matrix, shard)]))

    def vocabulary(self, embedding: str, head: str | None) -> tuple[Array, LinearWeight]:
        """The embedding `[V', h]`, whole on every rank, and this rank's share of the head, `[V' / ranks, h]`.

        `V'` is `V` rounded up to a multiple of the ranks; without a head of its own a model is tied: a view, unless
        the operators quantise heads (`Ops.quantise_head`).
        """
        rank, size = self._communicator.rank, self._communicator.size
        stored = self._weights.read(embedding)
        table = self._ops.upload_weight(*pad_rows(stored, size))
        share = rows_of_rank(stored if head is None else self._weights.read(head), rank=rank, size=size)
        quantised = self._ops.quantise_head(*share)
        if quantised is not None:
            return table, quantised
        if head is not None:
            return table, self._ops.upload_weight(*share)
        rows = len(table) // size
        return table, table[rank * rows : (rank + 1) * rows]

    def _adapted(
        self, weight: LinearWeight, pieces: Sequence[AdaptedPiece], added_by: AddedBy | None = None
    ) -> LinearWeight:
        """The weight as it is; where adapters are served, they have room for what they add to its product."""
        if self._adapters is not None:
            self._adapters.add(weight, pieces, added_by=added_by)
        return weight

    def _stacked_parts(self, name: str, heights: Sequence[int]) -> tuple[WeightPart, ...]:
        rank, size = self._communicator.rank, self._communicator.size
        return stacked_rows_of_rank(self._weights.read(name), heights, rank=rank, size=size)

    def _parts(self, matrices: Iterable[tuple[StoredMatrix, Shard]]) -> list[QuantisedPart]:
        return [
            read_quantised(self._weights, each, each.format, shard, self._communicator)
            for each, shard in matrices
            if each.format is not None
        ]

    def _upload(
        self,
        matrices: Sequence[StoredMatrix],
        parts: Sequence[QuantisedPart],
        num_matrices: int | None = None,
        *,
        grouped: bool = False,
    ) -> LinearWeight:
        with _named_errors(matrices):
            return self._ops.upload_quantised(*parts, num_matrices=num_matrices, grouped=grouped)


@contextmanager
def _named_errors(matrices: Sequence[StoredMatrix]) -> Generator[None]:
    """An operator knows no names of matrices."""
    try:
        yield
    except WeightValueError as error:
        raise InvalidCheckpoint(f"{', '.join(each.name for each in matrices)}: {error}") from error


def _named(matrix: StoredMatrix | str) -> StoredMatrix:
    return StoredMatrix(name=matrix, shape=(0, 0)) if isinstance(matrix, str) else matrix


def _is_plain(matrices: Sequence[StoredMatrix]) -> bool:
    """Whether all of one product are; raises `InvalidCheckpoint` if they differ in format."""
    formats = {each.format if each.format is None else each.format.format for each in matrices}
    if len(formats) > 1:
        listed = ", ".join(f"{each.name} {each.format.format if each.format else 'plain'}" for each in matrices)
        raise InvalidCheckpoint(f"matrices that are multiplied as one are stored in several formats: {listed}")
    return formats == {None}
