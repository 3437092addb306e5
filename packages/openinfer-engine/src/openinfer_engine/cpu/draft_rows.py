"""What `CpuWorker` keeps for rows with drafts: true lengths of sequences, drafts of their slots, a step's input ids."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import Int32Column, SlotStart, StepPlan
from openinfer_engine.drafting import SharedDrafter
from openinfer_kernels import Array, HostArray, Ops

_NO_DRAFT = -1


class SequenceLengths:
    """Known tokens of the sequence in each slot, after a row that sampled. Host state, alike on every rank."""

    def __init__(self, *, max_num_seqs: int) -> None:
        self._lengths: HostArray = np.zeros(max_num_seqs, np.int64)  # 0: no row of the sequence has sampled last

    def place(self, plan: StepPlan) -> StepPlan:
        """The plan with the true positions of its rows.

        Raises:
            ContractViolation: a row goes on from a last sampled id that its slot does not have, or before it.
        """
        for start in plan.started:
            self._lengths[start.slot] = 0
        num_last_ids = plan.counts - plan.num_host_tokens - plan.draft_counts
        num_drafts = np.maximum(plan.max_new - 1, 0)
        starts = np.where(num_last_ids == 1, self._lengths[plan.slots] - 1, plan.starts).astype(np.int32)
        is_astray = (num_last_ids < 0) | (num_last_ids > 1) | (starts < 0) | (starts > plan.starts)
        is_astray |= (plan.draft_counts > num_drafts) | (num_drafts > plan.counts - 1)
        if is_astray.any():
            row = int(np.flatnonzero(is_astray)[0])
            raise ContractViolation(
                f"row {row} is planned with {plan.counts[row]} ids at position {plan.starts[row]}, "
                f"{plan.num_host_tokens[row]} from the host and {plan.draft_counts[row]} drafts, max_new "
                f"{plan.max_new[row]}; its sequence has {self._lengths[plan.slots[row]]} tokens up to the last sampled"
            )
        return plan if np.array_equal(starts, plan.starts) else replace(plan, starts=starts)

    def advance(self, plan: StepPlan, new_counts: Int32Column) -> None:
        """Takes in how many tokens each row of a placed plan has yielded."""
        # The first token a row yields follows the positions before its drafts; one that failed is as if it had one.
        firsts = plan.starts + plan.counts - plan.max_new + 1
        self._lengths[plan.slots] = np.where(plan.max_new > 0, firsts + np.maximum(new_counts, 1), 0)


class SlotDrafts:
    """The drafts that follow the last id of each sequence slot, as the drafter left them."""

    def __init__(self, drafter: SharedDrafter, *, max_num_seqs: int, ops: Ops) -> None:
        self._drafter = drafter
        self._ops = ops
        self._ids: Array = ops.upload(np.full((max_num_seqs, drafter.max_drafts), _NO_DRAFT, np.int32))

    def start(self, starts: Sequence[SlotStart]) -> None:
        self._drafter.start(starts)
        for start in starts:
            self._ids[start.slot] = _NO_DRAFT

    def draft(self, slots: HostArray, last_ids: Array, hidden: Array, lengths: HostArray) -> None:
        """Asks the drafter for the drafts of rows that sampled; none replace those before if it gives none."""
        places = self._ops.upload(slots.astype(np.int32))
        drafts = self._drafter.draft(places, last_ids, hidden, self._ops.upload(lengths.astype(np.int32)))
        self._ids[self._ops.upload(slots)] = _NO_DRAFT if drafts is None else drafts

    def of(self, slot: int) -> tuple[int, ...]:
        """Those of one slot."""
        ids: list[int] = self._ops.download(self._ids[slot]).tolist()
        return tuple(ids[: ids.index(_NO_DRAFT)] if _NO_DRAFT in ids else ids)

    def take(self, slots: HostArray, indices: HostArray) -> Array:
        """One draft for each of these, -1 where the slot has fewer."""
        width = self._ids.shape[1]
        ids = self._ids[self._ops.upload(slots), self._ops.upload(np.minimum(indices, width - 1))]
        ids[self._ops.upload(indices >= width)] = _NO_DRAFT
        return ids


class InputIds:
    """The input ids of a step, where each row samples, and the drafts that stand there."""

    def __init__(self, plan: StepPlan, ids: Array, *, ops: Ops) -> None:
        self._ops = ops
        self._ids = ids
        self._plan = plan
        self.first_sampled: HostArray = np.cumsum(plan.counts) - plan.max_new
        """`[rows]` where each row samples first, in the tokens of the step; of no use in rows that do not sample."""
        # Read only where there are drafts: without any, a step needs no id on the host.
        self._host_ids: HostArray | None = ops.download(ids) if plan.max_new.max(initial=0) > 1 else None

    @classmethod
    def of(cls, plan: StepPlan, *, last_ids: Array, drafts: SlotDrafts | None, ops: Ops) -> Self:
        """Ids of a plan: host ids, last sampled ids and drafts of slots; -1 for drafts that the device has not."""
        begins = np.cumsum(plan.counts) - plan.counts
        num_last_ids = plan.counts - plan.num_host_tokens - plan.draft_counts
        offsets = np.arange(plan.num_tokens) - np.repeat(begins, plan.counts)
        num_before_drafts = np.repeat(plan.counts - plan.draft_counts, plan.counts)
        is_draft = offsets >= num_before_drafts
        is_host = ~is_draft & (offsets >= np.repeat(num_last_ids, plan.counts))
        host_ids = np.full(plan.num_tokens, _NO_DRAFT, np.int32)
        host_ids[is_host] = plan.token_ids
        ids = ops.upload(host_ids)
        from_device = num_last_ids > 0
        if from_device.any():
            ids[ops.upload(begins[from_device])] = last_ids[ops.upload(plan.slots[from_device])]
        if drafts is not None and is_draft.any():
            slots = np.repeat(plan.slots, plan.counts)[is_draft]
            taken = drafts.take(slots, (offsets - num_before_drafts)[is_draft])
            ids[ops.upload(np.flatnonzero(is_draft))] = taken
        return cls(plan, ids, ops=ops)

    def model_ids(self, *, num_token_ids: int) -> Array:
        """`[T]` for the embedding: drafts that are no token ids are replaced by ones that are."""
        if self._host_ids is None:
            return self._ids
        at = self._ops.upload(indices_of(self.first_sampled + 1, np.maximum(self._plan.max_new - 1, 0)))
        ids = self._ids.copy()
        ids[at] = ids[at].clip(0, num_token_ids - 1)
        return ids

    def draft_after(self, rows: HostArray, position: int) -> HostArray:
        """The draft that each of these rows has after its sampled position `position`; -1 where it has none."""
        found = np.full(len(rows), _NO_DRAFT, np.int64)
        if self._host_ids is not None:
            has = np.flatnonzero(self._plan.max_new[rows] > position + 1)
            found[has] = self._host_ids[self.first_sampled[rows[has]] + position + 1]
        return found

    @property
    def draft_counts(self) -> Int32Column:
        """`[rows]` drafts that can be compared, host and device drafts together."""
        counts = np.zeros(self._plan.num_rows, np.int32)
        if self._host_ids is not None:
            for row in np.flatnonzero(self._plan.max_new > 1).tolist():
                first = int(self.first_sampled[row]) + 1
                counts[row] = (self._host_ids[first : first + int(self._plan.max_new[row]) - 1] >= 0).sum()
        return counts


def indices_of(begins: HostArray, counts: HostArray) -> HostArray:
    """`counts[i]` indices from `begins[i]` on, for one i after the other."""
    ends = np.cumsum(counts)
    return np.repeat(begins - (ends - counts), counts) + np.arange(int(counts.sum()))
