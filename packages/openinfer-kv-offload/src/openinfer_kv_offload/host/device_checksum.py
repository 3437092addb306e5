"""The sum of a block's bytes that devices make (`BlockMover`), made here, for bytes that leave another way.

word i (8 bytes, little-endian, the last filled with zeros):  x = w[i] + (i + 1) * 0x9E3779B97F4A7C15 mod 2^64
m = MurmurHash3's 64-bit finaliser of x
sum = (Σ m mod 2^64 ‖ Σ m * (2 i + 1) mod 2^64), little-endian
"""

from typing import Any

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
_PIECE_WORDS = 1 << 13
"""So that what is made of them stays in a processor's cache."""


def block_sum(block: memoryview) -> bytes:
    """16 bytes."""
    content = np.frombuffer(block, np.uint8)
    words = np.zeros(-(-len(content) // 8), "<u8")
    words.view(np.uint8)[: len(content)] = content
    sums = np.zeros(2, np.uint64)
    for begin in range(0, len(words), _PIECE_WORDS):
        sums += _piece_sums(words[begin : begin + _PIECE_WORDS], begin)
    return sums.astype("<u8").tobytes()


def _piece_sums(words: "np.ndarray[Any, Any]", begin: int) -> "np.ndarray[Any, Any]":
    """Both sums over words from index `begin` on."""
    indices = np.arange(begin, begin + len(words), dtype=np.uint64)
    mixed = words + (indices + np.uint64(1)) * _STEP
    for multiplier in _MULTIPLIERS:
        mixed ^= mixed >> _SHIFT
        mixed *= multiplier
    mixed ^= mixed >> _SHIFT
    weights = np.uint64(2) * indices + np.uint64(1)
    return np.array([mixed.sum(dtype=np.uint64), (mixed * weights).sum(dtype=np.uint64)], np.uint64)
