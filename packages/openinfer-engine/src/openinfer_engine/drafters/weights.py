"""A drafter's weights, from its own folder or the model's, each looked at before it is used."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import ForeignWeight, WeightPart

_BF16_EXPONENT = np.uint16(0x7F80)
_NAN_CODES: Mapping[str, tuple[int, ...]] = {"F8_E4M3": (0x7F, 0xFF), "F8_E8M0": (0xFF,)}
"""Of formats of 8 bits, which have no infinity."""


class FiniteWeights:
    """A `WeightSource` that refuses numbers which are not finite: a draft made of them is no draft.

    Args:
        weights: what is read.
        tensors: what they are stored as.
    """

    def __init__(self, weights: WeightSource, tensors: Mapping[str, TensorInfo]) -> None:
        self._weights = weights
        self._tensors = tensors

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        """As `WeightSource.read`; `InvalidCheckpoint` names a tensor with NaN or infinity."""
        part = self._weights.read(name, shard)
        if isinstance(part, ForeignWeight):
            part = part.on_host()  # to be looked at
        _check(name, part)
        return part

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        """As `WeightSource.read_stored`; integers and codes of fewer than 8 bits are finite whatever they are."""
        part = self._weights.read_stored(name, shard)
        info = self._tensors.get(name)
        if info is not None and info.dtype in _NAN_CODES and bool(np.isin(part, _NAN_CODES[info.dtype]).any()):
            raise _not_finite(name)
        _check(name, part)
        return part


@contextmanager
def drafter_weights(
    folder: Path, tensors: Mapping[str, TensorSpec], *, rank: int, size: int
) -> Generator[WeightSource]:
    """Those of a folder, as one rank sees them; `tensors` are what is read of it, with whole shapes."""
    with Checkpoint.open(folder) as checkpoint:
        yield weights_of(checkpoint, tensors, rank=rank, size=size)


def weights_of(checkpoint: Checkpoint, tensors: Mapping[str, TensorSpec], *, rank: int, size: int) -> WeightSource:
    """The same of a checkpoint that is open."""
    checkpoint.join_pieces(tensors)
    return FiniteWeights(RankWeights(checkpoint, rank=rank, size=size), checkpoint.tensors)


def _check(name: str, part: Any) -> None:
    if isinstance(part, np.ndarray) and not _is_finite(cast("np.ndarray[Any, np.dtype[Any]]", part)):
        raise _not_finite(name)


def _not_finite(name: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"the drafter's tensor {name} has numbers that are not finite")


def _is_finite(part: "np.ndarray[Any, np.dtype[Any]]") -> bool:
    if part.dtype == np.uint16:  # BF16 as its bits
        return not bool(((part & _BF16_EXPONENT) == _BF16_EXPONENT).any())
    return part.dtype.kind != "f" or bool(np.isfinite(part).all())
