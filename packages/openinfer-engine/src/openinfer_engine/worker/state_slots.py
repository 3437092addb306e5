"""`StateSlots`: recurrent states of one rank, for models whose `KvSpec` has slot groups.

A sequence keeps its states in the slot that the plan runs it in, and they cannot be set back: a row goes on exactly
where the last one of its slot ended, or where a copy ends that the plan brings into the slot before. A row with drafts
ends where its accepted ones do: a worker keeps a copy of the states before it, and computes from that what was
accepted. Positions here are true ones, not a plan's upper bounds.

A slot is one piece of memory, laid out as `KvLayout` says, so that it is copied at once. With KV tiers it is padded to
whole chunks of a block's size, which tiers move like blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StateCopy, StepPlan
from openinfer_kernels import Array, AttentionBatch, HostArray, Ops
from openinfer_kv_cache import GroupKind, KvGroupLayout, KvLayout, KvRegion

_ALIGN_BYTES = 16  # what kernels load at once


def padded_slot_bytes(layout: KvLayout, *, in_blocks: bool) -> int:
    """Memory of one slot, a whole number of a block's size with `in_blocks`; 0 without states."""
    multiple = math.lcm(layout.block_bytes, _ALIGN_BYTES) if in_blocks else _ALIGN_BYTES
    return -(-layout.slot_bytes // multiple) * multiple


class StateSlots:
    """One slot per sequence that runs, and slots for copies."""

    def __init__(self, layout: KvLayout, *, num_slots: int, slot_bytes: int, ops: Ops) -> None:
        self._ops = ops
        self._consumed: HostArray = np.zeros(num_slots, np.int64)
        self._memory: Array = ops.zeros((num_slots, slot_bytes), np.uint8)
        self._tensors = {
            f"{group.name}.{region.name}": _view(self._memory, group, region)
            for group in layout.groups
            if group.kind is GroupKind.SLOT
            for region in group.regions
        }

    @property
    def memory(self) -> Array:
        """`[slots, bytes]`: all of them."""
        return self._memory

    @property
    def tensors(self) -> Mapping[str, Array]:
        """`GROUP.TENSOR` -> `[slots, layers, *shape]`, as a batch carries them; each piece of a layer is contiguous."""
        return self._tensors

    def advance(self, plan: StepPlan, *, are_bounds: bool = False) -> None:
        """Restores states that sequences begin on, and notes each slot's new end; `ContractViolation` for a gap.

        Args:
            plan: of the step.
            are_bounds: whether a plan's positions are upper bounds, and the true ones the device's.
        """
        for start in plan.started:
            self._consumed[start.slot] = 0
        self._copy(plan.state_restores)
        consumed = self._consumed[plan.slots]
        astray = np.flatnonzero((consumed < plan.starts) if are_bounds else (consumed != plan.starts))
        if len(astray):
            row = int(astray[0])
            raise ContractViolation(
                f"row {row} begins at position {plan.starts[row]}, and the states of its slot have consumed "
                f"{self._consumed[plan.slots[row]]} tokens: they can neither skip tokens nor be set back"
            )
        self._consumed[plan.slots] = plan.starts + plan.counts

    def keep(self, plan: StepPlan) -> None:
        self._copy(plan.state_snapshots)

    def copy_of(self, slots: HostArray) -> Array:
        """`[n, bytes]`: all states of these slots as they are now."""
        return self._memory[self._ops.upload(slots)]

    def set_back(self, slots: HostArray, states: Array, *, consumed: HostArray) -> None:
        """Gives slots back what `copy_of` had copied before a step with drafts.

        Args:
            slots: `[n]`.
            states: `[n, bytes]`.
            consumed: `[n]` tokens that each will have consumed when its accepted ones are computed again.
        """
        self._memory[self._ops.upload(slots)] = states
        self.note_set_back(slots, consumed=consumed)

    def note_set_back(self, slots: HostArray, *, consumed: HostArray) -> None:
        """As `set_back`, for slots whose `memory` a worker has set back itself."""
        self._consumed[slots] = consumed

    def _copy(self, copies: Sequence[StateCopy]) -> None:
        if not copies:
            return
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        for copy in copies:
            if copy.loaded_tokens is not None:
                self._consumed[copy.source] = copy.loaded_tokens
        self._consumed[targets] = self._consumed[sources]
        self._ops.copy_rows(self._memory, sources=sources, targets=targets)

    def join(self, batch: AttentionBatch, plan: StepPlan) -> AttentionBatch:
        return replace(batch, state_slots=self._ops.upload(plan.slots), states=self._tensors)


def _view(memory: Array, group: KvGroupLayout, region: KvRegion) -> Array:
    """`[slots, layers, *shape]` of one tensor in `memory [slots, bytes]`."""
    dtype = np.dtype(str(region.dtype))
    begin, stride, size, base = (
        num_bytes // dtype.itemsize
        for num_bytes in (group.regions[0].base_bytes, region.stride_bytes, region.size_bytes, region.base_bytes)
    )
    slots = memory.reshape(-1).view(dtype).reshape(len(memory), -1)
    layers = slots[:, begin : begin + group.num_layers * stride].reshape(len(memory), group.num_layers, stride)
    return layers[:, :, base - begin : base - begin + size].reshape(len(memory), group.num_layers, *region.shape)
