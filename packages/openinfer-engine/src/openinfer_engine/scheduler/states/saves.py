"""`StateSaves`: snapshots of recurrent states on their way into KV tiers, held until their copy has ended.

As for blocks (`BlockSaves`), only a share of the snapshots is saved at a time; what comes beyond it is not saved, and
is counted. Where snapshots are short for a sequence, copies that take longer than `PATIENCE_S` are cancelled.
"""

from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_kv_cache import Digest, PrefixHasher, StateSlotCopy, TierPort, TierTransfer
from openinfer_kv_cache.tiers.saves import PATIENCE_S

_SHARE = 2  # of the snapshots, one in so many may be on its way


class StateSaves:
    """Saves of one pool's snapshots."""

    def __init__(self, snapshots: Snapshots, port: TierPort, hasher: PrefixHasher) -> None:
        self._snapshots = snapshots
        self._port = port
        self._hasher = hasher
        self._most = max(1, snapshots.max_snapshots // _SHARE)
        self._noted: list[StateSlotCopy] = []  # holds of snapshots that were taken after the step that is applied now
        self._in_flight: list[tuple[TierTransfer, StateSlotCopy]] = []
        self.unsaved_blocks = 0  # chunks of states that were not saved because too many were on their way

    def note(self, digest: Digest) -> None:
        """A snapshot that has just been taken is to be saved, unless too many are on their way."""
        if len(self._noted) + len(self._in_flight) >= self._most:
            self.unsaved_blocks += self._port.chunks_per_slot
            return
        hold = self._snapshots.hold(digest)
        if hold is not None:
            self._noted.append(hold)

    def begin(self) -> None:
        noted, self._noted = self._noted, []
        for hold in noted:
            digests = self._hasher.state_digests(hold.digest, self._port.chunks_per_slot)
            transfer = self._port.save(digests, self._port.state_places(hold.source))
            if transfer is None:
                self._snapshots.end(hold, good=True)
            else:
                self._in_flight.append((transfer, hold))

    def settle(self) -> None:
        still: list[tuple[TierTransfer, StateSlotCopy]] = []
        for transfer, hold in self._in_flight:
            if transfer.is_over():
                self._snapshots.end(hold, good=True)
            else:
                still.append((transfer, hold))
        self._in_flight = still

    @property
    def is_moving(self) -> bool:
        return bool(self._in_flight)

    def hurry(self, patience_s: float = PATIENCE_S) -> None:
        latest_s = self._port.clock() - patience_s
        for transfer, _ in self._in_flight:
            if transfer.begin_s < latest_s:
                transfer.cancel()
