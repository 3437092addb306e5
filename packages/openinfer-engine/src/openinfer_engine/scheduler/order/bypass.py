"""`Bypass`: how often and for how long one that waits may be passed by later ones: the one rule of the run queue.

A request is passed where it cannot run yet, or would take long, and another can run meanwhile:

    waits for      because                                     who passes it
    adapter slot   all have other adapters, which are used     those whose adapter has a slot, or that need none;
                   (`adapter_slots.py`)                        of its tenant first
    its prefix     another computes it now (`followers.py`)    all that wait
    its turn       little of it is cached (`cached_first.py`)  later ones of its tenant, of which most is cached

Once `MAX_BYPASS_REQUESTS` have passed it, or `MAX_BYPASS_S` after the first could have, it is *overdue*, and none that
comes after it takes what it waits for: an adapter slot drains for it, a sequence slot and blocks are kept free until
its prefix is there, and none is served in its turn. Which tenant is served next is the policy's choice all the while.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from openinfer_engine.scheduler.sequence import Sequence

MAX_BYPASS_REQUESTS = 64
MAX_BYPASS_S = 2.0


@dataclass(slots=True)
class _Passed:
    since_s: float
    num_requests: int = 0


class Bypass:
    """Of one run queue. `now_s` is the time of the plan that is being made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._passed: dict[Sequence, _Passed] = {}

    def __len__(self) -> int:
        return len(self._passed)

    def begin(self, sequence: Sequence) -> None:
        """A sequence may be passed from now on; it changes nothing for one that may already."""
        self._passed.setdefault(sequence, _Passed(self.now_s))

    def count(self, passed: Iterable[Sequence]) -> None:
        """Another was admitted before these."""
        for sequence in passed:
            self._passed.setdefault(sequence, _Passed(self.now_s)).num_requests += 1

    def is_overdue(self, sequence: Sequence) -> bool:
        passed = self._passed.get(sequence)
        if passed is None:
            return False
        return passed.num_requests >= MAX_BYPASS_REQUESTS or self.now_s - passed.since_s >= MAX_BYPASS_S

    def forget(self, sequence: Sequence) -> None:
        """It is admitted, or has ended."""
        self._passed.pop(sequence, None)
