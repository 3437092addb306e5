"""`RefusalPace`: when a refusal (429) is sent, so that one who asks again and again is refused no faster.

    refusals of an owner:  BURST at once  ──►  RATE_PER_S  ──►  no later than RETRY_AFTER_S, which each of them names

To take a connection, read a head and refuse it costs the server and its machine about as much as to begin a short
answer. A client that waits as long as it is told to is never beyond the pace; one that does not spends its time waiting
for its refusal. Refusals that wait hold connections: few may, and those beyond are sent at once.
"""

from collections import Counter

from openinfer_server.http.api_errors import RETRY_AFTER_S

RATE_PER_S = 16.0
BURST = 16
MOST_WAITING = 16
"""Refusals of one owner that wait,"""
MOST_WAITING_IN_ALL = 32
"""and of all owners: an eighth of the connections that the smallest usual limit of open files leaves."""
_MOST_OWNERS = 1024


class RefusalPace:
    """Of one process; seconds are its event loop's."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}  # when an owner's next refusal is due; who was refused last is last
        self._waiting: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return self._waiting.total()

    def begin(self, owner: str, *, now_s: float) -> float:
        """How long a refusal of this owner waits. One that waits counts until `end`."""
        next_s = max(self._next_s.pop(owner, float("-inf")), now_s - BURST / RATE_PER_S)
        due_s = min(next_s + 1 / RATE_PER_S, now_s + RETRY_AFTER_S)
        self._next_s[owner] = due_s
        while len(self._next_s) > _MOST_OWNERS:
            del self._next_s[next(iter(self._next_s))]
        is_full = self._waiting.get(owner, 0) >= MOST_WAITING or self.num_waiting >= MOST_WAITING_IN_ALL
        wait_s = 0.0 if is_full else max(0.0, due_s - now_s)
        if wait_s:
            self._waiting[owner] += 1
        return wait_s

    def end(self, owner: str) -> None:
        """One that waited does no longer."""
        self._waiting[owner] -= 1
        if not self._waiting[owner]:
            del self._waiting[owner]
