"""`rank_weights`: what a model's weights take on one rank and what multiplies them, before any is read.

The definition's own `load` is run with arrays that have a shape and no memory, so that whatever it cuts, copies to
every rank or pads is counted as it is.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.model import ModelDefinition, Shard
from openinfer_engine.weights.checkpoint import share_of_rank
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES
from openinfer_engine.weights.stored_tensor import GroupIds, RandomBytes, Repeated, StoredTensor, TensorSpec, spec_bytes
from openinfer_kernels import (
    HostArray,
    LinearWeight,
    Ops,
    QuantisedPart,
    QuantisedWeight,
    RandomCodes,
    WeightFormat,
    WeightPart,
)
from openinfer_kernels.weights.gpu_kernels import Way, tile_layout
from openinfer_kernels.weights.low_bit_activations import FP8_ROWS
from openinfer_kernels.weights.plain import stacked_shape
from openinfer_kernels.weights.scale_blocks import common_block

logger = logging.getLogger("openinfer.engine")

_IN_TILES = (Way.TILES, Way.EXPERT_TILES, Way.TILES_DEQUANTISED)
_SCALE_BYTES = 4  # of a row of a head in FP8
_POSITIONS = 16  # of tables that a model makes for its positions; these are no weights
_SMALL = 64  # numbers of a tensor whose values a model may look at: a repeated shape, a scale


class WayOf(Protocol):
    """How a device holds a quantised weight."""

    def __call__(
        self, weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...], *, grouped: bool
    ) -> Way | None:
        """None: as it is stored, as a CPU does.

        Args:
            weight_format: its format.
            block: rows and columns within which no scale changes.
            shape: `[out, in]`, or `[matrices, out, in]`.
            grouped: whether these are for `Ops.grouped_linear`.
        """
        ...


def as_stored(weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...], *, grouped: bool) -> None:
    """Of every weight."""
    del weight_format, block, shape, grouped


@dataclass(slots=True)
class RankWeights:
    """The weights of one rank, counted."""

    num_bytes: int
    products: Counter[tuple[WeightFormat, Way]]
    """Quantised weights that are multiplied as one, or stacks of them, by format and way."""


def rank_weights(
    definition: ModelDefinition[Any],
    config: Any,
    tensors: Mapping[str, TensorSpec],
    *,
    size: int,
    itemsize_bytes: int,
    way_of: WayOf = as_stored,
    fp8_head: bool = False,
    data_parallel_size: int = 1,
) -> RankWeights:
    """Rank 0's weights.

    Args:
        definition: of the family.
        config: of the model.
        tensors: that the definition says the model has.
        size: ranks that share each layer.
        itemsize_bytes: of the compute dtype.
        way_of: how the device holds a quantised weight.
        fp8_head: with an output head that is quantised when it is loaded.
        data_parallel_size: ranks that share experts alone; then `size` is 1.
    """
    counting = _CountingOps(itemsize_bytes, way_of, fp8_head)
    weights, communicator = _Shapes(tensors, size), cast("Communicator", _Rank0(size))
    if data_parallel_size > 1:
        communicator = DataParallelCommunicator(cast("Communicator", _Rank0(data_parallel_size)))
    try:
        definition.load(
            config, weights, ops=cast("Ops", counting), communicator=communicator, max_model_tokens=_POSITIONS
        )
    except _NotCounted as reason:
        logger.warning("%s: weights are counted as if they were cut evenly over %d ranks", reason, size)
        num_bytes = sum(spec_bytes(spec, itemsize_bytes=itemsize_bytes) for spec in tensors.values()) // size
        return RankWeights(num_bytes, Counter())
    return RankWeights(counting.num_bytes, counting.products)


class _NotCounted(Exception):
    """A model's loading asks for more than this knows."""


@dataclass(frozen=True, slots=True)
class _Rank0:
    """The part of a communicator that loading asks for."""

    size: int
    rank: int = 0


class _Shapes:
    """A `WeightSource` of shapes."""

    def __init__(self, specs: Mapping[str, TensorSpec], size: int) -> None:
        self._specs = specs
        self._size = size

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        spec = self._specs[name]
        shape = spec.shape if isinstance(spec, StoredTensor) else spec
        return _without_memory(self._piece(name, shape, shard), np.dtype(np.uint16))

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> HostArray | RandomCodes:
        spec = self._specs[name]
        if not isinstance(spec, StoredTensor):
            raise _NotCounted(f"{name} is no stored tensor")
        dtype, shape = np.dtype(NUMPY_DTYPES[spec.dtypes[0]]), self._piece(name, spec.shape, shard)
        if isinstance(spec.dummy, RandomBytes):
            return RandomCodes.whole((shape[0], shape[1]), seed=0, mask=0, itemsize=dtype.itemsize)
        if isinstance(spec.dummy, GroupIds):
            return spec.dummy.of(shape[0])
        if isinstance(spec.dummy, Repeated) and len(spec.dummy.values) == 1 and dtype.kind in "iu":
            return np.broadcast_to(np.asarray(spec.dummy.values[0], np.int64).astype(dtype), shape)
        if isinstance(spec.dummy, Repeated) and math.prod(shape) <= _SMALL and dtype.kind in "iuf":
            return np.resize(np.asarray(spec.dummy.values), shape).astype(dtype)
        return _without_memory(shape, dtype)

    def _piece(self, name: str, shape: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
        begin, end = share_of_rank(shape, name, shard, rank=0, size=self._size)
        if shard is Shard.WHOLE:
            return shape
        return (end - begin, *shape[1:]) if shard is Shard.COLUMN_PARALLEL else (shape[0], end - begin)


def _stored_bytes(parts: tuple[QuantisedPart, ...], shape: tuple[int, int]) -> int:
    """Of codes and scales as a checkpoint has them."""
    group_rows, group_columns = (each or size for each, size in zip(parts[0].format.groups, shape, strict=True))
    scales = -(-shape[0] // group_rows) * -(-shape[1] // group_columns)
    code_bytes = sum(math.prod(part.codes.shape) * part.codes.itemsize for part in parts)
    with_them = (parts[0].zero_points, parts[0].minimums)
    scale_bytes = parts[0].scales.itemsize + sum(each.itemsize for each in with_them if each is not None)
    return code_bytes + scales * scale_bytes


@dataclass(slots=True)
class _CountingOps:
    """The part of `Ops` that loading asks for."""

    itemsize_bytes: int
    way_of: WayOf
    fp8_head: bool
    num_bytes: int = 0
    products: Counter[tuple[WeightFormat, Way]] = field(default_factory=Counter[tuple[WeightFormat, Way]])
    name: str = field(default="counting", init=False)

    def upload_weight(self, *parts: WeightPart) -> HostArray:
        return self._counted(stacked_shape(parts), self.itemsize_bytes)

    def upload_float32(self, *parts: WeightPart) -> HostArray:
        return self._counted(stacked_shape(parts), 4)

    def upload_quantised(
        self, *parts: QuantisedPart, num_matrices: int | None = None, grouped: bool = False
    ) -> LinearWeight:
        made, rows, columns = parts[0].format, sum(part.shape[0] for part in parts), parts[0].shape[1]
        shape = (rows, columns) if num_matrices is None else (num_matrices, rows // num_matrices, columns)
        block = common_block(parts, shape)
        way = self.way_of(made, block, shape, grouped=grouped)
        if way is not None:
            self.products[made, way] += 1
        if way is Way.BF16:
            return self._counted(shape, self.itemsize_bytes)
        if way in _IN_TILES:
            self.num_bytes += tile_layout(made, block, (math.prod(shape[:-1]), columns)).num_bytes
        else:
            self.num_bytes += _stored_bytes(parts, (rows, columns))
        nothing = np.empty(0, np.uint8)
        return QuantisedWeight(
            format=made, shape=shape, codes=nothing, scales=nothing, block_rows=block[0], block_columns=block[1]
        )

    def quantise_head(self, *parts: WeightPart) -> QuantisedWeight | None:
        if not self.fp8_head:
            return None
        rows, columns = shape = stacked_shape(parts)
        self.num_bytes += rows * (columns + _SCALE_BYTES)
        nothing = np.empty(0, np.uint8)
        return QuantisedWeight(
            format=FP8_ROWS, shape=shape, codes=nothing, scales=nothing, block_rows=1, block_columns=columns
        )

    def upload_dequantised(self, *parts: QuantisedPart) -> HostArray:
        return self._counted((sum(part.shape[0] for part in parts), parts[0].shape[1]), self.itemsize_bytes)

    def upload(self, host: HostArray) -> HostArray:
        """A table, which is no weight."""
        return host

    def zeros(self, shape: tuple[int, ...], dtype: Any = None) -> HostArray:
        return _without_memory(shape, np.dtype(np.float32 if dtype is None else dtype))

    @contextmanager
    def loading(self, progress: Callable[[int], None] = lambda num_bytes: None) -> Generator[None]:
        del progress
        yield

    def __getattr__(self, operator: str) -> Any:
        raise _NotCounted(f"the model's loading calls the operator {operator}")

    def _counted(self, shape: tuple[int, ...], itemsize: int) -> HostArray:
        self.num_bytes += math.prod(shape) * itemsize
        return _without_memory(shape, np.dtype(np.float32))


def _without_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    return np.broadcast_to(np.zeros((), dtype), shape)
