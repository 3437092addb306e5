"""What goes wrong, when and how long: drawn from the seed, counted by kind."""

import random
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from openinfer_kv_cache.testing.tier_faults import InjectedFault


class Fault(StrEnum):
    """Of the machine; those of clients are `Manners`."""

    GPU_DEATH = "GPU death"
    ENGINE_DEATH = "engine death"
    """Its process is killed."""
    WORKER_DEATH = "worker death"
    WORKER_DEATHS = "worker deaths"
    """As many within a minute as end the server."""
    SERVER_DEATH = "server death"
    RANK_DEATH = "rank death"
    LINK_STALL = "link stall"
    """Nothing arrives between two processes for a while."""
    LINK_CUT = "link cut"
    """A link between two processes ends, wherever in a message."""
    FORK_FAILS = "fork fails"
    """When a worker has died: the first that would take its place cannot be started, the next can."""
    NO_DESCRIPTORS = "no descriptors"
    """A worker may open no more files for a while (EMFILE)."""
    NO_MEMORY = "no memory"
    """The system has none for connections for a while (ENOMEM)."""
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
    IDLE_FLOOD = "idle flood"
    """More connections than there are descriptors, which ask nothing."""
    SLOW_READERS = "slow readers"
    """Streams of one tenant that are not read."""


ATTACKS = frozenset(
    {
        Fault.GARBAGE,
        Fault.GUARD_DEATH,
        Fault.GRAMMAR_FLOOD,
        Fault.MASK_FLOOD,
        Fault.BODY_FLOOD,
        Fault.IDLE_FLOOD,
        Fault.SLOW_READERS,
    }
)
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
