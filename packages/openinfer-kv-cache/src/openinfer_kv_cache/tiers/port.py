"""`TierPort`: what a scheduler asks of KV tiers, and `TieredScheduler`, `KvEventSource`: what an engine asks of it.

    find(digests)           the longest beginning of a chain that the tiers hold
    load(found, places)     what was found, on its way into those places
    save(digests, places)   sealed blocks on their way out

A place is a block, by its id, or one of the chunks of a slot of recurrent states, which is as large (`state_places`).
None of these waits. What a scheduler owes the tiers:

- The blocks of a load are the tiers' from `load` until `is_over`: no row reads or writes them, and they are not given
  back, also after `cancel` and after an abort of their request, whose load is cancelled.
- The blocks of a save are sealed, and pinned until `is_over` (`BlockPool.pin`).
- Only the first `completed_blocks` of a load are right; what follows is computed.
- Only what ran is saved: a step's blocks after its `apply`.

`KvTransfers` keeps these rules for a scheduler of whole sequences; `openinfer_kv_cache.testing.tiered_scheduler` checks
them for any.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from openinfer_kv_cache.blocks import BlockPin
from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.listener import BlockListener
from openinfer_kv_cache.tiers.contract import TierHit


class TierTransfer(Protocol):
    """One load or save. Until `is_over` its places are the tiers': hold them."""

    @property
    def num_blocks(self) -> int:
        """How many are on their way."""
        ...

    @property
    def begin_s(self) -> float:
        """When it began, on the clock of its port."""
        ...

    def is_over(self) -> bool:
        """Whether nothing is pending; what follows a partial chunk is cancelled, as it is of no use."""
        ...

    @property
    def completed_blocks(self) -> int:
        """Of a load that is over, how many leading blocks hold their right bytes."""
        ...

    def cancel(self) -> None:
        """Asks for an early end; it is over once no copy touches its places."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits until it has come further, at most so long."""
        ...


class PrefixHit:
    """Neighbouring chunks of a chain, none of them empty, held until they are loaded or closed."""

    __slots__ = ("hits",)

    def __init__(self, hits: Sequence[TierHit]) -> None:
        self.hits = list(hits)

    @property
    def num_blocks(self) -> int:
        return sum(len(hit.digests) for hit in self.hits)

    def take_back(self, num_blocks: int) -> int:
        """Gives back the chunks that go beyond `num_blocks`; returns how many blocks are held still."""
        while self.num_blocks > num_blocks:
            self.hits.pop().close()
        return self.num_blocks

    def close(self) -> None:
        self.take_back(0)


class TierPort(Protocol):
    """The tiers of one engine, of all its ranks, in terms of places of the pool; used from the scheduler's thread.

    It raises for no fault of a tier: such a tier is left alone from then on, and everything is computed instead.
    """

    @property
    def chunks_per_slot(self) -> int:
        """Chunks of the recurrent states of one sequence; 0 for a model without."""
        ...

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        """The longest beginning of a chain that the tiers hold, maybe empty."""
        ...

    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        """Begins to fill places with what was found; None if that is nothing, or cannot be loaded.

        Args:
            found: is spent.
            places: writable, as many as were found or more; those that the transfer does not cover stay as they are.
        """
        ...

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer | None:
        """Begins to copy what no step writes to any more into the tiers; None if these take none."""
        ...

    def state_places(self, slot: int) -> Sequence[int]:
        """The chunks of a slot of recurrent states."""
        ...

    def clock(self) -> float:
        """Monotonic seconds, as `TierTransfer.begin_s` has them."""
        ...


class PortPrefetch(NamedTuple):
    """What a port answers to `PrefetchingPort.prefetch`."""

    num_held: int
    """Leading blocks of the chain that the tiers have."""
    transfer: TierTransfer | None
    """Those of them that are on their way up; it uses no place. None if none are."""


@runtime_checkable
class PrefetchingPort(TierPort, Protocol):
    """A port that brings blocks from slow tiers into the fastest one, for requests that wait for their turn."""

    @property
    def prefetch_blocks(self) -> int:
        """As many may be brought up for requests that wait, all together; 0: none."""
        ...

    def prefetch(self, digests: Sequence[Digest]) -> PortPrefetch:
        """Begins to bring up what slow tiers have of a chain's beginning.

        Args:
            digests: few at a time, since memory for them is taken.
        """
        ...


@runtime_checkable
class TieredScheduler(Protocol):
    """A scheduler that can use KV tiers, as its `SchedulerCapabilities` say."""

    def use_tiers(self, port: TierPort) -> None:
        """From now on loads prefixes from tiers and saves to them; called once, before the first request.

        Raises:
            Refused: its configuration, or the model's recurrent states, leave no prefix to share.
        """
        ...


@runtime_checkable
class PinsPrefixes(Protocol):
    """A scheduler whose cached prefixes can be kept while they are handed to another engine.

    One with a `KvCache` and one block table without a window returns `cache.pool.pin_prefix(digests)`.
    """

    def pin_prefix(self, digests: Sequence[Digest]) -> BlockPin:
        """Keeps the blocks of the longest beginning of a chain that the pool has, until the pin is closed."""
        ...


@runtime_checkable
class KvEventSource(Protocol):
    """A scheduler that says what its block pool holds, as its `SchedulerCapabilities` say."""

    def listen(self, listener: BlockListener) -> None:
        """From now on `listener` hears of every change; called once, before the first request.

        A scheduler with a `KvCache` hands it on: `cache.listen(listener)`.
        """
        ...
