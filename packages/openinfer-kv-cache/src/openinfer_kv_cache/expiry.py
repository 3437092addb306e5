"""Time-to-live of idle blocks."""

from collections import OrderedDict
from collections.abc import Callable, Sequence


class Expiry:
    """When each idle block became idle, oldest first.

    The clock is read once per call, never per block.
    """

    __slots__ = ("_clock", "_idle_since", "_ttl_s")

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._idle_since: OrderedDict[int, float] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._idle_since

    def __len__(self) -> int:
        return len(self._idle_since)

    def admit(self, block_ids: Sequence[int]) -> None:
        """These become idle now."""
        now_s = self._clock()
        for block_id in block_ids:
            self._idle_since[block_id] = now_s

    def remove(self, block_ids: Sequence[int]) -> None:
        """These are idle no longer."""
        for block_id in block_ids:
            del self._idle_since[block_id]

    def due(self) -> list[int]:
        """The blocks idle for at least the time-to-live, oldest first; they stay until removed."""
        latest_s = self._clock() - self._ttl_s
        overdue: list[int] = []
        for block_id, since_s in self._idle_since.items():
            if since_s > latest_s:
                break
            overdue.append(block_id)
        return overdue
