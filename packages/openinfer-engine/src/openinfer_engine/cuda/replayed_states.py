"""`ReplayedStates`: recurrent states of a worker whose rows have drafts, where nothing waits for what is accepted.

A forward pass reads the states of rows with drafts and leaves them as they are; what its tokens would change them by is
kept. Once the tokens of a row were accepted, its states take in those that count, in the same step: what follows on the
stream, copies for prefixes among it, finds true states. This reads a state once more than a plain step does.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from openinfer_core.scheduling import StepPlan
from openinfer_engine.model import Model, ReplayedModel
from openinfer_kernels import Array, KeptInputs
from openinfer_kernels.cuda.sampling.draft_state import Spans


class ReplayedStates:
    """States of a model that replays them.

    Args:
        model: of the worker.
        states: of all slots, by name.
        kept: what the batches of the worker keep inputs in.
    """

    def __init__(self, model: ReplayedModel, states: Mapping[str, Array], kept: KeptInputs) -> None:
        self.kept = kept
        self._model = model
        self._states = states

    @classmethod
    def of(
        cls, model: Model, states: Mapping[str, Array], *, max_num_seqs: int, max_drafts: int
    ) -> "ReplayedStates | None":
        """None for a model, or states of a shape, that cannot be replayed."""
        if not isinstance(model, ReplayedModel):
            return None
        of_sequences = {name: tensor[:max_num_seqs] for name, tensor in states.items()}
        kept = model.keep_inputs(of_sequences, most_tokens=1 + max_drafts)
        return None if kept is None else cls(model, states, kept)

    def place(self, plan: StepPlan) -> StepPlan:
        """The plan without drafts in rows that have other tokens, too, or more than can be kept.

        A scheduler may plan drafts after a chunk of a prompt, and may also be told that there were none.
        """
        is_other = (plan.counts > plan.max_new) | (plan.counts > self.kept.most_tokens) | (plan.starts < 1)
        is_astray = (plan.max_new > 1) & is_other
        if not is_astray.any():
            return plan
        num_drafts = np.where(is_astray, plan.max_new - 1, 0)
        num_from_host = np.where(is_astray, num_drafts - plan.draft_counts, 0)
        after = plan.num_host_tokens - num_from_host  # ids of the host that stay, row by row
        is_left = np.arange(int(plan.num_host_tokens.sum())) - np.repeat(
            np.cumsum(plan.num_host_tokens) - plan.num_host_tokens, plan.num_host_tokens
        ) < np.repeat(after, plan.num_host_tokens)
        return replace(
            plan,
            counts=(plan.counts - num_drafts).astype(np.int32),
            max_new=np.where(is_astray, 1, plan.max_new).astype(np.int32),
            draft_counts=np.where(is_astray, 0, plan.draft_counts).astype(np.int32),
            num_host_tokens=after.astype(np.int32),
            token_ids=plan.token_ids[is_left],
        )

    def take_in(self, spans: Spans) -> None:
        """Queues, after the spans of a step are finished, what their states are to take in."""
        self._model.replay(self._states, self.kept, slots=spans.slots, counts=spans.consumed)
