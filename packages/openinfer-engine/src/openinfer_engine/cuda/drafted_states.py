"""`DraftedStates`: recurrent states of a worker whose rows have drafts.

A state that has consumed a refused draft cannot be set back. So the states of rows with drafts are copied before a
step; after it the host waits for what was accepted, brings back the copies of rows with refused drafts, and a second
forward pass computes what was accepted of them. States are true before any of them is copied for a prefix.
"""

from collections.abc import Callable

import numpy as np

from openinfer_core.scheduling import StepPlan
from openinfer_engine.cpu.draft_rows import SequenceLengths, indices_of
from openinfer_engine.cuda.mixed import MixedForward, RowColumns
from openinfer_engine.cuda.results import DraftedTokens
from openinfer_engine.worker.state_slots import StateSlots
from openinfer_kernels.cuda.common.pinned import StagingBuffer
from openinfer_kernels.cuda.common.row_copies import RowCopies
from openinfer_kernels.cuda.sampling.step_inputs import MixedInputs


class DraftedStates:
    """The host waits for every step with drafts, and so knows where each sequence stands.

    Args:
        states: of the worker.
        mixed: what computes accepted tokens again.
        max_num_seqs: sequence slots, all of which may have drafts in a step.
        synchronize: waits for the worker's stream.
    """

    def __init__(
        self, states: StateSlots, *, mixed: MixedForward, max_num_seqs: int, synchronize: Callable[[], None]
    ) -> None:
        self._states = states
        self._mixed = mixed
        self._copies = RowCopies(states.memory, most=max_num_seqs)
        self._lengths = SequenceLengths(max_num_seqs=max_num_seqs)
        self._synchronize = synchronize

    def place(self, plan: StepPlan) -> StepPlan:
        """The plan with true positions; `ContractViolation` for a row that begins elsewhere."""
        return self._lengths.place(plan)

    def save(self, plan: StepPlan) -> None:
        """Copies the states of rows with drafts, before they run."""
        self._copies.save(plan.slots[plan.max_new > 1].tolist())

    def advance(self, plan: StepPlan) -> None:
        """After a step whose rows had one token each."""
        self._lengths.advance(plan, np.minimum(plan.max_new, 1))

    def settle(self, plan: StepPlan, tokens: DraftedTokens, inputs: MixedInputs, staging: StagingBuffer) -> None:
        """Makes all states those of what was accepted; `inputs` and downloads of `tokens` are the step's."""
        new_counts = np.minimum(plan.max_new, 1)
        if (plan.max_new > 1).any():
            token_ids = staging.download(inputs.token_ids)
            self._synchronize()
            new_counts[tokens.rows] = tokens.new_counts
            rows = np.flatnonzero((plan.max_new > 1) & (new_counts < plan.max_new))
            if len(rows):
                # A row that failed goes on as if it had one token: its sequence ends, and is not looked at again.
                counts = plan.counts[rows] - plan.max_new[rows] + np.maximum(new_counts[rows], 1)
                slots, starts = plan.slots[rows], plan.starts[rows]
                self._copies.restore(slots.tolist())
                self._states.note_set_back(slots, consumed=starts + counts)
                places = indices_of((np.cumsum(plan.counts) - plan.counts)[rows], counts)
                self._mixed.run(RowColumns(slots, starts, counts, counts, token_ids[places]), staging)
        self._lengths.advance(plan, new_counts)
