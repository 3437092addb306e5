"""`AdmissionControl`: requests that the engine has been given and has not begun: how many, and how many prompt tokens.

    submitted ──► waiting ──scheduled | ended──► forgotten

The engine bounds the number of requests in its queue; this bounds their tokens, too, and knows that a queue is full
before the next request's body is read.
"""

from openinfer_core.request import RequestId
from openinfer_server.http.api_errors import overloaded

_UNBOUNDED = 2**62


class AdmissionControl:
    """Requests in the queue.

    Args:
        max_requests: so many at most.
        max_tokens: prompt tokens of all of them. A request that finds the queue empty may bring more.
    """

    def __init__(self, *, max_requests: int = _UNBOUNDED, max_tokens: int = _UNBOUNDED) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_tokens: dict[RequestId, int] = {}
        self._total_tokens = 0

    def __len__(self) -> int:
        return len(self._num_tokens)

    @property
    def num_tokens(self) -> int:
        return self._total_tokens

    def check_open(self) -> None:
        """Refuses further requests while the queue is full."""
        if len(self._num_tokens) >= self._max_requests:
            raise overloaded(f"{len(self._num_tokens)} requests are waiting; try again later")
        if self._total_tokens >= self._max_tokens:
            raise overloaded(f"{self._total_tokens} prompt tokens are waiting; try again later")

    def check_room(self, num_tokens: int) -> None:
        """Refuses a request whose prompts do not fit next to those that wait."""
        self.check_open()
        # an empty queue takes a prompt beyond the bound: it could never be served otherwise
        if self._num_tokens and self._total_tokens + num_tokens > self._max_tokens:
            raise overloaded(
                f"{self._total_tokens} prompt tokens are waiting, and {num_tokens} more do not fit; try again later"
            )

    def enter(self, request_id: RequestId, num_tokens: int) -> None:
        self._num_tokens[request_id] = num_tokens
        self._total_tokens += num_tokens

    def leave(self, request_id: RequestId) -> None:
        """It was scheduled or has ended; does nothing if it has left."""
        self._total_tokens -= self._num_tokens.pop(request_id, 0)
