"""`AdapterSlots`: which adapter lies in which slot of the device, and who may pass a request whose adapter does not.

    free ─► holds an adapter, with users ─► idle: holds it still ─► another one is loaded into it
                    │
                    └─ claimed: admits no new users, until the last has ended; then the claimant's adapter is loaded

A user is an admitted request that has not ended, also while it is preempted: it resumes in the slot that it began in.

A request whose adapter has no slot, and can have none, is passed by later ones whose adapters lie in slots, and by
those that need none, within the bound of `order/bypass.py`. Then it claims the slot that has the fewest users. So it
waits at most that long, and then as long as the longest of these users runs, if there are as many slots as adapters
that are overdue.
"""

from collections import Counter
from dataclasses import dataclass

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import AdapterLoad, AdapterPort
from openinfer_engine.scheduler.order.bypass import Bypass
from openinfer_engine.scheduler.sequence import NO_SLOT, Sequence


@dataclass(slots=True)
class _Slot:
    index: int
    digest: bytes | None = None
    num_users: int = 0
    last_used: int = 0  # number of the last admission into it
    claimant: bytes | None = None


class AdapterSlots:
    """Of one scheduler."""

    def __init__(self, num_slots: int, port: AdapterPort, bypass: Bypass) -> None:
        self._port = port
        self._bypass = bypass
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._by_digest: dict[bytes, _Slot] = {}
        self._waiting: Counter[bytes] = Counter()  # requests that were never admitted
        self._loads: list[AdapterLoad] = []  # since the last plan
        self._num_admitted = 0

    # --- requests ---------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        if (digest := _digest(sequence)) is not None:
            self._waiting[digest] += 1

    def may_enter(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits may be admitted now, for all that adapters have to say."""
        digest = _digest(sequence)
        if digest is None:
            return True
        slot = self._by_digest.get(digest)
        if slot is not None and slot.claimant is None:
            return True
        if self._slot_for(digest) is None:
            return False
        if self._port.is_held(digest):
            return True
        self._port.hold(digest)
        return False

    def enter(self, sequence: Sequence) -> None:
        """A sequence is admitted for the first time, after `may_enter` has said so."""
        digest = _digest(sequence)
        if digest is None:
            return
        slot = self._by_digest.get(digest)
        if slot is None or slot.claimant is not None:
            slot = self._load(digest)
        self._stop_waiting(digest)
        self._num_admitted += 1
        slot.num_users += 1
        slot.last_used = self._num_admitted
        sequence.adapter_slot = slot.index

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends, whether it was ever admitted or not."""
        digest = _digest(sequence)
        if digest is None:
            return
        if sequence.adapter_slot == NO_SLOT:
            self._stop_waiting(digest)
            return
        slot = self._slots[sequence.adapter_slot]
        slot.num_users -= 1
        sequence.adapter_slot = NO_SLOT

    def users(self) -> dict[bytes, tuple[int, int]]:
        """Of each adapter with unfinished requests: how many were admitted, and how many wait."""
        running: Counter[bytes] = Counter()
        for slot in self._slots:
            if slot.digest is not None and slot.num_users:
                running[slot.digest] += slot.num_users
        return {digest: (running[digest], self._waiting[digest]) for digest in {*running, *self._waiting}}

    def is_resident(self, sequence: Sequence) -> bool:
        """Whether its adapter lies in a slot; True for one that needs none."""
        digest = _digest(sequence)
        return digest is None or digest in self._by_digest

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """What is to be loaded before the rows of the plan that is made."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    # --- claims -----------------------------------------------------------------------------------------

    def claim_if_overdue(self, sequence: Sequence) -> None:
        """For a sequence that others pass, since `may_enter` has said no."""
        digest = _digest(sequence)
        if digest is not None and self._bypass.is_overdue(sequence) and self._slot_for(digest) is None:
            self._claim(digest)

    def _claim(self, digest: bytes) -> None:
        if any(slot.claimant == digest for slot in self._slots):
            return
        unclaimed = [slot for slot in self._slots if slot.claimant is None and slot.digest != digest]
        if unclaimed:
            slot = min(unclaimed, key=lambda each: (each.num_users, each.last_used))
            slot.claimant = digest
            self._port.hold(digest)  # while the slot drains

    # --- slots ------------------------------------------------------------------------------------------

    def _slot_for(self, digest: bytes) -> _Slot | None:
        """Where an adapter may be loaded now: the slot that it has claimed, a free one, or the longest idle."""
        idle = [slot for slot in self._slots if not slot.num_users and slot.claimant in (None, digest)]
        own = [slot for slot in idle if slot.claimant == digest]
        return min(own or idle, key=lambda each: (each.digest is not None, each.last_used), default=None)

    def _load(self, digest: bytes) -> _Slot:
        slot = self._slot_for(digest)
        if slot is None:
            raise ContractViolation(f"adapter {digest.hex()} is admitted, and there is no slot for it")
        if slot.digest is not None and self._by_digest.get(slot.digest) is slot:
            del self._by_digest[slot.digest]
        self._drop_claims(digest)
        slot.digest = digest
        # An adapter whose slot is claimed by another may be loaded into a second one: its users stay in the first.
        self._by_digest[digest] = slot
        for load in self._loads:
            if load.slot == slot.index:  # its user ended before a plan was made
                self._port.unpin(load.digest)
        self._loads = [load for load in self._loads if load.slot != slot.index]
        self._port.pin(digest)
        self._loads.append(AdapterLoad(slot=slot.index, digest=digest))
        return slot

    def _stop_waiting(self, digest: bytes) -> None:
        self._waiting[digest] -= 1
        if self._waiting[digest] <= 0:
            del self._waiting[digest]
            self._drop_claims(digest)
            self._port.release(digest)

    def _drop_claims(self, digest: bytes) -> None:
        for slot in self._slots:
            if slot.claimant == digest:
                slot.claimant = None


def _digest(sequence: Sequence) -> bytes | None:
    adapter = sequence.request.adapter
    return None if adapter is None else adapter.digest
