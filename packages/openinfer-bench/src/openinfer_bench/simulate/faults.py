"""What goes wrong, when and how long: drawn from the seed, counted by kind."""

import random
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from openinfer_kv_cache.testing.tier_faults import InjectedFault


class Fault(StrEnum):
    """Of the machine; those of clients are `Manners`."""

    ENGINE_DEATH = "engine death"
    RESTART = "restart"
    """Orderly: the server drains, as after SIGTERM."""
    SLOW_GPU = "slow GPU"
    SLOW_DISK = "slow disk"
    DISK_ERROR = "disk error"
    CLOCK_STEP = "clock step"
    STORM = "storm"
    GARBAGE = "garbage"
    GUARD_DEATH = "guard death"
    """The process that checks grammars does not answer for a while."""
    GRAMMAR_FLOOD = "grammar flood"
    MASK_FLOOD = "mask flood"
    BODY_FLOOD = "body flood"


ATTACKS = frozenset({Fault.GARBAGE, Fault.GUARD_DEATH, Fault.GRAMMAR_FLOOD, Fault.MASK_FLOOD, Fault.BODY_FLOOD})
"""What no other request may feel: by one tenant, or of what few need."""


class FaultSchedule:
    """Draws faults, each kind as often as every other; what each does is told by `actions`."""

    def __init__(self, draw: random.Random, actions: dict[Fault, Callable[[], None]]) -> None:
        self._draw = draw
        self._actions = actions
        self._deck: list[Fault] = []
        self.counts: Counter[Fault] = Counter()

    def strike(self) -> Fault:
        if not self._deck:
            self._deck = self._draw.sample([*self._actions], len(self._actions))
        fault = self._deck.pop()
        self.counts[fault] += 1
        self._actions[fault]()
        return fault


def disk_faults(draw: random.Random) -> list[InjectedFault]:
    """For the next operations of a disk."""
    return [draw.choice([*InjectedFault]) for _ in range(draw.randint(1, 6))]
