"""`CudaSamplingState`: how each sequence slot is sampled, on the device; what decides how a step runs, on the host."""

from dataclasses import dataclass

import numpy as np

from openinfer_core.scheduling import SlotStart, StepPlan
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.worker.sampling_state import LogitChanges, has_penalties, row_values
from openinfer_kernels import HostArray
from openinfer_kernels.cuda.common.pinned import StagingBuffer
from openinfer_kernels.cuda.sampling.slot_record import SLOT_RECORD
from openinfer_kernels.cuda.sampling.steps import SlotState, make_record

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class UnscoredRow:
    """A row whose positions predict prompt tokens that are to be scored."""

    row: int
    targets: tuple[int, ...]
    top: int


class CudaSamplingState:
    """One slot per running sequence. Copies and kernels are queued; nothing is waited for."""

    def __init__(self, state: SlotState, limits: WorkerLimits) -> None:
        self.state = state
        self._vocab_size = limits.vocab_size
        slots = limits.max_num_seqs
        # alternatives per sampled token that each slot's request asked for; -1 for no log-probabilities
        self.logprobs: HostArray = np.full(slots, -1, np.int32)
        self._changes_logits: HostArray = np.zeros(slots, np.bool_)
        # positions below this one predict prompt tokens whose log-probabilities were asked for
        self._unscored_before: HostArray = np.zeros(slots, np.int64)
        # position from which on the bias of a slot with `min_tokens` no longer forbids its stop tokens
        self._stop_allowed_from: HostArray = np.full(slots, _NEVER, np.int64)
        self._starts: dict[int, SlotStart] = {}

    def update(self, plan: StepPlan, entries: HostArray, staging: StagingBuffer) -> None:
        """Brings the device up to date before a step."""
        begun = [self._begin(start, staging) for start in plan.started]
        ends = plan.starts + plan.counts
        late = plan.slots[ends >= self._stop_allowed_from[plan.slots]].tolist()
        begun += [self._allow_stop(slot, staging) for slot in late]
        if begun or len(entries):
            records = np.concatenate(begun) if begun else np.zeros(0, SLOT_RECORD)
            table_entries, slot_records = staging.upload(entries, records.view(np.uint8))
            self.state.append_blocks(table_entries)
            self.state.start(slot_records)

    def is_plain(self, plan: StepPlan) -> bool:
        slots = plan.slots
        return not (plan.token_masks or self._changes_logits[slots].any() or (self.logprobs[slots] >= 0).any())

    def changes_logits(self, plan: StepPlan) -> bool:
        return bool(self._changes_logits[plan.slots].any())

    def unscored(self, plan: StepPlan) -> "list[UnscoredRow]":
        found: list[UnscoredRow] = []
        for row in np.flatnonzero(plan.starts < self._unscored_before[plan.slots]).tolist():
            request = self._starts[int(plan.slots[row])].request
            first = int(plan.starts[row]) + 1
            targets = request.prompt_token_ids[first : first + int(plan.counts[row])]
            found.append(UnscoredRow(row, targets, request.sampling.prompt_logprobs or 0))
        return found

    def _begin(self, start: SlotStart, staging: StagingBuffer) -> HostArray:
        """Takes over a slot; everything of its last owner is void. Returns its record."""
        slot, request = start.slot, start.request
        params, prompt_tokens = request.sampling, len(request.prompt_token_ids)
        self._starts[slot] = start
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._unscored_before[slot] = prompt_tokens - 1 if params.prompt_logprobs is not None else 0
        changes = LogitChanges.of(params)
        is_penalised = has_penalties(params)
        self._changes_logits[slot] = is_penalised or changes is not None
        if is_penalised:
            ids = [np.asarray(each, np.int32) for each in (request.prompt_token_ids, start.output_token_ids)]
            self.state.count_tokens(slot, *staging.upload(*ids))
        return self._first_record(start, changes, staging)

    def _first_record(self, start: SlotStart, changes: LogitChanges | None, staging: StagingBuffer) -> HostArray:
        """The record that a slot begins with; stop tokens are forbidden while its sequence is short."""
        params = start.request.sampling
        is_early = params.min_tokens > len(start.output_token_ids)
        allowed_from = len(start.request.prompt_token_ids) + params.min_tokens
        self._stop_allowed_from[start.slot] = allowed_from if changes and is_early else _NEVER
        return self._record(start, changes, staging, forbid_stop=is_early)

    def _allow_stop(self, slot: int, staging: StagingBuffer) -> HostArray:
        """Enough tokens are there: lifts the ban of the stop tokens. Returns the slot's new record."""
        start = self._starts[slot]
        self._stop_allowed_from[slot] = _NEVER
        return self._record(start, LogitChanges.of(start.request.sampling), staging, forbid_stop=False)

    def _record(
        self, start: SlotStart, changes: LogitChanges | None, staging: StagingBuffer, *, forbid_stop: bool
    ) -> HostArray:
        params, num_biased = start.request.sampling, 0
        if changes is not None:
            token_ids, values = changes.at(forbid_stop=forbid_stop)
            num_biased = len(token_ids)
            self.state.set_bias(start.slot, *staging.upload(token_ids, values))
        return make_record(
            start.slot,
            **row_values(params, self._vocab_size),
            seed=start.seed,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            num_biased=num_biased,
        )
