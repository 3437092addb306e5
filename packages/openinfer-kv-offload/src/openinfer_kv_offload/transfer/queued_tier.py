"""`QueuedTier`: what the tiers have in common that find blocks in an index and move them in threads of their own."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from openinfer_kv_cache import (
    Digest,
    KvLayout,
    KvTierError,
    TierCondition,
    TierCounters,
    TierHit,
    TierListener,
    TierMedium,
    Transfer,
)
from openinfer_kv_cache.tiers.traits import BlockMemory
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer
from openinfer_kv_offload.transfer.counters import TierTotals
from openinfer_kv_offload.transfer.memory import check_blocks
from openinfer_kv_offload.transfer.queue import CLOSE_S, QueueOptions, TransferQueue, Urgency
from openinfer_kv_offload.transfer.telling import IndexListener, ToldOf


class Held(Protocol):
    """What a tier knows of a block that it holds."""

    @property
    def digest(self) -> Digest: ...


HeldBlock = TypeVar("HeldBlock", bound=Held)


class HeldHit(Generic[HeldBlock]):
    """Blocks held in a tier."""

    __slots__ = ("_release", "digests", "held", "tier")

    def __init__(self, held: list[HeldBlock], *, tier: object, release: Callable[[list[HeldBlock]], None]) -> None:
        self.tier = tier
        self.digests = tuple([each.digest for each in held])
        self.held: list[HeldBlock] | None = held  # None: a load has taken them over, or they were given back
        self._release = release

    def close(self) -> None:
        held, self.held = self.held, None
        if held:
            self._release(held)


class BlockIndex(Protocol[HeldBlock]):
    """Which blocks a tier has, and which of them are held. Not thread-safe: the tier locks."""

    listener: IndexListener

    def digests(self) -> Collection[Digest]:
        """Of all blocks that can be found."""
        ...

    def __len__(self) -> int: ...

    def hold_prefix(self, digests: Sequence[Digest]) -> list[HeldBlock]:
        """Holds the longest beginning of `digests` that is there."""
        ...

    def release(self, held: Sequence[HeldBlock]) -> None: ...

    def drop(self, held: HeldBlock, /) -> bool:
        """Makes a block that is not intact unfindable; False if it was already."""
        ...

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if its books contradict themselves."""
        ...


Index = TypeVar("Index", bound=BlockIndex[Any])


class QueuedTier(ABC, Generic[HeldBlock, Index]):
    """The caller's side of a `DeviceTier`: finds, and queues transfers that a subclass carries out.

    A subclass calls `_open_queue` when nothing can fail any more: the queue's threads begin there.
    """

    takes_device_blocks = True
    medium: ClassVar[TierMedium] = TierMedium.STORAGE

    _queue: TransferQueue

    def __init__(
        self,
        layout: KvLayout,
        index: Index,
        *,
        name: str,
        accepts_saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.layout = layout
        self.accepts_saves = accepts_saves
        self._index = index
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = TierTotals(name)

    def _open_queue(self, options: QueueOptions) -> None:
        self._queue = TransferQueue(self.name, options, self._counters, clock=self._clock)

    def find(self, digests: Sequence[Digest]) -> HeldHit[HeldBlock]:
        held = [] if self._queue.is_refusing else self._hold(digests)
        self._counters.count_find(hit_blocks=len(held), missed_blocks=len(digests) - len(held))
        return HeldHit(held, tier=self, release=self._release)

    def load(self, hit: TierHit, blocks: Sequence[BlockMemory], *, timeout_s: float | None = None) -> Transfer:
        own = cast("HeldHit[HeldBlock]", hit)
        if not isinstance(hit, HeldHit) or own.tier is not self or own.held is None:
            raise KvTierError(f"tier {self.name} can load only an open hit of its own, once")
        check_blocks(blocks, self.layout, num_blocks=len(hit.digests), writable=True)
        held, own.held = own.held, None
        return self._queue.submit(
            lambda transfer: self._load(transfer, held, blocks),
            num_blocks=len(held),
            timeout_s=timeout_s,
            urgency=Urgency.LOAD,
            release=lambda: self._release(held),
        )

    def save(
        self, digests: Sequence[Digest], blocks: Sequence[BlockMemory], *, timeout_s: float | None = None
    ) -> Transfer:
        if not self.accepts_saves:
            raise KvTierError(f"tier {self.name} was opened with access=read: other processes write to it")
        check_blocks(blocks, self.layout, num_blocks=len(digests), writable=False)
        return self._queue.submit(
            lambda transfer: self._save(transfer, digests, blocks),
            num_blocks=len(digests),
            timeout_s=timeout_s,
            urgency=Urgency.SAVE,
            release=lambda: None,  # a save holds nothing of the tier before it runs
        )

    def listen(self, listener: TierListener) -> None:
        with self._lock:
            known = list(self._index.digests())
            if known:
                listener.stored(known, self.medium)
            self._index.listener = ToldOf(listener, self.medium)

    def counters(self) -> tuple[TierCounters, ...]:
        return (self._counters.snapshot(stored_blocks=len(self._index), condition=self._condition()),)

    def close(self) -> None:
        self.close_within(CLOSE_S)

    def close_within(self, timeout_s: float) -> bool:
        return self._queue.close(timeout_s, after=self._close_medium)

    def check_integrity(self) -> None:
        with self._lock:
            self._index.check_integrity()

    # The threads' side.

    @abstractmethod
    def _load(self, transfer: BlockTransfer, held: Sequence[HeldBlock], blocks: Sequence[BlockMemory]) -> None:
        """Copies held blocks to `blocks`, and completes them one after the other."""

    @abstractmethod
    def _save(self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[BlockMemory]) -> None:
        """Stores those blocks that are not there yet, and completes all one after the other."""

    def _close_medium(self) -> None:
        """Closes what the threads have used, in the last of them."""

    def _condition(self) -> TierCondition:
        return self._queue.condition

    def _hold(self, digests: Sequence[Digest]) -> list[HeldBlock]:
        with self._lock:
            return self._index.hold_prefix(digests)

    def _release(self, held: Sequence[HeldBlock]) -> None:
        with self._lock:
            self._index.release(held)

    def _drop(self, held: HeldBlock) -> bool:
        with self._lock:
            return self._index.drop(held)
