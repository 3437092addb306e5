"""`ObjectIndex`: which blocks a server has, as far as this process knows, which are held, and which is evicted first.

    filling ──add──► idle ⇄ held ──drop──► void ──last holder──► forgotten
                      │
                      └── make_room, forget ──► forgotten

Found are idle and held ones. The least recently used idle one is given up first. Not thread-safe: the tier locks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from openinfer_kv_cache import Digest, IntegrityError
from openinfer_kv_offload.transfer.telling import IndexListener, NotTold


class KnownObject:
    """A block on the server."""

    __slots__ = ("digest", "holders", "is_void")

    def __init__(self, digest: Digest) -> None:
        self.digest = digest
        self.holders = 0
        self.is_void = False


class ObjectIndex:
    """Bookkeeping of the blocks of one store; `capacity_objects` counts those on their way to it, too."""

    def __init__(self, capacity_objects: int) -> None:
        self._capacity_objects = capacity_objects
        self._known: dict[Digest, KnownObject] = {}
        self._idle: OrderedDict[Digest, None] = OrderedDict()
        self._num_filling = 0
        self.listener: IndexListener = NotTold()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._known

    def count_prefix(self, digests: Sequence[Digest]) -> int:
        """How many of a chain's first digests are known."""
        return next((place for place, digest in enumerate(digests) if digest not in self._known), len(digests))

    def hold_prefix(self, digests: Sequence[Digest]) -> list[KnownObject]:
        held: list[KnownObject] = []
        for digest in digests:
            known = self._known.get(digest)
            if known is None:
                break
            if not known.holders:
                del self._idle[digest]
            known.holders += 1
            held.append(known)
        return held

    def release(self, held: Sequence[KnownObject]) -> None:
        # The tail of a chain before its head, so that the tail is given up first: a chain is found from its head.
        for known in reversed(held):
            known.holders -= 1
            if not known.holders and not known.is_void:
                self._idle[known.digest] = None

    def make_room(self) -> list[Digest] | None:
        """Counts one more block as filling; returns those to delete for it, or None if all others are held."""
        excess = len(self._known) + self._num_filling + 1 - self._capacity_objects
        if excess > len(self._idle):
            return None
        self._num_filling += 1
        return [self._evict() for _ in range(max(excess, 0))]

    def end_filling(self) -> None:
        self._num_filling -= 1

    def add(self, digests: Iterable[Digest]) -> int:
        """Makes blocks findable; returns how many were not."""
        added = 0
        for digest in digests:
            if digest not in self._known:
                self._known[digest] = KnownObject(digest)
                self._idle[digest] = None
                self.listener.stored(digest)
                added += 1
        return added

    def drop(self, known: KnownObject) -> bool:
        if self._known.get(known.digest) is not known:
            return False
        known.is_void = True
        del self._known[known.digest]
        self.listener.removed(known.digest)
        self._idle.pop(known.digest, None)  # a load may have given it back in the meantime
        return True

    def forget(self, digests: Iterable[Digest]) -> int:
        forgotten = 0
        for digest in digests:
            known = self._known.get(digest)
            if known is not None and not known.holders:  # what is held is dropped by the load that misses it
                del self._known[digest], self._idle[digest]
                self.listener.removed(digest)
                forgotten += 1
        return forgotten

    def digests(self) -> set[Digest]:
        return set(self._known)

    def check_integrity(self) -> None:
        idle = {digest for digest, known in self._known.items() if not known.holders}
        if idle != set(self._idle):
            raise IntegrityError(f"{len(idle)} objects are idle and {len(self._idle)} are listed")
        if any(known.is_void or known.digest != digest for digest, known in self._known.items()):
            raise IntegrityError("a void object, or another one, can be found")
        if self._num_filling < 0:
            raise IntegrityError(f"{self._num_filling} objects are being filled")

    def _evict(self) -> Digest:
        digest, _ = self._idle.popitem(last=False)
        del self._known[digest]
        self.listener.removed(digest)
        return digest
