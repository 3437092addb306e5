"""`AdapterArena`: the adapter slots of one rank, for every product of the model that adapters change.

    WeightLoader.linear(q, k, v) ─► add(weight, pieces) ─► a [slots, P, r, in], b [slots, out, r]
    begin_share() ─► take(factors) ─► a rank's share of an adapter, in host memory, as a slot has it
    place(slot, share)           ─► copied into the slot; what the adapter leaves out of it is zero
    share_in(slot)               ─► copied back, for a sleep that takes the slots' memory

Factors are cut across ranks as their product is: where a rank has rows of the weight, it has these rows of B and all of
A; where it has columns, these columns of A and all of B. Then what a rank adds is its share of a sum that the model
makes over the ranks anyway. Memory is taken while the model is loaded, and stays where it is: a model that is read
again has its products' slots there.
"""

import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_engine.lora.adapter_folder import AdaptedModule, Factor, LowRank, module_key
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_kernels import Array, HostArray, LinearWeight, Ops, QuantisedWeight, WeightPart
from openinfer_kernels.adapted import AdaptedWeights, AdapterWeights
from openinfer_kernels.ops.lora import AddedBy
from openinfer_kernels.weights.adapter_columns import most_columns
from openinfer_kernels.weights.bfloat16 import rounded_bits, scaled_bits

RANK_MULTIPLE = 8
"""Ranks of slots are multiples of this: 16 bytes in BF16, which kernels load at once."""
_BF16_BYTES = 2
_MOST_TABLES = 8
"""Of scales that differ; nearly all adapters have one."""


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
    matrices: Sequence[tuple[StoredMatrix, Shard]],
    *,
    num_slots: int,
    rank: int,
    size: int,
    itemsize_bytes: int,
    may_fuse: bool,
) -> int:
    """What the slots of one of `size` ranks take, at most. `may_fuse`: as for an `AdapterArena` on a GPU."""
    padded = padded_rank(rank)
    of_a = num_slots * padded
    of_b = most_columns(num_slots, padded) if may_fuse else of_a
    values = 0
    for matrix, shard in matrices:
        rows, columns = matrix.shape
        values += of_b * (rows // (size if shard is Shard.COLUMN_PARALLEL else 1))
        values += of_a * (columns // (size if shard is Shard.ROW_PARALLEL else 1))
    return values * itemsize_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPiece:
    """One matrix of a product, and which part of it a rank has."""

    name: str
    """As the checkpoint names it, without `.weight`."""
    rows: tuple[slice, ...]
    """Of the whole matrix, in the order in which the rank has them."""
    columns: slice
    """Of the whole matrix."""
    is_whole: bool
    """Whether the rank has all of it."""

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
        is_whole=size == 1,
    )


def piece_of_stack(matrix: StoredMatrix, heights: Sequence[int], *, rank: int, size: int) -> AdaptedPiece:
    """A matrix in which several lie below each other, each cut by rows."""
    rows: list[slice] = []
    begin = 0
    for height in heights:
        share = _share(height, rank, size)
        rows.append(slice(begin + share.start, begin + share.stop))
        begin += height
    return AdaptedPiece(name=matrix.name, rows=tuple(rows), columns=slice(0, matrix.shape[1]), is_whole=size == 1)


def _share(length: int, rank: int, size: int) -> slice:
    return slice(rank * length // size, (rank + 1) * length // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    keys: tuple[str, ...]
    pieces: tuple[AdaptedPiece, ...]
    weights: AdapterWeights

    @property
    def num_slot_values(self) -> int:
        return math.prod(self.weights.a.shape[1:]) + math.prod(self.weights.b.shape[1:])

    def factors_in(self, memory: HostArray) -> tuple[HostArray, HostArray]:
        """A and B as a slot has them, in memory of `num_slot_values`."""
        num_a = math.prod(self.weights.a.shape[1:])
        return memory[:num_a].reshape(self.weights.a.shape[1:]), memory[num_a:].reshape(self.weights.b.shape[1:])

    def pieces_of(self, a: Array, b: Array) -> Sequence[tuple[Array, Array]]:
        """`[r, in]` and `[rows, r]` of each piece in what a slot has, on the host or the device."""
        starts = self.weights.starts
        return [(a[index], b[starts[index] : starts[index + 1]]) for index in range(len(self.pieces))]


class _Place(NamedTuple):
    """Where a module is."""

    product: int
    piece: int
    rows: int
    columns: int


class PieceShare(NamedTuple):
    """What a slot holds of one piece."""

    a: HostArray
    """`[r, in]` of the compute dtype."""
    b: HostArray
    """`[rows, r]`"""
    scale: float = 1.0
    """That B is multiplied by when it is placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShare:
    """One rank's share of an adapter in host memory: what a slot holds of it, in the products' order."""

    pieces: tuple[tuple[PieceShare | None, ...], ...]
    """Of each product; None of a piece that the adapter leaves out."""

    @property
    def num_bytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for product in self.pieces for each in product if each is not None)


class AdapterArena:
    """Slots of one rank; filled by the `WeightLoader` while the model is loaded, and then complete."""

    def __init__(
        self,
        *,
        ops: Ops,
        num_slots: int,
        max_rank: int,
        may_fuse: bool = True,
        may_defer: bool = True,
        memory: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`may_fuse`: False where products are another package's, `may_defer` where the operators after them are.

        Slots are made within `memory`.
        """
        self._may_defer = may_defer
        self._fused = ops.fused_adapters if may_fuse else None
        self.weights = AdaptedWeights()
        self.num_slots = num_slots
        self._ops = ops
        self._rank = padded_rank(max_rank)
        self._memory = memory
        self._products: list[_Product] = []
        self._places: dict[str, _Place] = {}
        self._next: int | None = None  # product of a model that is read again
        self._spare: HostArray | None = None  # for the next adapter of all products
        self._targets: dict[int, Sequence[Sequence[tuple[Array, Array]]]] = {}  # of each slot's pieces
        self._spare_lock = threading.Lock()

    @property
    def products(self) -> tuple[AdapterWeights, ...]:
        """In the order in which they were loaded."""
        return tuple(each.weights for each in self._products)

    @property
    def num_bytes(self) -> int:
        return sum(each.a.nbytes + (each.b if each.columns is None else each.columns).nbytes for each in self.products)

    def add(self, weight: LinearWeight, pieces: Sequence[AdaptedPiece], *, added_by: AddedBy | None = None) -> None:
        """Takes memory for a product's adapters; not for one that has a matrix outside of the model's layers.

        `added_by`: the operator that may add them. Where a rank has shares of its pieces, the product has to.
        """
        keys = [module_key(piece.name) for piece in pieces]
        if None in keys:
            return
        if self._next is not None:
            self._join(weight, keys)
            return
        with self._memory():
            self._add(weight, pieces, tuple(key for key in keys if key is not None), added_by)

    def _add(
        self,
        weight: LinearWeight,
        pieces: Sequence[AdaptedPiece],
        keys: tuple[str, ...],
        added_by: AddedBy | None,
    ) -> None:
        starts = np.cumsum([0, *(piece.num_rows for piece in pieces)]).tolist()
        columns = pieces[0].columns.stop - pieces[0].columns.start
        wide = self._wide(weight, starts)
        adapters = AdapterWeights(
            a=self._ops.zeros((self.num_slots, len(pieces), self._rank, columns)),
            b=self._ops.zeros((self.num_slots, starts[-1], self._rank)) if wide is None else self._slots_of(wide),
            columns=wide,
            starts=tuple(starts),
            added_by=added_by if self._may_defer and all(piece.is_whole for piece in pieces) else None,
        )
        for index, (key, piece) in enumerate(zip(keys, pieces, strict=True)):
            self._places[key] = _Place(len(self._products), index, piece.num_rows, columns)
        self._products.append(_Product(keys=keys, pieces=tuple(pieces), weights=adapters))
        self.weights.add(weight, adapters)

    @contextmanager
    def loading_again(self) -> Generator[None]:
        """Within it a model is loaded that has the products of the first one, in their order: they keep their slots.

        Raises:
            ContractViolation: it has others.
        """
        self.drop_weights()
        self._next = 0
        yield
        if self._next != len(self._products):
            raise ContractViolation(f"the model has {self._next} adapted products, and had {len(self._products)}")

    def drop_weights(self) -> None:
        """Lets go of the model's weights; what lies in the slots stays."""
        self.weights = AdaptedWeights()

    def _join(self, weight: LinearWeight, keys: Sequence[str | None]) -> None:
        index = self._next or 0
        known = self._products[index] if index < len(self._products) else None
        if known is None or known.keys != tuple(keys):
            raise ContractViolation(f"adapted product {index} of the model is {keys}, and was another one")
        self.weights.add(weight, known.weights)
        self._next = index + 1

    def _wide(self, weight: LinearWeight, starts: Sequence[int]) -> Array | None:
        """Room for the B's of all slots next to each other, if products with them are one launch."""
        if self._fused is None or isinstance(weight, QuantisedWeight):
            return None
        width = self._fused.columns(weight, num_slots=self.num_slots, rank=self._rank, starts=starts)
        return self._ops.zeros((starts[-1], width)) if width else None

    def _slots_of(self, wide: Array) -> Array:
        """`[slots, out, r]`"""
        return wide.reshape(len(wide), -1, self._rank)[:, : self.num_slots].transpose(1, 0, 2)

    def check(self, modules: Mapping[str, AdaptedModule]) -> None:
        """Raises `ContractViolation` unless the model was loaded with exactly these modules."""
        loaded = [key for product in self._products for key in product.keys]
        if sorted(loaded) != sorted(modules):
            differing = sorted({*loaded} ^ {*modules})[:4]
            raise ContractViolation(
                f"the family's adapted_matrices are not those that it loads by WeightLoader.linear: {differing}"
            )

    def begin_share(self) -> "ShareWriter":
        """Of an adapter that is going to be read, this rank's share; from any thread."""
        return ShareWriter(self._products, self._places, take_memory=self._host_memory)

    def prepare(self) -> None:
        """Takes host memory for another adapter, of all products; from any thread.

        A GPU's is pinned, which takes as long as reading an adapter: it is done when one has been read, not before.
        """
        with self._spare_lock:  # an adapter that comes meanwhile waits for this memory, and makes none of its own
            if self._spare is None:
                self._spare = self._ops.host_weights(sum(product.num_slot_values for product in self._products))

    def _host_memory(self, num_values: int) -> HostArray:
        with self._spare_lock:
            if self._spare is None or len(self._spare) != num_values:
                return self._ops.host_weights(num_values)
            spare, self._spare = self._spare, None
        return spare

    def share_in(self, slot: int) -> AdapterShare:
        """What lies in a slot, copied to host memory, after the steps that were launched."""
        sizes = [product.num_slot_values for product in self._products]
        memory = self._ops.host_weights(sum(sizes))
        pieces: list[tuple[PieceShare, ...]] = []
        for product, end, size in zip(self._products, np.cumsum(sizes).tolist(), sizes, strict=True):
            factors = product.factors_in(memory[end - size : end])
            for host, array in zip(factors, (product.weights.a, product.weights.b), strict=True):
                host[...] = self._ops.download(array[slot])
            pieces.append(tuple(PieceShare(*each) for each in product.pieces_of(*factors)))
        return AdapterShare(pieces=tuple(pieces))

    def place(self, slot: int, share: AdapterShare) -> None:
        """Begins to copy a share into a slot that no step in flight uses; it is kept until that has run.

        Called where steps are launched, between two.
        """
        if slot not in self._targets:  # the memory of slots stays where it is
            self._targets[slot] = [
                each.pieces_of(each.weights.a[slot], each.weights.b[slot]) for each in self._products
            ]
        copies: list[tuple[HostArray | None, Array]] = []
        scales: list[float] = []
        for targets, pieces in zip(self._targets[slot], share.pieces, strict=True):
            for (a, b), piece in zip(targets, pieces, strict=True):
                copies += ((None, a), (None, b)) if piece is None else ((piece.a, a), (piece.b, b))
                scales += (1.0, 1.0 if piece is None else piece.scale)
        self._ops.copy_weights(copies, scales=scales)


class ShareWriter:
    """Implements `TakesFactors`: lays out one rank's share of an adapter while the adapter is read.

    Where a slot's pieces are a file's tensors (BF16, one rank, every module of the slots' rank), they are read to where
    they stay: hundreds of small tensors are then no work of the interpreter's, for which all threads that read wait.
    """

    def __init__(
        self,
        products: Sequence[_Product],
        places: Mapping[str, _Place],
        *,
        take_memory: Callable[[int], HostArray],
    ) -> None:
        self._products = products
        self._places = places
        self._take_memory = take_memory
        self._factors: list[tuple[HostArray, HostArray] | None] = []
        self._whole: AdapterShare | None = None
        self._memory: HostArray | None = None  # of all tensors, as they lie in a file
        self._modules: Mapping[str, LowRank] = {}
        self._scaled_bits: Mapping[float, HostArray] = {}

    def begin(self, modules: Mapping[str, LowRank], *, is_bfloat16: bool) -> HostArray | None:
        self._modules = modules
        if is_bfloat16 and self._lies_as_in_a_file(modules):
            return self._begin_whole()
        self._begin_factors()
        return None

    def _lies_as_in_a_file(self, modules: Mapping[str, LowRank]) -> bool:
        """Whether a slot's pieces are the tensors of these modules, but for the scale."""
        weights = self._products[0].weights
        has_all_ranks = all(each.rank == weights.a.shape[2] for each in modules.values())
        is_whole = all(piece.is_whole for product in self._products for piece in product.pieces)
        return weights.a.dtype.itemsize == _BF16_BYTES and has_all_ranks and is_whole

    def _begin_whole(self) -> HostArray:
        places = (self._places[key] for key in self._modules)
        rank = self._products[0].weights.a.shape[2]
        self._memory = self._take_memory(rank * sum(each.rows + each.columns for each in places))
        return self._memory.view(np.uint8)

    def lay_out(self) -> None:
        if self._memory is None:
            return
        pieces: dict[str, PieceShare] = {}
        end = 0
        for key, (rank, scale) in self._modules.items():
            _, _, rows, columns = self._places[key]
            begin, middle, end = end, end + rank * columns, end + rank * (columns + rows)
            a, b = self._memory[begin:middle].reshape(rank, columns), self._memory[middle:end].reshape(rows, rank)
            pieces[key] = PieceShare(a, b, scale)
        self._whole = AdapterShare(pieces=tuple(tuple(map(pieces.get, each.keys)) for each in self._products))

    def _begin_factors(self) -> None:
        modules = self._modules
        sizes = [0 if modules.keys().isdisjoint(each.keys) else each.num_slot_values for each in self._products]
        memory = self._take_memory(sum(sizes))
        ends = np.cumsum(sizes).tolist()
        self._factors = [
            product.factors_in(memory[end - size : end]) if size else None
            for product, end, size in zip(self._products, ends, sizes, strict=True)
        ]
        for key, (number, index, _, _) in self._places.items():
            self._clear(number, index, rank=modules[key].rank if key in modules else 0)
        if memory.dtype.itemsize == _BF16_BYTES:
            scales = {each.scale for each in modules.values()} - {1.0}
            self._scaled_bits = {scale: scaled_bits(scale) for scale in sorted(scales)[:_MOST_TABLES]}

    def take(self, module: str, factor: Factor, values: HostArray) -> None:
        number, index, _, _ = self._places[module]
        piece, (a, b) = self._products[number].pieces[index], self._of(number)
        rank, scale = self._modules[module]
        if factor == "A":
            _write(values[:, piece.columns], a[index, :rank])
            return
        begin = self._products[number].weights.starts[index]
        for rows in piece.rows:
            end = begin + rows.stop - rows.start
            # The scale becomes part of B before it is rounded to the compute dtype: one rounding, and none per step.
            _write(values[rows], b[begin:end, :rank], scale=scale, scaled=self._scaled_bits.get(scale))
            begin = end

    def share(self) -> "AdapterShare":
        """When all factors were read, or taken."""
        if self._whole is not None:
            return self._whole
        pieces: list[tuple[PieceShare | None, ...]] = []
        for product, factors in zip(self._products, self._factors, strict=True):
            found = None if factors is None else product.pieces_of(*factors)
            pieces.append(
                (None,) * len(product.pieces) if found is None else tuple(PieceShare(*each) for each in found)
            )
        return AdapterShare(pieces=tuple(pieces))

    def _clear(self, number: int, index: int, *, rank: int) -> None:
        """What an adapter of this rank leaves out."""
        factors, starts = self._factors[number], self._products[number].weights.starts
        if factors is None or rank == factors[0].shape[1]:
            return
        a, b = factors
        a[index, rank:] = 0
        b[starts[index] : starts[index + 1], rank:] = 0

    def _of(self, number: int) -> tuple[HostArray, HostArray]:
        factors = self._factors[number]
        if factors is None:
            raise ContractViolation(f"a factor of product {number} was not announced")
        return factors


def _write(stored: HostArray, target: HostArray, *, scale: float = 1.0, scaled: HostArray | None = None) -> None:
    """`target` is of the compute dtype; `scaled` has BF16's bits times the scale."""
    if target.dtype.itemsize != _BF16_BYTES:
        target[...] = _scaled(stored, scale)
    elif stored.dtype != np.uint16:  # without the slower casts of BF16's own package
        target.view(np.uint16)[...] = rounded_bits(_scaled(stored, scale))
    elif scale == 1.0:
        target.view(np.uint16)[...] = stored
    elif scaled is None:
        target.view(np.uint16)[...] = rounded_bits(_scaled(stored, scale))
    else:
        # One call for many numbers: threads that read an adapter wait for the interpreter after each.
        np.take(scaled, stored, out=target.view(np.uint16), mode="clip")


def _scaled(stored: HostArray, scale: float) -> HostArray:
    """In float32, an array of its own."""
    if stored.dtype == np.uint16:  # BF16
        bits = stored.astype(np.uint32)
        bits <<= 16
        values = bits.view(np.float32)
    else:
        values = stored.astype(np.float32)
    values *= np.float32(scale)
    return values


class AdaptedSource:
    """A `WeightSource` whose matrices adapters may change: a `WeightLoader` tells the arena of them."""

    def __init__(self, weights: WeightSource, arena: AdapterArena) -> None:
        self.arena = arena
        self._weights = weights

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        return self._weights.read(name, shard)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        return self._weights.read_stored(name, shard)
