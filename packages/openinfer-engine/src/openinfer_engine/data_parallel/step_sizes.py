"""Sizes of steps that are replayed from graphs: a rank's own, or with data-parallel ranks what all of them agree on.

The experts of all ranks are in one step, so either all replay the graph of one size, which is that of the rank with
most tokens, or none replays one. Each rank knows what the others bring, and so chooses as they do.
"""

from contextlib import AbstractContextManager, nullcontext

from openinfer_core.scheduling import StepPlan
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.expert_group import DataParallelCommunicator


def is_decode(plan: StepPlan) -> bool:
    """Whether a plan has rows of one token alone, which their slots sampled last."""
    return not len(plan.token_ids) and plan.num_tokens == plan.num_rows


class StepSizes:
    """Of the steps of one rank, as its communicator was told them last."""

    def __init__(self, communicator: Communicator) -> None:
        self._shared = communicator if isinstance(communicator, DataParallelCommunicator) else None

    @property
    def are_shared(self) -> bool:
        """Whether other ranks take part in this one's steps with rows of their own."""
        return self._shared is not None

    def decode_rows(self, plan: StepPlan) -> int | None:
        """Rows of a decode step; None for one that is not."""
        if self._shared is not None:
            return self.others_decode_rows
        return plan.num_rows if is_decode(plan) else None

    @property
    def others_decode_rows(self) -> int | None:
        """Of a step in which this rank may have none."""
        return self.num_tokens() if self._shared is not None and self._shared.is_decode else None

    def num_tokens(self, plan: StepPlan | None = None) -> int:
        """Of the rank that has most."""
        if self._shared is not None:
            return max(self._shared.counts)
        return 0 if plan is None else plan.num_tokens

    def rehearsal(self) -> AbstractContextManager[None]:
        """Within it no rank waits for another."""
        return nullcontext() if self._shared is None else self._shared.rehearsal()

    def pad_to(self, num_tokens: int) -> None:
        """What is run next, or captured, has so many rows on every rank."""
        if self._shared is not None:
            self._shared.begin_step((num_tokens,) * len(self._shared.counts))
