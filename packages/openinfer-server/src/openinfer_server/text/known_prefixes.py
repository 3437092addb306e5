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
import itertools
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from openinfer_core.owned_cache import OwnedCache
from openinfer_core.request import NamedBeginning
from openinfer_server.text.marked_text import MarkedText

MIN_SEGMENT_CHARACTERS = 1024
"""Shorter ones are encoded in less time than is worth an entry."""
MIN_SEEN_CHARACTERS = 2**14
"""Shorter texts are digested in less time than is worth keeping them."""
MAX_ALIKE = 64
"""Texts with one first segment that are kept at most."""
DEFAULT_BYTES = 2**28
"""A hundred conversations of 142,000 tokens and 500 KB."""
_ENTRY_BYTES = 256  # of an entry beside its ids: digest, tuple, places in dictionaries
_ID_BYTES = 8  # of an id, which is an object that all prefixes share
_DIGEST_BYTES = 16
_SLICE_IDS = 2**12  # of which one call takes the highest, during which no other thread runs
_NAME_BITS = 63  # of a beginning
_PLACE_BYTES = 160  # of a control token, and of a cut with its digest


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
class SeenText:
    """The beginning of a text, up to a cut and as far after it as a look for control tokens before the cut reads.

    Attributes:
        plain: its characters.
        origins: of each.
        path: the cuts that divide it into segments, each with the digest of all before it.
        places: the control tokens before its last cut, as they were found; they are the encoder's.
        beginning: the ids up to its last cut, by a name of their own.
    """

    plain: str
    origins: bytes
    path: "tuple[tuple[Cut, bytes], ...]"
    places: tuple[Any, ...]
    beginning: NamedBeginning

    @property
    def end(self) -> int:
        """Its last cut."""
        return self.path[-1][0].position


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The longest beginning of a text that is known.

    Attributes:
        end: characters that it has.
        digest: of it; of the root where nothing is known.
        segments: its token ids.
        path: its cuts and digests.
        seen: the text that it was found by, if it was.
    """

    end: int
    digest: bytes
    segments: Sequence[tuple[int, ...]] = ()
    path: tuple[tuple[Cut, bytes], ...] = ()
    seen: SeenText | None = None

    @property
    def num_ids(self) -> int:
        return sum(map(len, self.segments))

    def followed_by(self, rest: Sequence[int]) -> tuple[int, ...]:
        """All ids of a text that begins so and goes on."""
        if not self.segments:
            return tuple(rest)
        # A list that grows by each segment is moved again and again, which for 290,000 ids takes a millisecond more.
        whole, begin = [0] * (self.num_ids + len(rest)), 0
        for segment in (*self.segments, rest):
            end = begin + len(segment)
            whole[begin:end] = segment
            begin = end
        return tuple(whole)

    @property
    def beginnings(self) -> tuple[NamedBeginning, ...]:
        """Names of what the ids begin with."""
        return () if self.seen is None or self.end < self.seen.end else (self.seen.beginning,)


class KnownPrefixes:
    """A bounded store, used from several threads.

    Args:
        max_bytes: of all that is kept; 0 keeps nothing.
        min_segment_characters: between two cuts.
        min_seen_characters: of texts that are kept themselves.

    Attributes:
        known_characters: found here since the start.
        new_characters: that had to be encoded.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_BYTES,
        *,
        min_segment_characters: int = MIN_SEGMENT_CHARACTERS,
        min_seen_characters: int = MIN_SEEN_CHARACTERS,
    ) -> None:
        self._min_characters = min_segment_characters
        self._min_seen_characters = min_seen_characters
        # Objects of ids, by id: to make new ones for a whole prompt, and to free them, takes 8 ms for 284,000.
        self._ids: list[int] = []
        self._cache: OwnedCache[bytes, tuple[int, ...] | SeenText] = OwnedCache(max_bytes, size_of=_size_of)
        self._alike: dict[bytes, list[bytes]] = {}  # keys of texts by the digest of their first segment, last used last
        self._first: dict[bytes, bytes] = {}  # of each of these
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
        return KnownPrefix(0, self._root(scope, generation))

    def is_first(self, cut: Cut) -> bool:
        """Whether the first segment of a text may end there; the first such cut is where it does."""
        return cut.position >= self._min_characters

    def seen(self, scope: Scope, generation: int, text: MarkedText, first: Cut) -> SeenText | None:
        """The longest beginning that was kept of a text that was seen before, if this one begins with it.

        Args:
            scope: whose.
            generation: as for `find`.
            text: as it was rendered.
            first: where its first segment ends.
        """
        if not self._alike:
            return None
        plain, origins = text.plain, text.origins
        digest = self._digest(self._root(scope, generation), (plain, origins), 0, first)
        with self._lock:
            kept = [self._cache.get(scope.owner, key) for key in self._alike.get(digest, ())]
        alike = (
            each
            for each in kept
            if isinstance(each, SeenText) and plain.startswith(each.plain) and origins.startswith(each.origins)
        )
        return max(alike, key=lambda each: each.end, default=None)

    def find(
        self, scope: Scope, generation: int, text: MarkedText, cuts: Iterable[Cut], seen: SeenText | None = None
    ) -> KnownPrefix:
        """The longest known prefix of a text.

        Args:
            scope: whose.
            generation: of the encoder; what others have encoded is not found.
            text: as it was rendered.
            cuts: all places where it may be cut, ascending.
            seen: what `seen` found.
        """
        digest, plain = self._root(scope, generation), text.plain
        path: list[tuple[Cut, bytes]] = []
        segments: list[tuple[int, ...]] = []
        end = 0
        for cut, following in self._digested(digest, (plain, text.origins), cuts, seen):
            with self._lock:
                ids = self._cache.get(scope.owner, following)
            if not isinstance(ids, tuple):
                break
            segments.append(ids)
            path.append((cut, following))
            digest, end = following, cut.position
        with self._lock:
            # The tail first, so that it goes before the beginning that it is found from.
            used = [following for _, following in reversed(path)]
            self._cache.touch(scope.owner, used if seen is None else [_key_of(seen), *used])
            self.known_characters += end
            self.new_characters += len(text) - end
        return KnownPrefix(end, digest, segments, tuple(path), seen)

    def _digested(
        self, root: bytes, text: tuple[str, bytes], cuts: Iterable[Cut], seen: SeenText | None
    ) -> Iterator[tuple[Cut, bytes]]:
        """The cuts between segments, with digests: those of what was seen are known."""
        digest, end = root, 0
        for cut, following in () if seen is None else seen.path:
            yield cut, following
            digest, end = following, cut.position
        for cut in self._far_enough(end, cuts):
            digest = self._digest(digest, text, end, cut)
            yield cut, digest
            end = cut.position

    def keep(
        self,
        scope: Scope,
        known: KnownPrefix,
        text: MarkedText,
        cuts: Sequence[tuple[Cut, int]],
        ids: Sequence[int],
        *,
        places: Sequence[Any] = (),
        num_after: int = 0,
    ) -> tuple[NamedBeginning, ...]:
        """Notes what comes after a known prefix. Returns the names of what the prompt begins with.

        Args:
            scope: as it was looked for.
            known: what was found.
            text: the whole.
            cuts: places where it may be cut after the prefix, each with the number of ids before it.
            ids: of what comes after the prefix, by `shared`.
            places: the control tokens of the whole, each with its `begin`; ascending.
            num_after: characters after a cut that decide which control tokens are found up to it.
        """
        digest, begin, first = known.digest, known.end, 0
        following, plain = dict(cuts), text.plain
        made: list[tuple[bytes, tuple[int, ...]]] = []
        path = list(known.path)
        for cut in self._far_enough(known.end, following):
            digest = self._digest(digest, (plain, text.origins), begin, cut)
            made.append((digest, tuple(ids[first : following[cut]])))
            path.append((cut, digest))
            begin, first = cut.position, following[cut]
        while path and path[-1][0].position + num_after > len(plain):
            path.pop()
        seen = None
        if path and path[-1][0].position >= max(known.end, self._min_seen_characters):
            end, last = path[-1][0].position, path[-1][0].position + num_after
            before = tuple(itertools.takewhile(lambda place: place.begin < end, places))
            named = NamedBeginning(secrets.randbits(_NAME_BITS), known.num_ids + following.get(path[-1][0], 0))
            seen = SeenText(plain[:last], text.origins[:last], tuple(path), before, named)
        with self._lock:
            for key, segment in reversed(made):
                self._put(scope.owner, key, segment)
            if seen is not None:
                self._keep_seen(scope.owner, seen, known)
        return known.beginnings if seen is None else (*known.beginnings, seen.beginning)

    def _keep_seen(self, owner: str, made: SeenText, known: KnownPrefix) -> None:
        key, old = _key_of(made), known.seen
        if old is not None and _key_of(old) != key:  # the next turn of one conversation
            self._forget_seen(_key_of(old))
            self._cache.drop(owner, _key_of(old))
        if key in self._first:
            return
        first = made.path[0][1]
        keys = self._alike.setdefault(first, [])
        keys.append(key)
        self._first[key] = first
        if len(keys) > MAX_ALIKE:
            self._cache.drop(owner, keys[0])
            self._forget_seen(keys[0])
        self._put(owner, key, made)
        if self._cache.get(owner, key) is None:
            self._forget_seen(key)

    def _forget_seen(self, key: bytes) -> None:
        first = self._first.pop(key, None)
        if first is not None:
            self._alike[first].remove(key)
            if not self._alike[first]:
                del self._alike[first]

    def _put(self, owner: str, key: bytes, value: "tuple[int, ...] | SeenText") -> None:
        for evicted in self._cache.put(owner, key, value):
            self._forget_seen(evicted)

    def shared(self, ids: Sequence[int]) -> list[int]:
        """The same ids, of objects that all prompts share: they take less memory so, and two prompts with a common
        beginning are compared in an eighth of the time.
        """
        known, found = self._ids, list[int]()
        for begin in range(0, len(ids), _SLICE_IDS):
            some = ids[begin : begin + _SLICE_IDS]
            if (highest := max(some)) >= len(known):
                with self._lock:
                    known.extend(range(len(known), highest + 1))
            found += [known[token_id] for token_id in some]
        return found

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


def _key_of(seen: SeenText) -> bytes:
    return b"seen" + seen.path[-1][1]


def _size_of(value: "tuple[int, ...] | SeenText") -> int:
    if isinstance(value, tuple):
        return _ENTRY_BYTES + _ID_BYTES * len(value)
    return sys.getsizeof(value.plain) + len(value.origins) + _PLACE_BYTES * (len(value.places) + len(value.path))
