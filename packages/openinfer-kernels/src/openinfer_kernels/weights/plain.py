"""What a weight is uploaded from: arrays of a checkpoint, or what no host holds, random or another process's."""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from numpy.typing import NDArray

from openinfer_kernels.weights.foreign import ForeignWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeight:
    """Normal numbers in the shape of a weight, or of a piece of one: a recipe, which the device computes.

    Numbers 4 i to 4 i + 3 of the whole tensor, counted row by row, come from the words of Philox-4x32-10 (Salmon et
    al., SC 2011) with the seed as key and `i` as counter: words 0 and 1, and words 2 and 3, each make two normal
    numbers by Box and Muller 1958, "A Note on the Generation of Random Normal Deviates". So a piece holds what the
    whole holds in its place.
    """

    seed: int
    """64 bits."""
    mean: float
    spread: float
    """Standard deviation."""
    shape: tuple[int, ...]
    """Of this piece."""
    row_length: int
    """Numbers in a row of the whole tensor; 1 where it has one axis."""
    origin: int = 0
    """Where in the whole tensor this piece begins."""

    @classmethod
    def whole(cls, shape: tuple[int, ...], *, seed: int, mean: float, spread: float) -> "RandomWeight":
        return cls(seed=seed, mean=mean, spread=spread, shape=shape, row_length=math.prod(shape[1:]))

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, begin: int, end: int) -> "RandomWeight":
        return replace(self, shape=(end - begin, *self.shape[1:]), origin=self.origin + begin * self.row_length)

    def columns(self, begin: int, end: int) -> "RandomWeight":
        return replace(self, shape=(self.shape[0], end - begin), origin=self.origin + begin)

    def flattened(self) -> "RandomWeight":
        """The same numbers as rows of the last axis, of a piece of whole rows: two axes."""
        columns = self.shape[-1]
        return replace(self, shape=(math.prod(self.shape[:-1]), columns), row_length=columns)


WeightPart: TypeAlias = NDArray[Any] | RandomWeight | ForeignWeight
"""Rows of a weight. Arrays: float32, float16, or uint16 holding BF16 bits; any strides."""


def stacked_shape(parts: tuple[WeightPart, ...]) -> tuple[int, ...]:
    """The shape of parts below each other.

    Raises:
        ValueError: there is none, or their rows differ in shape.
    """
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) != 1:
        listed = ", ".join(str(list(part.shape)) for part in parts) or "nothing"
        raise ValueError(f"parts of one weight must have rows of one shape; given was {listed}")
    return (sum(part.shape[0] for part in parts), *shapes.pop())
