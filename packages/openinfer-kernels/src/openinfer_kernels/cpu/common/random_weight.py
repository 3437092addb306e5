"""Random weights in NumPy: for comparison with a device, not for speed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.sampling.philox import philox
from openinfer_kernels.weights.plain import RandomWeight
from openinfer_kernels.weights.quantised import RandomCodes

_WORDS = 4
_LOW = np.uint64(0xFFFF_FFFF)
_SHIFT = np.uint64(32)


def random_weight(weight: RandomWeight) -> NDArray[np.float32]:
    """The numbers of a recipe, float32; a device rounds them to its own dtype."""
    places = _places(weight.shape, weight.row_length, weight.origin)
    words = _words(places // np.uint64(_WORDS), weight.seed)
    word = (places % np.uint64(_WORDS)).astype(np.intp)
    at = np.arange(len(places))
    first = words[word & ~1, at].astype(np.float64)
    second = words[word | 1, at].astype(np.float64)
    radius = np.sqrt(-2 * np.log((first + 0.5) * 2.0**-32))
    angle = 2 * np.pi * second * 2.0**-32
    normal: NDArray[Any] = radius * np.where(word % 2, np.sin(angle), np.cos(angle))
    return (weight.mean + weight.spread * normal).astype(np.float32).reshape(weight.shape)


def random_codes(codes: RandomCodes) -> NDArray[np.uint8]:
    """The bytes of a recipe, `[rows, bytes of a row]`."""
    rows, columns = codes.shape[0], codes.shape[1] * codes.itemsize
    places = _places((rows, columns), codes.row_length * codes.itemsize, codes.origin * codes.itemsize)
    words = _words(places // np.uint64(4 * _WORDS), codes.seed)
    word = words[(places // np.uint64(4) % np.uint64(_WORDS)).astype(np.intp), np.arange(len(places))]
    found = word.astype(np.uint64) >> (places % np.uint64(4) * np.uint64(8)) & np.uint64(codes.mask)
    return found.astype(np.uint8).reshape(rows, columns)


def _words(counters: NDArray[np.uint64], seed: int) -> NDArray[Any]:
    """The four words of each counter, `[4, counters]`."""
    nothing = np.zeros_like(counters)
    key = np.array([seed & int(_LOW), seed >> 32], np.uint64)[:, None]
    return philox(
        np.stack([counters & _LOW, counters >> _SHIFT, nothing, nothing]), np.broadcast_to(key, (2, len(counters)))
    )


def _places(shape: tuple[int, ...], row_length: int, origin: int) -> NDArray[np.uint64]:
    """Where in the whole tensor each number of a piece stands, row by row."""
    rows = np.arange(shape[0], dtype=np.uint64)[:, None] * np.uint64(row_length)
    columns = np.arange(int(np.prod(shape[1:])), dtype=np.uint64)
    return (np.uint64(origin) + rows + columns).ravel()
