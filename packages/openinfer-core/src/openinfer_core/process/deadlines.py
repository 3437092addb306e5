"""`Deadlines`: which open requests are late. The host asks once per iteration, whatever else is in the engine."""

import heapq
import itertools
from collections.abc import Container, Iterator

from openinfer_core.events import Failed, FailureKind
from openinfer_core.request import GenerateRequest, RequestId

_SPARE_ENTRIES = 64  # entries of ended requests that are kept before the heap is made anew


class Deadlines:
    """Requests with a `deadline_s` in the order in which they fall due; those that ended earlier are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestId, float]] = []  # due, serial, request, its `deadline_s`
        self._serials: dict[RequestId, int] = {}  # an id may come again, and an older entry then means nothing
        self._next_serial = itertools.count()
        self._num_kept = 0  # entries after the heap was last made anew

    def __len__(self) -> int:
        return len(self._heap)

    def begin(self, request: GenerateRequest, *, now_s: float, open_requests: "Container[object]") -> None:
        """Notes a request that has arrived; `open_requests` are those that have not ended."""
        request_id, deadline_s = request.request_id, request.deadline_s
        self._serials.pop(request_id, None)
        if deadline_s is None:
            return
        serial = self._serials[request_id] = next(self._next_serial)
        heapq.heappush(self._heap, (now_s + deadline_s, serial, request_id, deadline_s))
        # Nearly all requests end long before they fall due.
        if len(self._heap) > 2 * self._num_kept + _SPARE_ENTRIES:
            self._forget_ended(open_requests)

    def _forget_ended(self, open_requests: "Container[object]") -> None:
        self._heap = [entry for entry in self._heap if self._is_valid(entry) and entry[2] in open_requests]
        heapq.heapify(self._heap)
        self._serials = {request_id: serial for _, serial, request_id, _ in self._heap}
        self._num_kept = len(self._heap)

    def take_late(self, now_s: float, open_requests: "Container[object]") -> Iterator[Failed]:
        """The failures of open requests whose deadline is over, each once."""
        while self._heap and self._heap[0][0] <= now_s:
            entry = heapq.heappop(self._heap)
            if not self._is_valid(entry):
                continue
            request_id, deadline_s = entry[2], entry[3]
            del self._serials[request_id]
            if request_id in open_requests:
                message = f"the request was not done within its deadline_s of {deadline_s:g}"
                yield Failed(request_id, FailureKind.DEADLINE, message)

    def _is_valid(self, entry: tuple[float, int, RequestId, float]) -> bool:
        return self._serials.get(entry[2]) == entry[1]
