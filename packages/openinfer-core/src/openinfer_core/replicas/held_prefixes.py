"""`HeldPrefixes`: what a replica or a rank is believed to hold: the prompts sent there, by digests of their blocks."""

import itertools
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from openinfer_core.request import GenerateRequest

_DIGEST_BYTES = 16


class PrefixHoldings(Protocol):
    """What a replica is believed to hold."""

    def count(self, digests: Sequence[bytes]) -> int:
        """Blocks from the beginning of a prompt on that are held."""
        ...

    def note(self, digests: Sequence[bytes]) -> None:
        """A prompt with these digests was sent there."""
        ...


class HeldPrefixes:
    """Implements `PrefixHoldings`: blocks of prompts that were sent, the least recently used first forgotten.

    Args:
        num_blocks: remembered at most: those of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def count(self, digests: Sequence[bytes]) -> int:
        return sum(1 for _ in itertools.takewhile(self._held.__contains__, digests))

    def note(self, digests: Sequence[bytes]) -> None:
        # Last blocks first: of a chain the end is forgotten before its beginning, without which it is of no use.
        for digest in reversed(digests):
            self._held[digest] = None
            self._held.move_to_end(digest)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)

    def forget(self, digests: Sequence[bytes]) -> None:
        """Blocks that are not held after all."""
        for digest in digests:
            self._held.pop(digest, None)

    def clear(self) -> None:
        self._held.clear()


def prefix_digests(request: GenerateRequest, *, block_size_tokens: int, key: bytes) -> list[bytes]:
    """One per whole block of a prompt, each over all tokens up to its end; salts and adapters share none."""
    tokens = array("I", request.prompt_token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    parts = ((request.lora or "").encode(), (request.cache_salt or "").encode())
    parent = blake2b(b"\0".join(part.hex().encode() for part in parts), digest_size=_DIGEST_BYTES, key=key)
    chain, digests = parent.digest(), list[bytes]()
    for begin in range(0, len(tokens) - block_size_tokens + 1, block_size_tokens):
        block = tokens[begin : begin + block_size_tokens].tobytes()
        chain = blake2b(chain + block, digest_size=_DIGEST_BYTES, key=key).digest()
        digests.append(chain)
    return digests
