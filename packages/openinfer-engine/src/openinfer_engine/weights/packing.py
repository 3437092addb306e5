"""Unpacking the layouts of other packages into the one order of bits that `QuantisedPart` has, in NumPy.

AutoAWQ and AutoGPTQ store matrices as `[in, out]`. GPTQ's words run along the inputs, so that their transpose is
already in order; AWQ's run along the outputs, and each half byte has to move: 0.35 to 0.49 GB of codes a second were
seen on one thread, hence seconds of a start, which a GPU could do while it copies.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The half byte of a word in which AutoAWQ ("gemm") has each of 8 columns."""
_WORD_BITS = 32
_WORDS_AT_ONCE = 64  # columns of words that are transposed together: what they touch stays in a cache


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
    rows = np.empty((num_words, 8, num_inputs // 2), np.uint8)
    for begin in range(0, num_words, _WORDS_AT_ONCE):
        some = np.ascontiguousarray(words[:, begin : begin + _WORDS_AT_ONCE]).view(np.uint8)
        even, odd = some[0::2], some[1::2]
        halves: list[NDArray[Any]] = [(even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)]
        for column, half in enumerate(map(int, AWQ_ORDER)):
            # byte k of a word has the half bytes 2 k and 2 k + 1
            rows[begin : begin + _WORDS_AT_ONCE, column] = halves[half % 2][:, half // 2 :: 4].T
    return rows.reshape(8 * num_words, -1)


def offset_binary(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Signed bytes as 0 to 255 with a zero point of 128."""
    return codes.view(np.uint8) ^ np.uint8(0x80)
