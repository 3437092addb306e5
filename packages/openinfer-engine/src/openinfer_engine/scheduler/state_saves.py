"""`StateSaves`: snapshots of recurrent states on their way into KV tiers, held until their copy has ended.

As for blocks (`saves.py`), only a share of the snapshots is saved at a time; what comes beyond it is not saved, and is
counted. Where snapshots are short for somebody, copies that take longer than `PATIENCE_S` are cancelled.
"""

from openinfer_engine.kv_tiers.port import TierPort
from openinfer_engine.kv_tiers.transfer import Move
from openinfer_engine.scheduler.saves import PATIENCE_S
from openinfer_engine.scheduler.snapshots import Snapshots
from openinfer_kv_cache import Digest, PrefixHasher, StateSlotCopy

_SHARE = 2
"""Of the snapshots, one in so many may be on its way."""


class StateSaves:
    """Saves of one pool's snapshots.

    Args:
        snapshots: are held.
        port: takes their states.
        hasher: that names them.
    """

    def __init__(self, snapshots: Snapshots, port: TierPort, hasher: PrefixHasher) -> None:
        self._snapshots = snapshots
        self._port = port
        self._hasher = hasher
        self._most = max(1, snapshots.max_snapshots // _SHARE)
        self._noted: list[StateSlotCopy] = []
        """Holds of snapshots that were taken behind the step that is applied now."""
        self._moving: list[tuple[Move, StateSlotCopy]] = []
        self.unsaved_blocks = 0
        """Pieces of states that were not saved because too many were on their way."""

    def note(self, digest: Digest) -> None:
        """A snapshot that has just been taken is to be saved, unless too many are on their way."""
        if len(self._noted) + len(self._moving) >= self._most:
            self.unsaved_blocks += self._port.pieces_per_slot
            return
        hold = self._snapshots.hold(digest)
        if hold is not None:
            self._noted.append(hold)

    def begin(self) -> None:
        """Begins to save what was noted since the last time."""
        noted, self._noted = self._noted, []
        for hold in noted:
            digests = self._hasher.state_digests(hold.digest, self._port.pieces_per_slot)
            move = self._port.save(digests, self._port.state_places(hold.source))
            if move is None:
                self._snapshots.end(hold, good=True)
            else:
                self._moving.append((move, hold))

    def settle(self) -> None:
        """Lets go of the snapshots whose copies have ended."""
        still: list[tuple[Move, StateSlotCopy]] = []
        for move, hold in self._moving:
            if move.is_over():
                self._snapshots.end(hold, good=True)
            else:
                still.append((move, hold))
        self._moving = still

    def hurry(self) -> None:
        """Snapshots are short: slow copies are cancelled."""
        latest_s = self._port.clock() - PATIENCE_S
        for move, _ in self._moving:
            if move.begin_s < latest_s:
                move.cancel()
