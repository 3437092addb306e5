"""Random numbers in the shapes of a model, for sizing and speed without a checkpoint.

`DeviceDummyWeights` gives recipes, which a GPU computes at the speed of its memory. `DummyWeights` gives arrays: a
tensor is a piece of one long periodic sequence of normal numbers, cut at a place that its name and the seed
decide. That fills memory as fast as it can be written, and any rank can compute its piece of any tensor. The period
is prime, so that no two rows of a matrix are equal.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import shard_for_rank, share_of_rank
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES
from openinfer_engine.weights.stored_tensor import GroupIds, RandomBytes, RandomIds, Repeated, StoredTensor, TensorSpec
from openinfer_kernels import HostArray, RandomCodes, RandomWeight
from openinfer_kernels.weights.bfloat16 import rounded_bits
from openinfer_kernels.weights.code_values import E4M3_VALUES

_E8M0_BIAS = 127
_E4M3_NAN = 0x7F  # codes below it are numbers above zero, in ascending order
_PERIOD = 1_048_573  # the largest prime below 2^20

_MATRIX_GAIN = 2.0  # logits are products of a normed vector with rows of this length: their spread, far from flat
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


class DeviceDummyWeights:
    """A `WeightSource` of recipes for BF16 numbers: matrices and biases around 0, norms around 1."""

    def __init__(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int, seed: int = 0) -> None:
        self._shapes = shapes
        self._seed = seed
        self._rank = rank
        self._size = size

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> RandomWeight:
        shape = _shape_of(name, self._shapes)
        spread = _spread_of(name, shape)
        whole = RandomWeight.whole(shape, seed=_place(name, self._seed), mean=spread.mean, spread=spread.deviation)
        begin, end = share_of_rank(shape, name, shard, rank=self._rank, size=self._size)
        if shard is Shard.WHOLE:
            return whole
        return whole.rows(begin, end) if shard is Shard.COLUMN_PARALLEL else whole.columns(begin, end)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> HostArray | RandomCodes:
        spec = _stored_of(name, self._shapes)
        if not isinstance(spec.dummy, RandomBytes):
            whole = dummy_array(spec, seed=_place(name, self._seed))
            return shard_for_rank(whole, name, shard, rank=self._rank, size=self._size)
        rows, columns = spec.shape
        codes = RandomCodes.whole(
            (rows, columns),
            seed=_place(name, self._seed),
            mask=spec.dummy.mask,
            itemsize=NUMPY_DTYPES[spec.dtypes[0]].itemsize,
        )
        begin, end = share_of_rank(spec.shape, name, shard, rank=self._rank, size=self._size)
        if shard is Shard.WHOLE:
            return codes
        return codes.rows(begin, end) if shard is Shard.COLUMN_PARALLEL else codes.columns(begin, end)


class DummyWeights:
    """A `WeightSource` of BF16 numbers: matrices and biases around 0, norms around 1."""

    def __init__(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int, seed: int = 0) -> None:
        self._shapes = shapes
        self._seed = seed
        self._rank = rank
        self._size = size
        self._normal = np.random.default_rng(seed).standard_normal(_PERIOD, np.float32)

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> HostArray:
        """This rank's piece, in uint16 as BF16 bits: equal to the same piece of the whole tensor."""
        shape = _shape_of(name, self._shapes)
        mean, deviation = _spread_of(name, shape)
        # No more of the sequence than the tensor has: to scale and round a whole period takes 7 ms.
        start, count = _place(name, self._seed) % _PERIOD, min(math.prod(shape), _PERIOD)
        normal = np.concatenate((self._normal[start : start + count], self._normal[: max(0, start + count - _PERIOD)]))
        period = rounded_bits(normal * np.float32(deviation) + np.float32(mean))
        whole = np.resize(period, shape)
        return shard_for_rank(whole, name, shard, rank=self._rank, size=self._size)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> HostArray:
        whole = dummy_array(_stored_of(name, self._shapes), seed=_place(name, self._seed))
        return shard_for_rank(whole, name, shard, rank=self._rank, size=self._size)


class _Spread(NamedTuple):
    mean: float
    deviation: float


def _spread_of(name: str, shape: tuple[int, ...]) -> _Spread:
    if len(shape) > 1:
        return _Spread(0.0, _MATRIX_GAIN / math.sqrt(shape[-1]))
    return _Spread(1.0, _NORM_SPREAD) if name.endswith("norm.weight") else _Spread(0.0, _BIAS_SPREAD)


def _shape_of(name: str, shapes: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None or isinstance(shape, StoredTensor):
        raise InvalidCheckpoint(f"the model has no tensor {name!r}" + ("" if shape is None else " that is a weight"))
    return shape


def _stored_of(name: str, shapes: Mapping[str, TensorSpec]) -> StoredTensor:
    spec = shapes.get(name)
    if not isinstance(spec, StoredTensor):
        raise InvalidCheckpoint(f"the model has no tensor {name!r}" + ("" if spec is None else " of codes or ids"))
    return spec


def _place(name: str, seed: int) -> int:
    """64 bits that tell tensors and seeds apart."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")


def dummy_array(spec: StoredTensor, *, seed: int) -> HostArray:
    """All of a tensor, in its first dtype; not to be written to."""
    dtype = NUMPY_DTYPES[spec.dtypes[0]]
    if isinstance(spec.dummy, Repeated):
        values = _encoded(spec.dummy.values, spec.dtypes[0])
        return np.broadcast_to(values, spec.shape) if values.size == 1 else np.resize(values, spec.shape)
    if isinstance(spec.dummy, GroupIds):
        return spec.dummy.of(spec.shape[0]).astype(dtype)
    rng = np.random.default_rng(seed)
    if isinstance(spec.dummy, RandomIds):
        first = rng.integers(0, spec.dummy.bound, (*spec.shape[:-1], 1))
        return ((first + np.arange(spec.shape[-1])) % spec.dummy.bound).astype(dtype)
    found = np.frombuffer(rng.bytes(math.prod(spec.shape) * dtype.itemsize), np.uint8)
    return (found & np.uint8(spec.dummy.mask)).view(dtype).reshape(spec.shape)


def _encoded(values: tuple[float, ...], dtype: str) -> HostArray:
    """Numbers as the format stores them; E8M0 and E4M3 have the nearest."""
    numbers = np.array(values, np.float64)
    match dtype:
        case "F8_E8M0":
            return (np.rint(np.log2(numbers)) + _E8M0_BIAS).astype(np.uint8)
        case "F8_E4M3":
            return np.abs(E4M3_VALUES[:_E4M3_NAN] - numbers[:, None]).argmin(1).astype(np.uint8)
        case "BF16":
            return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        case _:
            return numbers.astype(NUMPY_DTYPES[dtype])
