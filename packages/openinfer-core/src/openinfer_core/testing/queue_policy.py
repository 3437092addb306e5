"""Conformance of a `QueuePolicy`, and a wrapper that watches how a scheduler uses one."""

import random
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeAlias

from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import SamplingParams
from openinfer_core.scheduling import ChoosesVictim, QueuePolicy, QueuePolicyConfig, SharesRows, WaitingRequest
from openinfer_core.testing.errors import require

QueuePolicyFactory: TypeAlias = Callable[[QueuePolicyConfig], QueuePolicy]

_TENANTS = ("", "gold", "silver", "free")


def check_queue_policy(
    factory: QueuePolicyFactory, *, num_requests: int = 400, seeds: Iterable[int] = range(8)
) -> None:
    """Checks a queue policy under random arrivals, admissions and withdrawals.

    Its keys must form one strict order that does not change, equal requests must be served in order of arrival, and
    none of its hooks may raise; `ConformanceError` if one is broken. One that chooses victims must answer an index.
    """
    for seed in seeds:
        _check_traffic(factory(_config()), num_requests, random.Random(seed))  # noqa: S311 - no secrets here
    _check_equal_requests(factory(_config()))
    _check_victims(factory(_config()))


def serving_order(policy: QueuePolicy, requests: Iterable[GenerateRequest]) -> list[RequestId]:
    """In which order requests are served that all arrive before the first is."""
    queue: list[_Entry] = []
    for arrival, request in enumerate(requests):
        insort(
            queue, _Entry(policy.key(WaitingRequest(request=request, arrival=arrival)), request), key=attrgetter("key")
        )
    for entry in queue:
        policy.admitted(entry.request)
    return [entry.request.request_id for entry in queue]


@dataclass(slots=True, eq=False)
class _Entry:
    key: Any
    request: GenerateRequest


def _config() -> QueuePolicyConfig:
    return QueuePolicyConfig(tenant_weights={"gold": 8.0, "free": 0.25})


def _check_traffic(policy: QueuePolicy, num_requests: int, rng: random.Random) -> None:
    queue: list[_Entry] = []
    for arrival in range(num_requests):
        request = _random_request(arrival, rng)
        entry = _Entry(policy.key(WaitingRequest(request=request, arrival=arrival)), request)
        for other in queue:
            require(
                bool(entry.key < other.key) != bool(other.key < entry.key),
                f"keys {entry.key!r} and {other.key!r}: one must be smaller; end keys with the arrival number",
            )
        insort(queue, entry, key=attrgetter("key"))
        require(
            all(a.key < b.key for a, b in pairwise(queue)),
            f"the keys are in no order: {[entry.key for entry in queue]!r}",
        )
        if rng.random() < 0.2:
            policy.withdrawn(queue.pop(rng.randrange(len(queue))).request)
        while queue and rng.random() < (0.6 if len(queue) > 16 else 0.3):
            policy.admitted(queue.pop(0).request)
    for entry in queue:
        policy.admitted(entry.request)


def _check_equal_requests(policy: QueuePolicy) -> None:
    requests = [_request(index, prompt_tokens=5, max_tokens=7) for index in range(32)]
    order = serving_order(policy, requests)
    require(order == sorted(order), f"equal requests are served in the order {order}, not as they arrived")


def _check_victims(policy: QueuePolicy) -> None:
    if not isinstance(policy, ChoosesVictim):
        return
    rng = random.Random(0)  # noqa: S311 - no secrets here
    for num_candidates in (1, 2, 7, 255):
        candidates = [_random_request(index, rng) for index in range(num_candidates)]
        for arrival, request in enumerate(candidates):
            policy.key(WaitingRequest(request=request, arrival=arrival))
            policy.admitted(request)
        chosen = policy.victim(candidates)
        is_index = 0 <= chosen < num_candidates
        require(is_index, f"victim answered {chosen!r} for {num_candidates} candidates; it must be 0 .. the last")


def _random_request(request_id: int, rng: random.Random) -> GenerateRequest:
    return _request(
        request_id,
        prompt_tokens=rng.choice((1, 2, 50, 400)),
        max_tokens=rng.choice((1, 16, 300)),
        tenant=rng.choice(_TENANTS),
        priority=rng.choice((-3, 0, 0, 7)),
    )


def _request(
    request_id: int, *, prompt_tokens: int, max_tokens: int, tenant: str = "", priority: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=(1,) * prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=tenant,
        priority=priority,
    )


class WatchedPolicy:
    """A `QueuePolicy` that passes everything on, and notes where a scheduler asks out of order.

    The order is `key` once for each request, and again while it waits only for a policy that asks for it, then
    `admitted` or `withdrawn` once. Candidates for a victim have been admitted, and come oldest first. It notes
    instead of raising, because a scheduler catches what a policy raises.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._queued: set[RequestId] = set()
        self._seen: set[RequestId] = set()
        self._last_arrival = -1
        self._violations: list[str] = []
        self._ages: dict[RequestId, int] = {}  # of the admitted, in order of admission
        self.asks_again = bool(getattr(policy, "asks_again", False))
        self.lets_cached_pass = bool(getattr(policy, "lets_cached_pass", False))
        if isinstance(policy, ChoosesVictim):
            self._chooser: ChoosesVictim = policy
            self.victim = self._victim  # a policy is asked only where it has the attribute
        if isinstance(policy, SharesRows):
            self._sharing: SharesRows = policy
            self.next, self.weight = self._next, policy.weight

    def key(self, waiting: WaitingRequest) -> Any:
        request_id, arrival = waiting.request.request_id, waiting.arrival
        if self.asks_again and request_id in self._queued:
            return self._policy.key(waiting)
        self._note(request_id not in self._seen, f"key of request {request_id} is asked twice")
        self._note(arrival > self._last_arrival, f"arrival {arrival} comes after {self._last_arrival}")
        self._last_arrival = arrival
        self._seen.add(request_id)
        key = self._policy.key(waiting)
        self._queued.add(request_id)
        return key

    def admitted(self, request: GenerateRequest) -> None:
        self._leave(request.request_id, "admitted")
        self._ages[request.request_id] = len(self._ages)
        self._policy.admitted(request)

    def withdrawn(self, request: GenerateRequest) -> None:
        self._leave(request.request_id, "withdrawn")
        self._policy.withdrawn(request)

    def _next(self, full: AbstractSet[str]) -> RequestId:
        self._note(self._queued, "next is asked while nothing waits")
        request_id = self._sharing.next(full)
        require(request_id in self._queued, f"next answered request {request_id}, which does not wait")
        return request_id

    def _victim(self, candidates: Sequence[GenerateRequest]) -> int:
        ids = [request.request_id for request in candidates]
        ages = [self._ages.get(request_id, -1) for request_id in ids]
        self._note(ids, "victim is asked without candidates")
        self._note(-1 not in ages, f"victim is asked of requests {ids}, which were not all admitted")
        self._note(ages == sorted(set(ages)), f"victim is asked of requests {ids}, which are not in order of admission")
        return self._chooser.victim(candidates)

    def check(self) -> None:
        require(not self._violations, "; ".join(self._violations))

    def check_is_empty(self) -> None:
        left = sorted(self._queued)
        require(not left, f"the policy was told neither admitted nor withdrawn of requests {left}")

    def _leave(self, request_id: RequestId, hook: str) -> None:
        self._note(request_id in self._queued, f"{hook} of request {request_id}, which is not queued")
        self._queued.discard(request_id)

    def _note(self, condition: object, violation: str) -> None:
        if not condition:
            self._violations.append(violation)
