"""`ArenaIndex`: which block of an arena holds which content, who uses it, and which one is given up first.

    free ──take──► filling ──publish──► stored ⇄ held ──drop──► void ──last holder──► free
      ▲               │ give_back         │
      └───────────────┴───────────────────┘ take, expire

Only stored blocks (found by their digest, held by no hit) are the eviction policy's. Not thread-safe: the tier locks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from openinfer_kv_cache import Digest, EvictionPolicy, EvictionPolicyError, IntegrityError
from openinfer_kv_offload.transfer.telling import IndexListener, NotTold


class Stored(NamedTuple):
    """A block in the arena."""

    block_id: int
    digest: Digest
    checksum: bytes


class ArenaIndex:
    """Bookkeeping of an arena of `num_blocks` equal blocks; what is idle for longer than `ttl_s` is given up."""

    def __init__(
        self, num_blocks: int, policy: EvictionPolicy, *, ttl_s: float | None, clock: Callable[[], float]
    ) -> None:
        self.num_blocks = num_blocks
        self._policy = policy
        self._ttl_s = ttl_s
        self._clock = clock
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_digest: dict[Digest, int] = {}
        self._stored: list[Stored | None] = [None] * num_blocks
        self._holders = [0] * num_blocks
        self._idle_since: dict[int, float] = {}
        self._filling: set[int] = set()
        self.listener: IndexListener = NotTold()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._by_digest

    def hold_prefix(self, digests: Sequence[Digest]) -> list[Stored]:
        held: list[Stored] = []
        by_digest, stored, holders, idle_since = self._by_digest, self._stored, self._holders, self._idle_since
        revived: list[int] = []
        for digest in digests:
            block_id = by_digest.get(digest)
            if block_id is None:
                break
            if not holders[block_id]:
                del idle_since[block_id]
                revived.append(block_id)
            holders[block_id] += 1
            held.append(stored[block_id])  # pyright: ignore[reportArgumentType] -- what has a digest is stored
        if revived:
            self._policy.reuse(revived)
        return held

    def release(self, held: Sequence[Stored]) -> None:
        holders = self._holders
        idle: list[int] = []
        # The tail of a chain before its head, so that the tail is given up first: a chain is found from its head.
        for each in reversed(held):
            block_id = each.block_id
            holders[block_id] -= 1
            if not holders[block_id]:
                if self._stored[block_id] is None:  # dropped while it was held
                    self._free.append(block_id)
                else:
                    idle.append(block_id)
        if idle:
            self._idle_since.update(dict.fromkeys(idle, self._clock()))
            self._policy.admit(idle)

    def take(self) -> tuple[int, Stored | None] | None:
        """A block to fill, and what was evicted from it; None if all are held or being filled."""
        left = None
        if not self._free:
            if not self._idle_since:
                return None
            left = self._evict_one()
        block_id = self._free.pop()
        self._filling.add(block_id)
        return block_id, left

    def publish(self, block_id: int, digest: Digest, checksum: bytes) -> bool:
        """Makes a filled block findable; False if another was faster with the same digest."""
        if digest in self._by_digest:
            self.give_back(block_id)
            return False
        self._filling.remove(block_id)
        self._by_digest[digest] = block_id
        self._stored[block_id] = Stored(block_id, digest, checksum)
        self._idle_since[block_id] = self._clock()
        self._policy.admit([block_id])
        self.listener.stored(digest)
        return True

    def give_back(self, block_id: int) -> None:
        self._filling.remove(block_id)
        self._free.append(block_id)

    def drop(self, held: Stored) -> bool:
        if self._stored[held.block_id] is not held:
            return False
        del self._by_digest[held.digest]
        self._stored[held.block_id] = None
        self.listener.removed(held.digest)
        return True

    def expire(self) -> int:
        if self._ttl_s is None:
            return 0
        latest_s = self._clock() - self._ttl_s
        due: list[int] = []
        for block_id, since_s in self._idle_since.items():
            if since_s > latest_s:  # in the order in which they became idle: the others are younger
                break
            due.append(block_id)
        self._policy.forget(due)
        for block_id in due:
            self._free_idle(block_id)
        return len(due)

    def digests(self) -> list[Digest]:
        return list(self._by_digest)

    def check_integrity(self) -> None:
        void = {block_id for block_id, each in enumerate(self._stored) if each is None and self._holders[block_id]}
        stored = set(self._by_digest.values())
        idle = {block_id for block_id in stored if not self._holders[block_id]}
        parts = (set(self._free), self._filling, void, stored)
        if sum(map(len, parts)) != self.num_blocks or set[int]().union(*parts) != set(range(self.num_blocks)):
            raise IntegrityError(f"blocks are not each free, filling, void or stored: {parts}")
        if idle != self._idle_since.keys():
            raise IntegrityError(f"idle blocks are {sorted(idle)} and {sorted(self._idle_since)} are listed")
        for digest, block_id in self._by_digest.items():
            each = self._stored[block_id]
            if each is None or each.digest != digest or each.block_id != block_id:
                raise IntegrityError(f"block {block_id} is found under {digest.hex()} and holds {each}")

    def _evict_one(self) -> Stored:
        victims = self._policy.select(1)
        if len(victims) != 1 or victims[0] not in self._idle_since:
            raise EvictionPolicyError(
                f"{type(self._policy).__name__}.select(1) returned {victims}; it must return one idle block"
            )
        return self._free_idle(victims[0])

    def _free_idle(self, block_id: int) -> Stored:
        stored = self._stored[block_id]
        assert stored is not None, f"idle block {block_id} holds nothing"  # noqa: S101 -- the diagram above
        del self._idle_since[block_id], self._by_digest[stored.digest]
        self.listener.removed(stored.digest)
        self._stored[block_id] = None
        self._free.append(block_id)
        return stored
