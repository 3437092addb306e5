"""`KnownPrefixes`: token ids of beginnings of rendered chats, found again by their text and its origins.

    text     |      segment      |    segment    |  segment  | what is new
             0                  cut             cut         cut
    digest   root ──────────────► d1 ───────────► d2 ───────► d3
    ids                          ids             ids         ids

A text is cut before control tokens (`ControlTokens.cut_ids`), where what comes before and what follows are encoded
without regard to each other; a cut is at least `MIN_SEGMENT_CHARACTERS` after the one before, so that it depends on
what comes before it alone. A digest binds all text up to its cut, the origin of each character, and the token at the
cut. Digests are keyed with a secret of this process, and begin with the owner and the cache salt: what one owner sent
is never found by another, nor under another salt.
"""

import hashlib
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from openinfer_core.owned_cache import OwnedCache
from openinfer_server.text.marked_text import MarkedText

MIN_SEGMENT_CHARACTERS = 1024
"""Shorter ones are encoded in less time than is worth an entry."""
DEFAULT_BYTES = 2**27
"""Some 16 million token ids: a hundred conversations of 142,000 tokens."""
_ENTRY_BYTES = 256  # of an entry beside its ids: digest, tuple, places in dictionaries
_ID_BYTES = 8  # of an id, which is an object that all prefixes share
_DIGEST_BYTES = 16


class Cut(NamedTuple):
    """A place where a text may be cut: before the control token that begins there."""

    position: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose prefixes are looked for: those of others are not found."""

    owner: str = ""
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The longest beginning of a text that is known.

    Attributes:
        end: characters that it has.
        digest: of it; of the root where nothing is known.
        token_ids: of it; not to be changed.
    """

    end: int
    digest: bytes
    token_ids: list[int]


class KnownPrefixes:
    """A bounded store, used from several threads.

    Args:
        max_bytes: of all that is kept; 0 keeps nothing.
        min_segment_characters: between two cuts.

    Attributes:
        known_characters: found here since the start.
        new_characters: that had to be encoded.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES, *, min_segment_characters: int = MIN_SEGMENT_CHARACTERS) -> None:
        self._min_characters = min_segment_characters
        # Objects of ids, by id: to make new ones for a whole prompt, and to free them, takes 8 ms for 284,000.
        self._ids: list[int] = []
        self._cache: OwnedCache[bytes, tuple[int, ...]] = OwnedCache(max_bytes, size_of=_size_of)
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self.known_characters = self.new_characters = 0

    @property
    def is_on(self) -> bool:
        return self._cache.max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes

    def nothing(self, scope: Scope, generation: int) -> KnownPrefix:
        """The empty prefix, which all texts begin with."""
        return KnownPrefix(0, self._root(scope, generation), [])

    def find(self, scope: Scope, generation: int, text: MarkedText, cuts: Iterable[Cut]) -> KnownPrefix:
        """The longest known prefix of a text.

        Args:
            scope: whose.
            generation: of the encoder; what others have encoded is not found.
            text: as it was rendered.
            cuts: all places where it may be cut, ascending.
        """
        digest, plain = self._root(scope, generation), text.plain
        found: list[bytes] = []
        token_ids: list[int] = []
        end = 0
        for cut in self._far_enough(0, cuts):
            following = self._digest(digest, (plain, text.origins), end, cut)
            with self._lock:
                ids = self._cache.get(scope.owner, following)
            if ids is None:
                break
            token_ids.extend(ids)
            found.append(following)
            digest, end = following, cut.position
        with self._lock:
            # The tail first, so that it goes before the beginning that it is found from.
            self._cache.touch(scope.owner, found[::-1])
            self.known_characters += end
            self.new_characters += len(text) - end
        return KnownPrefix(end, digest, token_ids)

    def keep(
        self, scope: Scope, known: KnownPrefix, text: MarkedText, cuts: Sequence[tuple[Cut, int]], ids: Sequence[int]
    ) -> None:
        """Notes what comes after a known prefix.

        Args:
            scope: as it was looked for.
            known: what was found.
            text: the whole.
            cuts: places where it may be cut after the prefix, each with the number of ids before it.
            ids: of what comes after the prefix.
        """
        digest, begin, first = known.digest, known.end, 0
        places, plain = dict(cuts), text.plain
        made: list[tuple[bytes, tuple[int, ...]]] = []
        for cut in self._far_enough(known.end, places):
            digest = self._digest(digest, (plain, text.origins), begin, cut)
            made.append((digest, self._shared(ids[first : places[cut]])))
            begin, first = cut.position, places[cut]
        with self._lock:
            for key, segment in reversed(made):
                self._cache.put(scope.owner, key, segment)

    def _shared(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The same ids, of objects that all entries share."""
        known = self._ids
        if ids and max(ids) >= len(known):
            with self._lock:
                known.extend(range(len(known), max(ids) + 1))
        return tuple([known[token_id] for token_id in ids])

    def _root(self, scope: Scope, generation: int) -> bytes:
        salt = b"\0" if scope.cache_salt is None else b"\1" + scope.cache_salt.encode("utf-8", "surrogatepass")
        owner = scope.owner.encode("utf-8", "surrogatepass")
        message = generation.to_bytes(8, "little") + len(owner).to_bytes(8, "little") + owner + salt
        return hashlib.blake2b(message, digest_size=_DIGEST_BYTES, key=self._key, person=b"prefix-root").digest()

    def _digest(self, parent: bytes, text: tuple[str, bytes], begin: int, cut: Cut) -> bytes:
        # Lengths come first, so that no two segments are the same bytes. hashlib releases the interpreter.
        plain, origins = text
        segment = plain[begin : cut.position].encode("utf-8", "surrogatepass")
        sizes = len(segment).to_bytes(8, "little") + cut.token_id.to_bytes(8, "little")
        hashed = hashlib.blake2b(parent + sizes, digest_size=_DIGEST_BYTES, key=self._key, person=b"prefix")
        hashed.update(segment)
        hashed.update(origins[begin : cut.position])
        return hashed.digest()

    def _far_enough(self, begin: int, cuts: Iterable[Cut]) -> Iterator[Cut]:
        for cut in cuts:
            if cut.position - begin >= self._min_characters:
                yield cut
                begin = cut.position


def _size_of(ids: tuple[int, ...]) -> int:
    return _ENTRY_BYTES + _ID_BYTES * len(ids)
