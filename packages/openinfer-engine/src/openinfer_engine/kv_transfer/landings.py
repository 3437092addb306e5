"""`Landings`: answers that wait until their prompt's blocks are in the tier that other engines read.

    finished ── pin, save ──► landing ── all blocks are there ──────────────► told: the whole prompt
                               │   ▲ └── the deadline is over, or it fails ─► told: what is there of its beginning
                               └───┘ a save that ended early is begun again

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
class _Landing:
    finished: Finished
    digests: Sequence[Digest]
    latest_s: float
    pin: BlockPin | None = None  # None before it begins
    transfer: TierTransfer | None = None
    retry_s: float = 0.0
    tries: int = 0
    completed_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Landed:
    """An answer that waits no longer."""

    finished: Finished
    digests: Sequence[Digest]  # of the blocks that can be read, from the prompt's beginning on
    is_whole: bool


@dataclass(slots=True, eq=False)
class Landings:
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
    _open: dict[RequestId, _Landing] = field(default_factory=dict[RequestId, _Landing])
    _left: list[_Landing] = field(default_factory=list[_Landing])  # told already, their blocks not unpinned yet

    def __len__(self) -> int:
        return len(self._open) + len(self._left)

    @property
    def open_ids(self) -> set[RequestId]:
        return set(self._open)

    def begin(self, finished: Finished, digests: Sequence[Digest], *, now_s: float) -> None:
        wanted_s = self.timeout_s + len(digests) * self.block_bytes / _BYTES_PER_S
        landing = _Landing(finished, digests, now_s + wanted_s)
        self._open[finished.request_id] = landing
        self._try(landing)

    def settle(self, *, now_s: float) -> list[Landed]:
        """What has landed, or need not be waited for any longer."""
        self._left = [landing for landing in self._left if not _unpin(landing)]
        over = [landing for landing in self._open.values() if self._is_over(landing, now_s=now_s)]
        return [self._tell(landing) for landing in over]

    def withdraw(self, request_id: RequestId) -> Finished | None:
        """The answer of a request that its caller does not want any longer; None if it does not wait here."""
        landing = self._open.get(request_id)
        if landing is None:
            return None
        self._leave(landing)
        return landing.finished

    def _is_over(self, landing: _Landing, *, now_s: float) -> bool:
        if landing.transfer is not None and landing.transfer.is_over():
            landing.completed_blocks = landing.transfer.completed_blocks
            landing.transfer = None
            landing.retry_s = now_s + _RETRY_S
        is_late = now_s >= landing.latest_s
        if landing.transfer is not None:
            if is_late:
                landing.completed_blocks = landing.transfer.completed_blocks
            return is_late
        if is_late or (landing.pin is not None and self._is_at_its_end(landing, landing.pin)):
            return True
        if now_s >= landing.retry_s:
            self._try(landing)
        return False

    def _is_at_its_end(self, landing: _Landing, pin: BlockPin) -> bool:
        return landing.completed_blocks >= len(pin.block_ids) or landing.tries >= _MOST_TRIES

    def _try(self, landing: _Landing) -> None:
        """Begins to save what is not in the tier yet, if there is room for more pins."""
        if landing.pin is None:
            if self._num_pinned and self._num_pinned + len(landing.digests) > self.num_blocks // _SHARE:
                return
            landing.pin = self.scheduler.pin_prefix(landing.digests)
        block_ids = landing.pin.block_ids
        landing.tries += 1
        if block_ids:
            # Blocks that the tier has count as saved, and cost nothing.
            landing.transfer = self.port.save(landing.digests[: len(block_ids)], block_ids)

    @property
    def _num_pinned(self) -> int:
        pins = (landing.pin for landing in (*self._open.values(), *self._left))
        return sum(len(pin.block_ids) for pin in pins if pin is not None)

    def _tell(self, landing: _Landing) -> Landed:
        self._leave(landing)
        completed = landing.completed_blocks
        return Landed(landing.finished, landing.digests[:completed], is_whole=completed == len(landing.digests))

    def _leave(self, landing: _Landing) -> None:
        del self._open[landing.finished.request_id]
        if not _unpin(landing):
            if landing.transfer is not None:
                landing.transfer.cancel()
            self._left.append(landing)


def _unpin(landing: _Landing) -> bool:
    """Whether no copy reads its blocks any more, which are given back then."""
    if landing.transfer is not None and not landing.transfer.is_over():
        return False
    if landing.pin is not None:
        landing.pin.close()
    return True
