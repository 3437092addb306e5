"""`AdmissionControl`: requests that the engine has been given and has not begun: how many, and how many prompt tokens.

    submitted ──► waiting ──scheduled | ended──► forgotten

The engine bounds the number of requests in its queue; this bounds their tokens, too, knows that a queue is full before
the next request's body is read, and divides both between owners, so that one owner's flood is refused and no other's
request. One that has something waiting is told 429, one that has nothing 503: the queue is full of others' requests.
"""

from collections.abc import Callable

from openinfer_core.engine import ElasticQueue, EngineHandle
from openinfer_core.request import RequestId
from openinfer_server.http.api_errors import busy, overloaded
from openinfer_server.limits.shared_budget import SharedBudget
from openinfer_server.limits.worker_table import WorkerTable
from openinfer_server.observability.metrics_snapshot import BudgetUse

_UNBOUNDED = 2**62


class AdmissionControl:
    """Requests in the queue, by owner.

    Args:
        max_requests: so many at most; what tells it where it changes.
        max_tokens: prompt tokens of all of them. A request that finds the queue empty may bring more.
    """

    def __init__(self, *, max_requests: int | Callable[[], int] = _UNBOUNDED, max_tokens: int = _UNBOUNDED) -> None:
        self._requests = SharedBudget("queued_requests", max_requests, unit="requests in the queue")
        self._tokens = SharedBudget("queued_tokens", max_tokens, unit="prompt tokens in the queue")
        self._waiting: dict[RequestId, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """In all workers."""
        return self._tokens.used_by_all

    def share(self, table: WorkerTable) -> None:
        """Makes shares those of all workers: there is one queue."""
        self._requests.share(table)
        self._tokens.share(table)

    def uses(self) -> list[BudgetUse]:
        """What `/metrics` shows."""
        return [self._requests.use, self._tokens.use]

    def check_open(self, owner: str) -> None:
        """Refuses further requests of an owner while the queue is full, or its share of it.

        Raises:
            ApiError: 429 or 503.
        """
        self._check(self._requests, owner, 1, f"{self._requests.used_by_all} requests are waiting")
        self._check(self._tokens, owner, 1, f"{self.num_tokens} prompt tokens are waiting")

    def check_room(self, owner: str, num_tokens: int) -> None:
        """Refuses a request whose prompts do not fit next to those that wait; raises as `check_open` does."""
        self.check_open(owner)
        # an empty queue takes a prompt beyond the bound: it could never be served otherwise
        if self._requests.used_by_all:
            what = f"{self.num_tokens} prompt tokens are waiting, and {num_tokens} more do not fit"
            self._check(self._tokens, owner, num_tokens, what)

    def enter(self, request_id: RequestId, owner: str, num_tokens: int) -> None:
        self._waiting[request_id] = (owner, num_tokens)
        self._requests.hold(owner, 1)
        self._tokens.hold(owner, num_tokens)

    def leave(self, request_id: RequestId) -> None:
        """It was scheduled or has ended; does nothing if it has left."""
        left = self._waiting.pop(request_id, None)
        if left is not None:
            owner, num_tokens = left
            self._requests.give_back(owner, 1)
            self._tokens.give_back(owner, num_tokens)

    def _check(self, budget: SharedBudget, owner: str, amount: int, what: str) -> None:
        if budget.has_room(owner, amount):
            return
        budget.refused += 1
        if held := budget.held(owner):
            raise overloaded(f"{what}; {held} of them are yours; try again later")
        raise busy(f"{what}; try again later")


def queue_bound(handle: EngineHandle) -> int | Callable[[], int]:
    """Requests that may wait in an engine's queue: `AdmissionControl.max_requests`."""
    if isinstance(handle, ElasticQueue):
        return lambda: max(1, handle.max_waiting)
    return max(1, handle.info.max_waiting)
