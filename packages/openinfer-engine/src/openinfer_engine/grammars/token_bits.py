"""`TokenBits`: some token ids as bits of a mask."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from openinfer_core.grammars import MaskWords


class TokenBits:
    """Sets or clears the bits of these tokens."""

    __slots__ = ("_bits", "_places")

    def __init__(self, token_ids: Iterable[int]) -> None:
        bits: dict[int, int] = {}
        for token_id in token_ids:
            bits[token_id // 32] = bits.get(token_id // 32, 0) | 1 << token_id % 32
        self._places: NDArray[np.intp] = np.array(list(bits), np.intp)
        self._bits: NDArray[np.uint32] = np.array(list(bits.values()), np.uint32)

    def allow(self, words: MaskWords) -> None:
        words[self._places] |= self._bits

    def forbid(self, words: MaskWords) -> None:
        words[self._places] &= ~self._bits
