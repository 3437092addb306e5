"""`AdapterArena`: the adapter slots of one rank, for every product of the model that adapters change.

    WeightLoader.linear(q, k, v) ─► add(weight, pieces) ─► a [slots, P, r, in], b [slots, out, r]
    share_of(adapter)            ─► a rank's share of an adapter, in host memory
    place(slot, share)           ─► copied into the slot; what the adapter leaves out of it is zero

Factors are cut across ranks as their product is: where a rank has rows of the weight, it has these rows of B and all of
A; where it has columns, these columns of A and all of B. Then what a rank adds is its share of a sum that the model
makes over the ranks anyway. Memory is taken while the model is loaded, and stays where it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_engine.lora.adapter_folder import AdaptedModule, Adapter, LowRankPair, module_key
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_kernels import HostArray, LinearWeight, Ops, WeightPart
from openinfer_kernels.adapted import AdaptedWeights, AdapterWeights

RANK_MULTIPLE = 8
"""Ranks of slots are multiples of this: 16 bytes in BF16, which kernels load at once."""


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def adapted_modules(matrices: Sequence[tuple[StoredMatrix, Shard]]) -> Mapping[str, AdaptedModule]:
    """By `module_key`, of what `ModelDefinition.adapted_matrices` gives."""
    found: dict[str, AdaptedModule] = {}
    for matrix, _ in matrices:
        key = module_key(matrix.name)
        if key is None:
            raise ContractViolation(f"{matrix.name} is no matrix of a layer: it cannot be adapted")
        found[key] = AdaptedModule(*matrix.shape)
    return found


def arena_bytes(
    matrices: Sequence[tuple[StoredMatrix, Shard]], *, num_slots: int, rank: int, size: int, itemsize_bytes: int
) -> int:
    """What the slots of one of `size` ranks take."""
    values = 0
    for matrix, shard in matrices:
        rows, columns = matrix.shape
        values += rows // (size if shard is Shard.COLUMN_PARALLEL else 1)
        values += columns // (size if shard is Shard.ROW_PARALLEL else 1)
    return num_slots * padded_rank(rank) * values * itemsize_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPiece:
    """One matrix of a product, and which part of it a rank has."""

    name: str
    """As the checkpoint names it, without `.weight`."""
    rows: tuple[slice, ...]
    """Of the whole matrix, in the order in which the rank has them."""
    columns: slice
    """Of the whole matrix."""

    @property
    def num_rows(self) -> int:
        return sum(each.stop - each.start for each in self.rows)


def piece_of(matrix: StoredMatrix, shard: Shard, *, rank: int, size: int) -> AdaptedPiece:
    """A matrix that is cut as a whole."""
    rows, columns = matrix.shape
    return AdaptedPiece(
        name=matrix.name,
        rows=(_share(rows, rank, size) if shard is Shard.COLUMN_PARALLEL else slice(0, rows),),
        columns=_share(columns, rank, size) if shard is Shard.ROW_PARALLEL else slice(0, columns),
    )


def piece_of_stack(matrix: StoredMatrix, heights: Sequence[int], *, rank: int, size: int) -> AdaptedPiece:
    """A matrix in which several lie below each other, each cut by rows."""
    rows: list[slice] = []
    begin = 0
    for height in heights:
        share = _share(height, rank, size)
        rows.append(slice(begin + share.start, begin + share.stop))
        begin += height
    return AdaptedPiece(name=matrix.name, rows=tuple(rows), columns=slice(0, matrix.shape[1]))


def _share(length: int, rank: int, size: int) -> slice:
    return slice(rank * length // size, (rank + 1) * length // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    keys: tuple[str, ...]
    pieces: tuple[AdaptedPiece, ...]
    weights: AdapterWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShare:
    """One rank's share of an adapter in host memory: what it adds to each product, in the products' order."""

    factors: tuple[tuple[tuple[HostArray, HostArray] | None, ...], ...]
    """Of each product and piece A `[r, in]` and B times its scale `[out, r]`, float32; None where there is none."""

    @property
    def num_bytes(self) -> int:
        pairs = [pair for product in self.factors for pair in product if pair is not None]
        return sum(a.nbytes + b.nbytes for a, b in pairs)


class AdapterArena:
    """Slots of one rank; filled by the `WeightLoader` while the model is loaded, and then complete."""

    def __init__(self, *, ops: Ops, num_slots: int, max_rank: int) -> None:
        self.weights = AdaptedWeights()
        self.num_slots = num_slots
        self._ops = ops
        self._rank = padded_rank(max_rank)
        self._products: list[_Product] = []

    @property
    def num_bytes(self) -> int:
        return sum(each.weights.a.nbytes + each.weights.b.nbytes for each in self._products)

    def add(self, weight: LinearWeight, pieces: Sequence[AdaptedPiece]) -> None:
        """Takes memory for a product's adapters; not for one that has a matrix outside of the model's layers."""
        keys = [module_key(piece.name) for piece in pieces]
        if None in keys:
            return
        starts = np.cumsum([0, *(piece.num_rows for piece in pieces)]).tolist()
        columns = pieces[0].columns.stop - pieces[0].columns.start
        adapters = AdapterWeights(
            a=self._ops.zeros((self.num_slots, len(pieces), self._rank, columns)),
            b=self._ops.zeros((self.num_slots, starts[-1], self._rank)),
            starts=tuple(starts),
        )
        known = tuple(key for key in keys if key is not None)
        self._products.append(_Product(keys=known, pieces=tuple(pieces), weights=adapters))
        self.weights.add(weight, adapters)

    def check(self, modules: Mapping[str, AdaptedModule]) -> None:
        """Raises `ContractViolation` unless the model was loaded with exactly these modules."""
        loaded = [key for product in self._products for key in product.keys]
        if sorted(loaded) != sorted(modules):
            differing = sorted({*loaded} ^ {*modules})[:4]
            raise ContractViolation(
                f"the family's adapted_matrices are not those that it loads by WeightLoader.linear: {differing}"
            )

    def share_of(self, adapter: Adapter) -> AdapterShare:
        """This rank's share; called from any thread."""
        return AdapterShare(
            factors=tuple(
                tuple(
                    None if (pair := adapter.pairs.get(key)) is None else _cut(pair, piece)
                    for key, piece in zip(product.keys, product.pieces, strict=True)
                )
                for product in self._products
            )
        )

    def place(self, slot: int, share: AdapterShare) -> None:
        """Copies a share into a slot that no step in flight uses. Called where steps are launched, between two."""
        for product, factors in zip(self._products, share.factors, strict=True):
            a, b = product.weights.a[slot], product.weights.b[slot]
            a[:] = 0
            b[:] = 0
            for index, pair in enumerate(factors):
                if pair is not None:
                    begin, end = product.weights.starts[index : index + 2]
                    a[index, : len(pair[0])] = self._ops.upload_weight(pair[0])
                    b[begin:end, : len(pair[0])] = self._ops.upload_weight(pair[1])


def _cut(pair: LowRankPair, piece: AdaptedPiece) -> tuple[HostArray, HostArray]:
    a = _float32(pair.a[:, piece.columns])
    b = np.concatenate([_float32(pair.b[rows]) for rows in piece.rows])
    # The scale becomes part of B before it is rounded to the compute dtype: one rounding, and none per step.
    return a, b * np.float32(pair.scale)


def _float32(stored: HostArray) -> HostArray:
    if stored.dtype == np.uint16:  # BF16
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


class AdaptedSource:
    """A `WeightSource` whose matrices adapters may change: a `WeightLoader` tells the arena of them."""

    def __init__(self, weights: WeightSource, arena: AdapterArena) -> None:
        self.arena = arena
        self._weights = weights

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        return self._weights.read(name, shard)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        return self._weights.read_stored(name, shard)
