"""`PolicyCalls`: how long a scheduler's queue policy has been in its calls, so that one that blocks is named itself."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from openinfer_core.plugins import place_of

P = ParamSpec("P")
T = TypeVar("T")


class PolicyCalls:
    """Makes the calls of one policy. Called from the scheduler's thread, but for `spent_s` and `name`.

    A scheduler that has them as its attribute `policy_calls` is not taken for the one that blocks where its policy is.
    With a `WaitingQueue` they are that one's `calls`.

    Args:
        policy: the class of the policy.
    """

    def __init__(self, policy: type) -> None:
        self.policy = place_of(policy)
        self.clock: Callable[[], float] = time.monotonic
        """In seconds; the one by which the guard of the scheduler measures its calls."""
        self._ended_s = 0.0
        self._last = ""
        self._begun_s: float | None = None

    @property
    def name(self) -> str:
        """Of the call that goes on, or of the last one; empty before the first."""
        return self._last

    @property
    def spent_s(self) -> float:
        """Seconds in all calls so far, with the one that goes on."""
        begun_s = self._begun_s  # once: the other thread may end the call meanwhile
        return self._ended_s + (0.0 if begun_s is None else self.clock() - begun_s)

    def run(self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the call returns, or raises."""
        self._last, begun_s = name, self.clock()
        self._begun_s = begun_s
        try:
            return call(*args, **kwargs)
        finally:
            self._begun_s = None
            self._ended_s += self.clock() - begun_s
