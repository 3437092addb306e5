"""Philox-4x32-10, a counter-based generator: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LOW = np.uint64(0xFFFF_FFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD251_1F53), np.uint64(0xCD9E_8D57))
_KEY_STEPS = (np.uint64(0x9E37_79B9), np.uint64(0xBB67_AE85))
_ROUNDS = 10


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Random words: `[4, n]` uint32 for `counters [4, n]` and `keys [2, n]`, both 32-bit words in uint64."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def uniforms(seeds: NDArray[Any], positions: NDArray[Any]) -> NDArray[np.float64]:
    """A multiple of 2^-32 in [0, 1) per row: seeds `[n]` uint64 are the keys, positions `[n]` int64 the counters."""
    seeds, positions = seeds.astype(np.uint64), positions.astype(np.uint64)
    nothing = np.zeros_like(positions)
    counters = np.stack([positions & _LOW, positions >> _SHIFT, nothing, nothing])
    words = philox(counters, np.stack([seeds & _LOW, seeds >> _SHIFT]))
    return words[0] * 2.0**-32
