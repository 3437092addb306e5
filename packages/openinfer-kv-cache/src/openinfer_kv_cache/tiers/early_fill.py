"""`EarlyFill`: blocks of no sequence on their way from KV tiers into the pool, where their digests will find them.

    free ── begin ──► writable, the tiers' ── is_over, finish ──► idle: what has completed, and free: the rest

Until it is finished its blocks are counted in `KvCache.filling`: they have a user that is neither a sequence nor a pin.
"""

from collections.abc import Callable, Sequence
from typing import Self

from openinfer_kv_cache.cache import KvCache
from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.tiers.port import TierPort, TierTransfer


class EarlyFill:
    """Of one cache with one block table; `begin` makes it."""

    def __init__(
        self, cache: KvCache, transfer: TierTransfer, blocks: Sequence[int], digests: Sequence[Digest]
    ) -> None:
        self._cache = cache
        self._transfer = transfer
        self._blocks = blocks
        self._digests = digests
        self._generation = cache.pool.generation
        cache.filling.update(blocks)

    @classmethod
    def begin(cls, cache: KvCache, port: TierPort, digests: Sequence[Digest], *, owner: str) -> Self | None:
        """Begins to load the beginning of a chain that tiers have; None if that is nothing, or the pool has no room.

        Args:
            cache: whose pool gets the blocks, and gives up idle ones for them, in its order.
            port: of the tiers.
            digests: that follow what the pool has.
            owner: whose share the blocks are of.
        """
        pool, found = cache.pool, port.find(digests)
        blocks = pool.allocate(found.num_blocks, owner)
        if not blocks:
            found.close()
            return None
        transfer = port.load(found, blocks)
        if transfer is None:
            pool.release(blocks)
            return None
        return cls(cache, transfer, blocks, digests[: len(blocks)])

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def is_over(self) -> bool:
        return self._transfer.is_over()

    def cancel(self) -> None:
        self._transfer.cancel()

    def finish(self, sealed: Callable[[Sequence[int]], None]) -> int:
        """Gives the blocks to the pool once it is over; how many can be found.

        Args:
            sealed: called with these, head first, while they are still in use.
        """
        pool, blocks = self._cache.pool, self._blocks
        # What came before a `clear` is of the old content, which no request may find.
        num_good = self._transfer.completed_blocks if pool.generation == self._generation else 0
        pool.seal(blocks[:num_good], self._digests[:num_good])
        if num_good:
            sealed(blocks[:num_good])
        self._cache.filling.difference_update(blocks)
        pool.release(blocks[::-1])  # the tail first, so that it is evicted before the head that it is found from
        return num_good
