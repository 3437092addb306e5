"""`TierStack`: tiers one above the other, fastest first, that are one tier together."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, cast

import msgspec

from openinfer_kv_cache import (
    BoundedTier,
    CopyingTier,
    DeviceTier,
    Digest,
    EvictingTier,
    KvTier,
    KvTierError,
    LastingTier,
    MemorySource,
    Prefetch,
    ResidentTier,
    SharedTier,
    TellingTier,
    TierCounters,
    TierHit,
    TierListener,
    Transfer,
    check_same_layout,
    close_tier,
)
from openinfer_kv_cache.tiers.closing import BackgroundCall
from openinfer_kv_cache.tiers.traits import BlockMemory
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.host.arena import Arena
from openinfer_kv_offload.stack.transfer import StackTransfer
from openinfer_kv_offload.stack.write_behind import WriteBehindWorker
from openinfer_kv_offload.transfer.queue import CLOSE_S

_log = logging.getLogger(__name__)
_PREFETCH_PART = 4
"""One block in so many of the first tier's may be brought up for requests that wait: the others are in use, or idle and
may be wanted sooner."""
_FLUSH_PART = 2
"""Of the time that an end may take, one part in so many is for handing blocks down; the rest is for threads to stop."""


class WriteMode(StrEnum):
    """Where a save goes."""

    THROUGH = "through"
    """Into every tier at once that accepts saves."""
    BEHIND = "behind"
    """Into the first, which is all that a save waits for; from there into the others (`write_behind.py`)."""
    BACK = "back"
    """Into the first; a tier hands to the next what it evicts (demotion)."""


class Promotion(StrEnum):
    """What becomes of a block that a lower tier had."""

    ON_LOAD = "on_load"
    """The tiers above save it from the caller's memory, before the load ends."""
    NEVER = "never"


class StackOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a `TierStack`."""

    write: WriteMode = WriteMode.THROUGH
    promotion: Promotion = Promotion.ON_LOAD
    demotion_timeout_s: float = 10.0
    """How long an eviction waits for the tier below, before its block is lost; and `close`, for write-behind."""
    flush_on_close: bool = False
    """Whether `close` first hands down all that only the upper tiers have; that may take long. `close_within` hands
    down what it can in half of its time: an engine that ends has a few seconds."""
    shared_in: str | None = None
    """Name of a tier that others read, for which `completed_blocks` of a save speaks, instead of for the best of them:
    what an engine that hands its KV to others waits for. Saves go to all tiers at once then (`write=through`)."""

    def __post_init__(self) -> None:
        if self.shared_in is not None and self.write is not WriteMode.THROUGH:
            raise TierConfigError(f"shared_in={self.shared_in} needs write=through, not {self.write}")


class Part(NamedTuple):
    """Neighbouring blocks of a hit that one tier has."""

    level: int
    hit: TierHit


class StackHit:
    """Blocks held in several tiers."""

    __slots__ = ("digests", "parts")

    def __init__(self, parts: list[Part]) -> None:
        self.digests = tuple([digest for part in parts for digest in part.hit.digests])
        self.parts: list[Part] | None = parts

    def close(self) -> None:
        parts, self.parts = self.parts, None
        for part in parts or ():
            part.hit.close()


class TierStack:
    """Several tiers as one, fastest first; it owns them and closes them.

    A save completes when every tier that it goes to has all blocks; if one is partial, `completed_blocks` is what
    the best of them has.

    Raises:
        LayoutMismatchError: two tiers hold different layouts.
        TierConfigError: fewer than two tiers, two of one name, write-back above a tier that evicts without a word, or
            write-behind one that cannot be copied from, or `shared_in` names none that others read.
    """

    def __init__(self, tiers: Sequence[KvTier], options: StackOptions | None = None, *, name: str = "stack") -> None:
        self.name = name
        # Those that take no device blocks are given none: a caller that has some asks `takes_device_blocks` first.
        self._tiers = cast("list[DeviceTier]", list(tiers))
        self._options = options or StackOptions()
        if len({tier.name for tier in tiers}) != len(tiers) or len(tiers) < 2:
            raise TierConfigError(f"a stack needs two tiers or more, of different names; got {[t.name for t in tiers]}")
        self.layout = tiers[0].layout
        self.takes_device_blocks = all(isinstance(tier, DeviceTier) and tier.takes_device_blocks for tier in tiers)
        self.accepts_saves = any(tier.accepts_saves for tier in tiers)
        for tier in tiers[1:]:
            check_same_layout(self.layout, tier.layout)
        self._bounded_first = tiers[0] if isinstance(tiers[0], BoundedTier) else None  # asked once, wanted in each step
        self._key = _common_key(tiers)
        self._shared = self._find_shared(self._options.shared_in)
        self._worker = self._make_worker() if self._options.write is WriteMode.BEHIND else None
        if self._options.write is WriteMode.BACK:
            for upper, lower in zip(self._tiers, self._tiers[1:], strict=False):
                self._join(upper, lower)

    def pinnable_memory(self) -> Sequence[memoryview]:
        return [memory for tier in self._tiers for memory in tier.pinnable_memory()]

    def use_memory(self, device: MemorySource | None) -> None:
        for tier in self._tiers:
            if isinstance(tier, ResidentTier):
                tier.use_memory(device)

    @property
    def digest_key(self) -> bytes | None:
        """The lasting tiers' key; None if one has none or two differ; random without such tiers."""
        return self._key

    def find(self, digests: Sequence[Digest]) -> StackHit:
        parts: list[Part] = []
        position = 0
        while position < len(digests) and (part := self._find_part(digests[position:])) is not None:
            parts.append(part)
            position += len(part.hit.digests)
        return StackHit(parts)

    def load(self, hit: TierHit, blocks: Sequence[BlockMemory], *, timeout_s: float | None = None) -> Transfer:
        if not isinstance(hit, StackHit) or hit.parts is None:
            raise KvTierError(f"{self.name} can load only an open hit of its own, once")
        if len(blocks) != len(hit.digests):
            raise KvTierError(f"the hit has {len(hit.digests)} blocks; {len(blocks)} were given to load it into")
        parts, hit.parts = hit.parts, None
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        loads: list[Transfer] = []
        promotions: list[Callable[[int], list[Transfer]]] = []
        try:
            for part in parts:
                into, blocks = blocks[: len(part.hit.digests)], blocks[len(part.hit.digests) :]
                loads.append(self._tiers[part.level].load(part.hit, into, timeout_s=timeout_s))
                promotions.append(self._promotion(part, into, deadline_s))
        except BaseException:
            _abandon(loads, parts[len(loads) :])
            raise
        return StackTransfer.of_load(loads, promotions)

    @property
    def prefetch_blocks(self) -> int:
        first = self._bounded_first
        if self._options.promotion is Promotion.NEVER or first is None or not self._tiers[0].accepts_saves:
            return 0
        return first.num_blocks // _PREFETCH_PART

    def prefetch(self, digests: Sequence[Digest], *, timeout_s: float | None = None) -> Prefetch:
        """As `PrefetchingTier` has it: a load into memory of the stack's own, which the tiers above save from."""
        hit = self.find(digests)
        parts, hit.parts = hit.parts or [], None
        for part in parts:
            if not part.level:
                part.hit.close()
        below = StackHit([part for part in parts if part.level])
        num_blocks = len(below.digests)
        if not num_blocks or not self.prefetch_blocks:
            below.close()
            return Prefetch(len(hit.digests), None)
        block_bytes = self.layout.block_bytes
        memory = Arena(num_blocks * block_bytes)  # its pages are taken by the threads that fill them
        blocks = [memory.view(at * block_bytes, block_bytes) for at in range(num_blocks)]
        return Prefetch(len(hit.digests), self.load(below, blocks, timeout_s=timeout_s))

    def save(
        self, digests: Sequence[Digest], blocks: Sequence[BlockMemory], *, timeout_s: float | None = None
    ) -> Transfer:
        tiers = [tier for tier in self._tiers if tier.accepts_saves]
        if not tiers:
            raise KvTierError(f"no tier of {self.name} accepts saves; other processes fill them")
        worker = self._worker
        if worker is not None or self._options.write is WriteMode.BACK:
            tiers = tiers[:1]

        def follow() -> None:
            if worker is not None:
                worker.enqueue(digests)

        saves: list[Transfer] = []
        try:
            for tier in tiers:
                saves.append(tier.save(digests, blocks, timeout_s=timeout_s))  # noqa: PERF401 -- kept when one raises
        except BaseException:
            _abandon(saves, ())
            raise
        if self._shared is None:
            return StackTransfer.of_save(saves, follow)
        handover = [save for save, tier in zip(saves, tiers, strict=True) if tier is self._shared]
        return StackTransfer.of_save(saves, follow, handover=handover)

    def listen(self, listener: TierListener) -> None:
        for tier in self._tiers:
            if isinstance(tier, TellingTier):
                tier.listen(listener)

    def look_up(self, digests: Sequence[Digest]) -> None:
        for tier in self._tiers:
            if isinstance(tier, SharedTier):
                tier.look_up(digests)

    def flush(self) -> None:
        """Gives what is above to the tiers below; before `close`. With write-back, and then in this thread, that is all
        above the last tier; with write-behind it waits for what has not been handed down yet.
        """
        if self._worker is not None:
            self._worker.flush()
        if self._options.write is WriteMode.BACK:
            for tier in self._tiers[:-1]:
                if isinstance(tier, EvictingTier):
                    tier.demote_all()

    def counters(self) -> tuple[TierCounters, ...]:
        # A find asks a lower tier only for what the upper ones do not have: their finds are not the stack's.
        return tuple(each for tier in self._tiers for each in tier.counters())

    def close(self) -> None:
        """Closes the tiers; what only the upper ones have is lost unless `flush` came first, or `flush_on_close`."""
        if self._options.flush_on_close:
            self.flush()
        flush_s = 0.0 if self._worker is None else self._options.demotion_timeout_s
        self._close(flush_s, flush_s + CLOSE_S * (1 + len(self._tiers)))

    def close_within(self, timeout_s: float) -> bool:
        until_s, flush_s = time.monotonic() + timeout_s, timeout_s / _FLUSH_PART
        if self._options.flush_on_close:
            flushing = BackgroundCall(self.flush, name=f"kv-tier-{self.name}-flush")
            if not flushing.wait(flush_s):
                _log.warning("%s: not all KV blocks were handed down in %.1f s", self.name, flush_s)
            flush_s = 0.0
        return self._close(min(flush_s, self._options.demotion_timeout_s), until_s - time.monotonic())

    def _close(self, flush_s: float, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        # What has not been handed down yet has `flush_s` for it; the tiers that it goes to are open until then.
        num_left = 1 + len(self._tiers)
        have_ended = self._worker is None or self._worker.close(flush_s, flush_s + (timeout_s - flush_s) / num_left)
        error: Exception | None = None
        # Upper tiers first: what they evict until their threads have stopped goes to a lower one that is open.
        for tier in self._tiers:
            num_left -= 1
            try:
                have_ended &= close_tier(tier, max(0.0, until_s - time.monotonic()) / num_left)
            except Exception as raised:  # noqa: BLE001 -- raised when the tiers below it are closed, too
                error = error or raised
        if error is not None:
            raise error
        return have_ended

    def _find_shared(self, name: str | None) -> KvTier | None:
        if name is None:
            return None
        for tier in self._tiers:
            if tier.name == name:
                if not isinstance(tier, SharedTier):
                    raise TierConfigError(f"shared_in={name}: no other process can read that tier")
                return tier
        raise TierConfigError(f"shared_in={name} names none of {[tier.name for tier in self._tiers]}")

    def _make_worker(self) -> WriteBehindWorker:
        first, *others = self._tiers
        lowers = [tier for tier in others if tier.accepts_saves]
        if not (isinstance(first, CopyingTier) and first.accepts_saves):
            raise TierConfigError(f"write-behind copies from the first tier, and {first.name} cannot be copied from")
        return WriteBehindWorker(first, lowers, timeout_s=self._options.demotion_timeout_s)

    def _join(self, upper: KvTier, lower: KvTier) -> None:
        if not isinstance(upper, EvictingTier):
            raise TierConfigError(
                f"write-back needs tiers that hand on what they evict, and {upper.name} does not; use write-through"
            )
        if not (upper.accepts_saves and lower.accepts_saves):
            raise TierConfigError(
                f"write-back from {upper.name} to {lower.name} needs both to accept saves; use write-through"
            )
        timeout_s = self._options.demotion_timeout_s

        def sink(digest: Digest, block: memoryview) -> None:
            lower.save([digest], [block], timeout_s=timeout_s).wait()

        upper.demote_to(sink)

    def _find_part(self, digests: Sequence[Digest]) -> Part | None:
        for level, tier in enumerate(self._tiers):
            hit = tier.find(digests)
            if hit.digests:
                return Part(level, hit)
            hit.close()
        return None

    def _promotion(
        self, part: Part, blocks: Sequence[BlockMemory], deadline_s: float | None
    ) -> Callable[[int], list[Transfer]]:
        wanted = self._options.promotion is Promotion.ON_LOAD
        above = [tier for tier in self._tiers[: part.level] if wanted and tier.accepts_saves]
        digests = part.hit.digests

        def promote(completed: int) -> list[Transfer]:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if not completed or (left_s is not None and left_s <= 0):
                return []
            saves: list[Transfer] = []
            try:
                for tier in above:
                    save = tier.save(digests[:completed], blocks[:completed], timeout_s=left_s)
                    saves.append(save)
            except Exception:  # noqa: BLE001 -- the fault boundary: the load is good without it; what has begun is waited for
                _log.exception("KV blocks could not be promoted into %s", above[len(saves)].name)
            return saves

        return promote


def _common_key(tiers: Sequence[KvTier]) -> bytes | None:
    keys = [tier.digest_key for tier in tiers if isinstance(tier, LastingTier)] or [secrets.token_bytes(32)]
    return keys[0] if all(key == keys[0] for key in keys) else None


def _abandon(begun: Sequence[Transfer], left: Sequence[Part]) -> None:
    """A later tier raised: nothing may stay under way that the caller has no transfer for."""
    for transfer in begun:
        transfer.cancel()
    for part in left:
        part.hit.close()
    for transfer in begun:
        transfer.wait()
