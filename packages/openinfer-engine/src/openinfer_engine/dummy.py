"""`DummyWeights`: random numbers in the shapes of a model, for sizing and speed without a checkpoint.

A tensor is a piece of one long periodic sequence of normal numbers, cut at a place that its name and the seed
decide. That fills memory as fast as it can be written, and any rank can compute its piece of any tensor. The period
is prime, so that no two rows of a matrix are equal.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.checkpoint import cut_for_rank
from openinfer_engine.model import Cut
from openinfer_kernels import HostArray

_PERIOD = 1_048_573
"""The largest prime below 2^20."""

_MATRIX_GAIN = 2.0
"""Logits are products of a normed vector with rows of this length: their spread, far from flat."""
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


class DummyWeights:
    """A `WeightSource` of BF16 numbers: matrices and biases around 0, norms around 1.

    Args:
        shapes: name -> whole shape of every tensor.
        rank: this rank.
        size: ranks that the model is cut into.
        seed: other seeds give other numbers.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, rank: int, size: int, seed: int = 0) -> None:
        self._shapes = shapes
        self._seed = seed
        self._rank = rank
        self._size = size
        self._normal = np.random.default_rng(seed).standard_normal(_PERIOD, np.float32)

    def read(self, name: str, cut: Cut = Cut.WHOLE) -> HostArray:
        """This rank's piece, in uint16 as BF16 bits: equal to the same piece of the whole tensor.

        Raises:
            InvalidCheckpoint: no such tensor, or its size does not divide by the ranks.
        """
        shape = self._shapes.get(name)
        if shape is None:
            raise InvalidCheckpoint(f"the model has no tensor {name!r}")
        period = _bfloat16_bits(_values(self._normal, name, shape))
        start = int.from_bytes(hashlib.blake2b(f"{self._seed}\0{name}".encode(), digest_size=8).digest(), "little")
        whole = np.resize(np.roll(period, -(start % _PERIOD)), math.prod(shape)).reshape(shape)
        return cut_for_rank(whole, name, cut, rank=self._rank, size=self._size)


def _values(normal: HostArray, name: str, shape: tuple[int, ...]) -> HostArray:
    """The sequence with the mean and spread that suit a tensor of this name and shape."""
    if len(shape) > 1:
        return normal * np.float32(_MATRIX_GAIN / math.sqrt(shape[-1]))
    if name.endswith("norm.weight"):
        return normal * np.float32(_NORM_SPREAD) + np.float32(1)
    return normal * np.float32(_BIAS_SPREAD)


def _bfloat16_bits(values: HostArray) -> HostArray:
    """Finite float32 numbers rounded to BF16, to the nearest, ties to even; as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
