"""`TierTotals`: what a tier counts, from several threads."""

import threading
from collections import Counter
from types import MappingProxyType

from openinfer_kv_cache import TierCondition, TierCounters, TierFailure


class TierTotals:
    """Running totals of one tier."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._failures: Counter[TierFailure] = Counter()

    def count_find(self, *, hit_blocks: int, missed_blocks: int) -> None:
        with self._lock:
            totals = self._totals
            totals["finds"] += 1
            totals["hit"] += hit_blocks
            totals["missed"] += missed_blocks

    def count_moved(self, *, loaded_blocks: int = 0, saved_blocks: int = 0) -> None:
        with self._lock:
            self._totals["loaded"] += loaded_blocks
            self._totals["saved"] += saved_blocks

    def count_lost(self, *, evicted_blocks: int = 0, corrupt_blocks: int = 0) -> None:
        with self._lock:
            self._totals["evicted"] += evicted_blocks
            self._totals["corrupt"] += corrupt_blocks

    def count_failure(self, failure: TierFailure) -> None:
        with self._lock:
            self._failures[failure] += 1

    def snapshot(self, *, stored_blocks: int, condition: TierCondition = TierCondition.OK) -> TierCounters:
        with self._lock:
            totals = self._totals
            return TierCounters(
                tier=self._tier,
                num_finds=totals["finds"],
                hit_blocks=totals["hit"],
                missed_blocks=totals["missed"],
                loaded_blocks=totals["loaded"],
                saved_blocks=totals["saved"],
                evicted_blocks=totals["evicted"],
                corrupt_blocks=totals["corrupt"],
                stored_blocks=stored_blocks,
                failures=MappingProxyType({reason: self._failures[reason] for reason in TierFailure}),
                condition=condition,
            )
