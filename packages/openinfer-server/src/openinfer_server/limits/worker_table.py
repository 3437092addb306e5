"""`WorkerTable`: what owners hold in each worker, in memory that all workers of a server have.

    row of a worker:   budget 0: [in all, owners by slot ...], budget 1: ..., one signed 64-bit number each

A worker writes its own row alone, and reads the others'. An owner's slot is a keyed digest of its name, so names stay
where they are and no client can choose a slot; two owners in one slot are taken for one, in what others hold of it. A
number is read while it may be written: two workers that take at one moment may exceed a bound by what both take.
"""

import hashlib
import mmap
import os
import secrets
from typing import Self

import msgspec

BUDGETS = ("requests", "body_bytes", "encode_characters", "queued_requests", "queued_tokens")
SLOTS = 2**12 - 1  # and one number for all owners together
_NUMBER_BYTES = 8
_MAX_NAMES = 2**14  # whose slots are remembered


class TableAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a further worker finds the table: its descriptor, which it has inherited."""

    descriptor: int
    num_workers: int
    worker: int
    key: bytes


class WorkerTable:
    """The table, as one worker has it: the first makes it (`create`), others are told of it. Linux alone has it."""

    def __init__(self, access: TableAccess) -> None:
        num_bytes = access.num_workers * len(BUDGETS) * (SLOTS + 1) * _NUMBER_BYTES
        self._access = access
        self._memory = mmap.mmap(access.descriptor, num_bytes)
        self._numbers = memoryview(self._memory).cast("q")
        self._slots: dict[str, int] = {}
        others = [worker for worker in range(access.num_workers) if worker != access.worker]
        self._elsewhere = [[self._place(worker, budget) for worker in others] for budget in range(len(BUDGETS))]

    @classmethod
    def create(cls, num_workers: int) -> Self:
        """All numbers are 0."""
        descriptor = os.memfd_create("openinfer-workers")
        os.ftruncate(descriptor, num_workers * len(BUDGETS) * (SLOTS + 1) * _NUMBER_BYTES)
        key = secrets.token_bytes(16)
        return cls(TableAccess(descriptor=descriptor, num_workers=num_workers, worker=0, key=key))

    @property
    def descriptor(self) -> int:
        return self._access.descriptor

    @property
    def num_workers(self) -> int:
        return self._access.num_workers

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker's."""
        return self._access.worker == 0

    def access_of(self, worker: int) -> TableAccess:
        return msgspec.structs.replace(self._access, worker=worker)

    def clear(self, worker: int) -> None:
        """What a worker held that has died."""
        length = len(BUDGETS) * (SLOTS + 1)
        self._numbers[worker * length : (worker + 1) * length] = memoryview(bytes(length * _NUMBER_BYTES)).cast("q")

    def add(self, budget: int, owner: str, amount: int) -> None:
        """An owner takes so much here, or gives it back."""
        place = self._place(self._access.worker, budget)
        self._numbers[place] += amount
        self._numbers[place + self._slot(owner)] += amount

    def elsewhere(self, budget: int, owner: str) -> tuple[int, int]:
        """What an owner, and what all, hold in other workers."""
        slot, numbers = self._slot(owner), self._numbers
        held = used = 0
        for place in self._elsewhere[budget]:
            held += numbers[place + slot]
            used += numbers[place]
        return held, used

    def _place(self, worker: int, budget: int) -> int:
        return (worker * len(BUDGETS) + budget) * (SLOTS + 1)

    def _slot(self, owner: str) -> int:
        slot = self._slots.get(owner)
        if slot is None:
            if len(self._slots) >= _MAX_NAMES:
                self._slots.clear()
            digest = hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), key=self._access.key, digest_size=8)
            slot = self._slots[owner] = 1 + int.from_bytes(digest.digest(), "big") % SLOTS
        return slot
