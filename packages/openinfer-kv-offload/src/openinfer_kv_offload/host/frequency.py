"""`LeastFrequentlyUsed`: the eviction policy for few prompts that come back again and again among many that do not."""

from collections import OrderedDict
from collections.abc import Sequence

MAX_FREQUENCY = 15


class LeastFrequentlyUsed:
    """Evicts what was found least often since it was stored; among equals, what has been idle longest.

    An `EvictionPolicy` of openinfer-kv-cache. Frequencies stop at `MAX_FREQUENCY`, and each time as many blocks have
    been evicted as are held, all are halved: what was popular yesterday does not stay for ever.
    """

    __slots__ = ("_evicted", "_frequency", "_idle")

    def __init__(self) -> None:
        self._frequency: dict[int, int] = {}
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(MAX_FREQUENCY + 1)]
        self._evicted = 0

    def admit(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._idle[self._frequency.setdefault(block_id, 0)][block_id] = None

    def reuse(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            frequency = self._frequency[block_id]
            del self._idle[frequency][block_id]
            self._frequency[block_id] = min(frequency + 1, MAX_FREQUENCY)

    def forget(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            del self._idle[self._frequency.pop(block_id)][block_id]

    def select(self, num_blocks: int) -> list[int]:
        victims: list[int] = []
        for idle in self._idle:
            while idle and len(victims) < num_blocks:
                victims.append(idle.popitem(last=False)[0])
        for block_id in victims:
            del self._frequency[block_id]
        self._evicted += len(victims)
        if self._evicted > len(self._frequency):
            self._halve()
        return victims

    def _halve(self) -> None:
        self._evicted = 0
        self._frequency = {block_id: frequency // 2 for block_id, frequency in self._frequency.items()}
        merged: list[OrderedDict[int, None]] = [OrderedDict() for _ in self._idle]
        for frequency, idle in enumerate(self._idle):
            merged[frequency // 2].update(idle)
        self._idle = merged
