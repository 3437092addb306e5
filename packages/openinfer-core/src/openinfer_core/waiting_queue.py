"""`WaitingQueue`: requests in the order a `QueuePolicy` gives, and a fault boundary around the policy.

A policy is code of another package. Whatever it raises, or does by returning keys that cannot be compared, costs the
request it was asked about and no other, is logged with its traceback, and is counted in `faults`.
"""

import logging
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import QueuePolicy

logger = logging.getLogger("openinfer.scheduler")

Item = TypeVar("Item")  # what a scheduler keeps of a request


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item]):
    key: Any
    item: Item
    request: GenerateRequest


class WaitingQueue(Generic[Item]):
    """Items by key. Keys are compared on entry only, so that a bad one cannot harm those already here."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.faults = 0  # times the policy raised
        self._policy = policy
        self._entries: list[_Entry[Item]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> Item | None:
        return self._entries[0].item if self._entries else None

    def add(self, item: Item, request: GenerateRequest) -> bool:
        """Queues an item; False if the policy raised: then it is not here."""
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        try:
            key = self._policy.key(request, arrival)
        except Exception as error:  # noqa: BLE001 - the policy is a plug-in: it costs this request only
            self._record_fault("key", error)
            return False
        try:
            insort(self._entries, _Entry(key, item, request), key=attrgetter("key"))
        except Exception as error:  # noqa: BLE001 - as above: comparing keys runs the policy's code too
            self._record_fault("comparison of keys", error)
            self._tell("withdrawn", self._policy.withdrawn, request)
            return False
        return True

    def admit_head(self) -> bool:
        """Takes the head out to run; False if the policy raised: it is out all the same, and has to fail."""
        return self._tell("admitted", self._policy.admitted, self._entries.pop(0).request)

    def withdraw(self, item: Item) -> bool:
        """Takes an item out unserved; False if it is not here."""
        for index, entry in enumerate(self._entries):
            if entry.item is item:
                del self._entries[index]
                self._tell("withdrawn", self._policy.withdrawn, entry.request)
                return True
        return False

    def _tell(self, name: str, hook: Callable[[GenerateRequest], None], request: GenerateRequest) -> bool:
        try:
            hook(request)
        except Exception as error:  # noqa: BLE001 - the policy is a plug-in: it costs this request only
            self._record_fault(name, error)
            return False
        return True

    def _record_fault(self, what: str, error: Exception) -> None:
        self.faults += 1
        logger.error("queue policy %s: %s raised", type(self._policy).__name__, what, exc_info=error)
