"""Tensors of a checkpoint that are no plain weights: codes and scales of quantised ones, tables of ids."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES
from openinfer_kernels import HostArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBytes:
    """Dummy codes: random bytes, each `& mask`."""

    mask: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomIds:
    """Dummy rows of ids below `bound`; no id is twice in a row of at most `bound`."""

    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Dummy numbers: these, again and again."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIds:
    """Dummy ids of groups of so many neighbours: 0, .., 0, 1, .., 1, ..."""

    size: int

    def of(self, count: int) -> HostArray:
        return np.arange(count) // self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that `WeightSource.read_stored` reads, where a plain shape stands for one that `read` reads."""

    shape: tuple[int, ...]  # of the array that is read: in bytes along the last axis, where two codes are in one
    dtypes: tuple[str, ...]  # of the safetensors format, that it may have; the first is what a dummy has
    dummy: RandomBytes | RandomIds | Repeated | GroupIds
    other_shapes: tuple[tuple[int, ...], ...] = ()  # in which checkpoints have the same numbers

    @property
    def num_bytes(self) -> int:
        """Bytes in the first dtype."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtypes[0]].itemsize


# what a model says of a tensor that it reads: the shape of a weight in BF16, float16 or float32, or anything else
TensorSpec: TypeAlias = tuple[int, ...] | StoredTensor


def spec_bytes(spec: TensorSpec, *, itemsize_bytes: int) -> int:
    """On a device whose compute dtype has so many bytes."""
    return spec.num_bytes if isinstance(spec, StoredTensor) else math.prod(spec) * itemsize_bytes
