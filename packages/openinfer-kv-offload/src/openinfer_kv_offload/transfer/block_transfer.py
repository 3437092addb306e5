"""`BlockTransfer`: one load or save between the thread that asked and the one that moves the bytes.

One lock says who may touch the caller's memory. The moving thread holds it for each copy (`touching`), and the
transfer can end only under it: so an end means that nothing touches that memory, now or later. `poll` never waits for
the lock: while a copy has it, the transfer is pending.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from openinfer_kv_cache import TierFailure, TransferState


class TransferEnded(Exception):
    """The moving thread has nothing left to do: deadline, cancellation or closing came first."""


class BlockTransfer:
    """A `Transfer` that a worker of this process carries out; `on_end` is called once, by the thread that ends it."""

    def __init__(
        self,
        num_blocks: int,
        *,
        deadline_s: float | None,
        clock: Callable[[], float],
        on_end: "Callable[[BlockTransfer], None]",
    ) -> None:
        self.num_blocks = num_blocks
        self.completed_blocks = 0
        self.failure: TierFailure | None = None
        self.has_begun = False  # whether a thread has taken it up
        self.has_stored = False  # whether the medium has taken a block of it, rather than having had all
        self._deadline_s = deadline_s
        self._clock = clock
        self._on_end = on_end
        self._state = TransferState.PENDING
        self._is_cancelled = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def poll(self) -> TransferState:
        # A lock that is held is a copy on its way: it is not waited for, and pending is the right answer until it ends.
        if self._state is TransferState.PENDING and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
        return self._state

    def cancel(self) -> None:
        self._is_cancelled = True
        self.poll()

    def wait(self, timeout_s: float | None = None) -> TransferState:
        until_s = None if timeout_s is None else self._clock() + timeout_s
        while self.poll() is TransferState.PENDING:
            now_s = self._clock()
            if until_s is not None and now_s >= until_s:
                break
            limits = [limit_s for limit_s in (until_s, self._deadline_s) if limit_s is not None]
            self._ended.wait(max(min(limits) - now_s, 0.001) if limits else None)
        return self._state

    # The moving thread's side.

    @contextmanager
    def touching(self) -> Generator[None]:
        """Holds the caller's memory for one copy.

        Raises:
            TransferEnded: it has ended, and the memory is not ours any more.
        """
        with self._lock:
            self._settle()
            if self._state is not TransferState.PENDING:
                raise TransferEnded
            yield

    def complete_blocks(self, num_blocks: int = 1) -> None:
        with self._lock:
            self._settle()
            if self._state is not TransferState.PENDING:
                raise TransferEnded
            self.completed_blocks += num_blocks

    def end(self, failure: TierFailure | None = None) -> None:
        """Ends it: completed without a failure, partial with one; nothing happens if it has ended already."""
        with self._lock:
            self._settle()
            if self._state is TransferState.PENDING:
                self._end(TransferState.PARTIAL if failure else TransferState.COMPLETED, failure)

    def close(self, timeout_s: float) -> None:
        """Ends it as partial (`CLOSED`); if a copy lasts longer than that it is pending until the copy has ended."""
        self._is_closed = True
        if self._lock.acquire(timeout=max(0.0, timeout_s)):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Under the lock: ends a transfer that was cancelled or closed, or whose deadline has passed."""
        # All blocks are there: neither a late deadline nor a cancellation makes them partial.
        if self._state is not TransferState.PENDING or self.completed_blocks == self.num_blocks > 0:
            return
        if self._is_cancelled:
            self._end(TransferState.CANCELLED, None)
        elif self._is_closed:
            self._end(TransferState.PARTIAL, TierFailure.CLOSED)
        elif self._deadline_s is not None and self._clock() >= self._deadline_s:
            self._end(TransferState.PARTIAL, TierFailure.DEADLINE)

    def _end(self, state: TransferState, failure: TierFailure | None) -> None:
        self.failure = failure
        self._state = state
        self._on_end(self)
        # Last, so that what waits finds the state and the counters settled.
        self._ended.set()
