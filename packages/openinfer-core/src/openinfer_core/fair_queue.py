"""`FairQueue`: work that waits for a few threads, fair over owners by the seconds that their work takes.

Each owner has used some seconds of the threads, and the next work is of the owner that has used least (start-time fair
queueing: Goyal, Vin and Cheng, IEEE/ACM Transactions on Networking 5(5), 1997). One that comes back, or comes first,
begins where those that wait are: what it did not use is not saved up. So an owner's work waits for what the threads
are at and for one piece of work of each other owner, however much they have submitted.

    submitted ──► waiting ──► running ──► done
                     └──cancelled, or the queue closes──► dropped at once, with all that it refers to

Work that runs is not interrupted.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Owner:
    """What one owner has in the queue."""

    def __init__(self, used_s: float) -> None:
        self.used_s = used_s  # of the threads, since the queue began, as if it had always had its share
        self.num_running = 0
        self.waiting: dict[Future[Any], Callable[[], Any]] = {}


class FairQueue:
    """Work of some threads, which begin with the first work.

    Args:
        name: of the threads.
        num_threads: so many at most.
        clock: seconds that work takes.

    Attributes:
        used_s: seconds that all work has taken.
    """

    def __init__(self, name: str, *, num_threads: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.used_s = 0.0
        self._name = name
        self.num_threads = num_threads
        self._clock = clock
        self._changed = threading.Condition()
        self._owners: dict[str, _Owner] = {}
        self._now_s = 0.0  # what the owner had used whose work was taken last
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(len(owner.waiting) for owner in self._owners.values())

    def submit(self, owner: str, work: Callable[[], T]) -> "Future[T]":
        """The future of a call; it can be cancelled until the call begins, and is when the queue closes before."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            found = self._owners.get(owner)
            if found is None:
                found = self._owners[owner] = _Owner(self._now_s)
            elif not found.waiting and not found.num_running:
                found.used_s = max(found.used_s, self._now_s)
            found.waiting[future] = work
            self._changed.notify()
            if len(self._threads) < self.num_threads:
                self._begin_thread()
        future.add_done_callback(lambda done: self._forget(found, done))
        return future

    def close(self) -> None:
        """Cancels what waits; the threads end after what they are at. Idempotent."""
        with self._changed:
            self._is_closed = True
            waiting = [future for owner in self._owners.values() for future in owner.waiting]
            self._changed.notify_all()
        for future in waiting:
            future.cancel()

    def join(self) -> None:
        """Returns when the threads have ended, after `close`."""
        for thread in self._threads:
            thread.join()

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _forget(self, owner: _Owner, future: "Future[Any]") -> None:
        # Cancelled: its work, and what it refers to, must not wait for a thread to be dropped.
        with self._changed:
            owner.waiting.pop(future, None)

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Takes one piece of work, and does it; False if there will be none. No work is a local of a waiting thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or any(each.waiting for each in self._owners.values()))
            if self._is_closed:
                return False
            owner = self._next_owner()
            future = next(iter(owner.waiting))
            work = owner.waiting.pop(future)
            owner.num_running += 1
        begin_s = self._clock()
        if future.set_running_or_notify_cancel():
            _settle(future, work)
        with self._changed:
            used_s = self._clock() - begin_s
            owner.num_running -= 1
            owner.used_s += used_s
            self.used_s += used_s
        return True

    def _next_owner(self) -> _Owner:
        owner = min((each for each in self._owners.values() if each.waiting), key=lambda each: each.used_s)
        self._now_s = max(self._now_s, owner.used_s)
        # Those that have nothing here and are owed nothing need not be known.
        self._owners = {
            name: each
            for name, each in self._owners.items()
            if each.waiting or each.num_running or each.used_s > self._now_s
        }
        return owner


def _settle(future: "Future[Any]", work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 -- raised where the result is taken
        future.set_exception(error)
        del future  # its error's traceback has this frame, and would keep it
    else:
        future.set_result(result)
