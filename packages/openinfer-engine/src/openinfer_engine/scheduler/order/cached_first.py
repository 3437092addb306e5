"""`CachedFirst`: of one tenant's requests, one whose prompt is cached may go before one that takes long to compute.

A conversation's next turn has little to compute as long as what came before it is in the pool, and is short of it for
as long as it waits: then others' prompts evict it. So where the next in order has at least `LEAST_GAIN_TOKENS` to
compute, the first of those after it that has at most a quarter of that goes before it, within the bound of
`bypass.py`. Nothing passes one that is overdue.

What is cached is estimated, from a few digests of a prompt, and counts for `ESTIMATE_S`; what KV tiers have is not
looked at.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike

from openinfer_engine.scheduler.order.bypass import Bypass
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.states.snapshots import Snapshots

LEAST_GAIN_TOKENS = 1024
PART = 4
SCAN = 32
"""Requests of a tenant that are looked at."""
ESTIMATE_S = 0.05


class CachedFirst:
    """Of one run queue."""

    def __init__(self, bypass: Bypass, snapshots: Snapshots | None) -> None:
        self._bypass = bypass
        self._snapshots = snapshots

    def choose(self, waiting: Iterable[Sequence]) -> tuple[Sequence | None, ListLike[Sequence]]:
        """Who goes before the first of one tenant's, in their order, and whom it passes; None and none if none does."""
        passed: list[Sequence] = []
        most_tokens = 0
        for sequence in waiting:
            if passed and not sequence.request.choice and self.uncached_tokens(sequence) <= most_tokens:
                return sequence, passed
            if self._bypass.is_overdue(sequence):
                break
            if not passed:
                tokens = self.uncached_tokens(sequence)
                if tokens < LEAST_GAIN_TOKENS:
                    break
                most_tokens = tokens // PART
            passed.append(sequence)
        return None, ()

    def uncached_tokens(self, sequence: Sequence) -> int:
        """About what a sequence that waits would compute of its prompt."""
        now_s = self._bypass.now_s
        if sequence.estimated_s is None or not 0 <= now_s - sequence.estimated_s < ESTIMATE_S:
            sequence.estimated_s = now_s
            sequence.uncached_tokens = sequence.known_tokens - self._cached_tokens(sequence)
        return sequence.uncached_tokens

    def _cached_tokens(self, sequence: Sequence) -> int:
        if not sequence.may_match:
            return 0
        cached_tokens = sequence.kv.estimate_cached_tokens()
        if self._snapshots is not None and cached_tokens:
            return self._snapshots.longest_prefix(sequence.kv, cached_tokens)
        return cached_tokens
