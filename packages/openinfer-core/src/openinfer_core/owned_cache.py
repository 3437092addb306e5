"""`OwnedCache`: a bounded cache that several owners share, of which none loses what another asks for in its place.

Where space is short, the owner that has most gives up what it has not used for longest: so owners are brought down to
one level, and those below it lose nothing (max-min fairness: Bertsekas and Gallager, Data Networks, 1992, section
6.5.2). One owner alone has the whole cache, which is then least recently used.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class OwnedCache(Generic[K, V]):
    """Used under a lock of its caller's.

    Args:
        max_bytes: of all entries.
        size_of: bytes of an entry; it does not change while the entry is here.
    """

    def __init__(self, max_bytes: int, *, size_of: Callable[[V], int]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._size_of = size_of
        self._entries: dict[str, OrderedDict[K, V]] = {}  # by owner, longest unused first
        self._held: dict[str, int] = {}
        # (-bytes, owner): at least one entry for each owner with what it has; others are out of date
        self._largest: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_owners(self) -> int:
        """Those that have entries."""
        return len(self._entries)

    def held_bytes(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def get(self, owner: str, key: K) -> V | None:
        """An owner's entry; it counts as used when `touch` says so."""
        entries = self._entries.get(owner)
        return None if entries is None else entries.get(key)

    def touch(self, owner: str, keys: Sequence[K]) -> None:
        """These were used, the last one last; those that are not here are passed over."""
        entries = self._entries.get(owner)
        if entries is not None:
            for key in keys:
                if key in entries:
                    entries.move_to_end(key)

    def put(self, owner: str, key: K, value: V) -> list[K]:
        """Keeps an entry, if it is no larger than the whole cache; one of the same key is there already and stays.

        Returns the keys of what made room, the new one may be among them.
        """
        size = self._size_of(value)
        entries = self._entries.setdefault(owner, OrderedDict())
        if key not in entries and size <= self.max_bytes:
            entries[key] = value
            self.num_bytes += size
            self._note(owner, self._held.get(owner, 0) + size)
        self._forget_empty(owner)
        evicted: list[K] = []
        while self.num_bytes > self.max_bytes:
            evicted.append(self._evict_one())
        return evicted

    def drop(self, owner: str, key: K) -> None:
        """Gives up an owner's entry, if it is here."""
        entries = self._entries.get(owner)
        if entries is None or key not in entries:
            return
        size = self._size_of(entries.pop(key))
        self.num_bytes -= size
        self._note(owner, self._held[owner] - size)
        self._forget_empty(owner)

    def clear(self) -> None:
        self._entries.clear()
        self._held.clear()
        self._largest.clear()
        self.num_bytes = 0

    def _evict_one(self) -> K:
        while True:
            level, owner = heappop(self._largest)
            if self._held.get(owner) == -level:
                break
        key, value = self._entries[owner].popitem(last=False)
        size = self._size_of(value)
        self.num_bytes -= size
        self._note(owner, -level - size)
        self._forget_empty(owner)
        return key

    def _note(self, owner: str, held: int) -> None:
        self._held[owner] = held
        heappush(self._largest, (-held, owner))
        if len(self._largest) > 4 * len(self._held) + 64:
            self._largest = [(-each, name) for name, each in self._held.items()]
            heapify(self._largest)

    def _forget_empty(self, owner: str) -> None:
        # Names come from outside: nothing is kept of an owner without entries.
        if not self._entries.get(owner):
            self._entries.pop(owner, None)
            self._held.pop(owner, None)
