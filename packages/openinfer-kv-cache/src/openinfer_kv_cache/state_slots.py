"""`StateSlotPool`: fixed-size states that are rewritten in place, and snapshots of them.

              leave           fill            publish           retire
    live ◄──────────► free ─────────► filling ────────► sealed ◄────────► idle
           allocate    ▲▲     discard    │                       revive     │
                       │└────────────────┘                                  │
                       └────────────────────────────────────────────────────┘
                                               evict
    free     no content
    live     one sequence's state, rewritten every step
    filling  destination of a copy that has not completed, from a live slot or from a KV tier
    sealed   a snapshot that a copy is reading, or that is held
    idle     a snapshot without a reader; evicted when slots or the budget are short, least recently used first

Of snapshots, those that are retained (`retain`) are evicted after others until their deadline.

A recurrent state cannot be cut back to an earlier token as a block table can. To reuse a prefix, or to roll back a
speculation, the state at a boundary is copied into another slot and kept under the digest of the prefix that it
ends (`BlockSequence.prefix_digests`). A copy runs on the device after the call that plans it, so it is a
`StateSlotCopy`: until it is completed or cancelled, neither of its slots can be handed to another sequence, even if the
sequence leaves meanwhile. `StateTable.move` enforces the diagram.

KV tiers copy states during the steps: into a snapshot that is being filled (`begin_load`), and out of one that is held
(`begin_hold`). These are `StateSlotCopy`s of one slot alone.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from openinfer_kv_cache.checks import check_count, require
from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.errors import BlockStateError, KvConfigError
from openinfer_kv_cache.state_boundaries import StateListener
from openinfer_kv_cache.states import StateTable, Transition


class StateSlotStatus(IntEnum):
    """See the module's diagram."""

    FREE = 0
    LIVE = 1
    FILLING = 2
    SEALED = 3
    IDLE = 4


_ALLOCATE = Transition("allocate", StateSlotStatus.FREE, StateSlotStatus.LIVE)
_LEAVE = Transition("leave", StateSlotStatus.LIVE, StateSlotStatus.FREE)
_FILL = Transition("fill", StateSlotStatus.FREE, StateSlotStatus.FILLING)
_DISCARD = Transition("discard", StateSlotStatus.FILLING, StateSlotStatus.FREE)
_PUBLISH = Transition("publish", StateSlotStatus.FILLING, StateSlotStatus.SEALED)
_RETIRE = Transition("retire", StateSlotStatus.SEALED, StateSlotStatus.IDLE)
_REVIVE = Transition("revive", StateSlotStatus.IDLE, StateSlotStatus.SEALED)
_EVICT = Transition("evict", StateSlotStatus.IDLE, StateSlotStatus.FREE)


class CopyKind(StrEnum):
    """Direction of a `StateSlotCopy`."""

    SNAPSHOT = "snapshot"
    """Live slot → snapshot."""
    RESTORE = "restore"
    """Snapshot → live slot."""
    LOAD = "load"
    """KV tier → snapshot; source and target are the same."""
    HOLD = "hold"
    """A snapshot stays as it is for a tier that reads it during steps; source and target are the same."""


_FILLING_KINDS = (CopyKind.SNAPSHOT, CopyKind.LOAD)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateSlotCopy:
    """A copy that the engine has to run, then to `complete` or `cancel`."""

    kind: CopyKind
    source: int
    target: int
    digest: Digest
    num_tokens: int
    """Tokens that the state has consumed: the boundary that the digest names."""


@dataclass(slots=True)
class _Snapshot:
    slot: int
    num_tokens: int
    num_readers: int = 0


class StateSlotPool:
    """Slots `0 .. num_state_slots - 1`, of which `max_snapshots` may hold snapshots at one time. Used from one thread.

    Raises:
        KvConfigError: a number is out of range.
    """

    __slots__ = (
        "_clock",
        "_copies",
        "_copying",
        "_deadlines",
        "_evicted_snapshots",
        "_free",
        "_idle",
        "_left",
        "_num_snapshot_slots",
        "_snapshots",
        "_stale",
        "_states",
        "listener",
        "max_snapshots",
        "num_state_slots",
    )

    def __init__(
        self, num_state_slots: int, *, max_snapshots: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_count("num_state_slots", num_state_slots)
        if not 0 <= max_snapshots < num_state_slots:
            raise KvConfigError(
                f"max_snapshots is {max_snapshots}; with {num_state_slots} slots it must be 0 .. "
                f"{num_state_slots - 1}, so that a sequence can always have one"
            )
        self.num_state_slots = num_state_slots
        self.max_snapshots = max_snapshots
        self._states = StateTable(num_state_slots, StateSlotStatus, noun="slot")
        self._free = list(range(num_state_slots - 1, -1, -1))
        self.listener: StateListener | None = None  # told after which prefixes there are snapshots
        self._snapshots: dict[Digest, _Snapshot] = {}
        self._idle: OrderedDict[Digest, None] = OrderedDict()
        self._num_snapshot_slots = 0
        self._copies: set[StateSlotCopy] = set()
        self._copying: Counter[int] = Counter()
        self._left: set[int] = set()  # their sequences are gone, a copy still uses them
        self._stale: set[int] = set()  # live, with states from before a `clear`
        self._evicted_snapshots = 0
        self._clock = clock
        self._deadlines: dict[Digest, float] = {}  # of retained snapshots

    # Questions.

    @property
    def available_slots(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_snapshot_slots(self) -> int:
        """Slots that count against `max_snapshots`: snapshots that can be found, and those being filled."""
        return self._num_snapshot_slots

    @property
    def evicted_snapshots(self) -> int:
        return self._evicted_snapshots

    def state(self, slot: int) -> StateSlotStatus:
        return self._states[slot]

    def find(self, digest: Digest) -> int | None:
        snapshot = self._snapshots.get(digest)
        return None if snapshot is None else snapshot.num_tokens

    # Live slots.

    def allocate(self) -> int | None:
        """A live slot with undefined content; None if every slot is live or in a copy."""
        slot = self._take_slot()
        if slot is not None:
            self._states.move((slot,), _ALLOCATE)
        return slot

    def leave(self, slot: int) -> None:
        self._require_owned(slot, verb="leave")
        self._left.add(slot)  # until no copy reads or writes it: a step in flight may still do so
        self._free_if_left(slot)

    # Copies.

    def begin_snapshot(self, slot: int, digest: Digest, *, num_tokens: int) -> StateSlotCopy | None:
        """Plans to keep a live slot's present state under the digest of the prefix that it has consumed.

        Returns:
            The copy to run; None, and nothing has changed, if the boundary is kept already, if slots or the
            budget are short and no snapshot is idle, or if the state is from before a `clear`.

        Raises:
            BlockStateError: the slot is not a sequence's, or is being restored.
        """
        self._require_owned(slot, verb="snapshot")
        if any(copy.kind is CopyKind.RESTORE and copy.target == slot for copy in self._copies):
            raise BlockStateError(f"cannot snapshot slot {slot}: a restore into it has not completed")
        if slot in self._stale:  # under this digest later weights would find states of earlier ones
            return None
        target = self._take_filling(digest)
        if target is None:
            return None
        return self._start(
            StateSlotCopy(kind=CopyKind.SNAPSHOT, source=slot, target=target, digest=digest, num_tokens=num_tokens)
        )

    def begin_load(self, digest: Digest, *, num_tokens: int) -> StateSlotCopy | None:
        """Plans to fill a snapshot from a KV tier; None where `begin_snapshot` would return it for want of room."""
        target = self._take_filling(digest)
        if target is None:
            return None
        return self._start(
            StateSlotCopy(kind=CopyKind.LOAD, source=target, target=target, digest=digest, num_tokens=num_tokens)
        )

    def begin_hold(self, digest: Digest) -> StateSlotCopy | None:
        """Keeps a snapshot from eviction until the copy has ended; None if there is no such snapshot."""
        snapshot = self._snapshots.get(digest)
        if snapshot is None:
            return None
        self._start_reading(digest, snapshot)
        slot, num_tokens = snapshot.slot, snapshot.num_tokens
        return self._start(
            StateSlotCopy(kind=CopyKind.HOLD, source=slot, target=slot, digest=digest, num_tokens=num_tokens)
        )

    def begin_restore(self, digest: Digest, slot: int) -> StateSlotCopy | None:
        """Plans to overwrite a live slot with the snapshot of a boundary; None if there is no such snapshot.

        Compare its `num_tokens` with the length of the KV that was matched, on every rank, before it is run.

        Raises:
            BlockStateError: the slot is not a sequence's, or another copy uses it.
        """
        self._require_owned(slot, verb="restore into")
        if self._copying[slot]:
            raise BlockStateError(f"cannot restore into slot {slot}: another copy uses it; complete that one first")
        snapshot = self._snapshots.get(digest)
        if snapshot is None:
            return None
        self._start_reading(digest, snapshot)
        return self._start(
            StateSlotCopy(
                kind=CopyKind.RESTORE,
                source=snapshot.slot,
                target=slot,
                digest=digest,
                num_tokens=snapshot.num_tokens,
            )
        )

    def complete(self, copy: StateSlotCopy) -> None:
        """The copy has run on every rank: a snapshot can be found, a restored slot stepped; a hold is over."""
        self._end(copy)
        if copy.kind in _FILLING_KINDS:
            self._states.move((copy.target,), _PUBLISH)
            self._snapshots[copy.digest] = _Snapshot(copy.target, copy.num_tokens, num_readers=1)
            if self.listener is not None:
                self.listener.kept(copy.digest)
        elif copy.kind is CopyKind.RESTORE:
            self._stale.discard(copy.target)  # its state is the snapshot's now, which is current
        self._stop_reading(copy.digest)

    def cancel(self, copy: StateSlotCopy) -> None:
        """The copy will not run, or has run and is not wanted. Never call it while the copy runs.

        A slot that was filled becomes free; a live slot's content is undefined after a cancelled restore.
        """
        self._end(copy)
        if copy.kind in _FILLING_KINDS:
            self._states.move((copy.target,), _DISCARD)
            self._free.append(copy.target)
            self._num_snapshot_slots -= 1
        else:
            self._stop_reading(copy.digest)

    def retain(self, digest: Digest, for_s: float) -> None:
        """Has a snapshot, if there is one, evicted after others for so many seconds from now, as `BlockPool.retain`."""
        if digest in self._snapshots:
            deadline_s = self._clock() + for_s
            self._deadlines[digest] = max(deadline_s, self._deadlines.get(digest, deadline_s))

    def clear(self) -> int:
        """Voids all snapshots and what live slots hold, as after a change of weights; returns how many there were.

        Live slots stay with their sequences; their states are never kept.

        Raises:
            BlockStateError: copies have not completed; nothing has changed.
        """
        if self._copies:
            raise BlockStateError(f"cannot clear: {len(self._copies)} copies have not completed; end them first")
        dropped = len(self._idle)
        while self._evict_oldest():
            pass
        self._stale = {slot for slot in range(self.num_state_slots) if self._states.is_in(slot, StateSlotStatus.LIVE)}
        return dropped

    def restart(self) -> None:
        """As `clear`, where no state that a live slot holds is read again: sequences begin anew in them.

        Raises:
            BlockStateError: copies have not completed; nothing has changed.
        """
        self.clear()
        self._stale.clear()

    # Private.

    def _require_owned(self, slot: int, *, verb: str) -> None:
        self._states.require((slot,), StateSlotStatus.LIVE, verb=verb)
        if slot in self._left:
            raise BlockStateError(f"cannot {verb} slot {slot}: its sequence has left, and a copy still uses it")

    def _take_filling(self, digest: Digest) -> int | None:
        # Nothing has changed where it is None: kept or being filled already, or short of room.
        if digest in self._snapshots or any(
            copy.kind in _FILLING_KINDS and copy.digest == digest for copy in self._copies
        ):
            return None
        if self._num_snapshot_slots >= self.max_snapshots and not self._evict_oldest():
            return None
        target = self._take_slot()
        if target is None:
            return None
        self._states.move((target,), _FILL)
        self._num_snapshot_slots += 1
        return target

    def _start(self, copy: StateSlotCopy) -> StateSlotCopy:
        self._copies.add(copy)
        self._copying.update((copy.source, copy.target))
        return copy

    def _end(self, copy: StateSlotCopy) -> None:
        if copy not in self._copies:
            raise BlockStateError(f"the {copy.kind} of slot {copy.source} to {copy.target} has ended already")
        self._copies.remove(copy)
        for slot in (copy.source, copy.target):
            self._copying[slot] -= 1
            self._free_if_left(slot)

    def _start_reading(self, digest: Digest, snapshot: _Snapshot) -> None:
        if not snapshot.num_readers:
            self._states.move((snapshot.slot,), _REVIVE)
            del self._idle[digest]
        snapshot.num_readers += 1

    def _stop_reading(self, digest: Digest) -> None:
        snapshot = self._snapshots[digest]
        snapshot.num_readers -= 1
        if not snapshot.num_readers:
            self._states.move((snapshot.slot,), _RETIRE)
            self._idle[digest] = None

    def _free_if_left(self, slot: int) -> None:
        if slot in self._left and not self._copying[slot]:
            self._states.move((slot,), _LEAVE)
            self._left.remove(slot)
            self._stale.discard(slot)
            self._free.append(slot)

    def _take_slot(self) -> int | None:
        if not self._free and not self._evict_oldest():
            return None
        return self._free.pop()

    def _first_victim(self) -> Digest:
        """The one that is idle longest, of those that are not retained if there are any."""
        deadlines = self._deadlines
        if deadlines:
            now_s = self._clock()
            for digest in [each for each, deadline_s in deadlines.items() if deadline_s <= now_s]:
                del deadlines[digest]
        return next((digest for digest in self._idle if digest not in deadlines), next(iter(self._idle)))

    def _evict_oldest(self) -> bool:
        if not self._idle:
            return False
        digest = self._first_victim()
        del self._idle[digest]
        self._deadlines.pop(digest, None)
        slot = self._snapshots.pop(digest).slot
        self._states.move((slot,), _EVICT)
        self._free.append(slot)
        self._num_snapshot_slots -= 1
        self._evicted_snapshots += 1
        if self.listener is not None:
            self.listener.given_up(digest)
        return True

    # Integrity.

    def check_integrity(self) -> None:
        """Compares everything the pool knows with everything else; O(num_state_slots). Raises `IntegrityError`."""
        self._check_slots()
        self._check_snapshots()
        self._check_copies()

    def _check_slots(self) -> None:
        free = {slot for slot in range(self.num_state_slots) if self._states.is_in(slot, StateSlotStatus.FREE)}
        require(sorted(self._free) == sorted(free), "the free list is not the free slots")
        kept = sum(map(self._states.count, (StateSlotStatus.FILLING, StateSlotStatus.SEALED, StateSlotStatus.IDLE)))
        require(kept == self._num_snapshot_slots, f"{kept} slots are snapshots, {self._num_snapshot_slots} counted")
        require(kept <= self.max_snapshots, f"{kept} snapshots, {self.max_snapshots} allowed")
        for slot in self._left:
            require(self._states.is_in(slot, StateSlotStatus.LIVE), f"slot {slot} was left and is not live")
            require(self._copying[slot] > 0, f"slot {slot} was left and is in no copy, but not free")
        for slot in self._stale:
            require(self._states.is_in(slot, StateSlotStatus.LIVE), f"slot {slot} is stale and not live")

    def _check_snapshots(self) -> None:
        for digest, snapshot in self._snapshots.items():
            is_idle = not snapshot.num_readers
            expected = StateSlotStatus.IDLE if is_idle else StateSlotStatus.SEALED
            state = self._states[snapshot.slot]
            require(state is expected, f"slot {snapshot.slot} is {state.name}, {snapshot.num_readers} read it")
            require(is_idle == (digest in self._idle), f"slot {snapshot.slot} and the order of eviction disagree")
        require(len(self._idle) <= len(self._snapshots), "the order of eviction names unknown snapshots")
        slots = {snapshot.slot for snapshot in self._snapshots.values()}
        require(len(slots) == len(self._snapshots), "two snapshots share a slot")
        kept = self._states.count(StateSlotStatus.SEALED) + self._states.count(StateSlotStatus.IDLE)
        require(kept == len(slots), f"{kept} slots hold snapshots, {len(slots)} can be found")

    def _check_copies(self) -> None:
        copying: Counter[int] = Counter()
        readers: Counter[Digest] = Counter()
        filling: set[int] = set()
        for copy in self._copies:
            copying.update((copy.source, copy.target))
            if copy.kind in _FILLING_KINDS:
                filling.add(copy.target)
            else:
                readers[copy.digest] += 1
        require(+self._copying == copying, "the count of copies per slot is not that of the copies")
        for slot in range(self.num_state_slots):
            is_filling = self._states.is_in(slot, StateSlotStatus.FILLING)
            require(is_filling == (slot in filling), f"slot {slot} and the copies disagree on whether it is filling")
        for digest, snapshot in self._snapshots.items():
            require(snapshot.num_readers == readers[digest], f"the readers of slot {snapshot.slot} are miscounted")
