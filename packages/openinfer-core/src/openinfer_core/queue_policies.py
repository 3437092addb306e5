"""The queue policies that come with the contract: first come first served, priority, weighted fair share."""

from heapq import nlargest
from operator import itemgetter

from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import QueuePolicyConfig, WaitingRequest

OPENINFER_CONTRACT = 1

# Tenants that the fair share remembers; names may come from outside, so there has to be a bound.
MAX_INDEBTED_TENANTS = 1 << 16

# What the fair share takes a request to generate at most, until it ends.
MAX_EXPECTED_TOKENS = 512


class FirstComeFirstServed:
    """Order of arrival."""

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

    A request's start tag is the later of the virtual time and its tenant's last finish tag; the finish tag adds
    its cost over the tenant's weight. The smallest start tag is served first, and the virtual time is the start tag of
    the request admitted last. A tenant that was idle gains no credit for it. Requests of one tenant are served in order
    of arrival, so that one tenant alone is served as by `FirstComeFirstServed`.

    A request costs its prompt and what it generates. That is known when it ends; before, it is taken for `max_tokens`
    or 512, whichever is less: clients that give no `max_tokens` would pay for a whole context otherwise.

    At most `MAX_INDEBTED_TENANTS` tenants are remembered; of more, those that owe least are forgotten.
    """

    def __init__(self, config: QueuePolicyConfig) -> None:
        self._weights = config.tenant_weights
        self._virtual_time = 0.0
        self._num_tenants_to_sweep = 64
        self._finish_tags: dict[str, float] = {}
        self._start_tags: dict[str, dict[int, float]] = {}  # of those that wait, by tenant, in order of arrival

    @property
    def num_tenants(self) -> int:
        return len(self._finish_tags)

    def key(self, waiting: WaitingRequest) -> tuple[float, int]:
        request = waiting.request
        start = max(self._virtual_time, self._finish_tags.get(request.tenant, 0.0))
        tags = self._start_tags.setdefault(request.tenant, {})
        if tags:
            # What was withdrawn is paid back in the finish tag; those that came before keep their place all the same.
            start = max(start, tags[next(reversed(tags))])
        self._finish_tags[request.tenant] = start + self._cost(request, _expected_tokens(request))
        tags[request.request_id] = start
        return start, waiting.arrival

    def admitted(self, request: GenerateRequest) -> None:
        start = self._take_start_tag(request)
        if start is not None:
            self._virtual_time = max(self._virtual_time, start)
        if len(self._finish_tags) >= self._num_tenants_to_sweep:
            self._sweep()

    def withdrawn(self, request: GenerateRequest) -> None:
        if self._take_start_tag(request) is not None:
            self._charge(request, -self._cost(request, _expected_tokens(request)))

    def ended(self, request: GenerateRequest, *, generated_tokens: int) -> None:
        """Charges what was generated beyond what was expected, or pays back what was not."""
        self._charge(request, (generated_tokens - _expected_tokens(request)) / self._weight(request))

    def _take_start_tag(self, request: GenerateRequest) -> float | None:
        tags = self._start_tags.get(request.tenant, {})
        start = tags.pop(request.request_id, None)
        if not tags:
            self._start_tags.pop(request.tenant, None)
        return start

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
        return self._weights.get(request.tenant, 1.0)


def _expected_tokens(request: GenerateRequest) -> int:
    return min(request.sampling.max_tokens, MAX_EXPECTED_TOKENS)
