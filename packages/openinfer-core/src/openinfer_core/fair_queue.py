"""`FairQueue`: grammars that wait for the one thread that compiles them, fair over tenants.

Each tenant has used some seconds of that thread, and the next grammar is of the tenant that has used least (start-time
fair queueing: Goyal, Vin and Cheng, IEEE/ACM Transactions on Networking 5(5), 1997). One that comes back, or comes
first, begins where those that wait are: what it did not use is not saved up. So a tenant's grammar waits for one of
each other tenant, and the one that is being compiled, however many they have sent.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Tenant:
    """What one tenant has waiting."""

    def __init__(self, used_s: float) -> None:
        self.used_s = used_s  # of the thread, since the queue began, as if it had always had its share
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()


class FairQueue:
    """Work of one thread.

    Args:
        name: of the thread.
        clock: seconds that work takes.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.used_s = 0.0
        self._clock = clock
        self._changed = threading.Condition()
        self._tenants: dict[str, _Tenant] = {}
        self._now_s = 0.0  # what the tenant had used whose work was taken last
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def submit(self, tenant: str, work: Callable[[], T]) -> "Future[T]":
        """The future of a call; cancelled if it has not begun when this is closed."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            found = self._tenants.get(tenant)
            if found is None:
                found = self._tenants[tenant] = _Tenant(self._now_s)
            elif not found.waiting:
                found.used_s = max(found.used_s, self._now_s)
            found.waiting.append((future, work))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Ends the thread after what it is at. Idempotent."""
        with self._changed:
            self._is_closed = True
            for tenant in self._tenants.values():
                while tenant.waiting:
                    tenant.waiting.popleft()[0].cancel()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            tenant, future, work = taken
            if not future.set_running_or_notify_cancel():
                continue
            begin_s = self._clock()
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 -- raised where the result is taken
                future.set_exception(error)
            else:
                future.set_result(result)
            used_s = self._clock() - begin_s
            with self._changed:
                tenant.used_s += used_s
                self.used_s += used_s

    def _take(self) -> "tuple[_Tenant, Future[Any], Callable[[], Any]] | None":
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or any(each.waiting for each in self._tenants.values()))
            if self._is_closed:
                return None
            tenant = min((each for each in self._tenants.values() if each.waiting), key=lambda each: each.used_s)
            self._now_s = max(self._now_s, tenant.used_s)
            # Those that have nothing waiting and are owed nothing need not be known.
            self._tenants = {
                name: each for name, each in self._tenants.items() if each.waiting or each.used_s > self._now_s
            }
            return tenant, *tenant.waiting.popleft()
