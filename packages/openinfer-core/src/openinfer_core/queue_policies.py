"""The queue policies that come with the contract: first come first served, priority, weighted fair share."""

from collections import deque
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush, nlargest
from operator import itemgetter

from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import QueuePolicyConfig, WaitingRequest

OPENINFER_CONTRACT = 1

# Tenants that the fair share remembers; names may come from outside, so there has to be a bound.
MAX_INDEBTED_TENANTS = 1 << 16

# What the fair share takes a request to generate at most, until it ends.
MAX_EXPECTED_TOKENS = 512


class FirstComeFirstServed:
    """Order of arrival."""

    lets_cached_pass = True

    def __init__(self, config: QueuePolicyConfig) -> None:
        del config

    def key(self, waiting: WaitingRequest) -> int:
        return waiting.arrival

    def admitted(self, request: GenerateRequest) -> None:
        """Keeps no account."""

    def withdrawn(self, request: GenerateRequest) -> None:
        """Keeps no account."""


class Priority:
    """`GenerateRequest.priority`, smaller first; order of arrival among equals."""

    def __init__(self, config: QueuePolicyConfig) -> None:
        del config

    def key(self, waiting: WaitingRequest) -> tuple[int, int]:
        return waiting.request.priority, waiting.arrival

    def admitted(self, request: GenerateRequest) -> None:
        """Keeps no account."""

    def withdrawn(self, request: GenerateRequest) -> None:
        """Keeps no account."""


class FairShare:
    """Weighted fair share of tokens per tenant: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996).

    A request's start tag is the later of the virtual time and its tenant's last finish tag; the finish tag adds its
    cost over the tenant's weight. The smallest start tag is served first, and the virtual time is no earlier than the
    start tag of the request admitted last. A tenant that was idle gains no credit for it. The virtual time also
    passes with the work that is done, divided by the weights of the tenants that wait, as in weighted fair queueing
    (Demers, Keshav, Shenker, SIGCOMM 1989): requests of ever new tenants, which all start at the virtual time, would
    otherwise keep it where it is, and come before a tenant's next request for as long as they come. Requests of one
    tenant are served in order of arrival, so that one tenant alone is served as by `FirstComeFirstServed`; but of
    several choices of one request (`GenerateRequest.choice`) the second counts as if it had come with the tenant's next
    request, the third with the one after that, so that many weigh as one.

    A request costs its prompt and what it generates. That is known when it ends; before, it is taken for `max_tokens`
    or 512, whichever is less: clients that give no `max_tokens` would pay for a whole context otherwise.

    At most `MAX_INDEBTED_TENANTS` tenants are remembered; of more, those that owe least are forgotten.
    """

    lets_cached_pass = True

    def __init__(self, config: QueuePolicyConfig) -> None:
        self._weights = config.tenant_weights
        self._virtual_time = 0.0
        self._num_tenants_to_sweep = 64
        self._finish_tags: dict[str, float] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_weight = 0.0
        # first tags of tenants, with those that are no longer the first
        self._heads: list[tuple[float, int, str]] = []

    @property
    def num_tenants(self) -> int:
        return len(self._finish_tags)

    def key(self, waiting: WaitingRequest) -> tuple[float, int]:
        request = waiting.request
        start = max(self._virtual_time, self._finish_tags.get(request.tenant, 0.0))
        if (of_tenant := self._waiting.get(request.tenant)) is None:
            of_tenant = self._waiting[request.tenant] = _Waiting()
            self._waiting_weight += self._weight(request)
        if of_tenant.tags:
            # What was withdrawn is paid back in the finish tag; those that came before keep their place all the same.
            start = max(start, of_tenant.tags[-1][0])
        self._finish_tags[request.tenant] = start + self._cost(request, _expected_tokens(request))
        of_tenant.add(request, start, waiting.arrival)
        if len(of_tenant.tags) == 1:
            self._push_head(request.tenant, of_tenant)
        return start, waiting.arrival

    def next(self, full: AbstractSet[str]) -> RequestId:
        heads = self._heads
        passed: list[tuple[float, int, str]] = []
        while heads:
            start, arrival, tenant = heads[0]
            of_tenant = self._waiting.get(tenant)
            if of_tenant is None or of_tenant.tags[0] != (start, arrival):
                heappop(heads)
            elif tenant in full:
                passed.append(heappop(heads))
            else:
                break
        chosen = heads[0] if heads else passed[0]
        for head in passed:
            heappush(heads, head)
        return self._waiting[chosen[2]].first

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def admitted(self, request: GenerateRequest) -> None:
        of_tenant = self._waiting.get(request.tenant)
        if of_tenant is not None and of_tenant.remove(request) is not None:
            # Whichever of its requests a tenant is served, it is served in the first one's turn.
            start, _ = of_tenant.tags.popleft()
            self._virtual_time = max(self._virtual_time, start)
            self._note_left(request.tenant, of_tenant)
            self._pass_time(request, len(request.prompt_token_ids))
        if len(self._finish_tags) >= self._num_tenants_to_sweep:
            self._sweep()

    def withdrawn(self, request: GenerateRequest) -> None:
        of_tenant = self._waiting.get(request.tenant)
        if of_tenant is not None and (tag := of_tenant.remove(request)) is not None:
            if tag in of_tenant.tags:
                of_tenant.tags.remove(tag)
            else:
                of_tenant.tags.pop()  # another was served in its turn
            self._note_left(request.tenant, of_tenant)
            self._charge(request, -self._cost(request, _expected_tokens(request)))

    def ended(self, request: GenerateRequest, *, generated_tokens: int) -> None:
        """Charges what was generated beyond what was expected, or pays back what was not."""
        self._pass_time(request, generated_tokens)
        self._charge(request, (generated_tokens - _expected_tokens(request)) / self._weight(request))

    def _note_left(self, tenant: str, of_tenant: "_Waiting") -> None:
        if of_tenant.tags:
            self._push_head(tenant, of_tenant)
        else:
            del self._waiting[tenant]
            self._waiting_weight = self._waiting_weight - self.weight(tenant) if self._waiting else 0.0

    def _pass_time(self, request: GenerateRequest, tokens: int) -> None:
        """The virtual time that this work takes, shared by its tenant and all that wait."""
        own = 0.0 if request.tenant in self._waiting else self._weight(request)
        self._virtual_time += tokens / (self._waiting_weight + own)

    def _push_head(self, tenant: str, of_tenant: "_Waiting") -> None:
        heappush(self._heads, (*of_tenant.tags[0], tenant))
        if len(self._heads) > 2 * len(self._waiting) + 64:
            self._heads = [(*each.tags[0], name) for name, each in self._waiting.items()]
            heapify(self._heads)

    def _charge(self, request: GenerateRequest, cost: float) -> None:
        if request.tenant in self._finish_tags:
            self._finish_tags[request.tenant] += cost

    def _sweep(self) -> None:
        # Each time there are twice as many tenants, so that it costs O(1) per request.
        debts = {tenant: tag for tenant, tag in self._finish_tags.items() if tag > self._virtual_time}
        if len(debts) > MAX_INDEBTED_TENANTS:
            debts = dict(nlargest(MAX_INDEBTED_TENANTS // 2, debts.items(), key=itemgetter(1)))
        self._finish_tags = debts
        self._num_tenants_to_sweep = max(64, 2 * len(debts))

    def _cost(self, request: GenerateRequest, generated_tokens: int) -> float:
        return (len(request.prompt_token_ids) + generated_tokens) / self._weight(request)

    def _weight(self, request: GenerateRequest) -> float:
        return self.weight(request.tenant)


class _Waiting:
    """What waits of one tenant: start tags in order of arrival, and requests in the order in which they take them."""

    __slots__ = ("_ids", "_num_requests", "_order", "tags")

    def __init__(self) -> None:
        self.tags: deque[tuple[float, int]] = deque()
        self._ids: dict[RequestId, tuple[float, int]] = {}
        self._order: list[tuple[int, int, int, RequestId]] = []  # with those that do not wait any more
        self._num_requests = 0

    @property
    def first(self) -> RequestId:
        while self._order[0][3] not in self._ids:
            heappop(self._order)
        return self._order[0][3]

    def add(self, request: GenerateRequest, start: float, arrival: int) -> None:
        self.tags.append((start, arrival))
        self._ids[request.request_id] = (start, arrival)
        self._num_requests += not request.choice
        heappush(self._order, (self._num_requests + request.choice, request.choice, arrival, request.request_id))

    def remove(self, request: GenerateRequest) -> tuple[float, int] | None:
        """The tag that it came with; None if it is not here."""
        tag = self._ids.pop(request.request_id, None)
        if len(self._order) > 2 * len(self._ids) + 64:
            self._order = [each for each in self._order if each[3] in self._ids]
            heapify(self._order)
        return tag


def _expected_tokens(request: GenerateRequest) -> int:
    return min(request.sampling.max_tokens, MAX_EXPECTED_TOKENS)
