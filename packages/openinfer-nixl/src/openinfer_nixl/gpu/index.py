"""`BlockBook`: which blocks this engine has, which of those it has leased to peers, and which a peer has.

    own        in this engine's memory, as `ArenaIndex` draws their life; a lease is one more holder
    a peer's   told by it at a look-up; may be gone since, which the load finds out

Not thread-safe: the tier locks.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from openinfer_kv_cache import Digest, LeastRecentlyUsed
from openinfer_kv_offload.host.block_index import ArenaIndex, Stored
from openinfer_kv_offload.transfer.telling import IndexListener, NotTold

_MOST_TOLD = 1 << 18  # blocks of peers that are remembered: 4 million tokens in blocks of 16


class Elsewhere(NamedTuple):
    """A block that a peer has."""

    digest: Digest
    peer: int


Held: TypeAlias = Stored | Elsewhere


class BlockBook:
    """Bookkeeping of one tier.

    Args:
        num_blocks: that this engine's memory has room for.
        lease_s: after which a lease is void.
        clock: monotonic seconds.
    """

    def __init__(self, num_blocks: int, *, lease_s: float, clock: Callable[[], float]) -> None:
        self._own = ArenaIndex(num_blocks, LeastRecentlyUsed(), ttl_s=None, clock=clock)
        self._own.listener = self
        self.listener: IndexListener = NotTold()
        self._told: dict[Digest, int] = {}
        self._leases: dict[int, tuple[list[Stored], float]] = {}  # blocks, and the end; ends are in order
        self._lease_s = lease_s
        self._clock = clock
        self._ids = itertools.count(1)

    def stored(self, digest: Digest) -> None:
        """The listener is told of this engine's own blocks alone."""
        self.listener.stored(digest)

    def removed(self, digest: Digest) -> None:
        self.listener.removed(digest)

    # What can be found.

    def __len__(self) -> int:
        return len(self._own)

    def digests(self) -> list[Digest]:
        return self._own.digests()

    def has(self, digest: Digest) -> bool:
        """Whether it is this engine's own."""
        return digest in self._own

    def count_own(self, digests: Iterable[Digest]) -> int:
        """How many of a chain's first blocks are this engine's own."""
        return sum(1 for _ in itertools.takewhile(self.has, digests))

    def count_known(self, digests: Iterable[Digest]) -> int:
        """How many of a chain's first blocks are this engine's own, or a peer's as far as is known."""
        return sum(1 for _ in itertools.takewhile(lambda digest: digest in self._own or digest in self._told, digests))

    def hold_prefix(self, digests: Sequence[Digest]) -> list[Held]:
        held: list[Held] = []
        while len(held) < len(digests):
            if own := self._own.hold_prefix(digests[len(held) :]):
                held += own
                continue
            digest = digests[len(held)]
            peer = self._told.get(digest)
            if peer is None:
                break
            held.append(Elsewhere(digest, peer))
        return held

    def release(self, held: Sequence[Held]) -> None:
        self._own.release([each for each in held if isinstance(each, Stored)])

    def drop(self, held: Held) -> bool:
        if isinstance(held, Stored):
            return self._own.drop(held)
        return self._told.pop(held.digest, None) is not None

    # Peers.

    def learn(self, digests: Iterable[Digest], peer: int) -> None:
        """A peer has said that it has these."""
        for digest in digests:
            self._told.pop(digest, None)  # the latest last
            self._told[digest] = peer
        while len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]

    def lease(self, digests: Sequence[Digest]) -> tuple[int, list[Stored]]:
        """Holds the longest beginning of `digests` that is its own, until `end_leases` or until its time is over."""
        self.end_late_leases()
        held = self._own.hold_prefix(digests)
        lease_id = next(self._ids)
        self._leases[lease_id] = held, self._clock() + self._lease_s
        return lease_id, held

    def end_leases(self, lease_ids: Iterable[int]) -> None:
        """Those that are void already are no error."""
        for lease_id in lease_ids:
            held, _ = self._leases.pop(lease_id, ((), 0.0))
            self._own.release(held)

    def end_late_leases(self) -> None:
        now_s = self._clock()
        self.end_leases([*itertools.takewhile(lambda each: self._leases[each][1] <= now_s, self._leases)])

    # Places.

    def take(self) -> tuple[int, Stored | None] | None:
        """A place to fill, and what was evicted from it; None if all are held, leased or being filled."""
        self.end_late_leases()
        return self._own.take()

    def publish(self, block_id: int, digest: Digest, checksum: bytes) -> bool:
        return self._own.publish(block_id, digest, checksum)

    def give_back(self, block_id: int) -> None:
        self._own.give_back(block_id)

    def check_integrity(self) -> None:
        self._own.check_integrity()
