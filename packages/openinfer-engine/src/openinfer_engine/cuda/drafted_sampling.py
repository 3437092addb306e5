"""`DraftedSamplingState`: `CudaSamplingState` of an engine with a drafter, where true positions are the device's."""

import numpy as np

from openinfer_core.scheduling import SlotStart, StepPlan
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.sampling_state import CudaSamplingState
from openinfer_engine.worker.sampling_state import LogitChanges
from openinfer_kernels import HostArray
from openinfer_kernels.cuda.common.pinned import StagingBuffer
from openinfer_kernels.cuda.sampling.draft_state import DRAFT_RECORD, DraftedSlotState


class DraftedSamplingState(CudaSamplingState):
    """The bias of a slot as two lists, with and without the ban of its stop tokens: the device knows which one counts.

    `starts` of a plan are upper bounds, so the host would lift the ban too early; and the position from which on a stop
    token is allowed may lie within a row.
    """

    def __init__(self, state: DraftedSlotState, limits: WorkerLimits) -> None:
        super().__init__(state, limits)
        self.drafts = state
        self._begun: list[tuple[int, int, int]] = []

    def update(self, plan: StepPlan, entries: HostArray, staging: StagingBuffer) -> None:
        super().update(plan, entries, staging)
        if self._begun:
            (records,) = staging.upload(np.asarray(self._begun, np.int32).reshape(-1, DRAFT_RECORD))
            self.drafts.start_drafts(records)
            self._begun.clear()

    def _first_record(self, start: SlotStart, changes: LogitChanges | None, staging: StagingBuffer) -> HostArray:
        params, num_early = start.request.sampling, 0
        if changes is not None and params.min_tokens:
            token_ids, values = changes.at(forbid_stop=True)
            num_early = len(token_ids)
            self.drafts.set_early_bias(start.slot, *staging.upload(token_ids, values))
        allowed_from = len(start.request.prompt_token_ids) + params.min_tokens
        self._begun.append((start.slot, allowed_from, num_early))
        return self._record(start, changes, staging, forbid_stop=False)
