"""`EvictionOrder`: which record makes room, the oldest of the owner with most, found without looking at the others.

Each change of what an owner has, or of its oldest record, is one entry more of a heap; an entry that has become wrong
is dropped when it comes to the top. So a record costs the logarithm of the number of owners, not the number of records.
"""

import heapq
from collections import Counter

_MAX_STALE = 64  # entries of a heap beyond two per owner, before it is made anew


class EvictionOrder:
    """Of owners, by how much each has of one thing, and of their records that may go, by last use."""

    def __init__(self) -> None:
        self.total = 0
        self._amounts: Counter[str] = Counter()
        self._records: dict[str, dict[str, int]] = {}  # of each owner, by id: number of the last use; the youngest last
        self._heap: list[tuple[int, int, str]] = []  # minus the amount, number of the oldest one's last use, owner

    def __getitem__(self, owner: str) -> int:
        """How much an owner has."""
        return self._amounts[owner]

    def add(self, owner: str, amount: int) -> None:
        """An owner has so much more, or less."""
        self.total += amount
        self._amounts[owner] += amount
        if not self._amounts[owner]:
            del self._amounts[owner]
        self._note(owner)

    def use(self, owner: str, name: str, number: int) -> None:
        """A record may go from now on, or is used again.

        Args:
            owner: of the record.
            name: its id.
            number: of this use; greater than that of any before.
        """
        records = self._records.setdefault(owner, {})
        records.pop(name, None)
        records[name] = number
        self._note(owner)

    def drop(self, owner: str, name: str) -> None:
        """A record has gone; nothing if it could not go."""
        records = self._records.get(owner, {})
        if records.pop(name, None) is not None and not records:
            del self._records[owner]
        self._note(owner)

    def first(self) -> str | None:
        """The oldest record of the owner with most, of the owners that have one; of equals, the oldest of all."""
        while self._heap:
            owner = self._heap[0][2]
            if self._heap[0] == self._entry(owner):
                return next(iter(self._records[owner]))
            heapq.heappop(self._heap)
        return None

    def _note(self, owner: str) -> None:
        entry = self._entry(owner)
        if entry is None:
            return
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._records) + _MAX_STALE:
            self._heap = [entry for owner in self._records if (entry := self._entry(owner)) is not None]
            heapq.heapify(self._heap)

    def _entry(self, owner: str) -> tuple[int, int, str] | None:
        """What the heap has to say of an owner; None if nothing of it may go."""
        records = self._records.get(owner)
        return (-self._amounts[owner], next(iter(records.values())), owner) if records else None
