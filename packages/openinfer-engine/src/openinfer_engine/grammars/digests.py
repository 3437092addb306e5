"""`GrammarDigests`: the digests of grammars, without hashing a long one that came a moment ago.

The choices of a request (`n`) reach the engine one by one, each with its grammar. To write down and hash 237,000
characters takes 0.24 ms of the loop's thread, to compare them with the last such text a tenth of that or less.
"""

import hashlib
from collections import OrderedDict
from typing import TypeAlias

import msgspec

from openinfer_core import Grammar
from openinfer_core.sampling import MAX_GRAMMAR_LENGTH

LEAST_CHARACTERS = 4096  # shorter ones are hashed sooner than found
MOST_CHARACTERS = 4 * MAX_GRAMMAR_LENGTH  # of all that are remembered
_END = 32  # characters at each end that tell texts of one length apart

_Place: TypeAlias = tuple[str, int, str, str, bytes]


class GrammarDigests:
    """Used from one thread."""

    def __init__(self) -> None:
        self.num_hashed = 0
        self._known: OrderedDict[_Place, tuple[str, bytes]] = OrderedDict()
        self._num_characters = 0

    def of(self, grammar: Grammar) -> bytes:
        """16 bytes of what is to be compiled."""
        text = grammar.text
        if len(text) < LEAST_CHARACTERS:
            return self._hash(grammar)
        place = (grammar.kind, len(text), text[:_END], text[-_END:], msgspec.json.encode(grammar.preamble))
        known = self._known.get(place)
        if known is not None and known[0] == text:
            self._known.move_to_end(place)
            return known[1]
        digest = self._hash(grammar)
        self._remember(place, text, digest)
        return digest

    def _hash(self, grammar: Grammar) -> bytes:
        self.num_hashed += 1
        return hashlib.blake2b(msgspec.json.encode(grammar), digest_size=16).digest()

    def _remember(self, place: _Place, text: str, digest: bytes) -> None:
        """One text for each place, so that one comparison is all that a look costs."""
        if place not in self._known:
            self._num_characters += len(text)
        self._known[place] = (text, digest)
        self._known.move_to_end(place)
        while self._num_characters > MOST_CHARACTERS:
            (_, length, *_), _ = self._known.popitem(last=False)
            self._num_characters -= length
