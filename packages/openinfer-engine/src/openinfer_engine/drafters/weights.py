"""A drafter's weights, from its own folder or the model's, each looked at before it is used."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import WeightPart

_BF16_EXPONENT = np.uint16(0x7F80)


class FiniteWeights:
    """A `WeightSource` that refuses numbers which are not finite: a draft made of them is no draft."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        """As `WeightSource.read`; `InvalidCheckpoint` names a tensor with NaN or infinity."""
        part = self._weights.read(name, shard)
        _check(name, part)
        return part

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        """As `WeightSource.read_stored`; scales are looked at, codes of 8 bits and fewer are not."""
        part = self._weights.read_stored(name, shard)
        _check(name, part)
        return part


@contextmanager
def drafter_weights(
    folder: Path, tensors: Mapping[str, TensorSpec], *, rank: int, size: int
) -> Generator[WeightSource]:
    """Those of a folder, as one rank sees them; `tensors` are what is read of it, with whole shapes."""
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.join_pieces(tensors)
        yield FiniteWeights(RankWeights(checkpoint, rank=rank, size=size))


def _check(name: str, part: Any) -> None:
    if isinstance(part, np.ndarray) and not _is_finite(cast("np.ndarray[Any, np.dtype[Any]]", part)):
        raise InvalidCheckpoint(f"the drafter's tensor {name} has numbers that are not finite")


def _is_finite(part: "np.ndarray[Any, np.dtype[Any]]") -> bool:
    if part.dtype == np.uint16:  # BF16 as its bits
        return not bool(((part & _BF16_EXPONENT) == _BF16_EXPONENT).any())
    return part.dtype.kind != "f" or bool(np.isfinite(part).all())
