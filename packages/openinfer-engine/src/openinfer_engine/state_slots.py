"""`StateSlots`: recurrent states of one rank, for models whose `KvSpec` has slot groups.

A sequence keeps its states in the slot that the plan runs it in, and they cannot be set back: a row goes on exactly
where the last one of its slot ended, or where a copy ends that the plan brings into the slot before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StateCopy, StepPlan
from openinfer_kernels import Array, AttentionBatch, HostArray, Ops
from openinfer_kv_cache import GroupKind, KvLayout


class StateSlots:
    """One slot per sequence that runs, and slots for copies; all layers of a slot group are one array per tensor.

    Args:
        layout: its slot groups; their tensors are named `GROUP.TENSOR`.
        num_slots: of both.
        ops: of this rank.
    """

    def __init__(self, layout: KvLayout, *, num_slots: int, ops: Ops) -> None:
        self._ops = ops
        self._consumed: HostArray = np.zeros(num_slots, np.int64)
        self._tensors: dict[str, Array] = {
            f"{group.name}.{region.name}": ops.zeros(
                (num_slots, group.num_layers, *region.shape), np.dtype(str(region.dtype))
            )
            for group in layout.groups
            if group.kind is GroupKind.SLOT
            for region in group.regions
        }

    @property
    def tensors(self) -> Mapping[str, Array]:
        """`GROUP.TENSOR` -> `[slots, layers, *shape]`, as a batch carries them."""
        return self._tensors

    def advance(self, plan: StepPlan) -> None:
        """Restores the states of sequences that begin on a prefix, and notes what a step adds to each slot's.

        Raises:
            ContractViolation: a row does not go on where the last one of its slot ended.
        """
        for start in plan.started:
            self._consumed[start.slot] = 0
        self._copy(plan.state_restores)
        astray = np.flatnonzero(self._consumed[plan.slots] != plan.starts)
        if len(astray):
            row = int(astray[0])
            raise ContractViolation(
                f"row {row} begins at position {plan.starts[row]}, and the states of its slot have consumed "
                f"{self._consumed[plan.slots[row]]} tokens: they can neither skip tokens nor be set back"
            )
        self._consumed[plan.slots] = plan.starts + plan.counts

    def keep(self, plan: StepPlan) -> None:
        """Copies the states that the plan keeps, once its rows were computed."""
        self._copy(plan.state_snapshots)

    def _copy(self, copies: Sequence[StateCopy]) -> None:
        if not copies:
            return
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        self._consumed[targets] = self._consumed[sources]
        for tensor in self._tensors.values():
            self._ops.copy_rows(tensor, sources=sources, targets=targets)

    def join(self, batch: AttentionBatch, plan: StepPlan) -> AttentionBatch:
        """The batch of a step with the states of its rows."""
        return replace(batch, state_slots=self._ops.upload(plan.slots), states=self._tensors)
