"""`PlaceIndex`: which block is at which place of an arena, who holds it, and which one is given up first.

    free ──take──► filling ──publish──► stored ⇄ held ──drop──► void ──last holder──► free
      ▲               │ give_back         │
      └───────────────┴───────────────────┘ take, expire

Only stored places (found by their digest, held by nobody) are the eviction policy's. Not thread-safe: the tier locks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from openinfer_kv_cache import Digest, EvictionPolicy, EvictionPolicyError, IntegrityError


class Stored(NamedTuple):
    """A block in the arena."""

    place: int
    digest: Digest
    stamp: bytes


class PlaceIndex:
    """Bookkeeping of `num_places` equal places.

    Args:
        num_places: of the arena. policy: orders the idle ones. ttl_s: idle for longer is given up; None for never.
            clock: seconds that never run back.
    """

    def __init__(
        self, num_places: int, policy: EvictionPolicy, *, ttl_s: float | None, clock: Callable[[], float]
    ) -> None:
        self.num_places = num_places
        self._policy = policy
        self._ttl_s = ttl_s
        self._clock = clock
        self._free = list(range(num_places - 1, -1, -1))
        self._by_digest: dict[Digest, int] = {}
        self._stored: list[Stored | None] = [None] * num_places
        self._holders = [0] * num_places
        self._idle_since: dict[int, float] = {}
        self._filling: set[int] = set()

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._by_digest)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._by_digest

    def hold_prefix(self, digests: Sequence[Digest]) -> list[Stored]:
        """Holds the longest beginning of `digests` that is stored."""
        held: list[Stored] = []
        by_digest, stored, holders, idle_since = self._by_digest, self._stored, self._holders, self._idle_since
        revived: list[int] = []
        for digest in digests:
            place = by_digest.get(digest)
            if place is None:
                break
            if not holders[place]:
                del idle_since[place]
                revived.append(place)
            holders[place] += 1
            held.append(stored[place])  # pyright: ignore[reportArgumentType] -- what has a digest is stored
        if revived:
            self._policy.reuse(revived)
        return held

    def release(self, held: Sequence[Stored]) -> None:
        """Gives held places back, the tail of a chain before its head, so that the tail is given up first."""
        holders = self._holders
        idle: list[int] = []
        for each in reversed(held):
            place = each.place
            holders[place] -= 1
            if not holders[place]:
                if self._stored[place] is None:
                    self._free.append(place)
                else:
                    idle.append(place)
        if idle:
            self._idle_since.update(dict.fromkeys(idle, self._clock()))
            self._policy.admit(idle)

    def take(self) -> tuple[int, Stored | None] | None:
        """A place to fill, and the block that had to leave it; None if all are held or being filled."""
        left = None
        if not self._free:
            if not self._idle_since:
                return None
            left = self._evict_one()
        place = self._free.pop()
        self._filling.add(place)
        return place, left

    def publish(self, place: int, digest: Digest, stamp: bytes) -> bool:
        """Makes a filled place findable; False if another was faster with the same digest."""
        if digest in self._by_digest:
            self.give_back(place)
            return False
        self._filling.remove(place)
        self._by_digest[digest] = place
        self._stored[place] = Stored(place, digest, stamp)
        self._idle_since[place] = self._clock()
        self._policy.admit([place])
        return True

    def give_back(self, place: int) -> None:
        """Frees a place that was not filled after all."""
        self._filling.remove(place)
        self._free.append(place)

    def drop(self, held: Stored) -> bool:
        """Makes a held block unfindable at once; False if it was already."""
        if self._stored[held.place] is not held:
            return False
        del self._by_digest[held.digest]
        self._stored[held.place] = None
        return True

    def expire(self) -> int:
        """Frees what has been idle for longer than the time-to-live, and returns how many."""
        if self._ttl_s is None:
            return 0
        latest_s = self._clock() - self._ttl_s
        due: list[int] = []
        for place, since_s in self._idle_since.items():
            if since_s > latest_s:
                break
            due.append(place)
        self._policy.forget(due)
        for place in due:
            self._free_idle(place)
        return len(due)

    def digests(self) -> list[Digest]:
        """Of all blocks that can be found."""
        return list(self._by_digest)

    def check_integrity(self) -> None:
        """Compares everything it knows; O(num_places).

        Raises:
            IntegrityError: the books contradict themselves.
        """
        void = {place for place, each in enumerate(self._stored) if each is None and self._holders[place]}
        stored = set(self._by_digest.values())
        idle = {place for place in stored if not self._holders[place]}
        parts = (set(self._free), self._filling, void, stored)
        if sum(map(len, parts)) != self.num_places or set[int]().union(*parts) != set(range(self.num_places)):
            raise IntegrityError(f"places are not each free, filling, void or stored: {parts}")
        if idle != self._idle_since.keys():
            raise IntegrityError(f"idle places are {sorted(idle)} and {sorted(self._idle_since)} are listed")
        for digest, place in self._by_digest.items():
            each = self._stored[place]
            if each is None or each.digest != digest or each.place != place:
                raise IntegrityError(f"place {place} is found under {digest.hex()} and holds {each}")

    def _evict_one(self) -> Stored:
        victims = self._policy.select(1)
        if len(victims) != 1 or victims[0] not in self._idle_since:
            raise EvictionPolicyError(
                f"{type(self._policy).__name__}.select(1) returned {victims}; it must return one idle place"
            )
        return self._free_idle(victims[0])

    def _free_idle(self, place: int) -> Stored:
        stored = self._stored[place]
        assert stored is not None, f"idle place {place} holds nothing"  # noqa: S101 -- the diagram above
        del self._idle_since[place], self._by_digest[stored.digest]
        self._stored[place] = None
        self._free.append(place)
        return stored
