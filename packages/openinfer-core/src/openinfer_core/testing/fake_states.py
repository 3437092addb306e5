"""`FakeStates`: the recurrent states of a fake device, one per slot, which can be neither set back nor skipped.

A state slot's content is the fake model's state after the last token that it has consumed: a hash of the whole prefix.
So a sequence that begins on a prefix of another salt, or goes on from a copy of another boundary, is caught.
"""

from collections.abc import Sequence

from openinfer_core.scheduling import SchedulerConfig, StateCopy, StepPlan
from openinfer_core.testing.errors import require


class FakeStates:
    """States of slots `0 .. max_num_seqs - 1`, and of the `num_snapshots` slots after them, for copies."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._num_running = config.max_num_seqs
        self._num_slots = config.max_num_seqs + config.num_snapshots
        self._states: dict[int, int | None] = {}  # slot -> state; None before the first token

    def begin(self, plan: StepPlan) -> None:
        """Empties the slots that begin anew, then restores what the plan says."""
        started = {start.slot for start in plan.started}
        self._states |= dict.fromkeys(started)
        targets = [copy.target for copy in plan.state_restores]
        require(len({*targets}) == len(targets), f"two restores into one slot: {targets}")
        for copy in plan.state_restores:
            require(copy.target in started, f"slot {copy.target} is restored and does not begin in the step")
            require(self._is_copy(copy.source), f"slot {copy.source} is restored from; it is not one of the copies")
        self._copy(plan.state_restores)

    def consume(self, slot: int, states: Sequence[int], start: int, end: int, *, what: str) -> None:
        right = states[start - 1] if start else None
        require(self._states.get(slot) == right, f"{what}: its slot holds the states of another prefix")
        self._states[slot] = states[end - 1]

    def keep(self, plan: StepPlan) -> None:
        targets = [copy.target for copy in plan.state_snapshots]
        require(len({*targets}) == len(targets), f"two copies into one slot: {targets}")
        for copy in plan.state_snapshots:
            require(copy.source in plan.slots, f"slot {copy.source} is copied and has no row in the step")
            require(self._is_copy(copy.target), f"slot {copy.target} is copied to; it is not one for copies")
        self._copy(plan.state_snapshots)

    def read(self, slot: int) -> int | None:
        return self._states.get(slot)

    def write(self, slot: int, state: int | None) -> None:
        # As a copy from a KV tier does.
        require(self._is_copy(slot), f"slot {slot} is written to by a tier; it is not one for copies")
        self._states[slot] = state

    def _is_copy(self, slot: int) -> bool:
        return self._num_running <= slot < self._num_slots

    def _copy(self, copies: Sequence[StateCopy]) -> None:
        for copy in copies:
            require(copy.source in self._states, f"slot {copy.source} is copied and was never written")
        self._states |= {copy.target: self._states[copy.source] for copy in copies}
