"""`WaitingQueue`: requests in the order a `QueuePolicy` gives, and a fault boundary around the policy.

A policy is code of another package. Whatever it raises, or does by returning keys that cannot be compared, costs the
request it was asked about and no other, is logged with its traceback, and is counted in `faults`. A wrong choice of a
victim costs none.
"""

import logging
import operator
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, TypeVar

from openinfer_core.plugins import PLUGIN_ERRORS
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling.policy_calls import PolicyCalls
from openinfer_core.scheduling.scheduler import ChoosesVictim, CountsTokens, QueuePolicy, SharesRows, WaitingRequest

logger = logging.getLogger("openinfer.scheduler")

Item = TypeVar("Item")  # what a scheduler keeps of a request

ASKED_AGAIN = 32
"""Requests whose keys are asked again before a step, at most."""
_COMPARISON = "comparison of keys"
MAX_BYPASS_S = 30.0
"""Seconds for which later requests may pass one that waits, where a policy that is asked again says nothing else."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item]):
    key: Any
    item: Item
    waiting: WaitingRequest
    arrived_s: float

    @property
    def request(self) -> GenerateRequest:
        return self.waiting.request


class WaitingQueue(Generic[Item]):
    """Items by key. Keys are compared on entry, or where the policy is asked again; a bad one harms none already here.

    Args:
        policy: gives the order.
        describe: what is cached of an item, and whether its adapter is loaded, at this moment, for policies that are
            asked again: the two last fields of `WaitingRequest`.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        *,
        describe: Callable[[Item], tuple[int, bool]] | None = None,
    ) -> None:
        self.faults = 0  # times the policy raised
        # What a request is answered that the policy raised on: a client's operator looks for that policy.
        self.calls = PolicyCalls(type(policy))
        self.fault_message = f"the queue policy {self.calls.policy} failed on this request"
        self._policy = policy
        self._describe = describe
        self._choose = policy.victim if isinstance(policy, ChoosesVictim) else None
        self._ended = policy.ended if isinstance(policy, CountsTokens) else None
        self.shares = policy if isinstance(policy, SharesRows) else None
        self.tenants: Counter[str] = Counter()  # of how many requests of each wait
        self._by_id: dict[RequestId, _Entry[Item]] = {}
        self._max_bypass_s = float(getattr(policy, "max_bypass_s", MAX_BYPASS_S))
        self.lets_cached_pass = bool(getattr(policy, "lets_cached_pass", False))
        self._asks_again = bool(getattr(policy, "asks_again", False))
        self._entries: list[_Entry[Item]] = []
        self._arrivals = 0
        self._next_asked = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> Item | None:
        return self._entries[0].item if self._entries else None

    def add(self, item: Item, request: GenerateRequest, *, now_s: float = 0.0) -> bool:
        """Queues an item; False if the policy raised: then it is not here."""
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        try:
            waiting = self._waiting(item, request, arrival)
            key = self.calls.run("key", self._policy.key, waiting)
        except PLUGIN_ERRORS as error:  # the policy is a plug-in: it costs this request only
            self._record_fault("key", error)
            return False
        try:
            entry = _Entry(key, item, waiting, now_s)
            self.calls.run(_COMPARISON, insort, self._entries, entry, key=attrgetter("key"))
        except PLUGIN_ERRORS as error:  # as above: comparing keys runs the policy's code too
            self._record_fault(_COMPARISON, error)
            self._tell("withdrawn", self._policy.withdrawn, request)
            return False
        self.tenants[request.tenant] += 1
        self._by_id[request.request_id] = entry
        return True

    def ask_again(self, *, now_s: float) -> None:
        """Orders the queue anew, if the policy is to be asked again; call it before a step's admissions.

        `ASKED_AGAIN` keys are asked for at a time, the next ones the next time. Where the policy raises, the old keys
        and the old order stay.
        """
        if not self._asks_again or len(self._entries) < 2:
            return
        for _ in range(min(ASKED_AGAIN, len(self._entries))):
            self._next_asked = (self._next_asked + 1) % len(self._entries)
            entry = self._entries[self._next_asked]
            try:
                entry.waiting = self._waiting(entry.item, entry.request, entry.waiting.arrival)
                entry.key = self.calls.run("key", self._policy.key, entry.waiting)
            except PLUGIN_ERRORS as error:  # the policy is a plug-in
                self._record_fault("key", error)
        overdue = [entry for entry in self._entries if now_s - entry.arrived_s >= self._max_bypass_s]
        others = [entry for entry in self._entries if now_s - entry.arrived_s < self._max_bypass_s]
        try:
            self.calls.run(_COMPARISON, others.sort, key=attrgetter("key"))
        except PLUGIN_ERRORS as error:  # comparing keys runs the policy's code too
            self._record_fault(_COMPARISON, error)
            return
        self._entries = sorted(overdue, key=lambda entry: entry.waiting.arrival) + others

    def first(self, num_items: int, *, tenant: str | None = None) -> list[Item]:
        """The first so many items in the order of the keys, of one tenant if it is named."""
        of_tenant = (each for each in self._entries if tenant is None or each.request.tenant == tenant)
        return [entry.item for entry in islice(of_tenant, num_items)]

    def next(self, full: AbstractSet[str]) -> Item | None:
        """What is to be admitted next: the head, or what a `SharesRows` says, where `full` tenants have their share."""
        if self.shares is None or not self._entries:
            return self.head
        try:
            return self._by_id[self.calls.run("next", self.shares.next, full)].item
        except PLUGIN_ERRORS as error:  # the policy is a plug-in: the order of the keys stands in
            self._record_fault("next", error)
            return self.head

    def weight(self, tenant: str) -> float:
        """Of a tenant's share; 1 where the policy does not say, or says no number above 0."""
        if self.shares is None:
            return 1.0
        try:
            weight = float(self.calls.run("weight", self.shares.weight, tenant))
            if not 0 < weight < float("inf"):
                raise ValueError(f"weight of {tenant!r} is {weight}; it must be above 0 and finite")
        except PLUGIN_ERRORS as error:  # the policy is a plug-in
            self._record_fault("weight", error)
            return 1.0
        return weight

    def admit_head(self) -> bool:
        """Takes the head out to run; False if the policy raised: it is out all the same, and has to fail."""
        return self._admit(0)

    def admit(self, item: Item) -> bool:
        """Takes an item out to run, which is here; returns what `admit_head` does."""
        return self._admit(next(index for index, entry in enumerate(self._entries) if entry.item is item))

    def _admit(self, index: int) -> bool:
        request = self._take(index)
        return self._tell("admitted", self._policy.admitted, request)

    def _take(self, index: int) -> GenerateRequest:
        request = self._entries.pop(index).request
        del self._by_id[request.request_id]
        self.tenants[request.tenant] -= 1
        if not self.tenants[request.tenant]:
            del self.tenants[request.tenant]
        return request

    def withdraw(self, item: Item) -> bool:
        """Takes an item out unserved; False if it is not here."""
        for index, entry in enumerate(self._entries):
            if entry.item is item:
                self._tell("withdrawn", self._policy.withdrawn, self._take(index))
                return True
        return False

    def ended(self, request: GenerateRequest, *, generated_tokens: int) -> None:
        """Tells the policy what a request that was taken out to run has come to, if it wants to know."""
        if self._ended is not None:
            self._tell("ended", partial(self._ended, generated_tokens=generated_tokens), request)

    @property
    def chooses_victim(self) -> bool:
        """Whether the policy is a `ChoosesVictim`."""
        return self._choose is not None

    def victim(self, candidates: Sequence[GenerateRequest]) -> int | None:
        """The index of the running request that the policy has give way; None if it does not say, or says no index."""
        if self._choose is None:
            return None
        try:
            chosen = operator.index(self.calls.run("victim", self._choose, candidates))
            if not 0 <= chosen < len(candidates):
                raise IndexError(f"victim answered {chosen}; there are {len(candidates)} candidates, from 0 on")
        except PLUGIN_ERRORS as error:  # the policy is a plug-in: the scheduler's own choice stands in
            self._record_fault("victim", error)
            return None
        return chosen

    def _waiting(self, item: Item, request: GenerateRequest, arrival: int) -> WaitingRequest:
        # Counting what is cached hashes the prompt: only policies that can use it pay for it.
        if not self._asks_again or self._describe is None:
            return WaitingRequest(request=request, arrival=arrival)
        cached_tokens, is_adapter_loaded = self._describe(item)
        return WaitingRequest(
            request=request, arrival=arrival, cached_tokens=cached_tokens, is_adapter_loaded=is_adapter_loaded
        )

    def _tell(self, name: str, hook: Callable[[GenerateRequest], None], request: GenerateRequest) -> bool:
        try:
            self.calls.run(name, hook, request)
        except PLUGIN_ERRORS as error:  # the policy is a plug-in: it costs this request only
            self._record_fault(name, error)
            return False
        return True

    def _record_fault(self, what: str, error: BaseException) -> None:
        self.faults += 1
        logger.error("queue policy %s: %s raised", self.calls.policy, what, exc_info=error)
