"""What a cache that forgets nothing would have had of each prompt."""

import hashlib

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16
"""Of the cache that is compared with: ours, and vLLM's default."""


class PrefixesSeen:
    """Whole blocks of every prompt and answer so far, by a digest of all tokens up to their end."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def reusable_tokens(self, prompt: NDArray[np.int32]) -> int:
        """Of a prompt: those of leading blocks that were there before; the last token is always computed."""
        count = 0
        for digest in _digests(prompt[:-1]):
            if digest not in self._digests:
                break
            count += BLOCK_TOKENS
        return count

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Tokens whose KV exists now."""
        self._digests.update(_digests(tokens))


def _digests(tokens: NDArray[np.int32]) -> list[bytes]:
    state = hashlib.blake2b(digest_size=16)
    found: list[bytes] = []
    for begin in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        state.update(tokens[begin : begin + BLOCK_TOKENS].tobytes())
        found.append(state.digest())
    return found
