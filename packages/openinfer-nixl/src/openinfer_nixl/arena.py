"""`Arena`: objects in one piece of memory that peers read.

    free ──put──► filling ──► held ──delete, put again──► retired ──last lease ends──► free
                                └──────────────────────── without a lease ────────────► free

A leased object stays where it is: until the lease is given back, its holder's connection ends, or its time is over.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from openinfer_kv_cache import TierFailure
from openinfer_kv_offload.transfer.failures import BlockFault


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    num_bytes: int = 0
    leases: set[int] = field(default_factory=set[int])
    is_retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """An object that stays where it is for a while."""

    lease_id: int
    address: int
    num_bytes: int


class Arena:
    """Used from several threads at once.

    Args:
        num_slots: for objects; more are taken while some are leased: `put` refuses then.
        slot_bytes: of the largest object.
        num_landings: places for what is read from peers, of `slot_bytes` each.
        lease_s: after which a lease is void.
        clock: monotonic seconds.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, num_landings: int, lease_s: float, clock: Callable[[], float]
    ) -> None:
        self.slot_bytes = slot_bytes
        self._lease_s = lease_s
        self._clock = clock
        self._memory: NDArray[np.uint8] = np.zeros((num_slots + num_landings) * slot_bytes, np.uint8)
        self._lock = threading.Lock()
        self._free = list(range(num_slots))
        self._held: dict[str, _Slot] = {}
        self._leased: dict[int, tuple[_Slot, float]] = {}
        self._ids = itertools.count(1)
        self.landings = tuple(self._address(number) for number in range(num_slots, num_slots + num_landings))
        """Addresses of the places for what is read."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self._memory.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def put(self, key: str, content: memoryview | bytes) -> None:
        """Keeps an object.

        Raises:
            BlockFault: no place is free, or it is too large for one.
        """
        if len(content) > self.slot_bytes:
            raise BlockFault(TierFailure.ERROR)
        with self._lock:
            self._drop_late_leases()
            if not self._free:
                raise BlockFault(TierFailure.BUSY)
            slot = _Slot(self._free.pop(), len(content))
        self._view(slot)[:] = np.frombuffer(content, np.uint8)  # no reader knows the place yet
        with self._lock:
            before = self._held.get(key)
            self._held[key] = slot
            if before is not None:
                self._retire(before)

    def get(self, key: str) -> bytes | None:
        lease = self.lease(key)
        if lease is None:
            return None
        try:
            return self.bytes_at(lease.address, lease.num_bytes)
        finally:
            self.release([lease.lease_id])

    def bytes_at(self, address: int, num_bytes: int) -> bytes:
        """A copy of what is at an address of the memory."""
        begin = address - self.address
        return self._memory[begin : begin + num_bytes].tobytes()

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self._held

    def keys(self, prefix: str) -> tuple[str, ...]:
        with self._lock:
            return tuple(key for key in self._held if key.startswith(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                slot = self._held.pop(key, None)
                if slot is not None:
                    self._retire(slot)

    def lease(self, key: str) -> Lease | None:
        """Holds an object where it is; None if there is none."""
        with self._lock:
            self._drop_late_leases()
            slot = self._held.get(key)
            if slot is None:
                return None
            lease_id = next(self._ids)
            slot.leases.add(lease_id)
            self._leased[lease_id] = (slot, self._clock() + self._lease_s)
            return Lease(lease_id=lease_id, address=self._address(slot.number), num_bytes=slot.num_bytes)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Gives leases back; those that are void already are no error."""
        with self._lock:
            for lease_id in lease_ids:
                self._end(lease_id)

    def _drop_late_leases(self) -> None:
        now_s = self._clock()
        for lease_id in [each for each, (_, end_s) in self._leased.items() if end_s <= now_s]:
            self._end(lease_id)

    def _end(self, lease_id: int) -> None:
        found = self._leased.pop(lease_id, None)
        if found is not None:
            slot, _ = found
            slot.leases.discard(lease_id)
            self._free_if_unused(slot)

    def _retire(self, slot: _Slot) -> None:
        slot.is_retired = True
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: _Slot) -> None:
        if slot.is_retired and not slot.leases:
            self._free.append(slot.number)

    def _address(self, number: int) -> int:
        return self.address + number * self.slot_bytes

    def _view(self, slot: _Slot) -> NDArray[np.uint8]:
        begin = slot.number * self.slot_bytes
        return self._memory[begin : begin + slot.num_bytes]
