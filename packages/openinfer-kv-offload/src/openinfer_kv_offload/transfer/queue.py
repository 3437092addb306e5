"""`TransferQueue`: a tier's own threads, its breaker, and what happens when a transfer goes wrong."""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from enum import IntEnum

import msgspec

from openinfer_core.process.processors import usable_processors
from openinfer_kv_cache import TierCondition, TierFailure, TransferState
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer, TransferEnded
from openinfer_kv_offload.transfer.counters import TierTotals
from openinfer_kv_offload.transfer.failures import classify
from openinfer_kv_offload.transfer.health import TierHealth

_log = logging.getLogger(__name__)
CLOSE_S = 5.0
"""What the end of a queue may take, unless it is told another time."""


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tier moves bytes.

    Raises:
        TierConfigError: a field is out of range.
    """

    num_threads: int = msgspec.field(default_factory=lambda: min(8, max(2, usable_processors() // 2)))
    """Threads of its own; by default half of the processors that the process may use, 2 to 8."""
    max_queued: int = 256
    """Saves that wait; one more ends partial at once (`BUSY`)."""
    max_queued_loads: int = 16_384
    """Loads that wait; one more ends partial at once (`BUSY`). Each has its places already, so there may be many: a
    session of 142,000 tokens comes in 70 to 280 transfers."""
    breaker_failures: int = 5
    """In a row, after which the tier is left alone."""
    breaker_cooldown_s: float = 10.0

    def __post_init__(self) -> None:
        for field, value in msgspec.structs.asdict(self).items():
            if value <= 0:
                raise TierConfigError(f"{field} is {value}; it must be more than 0")


class Urgency(IntEnum):
    """What a thread takes first."""

    LOAD = 0
    """A request waits for it."""
    SAVE = 1
    """Saves, and work that belongs to no transfer."""
    STOP = 2


class TransferQueue:
    """Carries out the transfers of one tier, loads first, in the order of their submission."""

    def __init__(
        self, name: str, options: QueueOptions, counters: TierTotals, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._counters = counters
        self._clock = clock
        self._health = TierHealth(
            name, num_failures=options.breaker_failures, cooldown_s=options.breaker_cooldown_s, clock=clock
        )
        self._jobs: queue.PriorityQueue[tuple[Urgency, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()  # keeps the order of jobs of one urgency, which are not compared
        self._most = {Urgency.LOAD: options.max_queued_loads, Urgency.SAVE: options.max_queued}
        self._queued = dict.fromkeys(self._most, 0)  # under the lock
        self._open: dict[BlockTransfer, None] = {}  # in order of submission, which is that of their ends in `close`
        self._lock = threading.Lock()
        self._is_closed = False
        self._after: Callable[[], None] = lambda: None
        self._num_running = options.num_threads
        self._threads = [
            # Daemons: a medium that hangs must not keep the process from ending (`close`).
            threading.Thread(target=self._run, name=f"kv-tier-{name}-{index}", daemon=True)
            for index in range(options.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_refusing(self) -> bool:
        return self._is_closed or self._health.is_refusing

    @property
    def condition(self) -> TierCondition:
        return self._health.condition

    def submit(
        self,
        job: Callable[[BlockTransfer], None],
        *,
        num_blocks: int,
        timeout_s: float | None,
        urgency: Urgency,
        release: Callable[[], None],
    ) -> BlockTransfer:
        """Queues a transfer; one of no blocks completes at once.

        `job` moves the blocks in one of the threads; its exceptions become the transfer's failure. `release` gives
        back what the transfer holds; it is called once, after the job or instead of it.
        """
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        is_save = urgency is Urgency.SAVE
        refusal = self._refusal(is_save=is_save) if num_blocks else None
        was_refused = refusal is not None

        def on_end(ended: BlockTransfer) -> None:
            self._on_end(ended)
            if not was_refused:
                self._health.ended(ended, is_save=is_save)

        transfer = BlockTransfer(num_blocks, deadline_s=deadline_s, clock=self._clock, on_end=on_end)
        with self._lock:
            self._open[transfer] = None
        if refusal is None and num_blocks:
            refusal = self._enqueue(lambda: self._carry_out(job, transfer, release), urgency)
            if refusal is None:
                return transfer
        transfer.end(refusal)
        release()
        return transfer

    def run_soon(self, task: Callable[[], None]) -> bool:
        """Queues work that belongs to no transfer; False if there is no room."""
        guarded = lambda: None if self._is_closed else self._guard(task)  # noqa: E731
        return not self._is_closed and self._enqueue(guarded, Urgency.SAVE) is None

    def close(self, timeout_s: float = CLOSE_S, *, after: Callable[[], None] = lambda: None) -> bool:
        """Ends what is pending, lets copies on their way finish, and stops the threads.

        Args:
            timeout_s: what all of it may take.
            after: closes what the threads use; called once, by the last of them.

        Returns:
            Whether all have stopped; one that hangs in its medium is left behind, and may still use it.
        """
        until_s = time.monotonic() + timeout_s
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            pending = list(self._open) if is_first else []
            if is_first:
                self._after = after
        # Outside the lock: an end takes the transfer's lock first and this one then (`_on_end`).
        for transfer in pending:
            transfer.close(until_s - time.monotonic())
        if is_first:
            self._drain()
            for _ in self._threads:  # the least urgent: whatever is still queued goes first
                self._put(Urgency.STOP, None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                _log.warning("tier %s: thread %s hangs in its medium and is left behind", self._name, thread.name)
        return not any(thread.is_alive() for thread in self._threads)

    def _refusal(self, *, is_save: bool) -> TierFailure | None:
        return TierFailure.CLOSED if self._is_closed else self._health.refusal(is_save=is_save)

    def _enqueue(self, task: Callable[[], None], urgency: Urgency) -> TierFailure | None:
        with self._lock:
            if self._queued[urgency] >= self._most[urgency]:
                return TierFailure.BUSY
            self._queued[urgency] += 1
        self._put(urgency, task)
        return None

    def _put(self, urgency: Urgency, task: Callable[[], None] | None) -> None:
        self._jobs.put((urgency, next(self._numbers), task))

    def _drain(self) -> None:
        """After the end of all transfers: what is queued only gives back what it holds."""
        with contextlib.suppress(queue.Empty):
            while (task := self._taken(*self._jobs.get_nowait())) is not None:
                task()

    def _run(self) -> None:
        while (task := self._taken(*self._jobs.get())) is not None:
            task()
        with self._lock:
            self._num_running -= 1
            is_last = not self._num_running
        if is_last:
            self._guard(self._after)

    def _taken(self, urgency: Urgency, _: int, task: Callable[[], None] | None) -> Callable[[], None] | None:
        if task is not None:
            with self._lock:
                self._queued[urgency] -= 1
        return task

    def _carry_out(
        self, job: Callable[[BlockTransfer], None], transfer: BlockTransfer, release: Callable[[], None]
    ) -> None:
        try:
            if transfer.poll() is TransferState.PENDING:
                transfer.has_begun = True
                job(transfer)
                transfer.end()
        except TransferEnded:
            pass  # its end was counted where it was ended
        except Exception as error:  # noqa: BLE001 -- the fault boundary: a tier never takes the engine down
            failure = classify(error)
            if failure is TierFailure.ERROR:
                _log.exception("tier %s: its own code failed", self._name)
            transfer.end(failure)
        finally:
            self._guard(release)

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # noqa: BLE001 -- the fault boundary, as above
            _log.exception("tier %s: work in the background failed", self._name)

    def _on_end(self, transfer: BlockTransfer) -> None:
        with self._lock:
            self._open.pop(transfer, None)
        if transfer.failure is not None:
            self._counters.count_failure(transfer.failure)
