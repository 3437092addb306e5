"""`FairTurns`: whose work is next, fair by the seconds that each owner's work has taken.

Each owner has used some seconds, and the next item is of the one that has used least (start-time fair queueing: Goyal,
Vin and Cheng, IEEE/ACM Transactions on Networking 5(5), 1997). One that comes back, or comes first, begins where those
that wait are: what it did not use is not saved up. So an owner waits for one item of each other owner, and for those
that are being worked on, however many they have sent.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Share(Generic[Item]):
    """What one owner has waiting and has used."""

    __slots__ = ("num_running", "used_s", "waiting")

    def __init__(self, used_s: float) -> None:
        self.used_s = used_s  # since the queue began, as if it had always had its share
        self.num_running = 0
        self.waiting: deque[Item] = deque()

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

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being worked on."""
        return not self._num_waiting and not any(share.num_running for share in self._shares.values())

    def put(self, owner: Hashable, item: Item) -> None:
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = Share(self._now_s)
        elif not share.waiting and not share.num_running:
            share.used_s = max(share.used_s, self._now_s)
        share.waiting.append(item)
        self._num_waiting += 1

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
        return share, share.waiting.popleft()

    def clear(self) -> list[Item]:
        """Takes out all that wait."""
        items = [item for share in self._shares.values() for item in share.waiting]
        for share in self._shares.values():
            share.waiting.clear()
        self._num_waiting = 0
        return items
