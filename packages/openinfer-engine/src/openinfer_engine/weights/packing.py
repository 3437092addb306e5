"""Unpacking the layouts of other packages into the one order of bits that `QuantisedPart` has, in NumPy.

AutoAWQ and AutoGPTQ store matrices as `[in, out]`. GPTQ's words run along the inputs, so that a view of them, turned
around, is already in order; AWQ's run along the outputs, and each half byte has to move. One thread moves about 0.4 GB
of AWQ's codes a second: ten seconds of a start for a model of 8B.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The half byte of a word in which AutoAWQ ("gemm") has each of 8 columns."""
_WORD_BITS = 32
_WORDS_AT_ONCE = 64  # columns of words that are turned around together: what they touch stays in a cache


def unpacked(words: NDArray[Any], bits: int, axis: int) -> NDArray[np.uint8]:
    """The codes of int32 words, the lowest bits first, along one axis that gets as many times longer."""
    per_word = _WORD_BITS // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    codes = (words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    spread = np.moveaxis(codes, -1, axis + 1)
    shape = [*words.shape]
    shape[axis] *= per_word
    return spread.reshape(shape)


def awq_unpacked(words: NDArray[Any]) -> NDArray[np.uint8]:
    """`[n, out]` codes of AutoAWQ's words `[n, out / 8]`."""
    in_order = unpacked(words, 4, 1).reshape(*words.shape, 8)
    return in_order[..., AWQ_ORDER].reshape(len(words), -1)


def awq_rows(words: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes `[out, in / 2]` of AutoAWQ's words `[in, out / 8]`: columns of inputs in pairs, the even one low."""
    num_inputs, num_words = words.shape
    rows = np.empty((8 * num_words, num_inputs // 2), np.uint8)
    for begin in range(0, num_words, _WORDS_AT_ONCE):
        some = np.ascontiguousarray(words[:, begin : begin + _WORDS_AT_ONCE]).view(np.uint8)
        even, odd = some[0::2], some[1::2]
        low = (even & 15) | (odd << 4)
        high = (even >> 4) | (odd & 0xF0)
        # byte k of a word has the half bytes 2 k and 2 k + 1
        halves = np.stack([low, high], axis=2).reshape(num_inputs // 2, -1, 8)
        columns = halves[:, :, AWQ_ORDER].reshape(num_inputs // 2, -1)
        rows[8 * begin : 8 * begin + columns.shape[1]] = columns.T
    return rows


def offset_binary(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Signed bytes as 0 to 255 with a zero point of 128."""
    return codes.view(np.uint8) ^ np.uint8(0x80)
