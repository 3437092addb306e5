"""`MaskQueue`: masks that are computed in threads, next to the step loop, fair over tenants by seconds.

    loop:     submit ─► wait (a budget for each step) ─► a step with the rows whose masks are there ─► submit …
    threads:            tenant that used least ─► its grammar that used least ─► oldest of these ─► masks

A tenant's turn is one grammar's, and a grammar's one state: however many requests a tenant sends, and however many
outputs (`n`) each has, another tenant's mask waits for the masks that are being computed and one of each tenant.
llguidance gives the interpreter lock back while it computes a mask, so that the loop goes on meanwhile.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from openinfer_core.engine import MASK_OUTCOMES
from openinfer_core.fair_queue import FairTurns, Share
from openinfer_core.grammars import MaskWords

_CLOSE_S = 5.0  # that a mask which is being computed is waited for


class MaskJob:
    """The masks of one row, for all requests that stand in the same state.

    Args:
        tenant: whose share of the threads it draws on.
        group: whose share of the tenant's: what its requests have in common that compete as one.
        compute: the masks; what it raises is the result, too.
    """

    __slots__ = (
        "_compute",
        "begun_s",
        "error",
        "group",
        "is_done",
        "masks",
        "num_wanted",
        "round",
        "sat_out",
        "tenant",
    )

    def __init__(self, tenant: str, group: Hashable, compute: Callable[[], Sequence[MaskWords]] | None) -> None:
        self.tenant = tenant
        self.group = group
        self.masks: Sequence[MaskWords] = ()
        self.error: BaseException | None = None
        self.is_done = False
        self.round = 0  # of the queue, in which it was submitted
        self.sat_out = False  # a step went without its rows
        self.begun_s: float | None = None  # on the monotonic clock
        self.num_wanted = 1  # requests that stand in its state
        self._compute = compute

    @classmethod
    def done(cls, masks: Sequence[MaskWords]) -> "MaskJob":
        """One that needs no computation."""
        job = cls("", None, None)
        job.masks, job.is_done = masks, True
        return job

    def run(self) -> None:
        """Computes the masks, unless all requests that wanted them have ended."""
        compute, self._compute = self._compute, None
        if compute is None:
            return
        try:
            self.masks = compute()
        except BaseException as error:  # noqa: BLE001 - what Rust panics with, too; told where the result is taken
            self.error = error

    def drop(self) -> None:
        """One request less wants it; with the last, what it holds is freed, unless a thread has begun."""
        self.num_wanted -= 1
        if not self.num_wanted:
            self._compute = None

    @property
    def outcome(self) -> str:
        """One of `MASK_OUTCOMES`."""
        if not self.num_wanted:
            return "unwanted"
        if self.error is not None:
            return "refused"
        return "late" if self.sat_out else "in_time"


class MaskQueue:
    """Work of a few threads, which begin with the first of it. Called from the loop's thread, but for `oldest_s`.

    Args:
        num_threads: at most.
        clock: seconds of processor time of the calling thread.
    """

    def __init__(self, num_threads: int, *, clock: Callable[[], float] = time.thread_time) -> None:
        self.mask_s: dict[str, float] = dict.fromkeys(MASK_OUTCOMES, 0.0)
        self._num_threads = num_threads
        self._clock = clock
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._is_reached = threading.Condition(self._lock)  # what the loop waits for
        self._target: Callable[[], bool] | None = None
        self._tenants: FairTurns[str] = FairTurns()
        self._groups: dict[str, FairTurns[MaskJob]] = {}
        self._urgent: deque[MaskJob] = deque()
        self._running: set[MaskJob] = set()
        self._round = 0  # times that the loop has waited for what was fresh
        self._num_fresh = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        with self._lock:
            return len(self._tenants) + len(self._running)

    def oldest_s(self) -> float:
        """For how long the oldest mask that is being computed has been."""
        with self._lock:
            begun_s = [job.begun_s for job in self._running if job.begun_s is not None]
        return time.monotonic() - min(begun_s) if begun_s else 0.0

    def submit(self, jobs: Sequence[MaskJob]) -> None:
        with self._lock:
            for job in jobs:
                job.round = self._round
                self._tenants.put(job.tenant, job.tenant)
                self._groups.setdefault(job.tenant, FairTurns()).put(job.group, job)
            self._num_fresh += len(jobs)
            self._has_work.notify(len(jobs))
            missing = min(self._num_threads, len(self._tenants)) - len(self._threads)
        for _ in range(missing):
            thread = threading.Thread(target=self._run, name="openinfer-masks", daemon=True)
            self._threads.append(thread)
            thread.start()

    # --- what the loop waits for ------------------------------------------------------------------------

    def wait_for_fresh(self, timeout_s: float) -> None:
        """Waits for the masks that were submitted since this was called last; for those before them, it has."""
        with self._lock:
            self._wait(lambda: self._num_fresh == 0, timeout_s)
            self._round, self._num_fresh = self._round + 1, 0

    def wait_for_any(self, jobs: Sequence[MaskJob], timeout_s: float) -> None:
        with self._lock:
            self._wait(lambda: any(job.is_done for job in jobs), timeout_s)

    def wait_for(self, job: MaskJob) -> None:
        """Waits for one that a step cannot go without; it is computed before all others."""
        with self._lock:
            if job.begun_s is None:
                self._urgent.append(job)
                self._has_work.notify()
            self._wait(lambda: job.is_done, None)

    def _wait(self, target: Callable[[], bool], timeout_s: float | None) -> None:
        self._target = target
        self._is_reached.wait_for(target, timeout_s)
        self._target = None

    # --- threads ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            job, shares = taken
            begin_s = self._clock()
            job.run()
            self._end(job, shares, self._clock() - begin_s)

    def _take(self) -> tuple[MaskJob, Sequence[Share[Any]]] | None:
        with self._lock:
            while True:
                self._has_work.wait_for(lambda: self._is_closed or self._urgent or len(self._tenants) > 0)
                if self._is_closed:
                    return None
                job, shares = self._next()
                if job.begun_s is None:
                    break
                self._charge(job, shares, 0.0)  # it was urgent, and is here a second time
            job.begun_s = time.monotonic()
            self._running.add(job)
            return job, shares

    def _next(self) -> tuple[MaskJob, Sequence[Share[Any]]]:
        if self._urgent:
            return self._urgent.popleft(), ()
        of_tenant, tenant = self._tenants.take()
        of_group, job = self._groups[tenant].take()
        return job, (of_tenant, of_group)

    def _end(self, job: MaskJob, shares: Sequence[Share[Any]], used_s: float) -> None:
        with self._lock:
            self._charge(job, shares, used_s)
            self._running.discard(job)
            self.mask_s[job.outcome] += used_s
            job.is_done = True
            self._num_fresh -= job.round == self._round
            if self._target is not None and self._target():
                self._is_reached.notify()

    def _charge(self, job: MaskJob, shares: Sequence[Share[Any]], used_s: float) -> None:
        for share in shares:
            share.end(used_s)
        groups = self._groups.get(job.tenant)
        if groups is not None and groups.is_idle:
            del self._groups[job.tenant]

    def close(self) -> None:
        """Ends the threads after what they are at. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._has_work.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
