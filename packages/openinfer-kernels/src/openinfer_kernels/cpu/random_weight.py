"""Random weights in NumPy: for comparison with a device, not for speed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.philox import philox
from openinfer_kernels.weights import RandomWeight

_WORDS = 4
_LOW = np.uint64(0xFFFF_FFFF)
_SHIFT = np.uint64(32)


def random_weight(weight: RandomWeight) -> NDArray[np.float32]:
    """The numbers of a recipe, float32; a device rounds them to its own dtype."""
    places = _places(weight)
    counters = places // np.uint64(_WORDS)
    nothing = np.zeros_like(counters)
    key = np.array([weight.seed & int(_LOW), weight.seed >> 32], np.uint64)[:, None]
    words = philox(
        np.stack([counters & _LOW, counters >> _SHIFT, nothing, nothing]), np.broadcast_to(key, (2, len(places)))
    )
    turn = (places % np.uint64(_WORDS)).astype(np.intp)
    at = np.arange(len(places))
    first = words[turn & ~1, at].astype(np.float64)
    second = words[turn | 1, at].astype(np.float64)
    radius = np.sqrt(-2 * np.log((first + 0.5) * 2.0**-32))
    angle = 2 * np.pi * second * 2.0**-32
    normal: NDArray[Any] = radius * np.where(turn % 2, np.sin(angle), np.cos(angle))
    return (weight.mean + weight.spread * normal).astype(np.float32).reshape(weight.shape)


def _places(weight: RandomWeight) -> NDArray[np.uint64]:
    """Where in the whole tensor each number stands, row by row."""
    rows = np.arange(weight.shape[0], dtype=np.uint64)[:, None] * np.uint64(weight.row_length)
    columns = np.arange(int(np.prod(weight.shape[1:])), dtype=np.uint64)
    return (np.uint64(weight.origin) + rows + columns).ravel()
