"""The queue policies that come with the contract: first come first served, priority, weighted fair share."""

from heapq import nlargest
from operator import itemgetter

from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import QueuePolicyConfig, WaitingRequest

OPENINFER_CONTRACT = 1

# Tenants that the fair share remembers; names may come from outside, so there has to be a bound.
MAX_INDEBTED_TENANTS = 1 << 16


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
    its cost (prompt and at most `max_tokens` tokens) over the tenant's weight. The smallest start tag is served
    first, and the virtual time is the start tag of the request admitted last. A tenant that was idle gains no
    credit for it. At most `MAX_INDEBTED_TENANTS` tenants are remembered; of more, those that owe least are forgotten.
    """

    def __init__(self, config: QueuePolicyConfig) -> None:
        self._weights = config.tenant_weights
        self._virtual_time = 0.0
        self._num_tenants_to_sweep = 64
        self._finish_tags: dict[str, float] = {}
        self._start_tags: dict[int, float] = {}

    @property
    def num_tenants(self) -> int:
        return len(self._finish_tags)

    def key(self, waiting: WaitingRequest) -> tuple[float, int]:
        request = waiting.request
        start = max(self._virtual_time, self._finish_tags.get(request.tenant, 0.0))
        self._finish_tags[request.tenant] = start + self._cost(request)
        self._start_tags[request.request_id] = start
        return start, waiting.arrival

    def admitted(self, request: GenerateRequest) -> None:
        start = self._start_tags.pop(request.request_id, self._virtual_time)
        self._virtual_time = max(self._virtual_time, start)
        if len(self._finish_tags) >= self._num_tenants_to_sweep:
            self._sweep()

    def withdrawn(self, request: GenerateRequest) -> None:
        if self._start_tags.pop(request.request_id, None) is not None and request.tenant in self._finish_tags:
            self._finish_tags[request.tenant] -= self._cost(request)

    def _sweep(self) -> None:
        # Each time there are twice as many tenants, so that it costs O(1) per request.
        debts = {tenant: tag for tenant, tag in self._finish_tags.items() if tag > self._virtual_time}
        if len(debts) > MAX_INDEBTED_TENANTS:
            debts = dict(nlargest(MAX_INDEBTED_TENANTS // 2, debts.items(), key=itemgetter(1)))
        self._finish_tags = debts
        self._num_tenants_to_sweep = max(64, 2 * len(debts))

    def _cost(self, request: GenerateRequest) -> float:
        tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        return tokens / self._weights.get(request.tenant, 1.0)
