"""`StackTransfer`: several tiers' transfers as one."""

import time
from collections.abc import Callable, Sequence
from typing import Self

from openinfer_kv_cache import TierFailure, Transfer, TransferState

Promote = Callable[[int], list[Transfer]]
"""Begins to save what a part of a load brought, given how many blocks completed."""


class StackTransfer:
    """Ends when all its parts have ended, and the promotions that follow them; one thread polls it."""

    def __init__(self, parts: Sequence[Transfer], promotions: Sequence[Promote], *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._parts = parts
        self._promotions = promotions
        self._promoting: list[Transfer] | None = None
        self._shared: Sequence[Transfer] | None = None  # of a save, those that count
        self._is_cancelled = False

    @classmethod
    def of_load(cls, parts: Sequence[Transfer], promotions: Sequence[Promote]) -> Self:
        """Parts that follow each other in one chain, each with its promotion."""
        return cls(parts, promotions, num_blocks=sum(part.num_blocks for part in parts))

    @classmethod
    def of_save(
        cls, parts: Sequence[Transfer], follow: Callable[[], None], *, handover: Sequence[Transfer] | None = None
    ) -> Self:
        """The same blocks into several tiers; `follow` is called once the first has all of them.

        Args:
            parts: one for each tier.
            follow: begins what comes after.
            handover: those of the parts whose blocks count as completed; by default all.
        """

        def promote(completed: int) -> list[Transfer]:
            if completed == parts[0].num_blocks:
                follow()
            return []

        transfer = cls(parts, (promote,), num_blocks=parts[0].num_blocks)
        transfer._shared = parts if handover is None else handover
        return transfer

    @property
    def completed_blocks(self) -> int:
        if self._shared is not None:
            return max((part.completed_blocks for part in self._shared), default=0)
        completed = 0
        for part in self._parts:
            completed += part.completed_blocks
            if part.completed_blocks < part.num_blocks:
                break
        return completed

    @property
    def failure(self) -> TierFailure | None:
        if self.poll() is not TransferState.PARTIAL:
            return None
        return next(part.failure for part in self._parts if part.failure is not None)

    def poll(self) -> TransferState:
        """Also begins the promotions, once the parts have ended."""
        states = [part.poll() for part in self._parts]
        if TransferState.PENDING in states or self._is_promoting():
            return TransferState.PENDING
        if TransferState.PARTIAL in states:
            return TransferState.PARTIAL
        return TransferState.CANCELLED if TransferState.CANCELLED in states else TransferState.COMPLETED

    def cancel(self) -> None:
        self._is_cancelled = True
        for part in (*self._parts, *(self._promoting or ())):
            part.cancel()

    def wait(self, timeout_s: float | None = None) -> TransferState:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is TransferState.PENDING:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            pending = (
                each for each in (*self._parts, *(self._promoting or ())) if each.poll() is TransferState.PENDING
            )
            if (first := next(pending, None)) is not None:
                first.wait(left_s)
        return self.poll()

    def _is_promoting(self) -> bool:
        """Whether a promotion still reads the caller's blocks; begins them when the parts have ended."""
        if self._promoting is None:
            # Once, and before the end is told: until then the caller may not reuse the blocks that are read.
            begin = () if self._is_cancelled else zip(self._parts, self._promotions, strict=False)
            self._promoting = [each for part, promote in begin for each in promote(part.completed_blocks)]
        return any(each.poll() is TransferState.PENDING for each in self._promoting)
