"""`FairQueue`: work that waits for a few threads, fair over owners by the seconds that their work takes.

    submitted ──► waiting ──► running ──► done
                     └──cancelled, or the queue closes──► dropped at once, with all that it refers to

Work that runs is not interrupted. Whose work is next is `FairTurns`', which has no threads: each owner has used some
seconds, and the next item is of the one that has used least (start-time fair queueing: Goyal, Vin and Cheng, IEEE/ACM
Transactions on Networking 5(5), 1997). One that comes back, or comes first, begins where those that wait are: what it
did not use is not saved up. So an owner waits for one item of each other owner, and for those that are being worked
on, however many they have sent.

Of one owner's items the one with the least `order` is next, then the one that came first. What is done in several
pieces gives all of them the time at which it began: it is then done before what began later, where each piece by itself
would wait for the first pieces of all others, so that all would be done late.
"""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from heapq import heappop, heappush
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


class Share(Generic[Item]):
    """What one owner has waiting and has used."""

    __slots__ = ("num_running", "order", "used_s", "waiting")

    def __init__(self, used_s: float) -> None:
        self.used_s = used_s  # since the turns began, as if it had always had its share
        self.num_running = 0
        self.waiting: dict[int, Item] = {}  # by ticket, in order of arrival
        self.order: list[tuple[float, int]] = []  # of tickets, a heap; some may be withdrawn

    def take(self) -> Item:
        """Takes out the item that is next; there must be one."""
        while (ticket := heappop(self.order)[1]) not in self.waiting:
            pass
        return self.waiting.pop(ticket)

    def end(self, used_s: float) -> None:
        """An item that was taken is done, and took so long."""
        self.num_running -= 1
        self.used_s += used_s


class FairTurns(Generic[Item]):
    """See the module. Its caller has a lock."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, Share[Item]] = {}
        self._now_s = 0.0  # what the owner had used whose item was taken last
        self._num_waiting = 0
        self._next_ticket = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being worked on."""
        return not self._num_waiting and not any(share.num_running for share in self._shares.values())

    def put(self, owner: Hashable, item: Item, *, order: float = 0.0) -> tuple[Share[Item], int]:
        """Returns the share and the ticket by which the item can be withdrawn."""
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = Share(self._now_s)
        elif not share.waiting and not share.num_running:
            share.used_s = max(share.used_s, self._now_s)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        share.waiting[ticket] = item
        heappush(share.order, (order, ticket))
        self._num_waiting += 1
        return share, ticket

    def withdraw(self, share: Share[Item], ticket: int) -> None:
        """Takes out an item that waits; one that was taken is left alone."""
        if ticket in share.waiting:
            del share.waiting[ticket]
            self._num_waiting -= 1

    def take(self) -> tuple[Share[Item], Item]:
        """The next item, whose share is told when it is done; there must be one."""
        share = min((each for each in self._shares.values() if each.waiting), key=lambda each: each.used_s)
        self._now_s = max(self._now_s, share.used_s)
        # Those that have nothing here and are owed nothing need not be known.
        self._shares = {
            owner: each
            for owner, each in self._shares.items()
            if each.waiting or each.num_running or each.used_s > self._now_s
        }
        share.num_running += 1
        self._num_waiting -= 1
        return share, share.take()

    def waiting(self) -> list[Item]:
        """All that wait, in no particular order."""
        return [item for share in self._shares.values() for item in share.waiting.values()]


_Call: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


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
        self._turns: FairTurns[_Call] = FairTurns()
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return len(self._turns)

    def submit(self, owner: str, work: Callable[[], T], *, order_s: float | None = None) -> "Future[T]":
        """The future of a call; it can be cancelled until the call begins, and is when the queue closes before.

        Args:
            owner: whose share it takes.
            work: the call.
            order_s: on the queue's clock; of the owner's calls the one with the least is next. By default, now.
        """
        order = self._clock() if order_s is None else order_s
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            share, ticket = self._turns.put(owner, (future, work), order=order)
            self._changed.notify()
            if len(self._threads) < self.num_threads:
                self._begin_thread()
        future.add_done_callback(lambda _: self._forget(share, ticket))
        return future

    def close(self) -> None:
        """Cancels what waits; the threads end after what they are at. Idempotent."""
        with self._changed:
            self._is_closed = True
            waiting = [future for future, _ in self._turns.waiting()]
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

    def _forget(self, share: Share[_Call], ticket: int) -> None:
        # Cancelled: its work, and what it refers to, must not wait for a thread to be dropped.
        with self._changed:
            self._turns.withdraw(share, ticket)

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Takes one piece of work, and does it; False if there will be none. No work is a local of a waiting thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._turns) > 0)
            if self._is_closed:
                return False
            share, (future, work) = self._turns.take()
        begin_s = self._clock()
        if future.set_running_or_notify_cancel():
            _settle(future, work)
        with self._changed:
            used_s = self._clock() - begin_s
            share.end(used_s)
            self.used_s += used_s
        return True


def _settle(future: "Future[Any]", work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 -- raised where the result is taken
        future.set_exception(error)
        del future  # its error's traceback has this frame, and would keep it
    else:
        future.set_result(result)
