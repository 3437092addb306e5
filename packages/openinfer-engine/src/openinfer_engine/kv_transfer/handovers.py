"""`Handovers`: answers that wait until their prompt's blocks are in the tier that other engines read.

    finished ── pin, save ──► handover ── all blocks are there ──────────────► told: the whole prompt
                               │    ▲ └── the deadline is over, or it fails ► told: what is there of its beginning
                               └────┘ a save that ended early is begun again

A save counts when the tier has the block, on every rank: then another process that looks it up can read it. Most blocks
are there already, since each is saved when it is sealed; what was evicted since, or was not saved because too much was
on its way, is saved now. Blocks are pinned meanwhile, at most half of the pool; the deadline grows with their bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer_core.events import Finished
from openinfer_core.request import RequestId
from openinfer_kv_cache import BlockPin, Digest, PinsPrefixes, TierPort, TierTransfer

_BYTES_PER_S = 64 << 20
_MOST_TRIES, _RETRY_S = 4, 0.05
_SHARE = 2  # of the pool, one in so many blocks may be pinned


@dataclass(slots=True, eq=False)
class _Handover:
    finished: Finished
    digests: Sequence[Digest]
    latest_s: float
    pin: BlockPin | None = None  # None before it begins
    transfer: TierTransfer | None = None
    retry_s: float = 0.0
    tries: int = 0
    completed_blocks: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """An answer that waits no longer."""

    finished: Finished
    digests: Sequence[Digest]  # of the blocks that can be read, from the prompt's beginning on
    is_whole: bool


@dataclass(slots=True, eq=False)
class Handovers:
    """Of one engine.

    Args:
        scheduler: has the blocks.
        port: to the tiers.
        block_bytes: of one block on all ranks.
        num_blocks: of the pool.
        timeout_s: that an answer waits at most, and a second more for each 64 MiB.
    """

    scheduler: PinsPrefixes
    port: TierPort
    block_bytes: int
    num_blocks: int
    timeout_s: float
    _open: dict[RequestId, _Handover] = field(default_factory=dict[RequestId, _Handover])
    _left: list[_Handover] = field(default_factory=list[_Handover])  # told already, their blocks not unpinned yet

    def __len__(self) -> int:
        return len(self._open) + len(self._left)

    @property
    def open_ids(self) -> set[RequestId]:
        return set(self._open)

    def begin(self, finished: Finished, digests: Sequence[Digest], *, now_s: float) -> None:
        wanted_s = self.timeout_s + len(digests) * self.block_bytes / _BYTES_PER_S
        handover = _Handover(finished, digests, now_s + wanted_s)
        self._open[finished.request_id] = handover
        self._try(handover)

    def settle(self, *, now_s: float) -> list[HandedOver]:
        """What is stored, or need not be waited for any longer."""
        self._left = [handover for handover in self._left if not _unpin(handover)]
        over = [handover for handover in self._open.values() if self._is_over(handover, now_s=now_s)]
        return [self._tell(handover) for handover in over]

    def withdraw(self, request_id: RequestId) -> Finished | None:
        """The answer of a request that its caller does not want any longer; None if it does not wait here."""
        handover = self._open.get(request_id)
        if handover is None:
            return None
        self._leave(handover)
        return handover.finished

    def _is_over(self, handover: _Handover, *, now_s: float) -> bool:
        if handover.transfer is not None and handover.transfer.is_over():
            handover.completed_blocks = handover.transfer.completed_blocks
            handover.transfer = None
            handover.retry_s = now_s + _RETRY_S
        is_late = now_s >= handover.latest_s
        if handover.transfer is not None:
            if is_late:
                handover.completed_blocks = handover.transfer.completed_blocks
            return is_late
        if is_late or (handover.pin is not None and self._is_at_its_end(handover, handover.pin)):
            return True
        if now_s >= handover.retry_s:
            self._try(handover)
        return False

    def _is_at_its_end(self, handover: _Handover, pin: BlockPin) -> bool:
        return handover.completed_blocks >= len(pin.block_ids) or handover.tries >= _MOST_TRIES

    def _try(self, handover: _Handover) -> None:
        """Begins to save what is not in the tier yet, if there is room for more pins."""
        if handover.pin is None:
            if self._num_pinned and self._num_pinned + len(handover.digests) > self.num_blocks // _SHARE:
                return
            handover.pin = self.scheduler.pin_prefix(handover.digests)
        block_ids = handover.pin.block_ids
        handover.tries += 1
        if block_ids:
            # Blocks that the tier has count as saved, and cost nothing.
            handover.transfer = self.port.save(handover.digests[: len(block_ids)], block_ids)

    @property
    def _num_pinned(self) -> int:
        pins = (handover.pin for handover in (*self._open.values(), *self._left))
        return sum(len(pin.block_ids) for pin in pins if pin is not None)

    def _tell(self, handover: _Handover) -> HandedOver:
        self._leave(handover)
        completed = handover.completed_blocks
        return HandedOver(handover.finished, handover.digests[:completed], is_whole=completed == len(handover.digests))

    def _leave(self, handover: _Handover) -> None:
        del self._open[handover.finished.request_id]
        if not _unpin(handover):
            if handover.transfer is not None:
                handover.transfer.cancel()
            self._left.append(handover)


def _unpin(handover: _Handover) -> bool:
    """Whether no copy reads its blocks any more, which are given back then."""
    if handover.transfer is not None and not handover.transfer.is_over():
        return False
    if handover.pin is not None:
        handover.pin.close()
    return True
