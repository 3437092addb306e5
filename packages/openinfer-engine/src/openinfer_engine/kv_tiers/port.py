"""`PoolTierPort`: the tiers of an engine and the blocks of its pool, as `openinfer_kv_cache.TierPort` has them.

    find(digests)           the longest beginning of a chain that the tiers hold
    load(found, places)     what was found, on its way into those places
    save(digests, places)   sealed blocks on their way out
    prefetch(digests)       from slow tiers into the fastest one, before they are loaded

A place is a block, by its id, or one of the chunks of a slot of recurrent states, which is as large (`state_places`).

Nothing here waits but `wait` and `close`. A tier that raises is left alone from then on: its fault is counted and
logged, and everything it was asked for is computed instead. A transfer that raises ends the engine, since what
still touches the pool's blocks is not known then.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import cast

from openinfer_core.engine import KvTierStats
from openinfer_engine.kv_tiers.share import RankShare
from openinfer_engine.kv_tiers.stats import stats_of, total_of_ranks
from openinfer_engine.kv_tiers.transfer import ChunkedTransfer, RankedTransfer, TracedTransfer
from openinfer_engine.tracing.trace import NoTrace, Tracer
from openinfer_kv_cache import (
    Digest,
    KvTier,
    PortPrefetch,
    PrefetchingTier,
    PrefixHit,
    SharedTier,
    TierHit,
    TierTransfer,
    Transfer,
    close_tier,
)
from openinfer_kv_cache.tiers.closing import BackgroundCall
from openinfer_kv_cache.tiers.traits import BlockMemory

logger = logging.getLogger("openinfer.engine")

# Blocks of one transfer: enough for its cost to vanish, few enough for several threads of a tier to share a prompt.
CHUNK_BLOCKS = 32
_CHUNK_BYTES, _MOST_CHUNK_BLOCKS = 160 << 20, 128
TIMEOUT_BLOCKS = 2048
"""A load has its timeout once for each so many blocks: what is long to load is longer to compute."""
CLOSE_S = 4.0
"""What the end of a port may take in all. Ranks in processes of their own close theirs after it, in as long, and the
engine's process has 10 s before it is killed."""
_TOLD_PART = 0.8  # of what is left of it, what the tiers are told
_FINISH_S = 1.0  # of it, for copies to complete, and as long again for them to stop


def chunk_blocks_for(block_bytes: int) -> int:
    """Blocks of one transfer: more of small ones, whose copies are over before the next transfer is begun."""
    return max(CHUNK_BLOCKS, min(_MOST_CHUNK_BLOCKS, _CHUNK_BYTES // block_bytes))


class PoolTierPort:
    """The tiers of one engine and the blocks of its pool. Called by one thread, but for `stats`.

    Args:
        tier: a tier, or a stack of them; closed by `close`.
        blocks: the pool's, by block id.
        states: the chunks of each slot of recurrent states; none for a model without.
        shares: of the other ranks, which do the same with theirs; closed by `close`.
        load_timeout_s: after which what has not completed is computed instead, for each `TIMEOUT_BLOCKS` begun.
        chunk_blocks: that one transfer moves; a load is several, side by side.
        save_timeout_s: after which a save is given up.
        before_close: called when nothing touches the blocks any more, before the tier is closed.
        clock: monotonic seconds.
        tracer: told of each load and save when it is over.
    """

    def __init__(
        self,
        tier: KvTier,
        blocks: Sequence[BlockMemory],
        *,
        states: Sequence[Sequence[BlockMemory]] = (),
        shares: Sequence[RankShare] = (),
        load_timeout_s: float,
        chunk_blocks: int = CHUNK_BLOCKS,
        save_timeout_s: float = 30.0,
        before_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self._tier = tier
        self._tracer = tracer or NoTrace()
        self._places = [*blocks, *(chunk for slot in states for chunk in slot)]
        self._num_blocks = len(blocks)
        self._shares = shares
        # Of the recurrent states of one sequence; 0 for a model without.
        self.chunks_per_slot = len(states[0]) if states else 0
        self._load_timeout_s = load_timeout_s
        self._chunk_blocks = chunk_blocks
        self._save_timeout_s = save_timeout_s
        self._before_close = before_close
        self.clock = clock
        self._transfers: dict[TierTransfer, None] = {}  # in order: what is waited for does not depend on addresses
        self._is_broken = False
        self._faults = 0

    @property
    def is_moving(self) -> bool:
        """Whether something is on its way, or was when it was last looked at."""
        return bool(self._transfers)

    def state_places(self, slot: int) -> Sequence[int]:
        begin = self._num_blocks + slot * self.chunks_per_slot
        return range(begin, begin + self.chunks_per_slot)

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        """The longest beginning of a chain that the tiers hold, maybe empty."""
        hits: list[TierHit] = []
        try:
            for begin in range(0, 0 if self._is_broken else len(digests), self._chunk_blocks):
                asked = digests[begin : begin + self._chunk_blocks]
                hit = self._tier.find(asked)
                if hit.digests:
                    hits.append(hit)
                else:
                    hit.close()
                if len(hit.digests) < len(asked):
                    break
        except Exception as error:  # noqa: BLE001 -- the fault boundary: a tier's fault costs a recomputation, not the engine
            self._break("find", error)
        return PrefixHit(hits)

    def find_looking_up(self, digests: Sequence[Digest]) -> PrefixHit:
        """`find` of what rank 0's tiers have: what this rank's list lacks, another engine may have saved since."""
        found = self.find(digests)
        if found.num_blocks == len(digests):
            return found
        found.close()
        with contextlib.suppress(OSError):  # then it is a miss, and computed
            self.look_up(digests)
        return self.find(digests)

    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        """Begins to fill places with what was found; None if that is nothing, or cannot be loaded.

        Args:
            found: is spent.
            places: writable, as many as were found or more; those that the transfer does not cover stay as they are.
        """
        chunks: list[Transfer] = []
        hits, found.hits = found.hits, []  # `load` takes each over: closing what was found must not close them again
        digests = [digest for hit in hits for digest in hit.digests]
        timeout_s = self._load_timeout_s * -(-len(digests) // TIMEOUT_BLOCKS)
        try:
            place = 0
            for hit in hits:
                into = self._memory(places[place : place + len(hit.digests)])
                chunks.append(self._tier.load(hit, into, timeout_s=timeout_s))
                place += len(into)
        except Exception as error:  # noqa: BLE001 -- the fault boundary, as above
            self._break("load", error)
            # What has begun goes on; a hit whose load did not begin is still ours to close.
            for hit in hits[len(chunks) :]:
                hit.close()
        if not chunks:
            return None
        return self._begin("load", chunks, [share.load(digests, places) for share in self._shares])

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer | None:
        """Begins to copy what no step writes to any more into the tiers; None if these take none."""
        if self._is_broken or not self._tier.accepts_saves:
            return None
        chunks: list[Transfer] = []
        try:
            for begin in range(0, len(digests), self._chunk_blocks):
                chunk = slice(begin, begin + self._chunk_blocks)
                memory = self._memory(places[chunk])
                chunks.append(self._tier.save(digests[chunk], memory, timeout_s=self._save_timeout_s))
        except Exception as error:  # noqa: BLE001 -- the fault boundary, as above
            self._break("save", error)
        if not chunks:
            return None
        return self._begin("save", chunks, [share.save(digests, places) for share in self._shares])

    @cached_property
    def _prefetching(self) -> PrefetchingTier | None:
        """The tier, if it prefetches. Asked once: each step wants to know, and looking for all methods takes longer."""
        return self._tier if isinstance(self._tier, PrefetchingTier) else None

    @property
    def prefetch_blocks(self) -> int:
        """How many blocks may be brought up for requests that wait; 0 where there is one tier, or promotion is off."""
        try:
            return 0 if self._is_broken or self._prefetching is None else self._prefetching.prefetch_blocks
        except Exception as error:  # noqa: BLE001 -- the fault boundary, as above
            self._break("prefetch_blocks", error)
            return 0

    def prefetch(self, digests: Sequence[Digest]) -> PortPrefetch:
        """Begins to bring what slow tiers have of a chain's beginning into the fastest one, on all ranks."""
        if self._is_broken or self._prefetching is None:
            return PortPrefetch(0, None)
        try:
            found = self._prefetching.prefetch(digests, timeout_s=self._load_timeout_s)
        except Exception as error:  # noqa: BLE001 -- the fault boundary, as above
            self._break("prefetch", error)
            return PortPrefetch(0, None)
        if found.transfer is None:
            return PortPrefetch(found.num_held, None)
        for share in self._shares:
            share.prefetch(digests)  # what a rank has not in time it loads from where it is
        return PortPrefetch(found.num_held, self._begin("prefetch", [found.transfer], ()))

    def look_up(self, digests: Sequence[Digest]) -> None:
        """Asks a tier that others write to for what they have saved; waits for it, so from threads of the caller's.

        Raises:
            OSError: its medium cannot be reached, or refuses.
        """
        if isinstance(self._tier, SharedTier) and not self._is_broken:
            self._tier.look_up(digests)

    def settle(self) -> None:
        self._transfers = {transfer: None for transfer in self._transfers if not transfer.is_over()}

    def wait(self, timeout_s: float) -> None:
        """Waits until one of the transfers has come further, at most so long."""
        for transfer in self._transfers:
            transfer.wait(timeout_s)
            break

    def stats(self) -> tuple[KvTierStats, ...]:
        """One entry for each tier, of all ranks; from any thread."""
        try:
            counted = self._tier.counters()
        except Exception as error:  # noqa: BLE001 -- the fault boundary, as above
            self._break("counters", error)
            return ()
        return total_of_ranks([stats_of(counted), *(share.stats() for share in self._shares)])

    @property
    def faults(self) -> int:
        """Times a tier raised where it may not, on any rank."""
        return self._faults + sum(share.faults for share in self._shares)

    def close(self) -> None:
        """Lets transfers complete, not for long, then ends them; closes the tiers once no copy touches the pool.

        All of that takes `CLOSE_S` at most: what has not ended then is left behind in its threads. Idempotent.
        """
        until_s = self.clock() + CLOSE_S
        self._wait_for_all(_FINISH_S)
        for transfer in self._transfers:
            transfer.cancel()
        self._wait_for_all(_FINISH_S)
        if self._transfers:
            logger.warning("KV tiers: %d transfers hang in their medium and are left behind", len(self._transfers))
        self._transfers.clear()
        # Between the last copy and the end of the tier: memory is unlocked while it is still there, and once.
        before_close, self._before_close = self._before_close, lambda: None
        before_close()
        left_s = until_s - self.clock()
        closings = [BackgroundCall(share.close, name="kv-tiers-close") for share in self._shares]
        # Also a tier that is told its time, in a thread: a plug-in may hang in spite of it.
        told_s = left_s * _TOLD_PART
        closings.append(BackgroundCall(lambda: self._close_tier(told_s), name="kv-tiers-close"))
        if not all(closing.wait(until_s - self.clock()) for closing in closings):
            logger.warning("KV tiers: not all of them could be closed in %.1f s; they end with the process", left_s)

    def _close_tier(self, timeout_s: float) -> None:
        try:
            close_tier(self._tier, timeout_s)
        except Exception as error:  # noqa: BLE001 -- the fault boundary, as above: what the engine closes next is closed
            self._break("close", error)

    def _wait_for_all(self, timeout_s: float) -> None:
        until_s = self.clock() + timeout_s
        self.settle()
        while self._transfers and self.clock() < until_s:
            self.wait(0.1)
            self.settle()

    def _memory(self, places: Sequence[int]) -> list[memoryview]:
        """Places as the tier takes them; its maker has checked that it takes the pool's kind."""
        memory = cast("Sequence[memoryview]", self._places)
        return [memory[place] for place in places]

    def _begin(self, name: str, chunks: Sequence[Transfer], others: Sequence[TierTransfer]) -> TierTransfer:
        num_blocks = sum(chunk.num_blocks for chunk in chunks)
        transfer: TierTransfer = ChunkedTransfer(chunks, num_blocks=num_blocks, begin_s=self.clock())
        if others:
            transfer = RankedTransfer([transfer, *others])
        if self._tracer.is_on:
            transfer = TracedTransfer(transfer, name, self._tracer)
        self._transfers[transfer] = None
        return transfer

    def _break(self, verb: str, error: Exception) -> None:
        self._faults += 1
        self._is_broken = True
        logger.error("KV tier %s raised in %s and is not used any more", self._tier.name, verb, exc_info=error)
