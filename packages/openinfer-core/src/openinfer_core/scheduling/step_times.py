"""`DecodeStepTime`: what a step took that was run to be timed, before the first request; and who is told of it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class DecodeStepTime(msgspec.Struct, frozen=True, array_like=True):
    """One step of decode rows alone, from the result before it to its own, as `Scheduler.apply` sees steps."""

    num_rows: int
    num_drafts: int
    """Of all rows; 0 for a step without drafts."""
    ms: float


@runtime_checkable
class TakesStepTimes(Protocol):
    """A `Scheduler` that decides by what steps take, and can be told before it has planned any.

    A hook that not every scheduler has. The engine calls it where `SchedulerConfig.adapts_drafts` is set.
    """

    def take_step_times(self, times: Sequence[DecodeStepTime]) -> None:
        """Called once at most, before anything is added; steps of few rows first, which may be all that were timed."""
        ...
