"""`NgramDrafter`: what followed the last tokens of a sequence where they stood before may follow again.

The ids of each sequence slot are kept on the device, where they are looked up (`Ops.ngram_drafts`), so that the host
waits for nothing. A request that brings a prediction (`GenerateRequest.prediction_token_ids`) is looked up in that
alone: the answer is expected to be much of it.

    ids of a slot:   end of the prompt, prediction │ prompt, answer so far
                     a reference, if there is one  │
"""

from collections.abc import Mapping, Sequence

import numpy as np

from openinfer_core.errors import Refused
from openinfer_core.request import MAX_PREDICTION_TOKENS
from openinfer_core.scheduling import SlotStart
from openinfer_engine.drafting import DrafterContext
from openinfer_engine.speculation.setting import read_integer
from openinfer_kernels import Array, NgramHistory, NgramMatch, NgramRule
from openinfer_kernels.ops.drafting import LONGEST_NGRAM

OPENINFER_CONTRACT = 1
DEFAULT_N_MIN, DEFAULT_N_MAX = 2, 4
PREDICTION_N_MAX = 32
"""A prediction is compared with so many tokens, so that of equal lines the one after the same lines is found."""


_ID_BYTES = 4


def history_tokens(max_model_tokens: int) -> int:
    """Ids that a slot has room for: a context, and a prediction after the end of its prompt."""
    return max_model_tokens + PREDICTION_N_MAX + min(MAX_PREDICTION_TOKENS, max_model_tokens)


class NgramDrafter:
    """Implements `Drafter`. Options: n_min, n_max (tokens that match), match (earliest or latest)."""

    options = ("match", "n_max", "n_min")
    takes_predictions = True

    def __init__(self, context: DrafterContext) -> None:
        """Raises `Refused`: an option is out of range."""
        self.max_drafts = context.max_drafts
        self._ops = context.ops
        self._rule = read_rule(context.options, max_tokens=context.max_model_tokens)
        # Of a prediction that is longer than any answer, the rest is not looked up.
        self._most_predicted = min(MAX_PREDICTION_TOKENS, context.max_model_tokens)
        width = history_tokens(context.max_model_tokens)
        slots, upload = context.max_num_seqs, context.ops.upload
        self._history = NgramHistory(
            ids=upload(np.full((slots, width), -1, np.int32)),
            known=upload(np.zeros(slots, np.int32)),
            references=upload(np.zeros(slots, np.int32)),
            drafts=upload(np.full((slots, context.max_drafts), -1, np.int32)),
        )

    @staticmethod
    def bytes_per_sequence(max_model_tokens: int, max_drafts: int) -> int:
        """Of the history: ids, two lengths, and the last drafts."""
        return _ID_BYTES * (history_tokens(max_model_tokens) + 2 + max_drafts)

    def start(self, starts: Sequence[SlotStart]) -> None:
        history = self._history
        for start in starts:
            prompt, prediction = start.request.prompt_token_ids, start.request.prediction_token_ids
            reference = (*prompt[-PREDICTION_N_MAX:], *prediction[: self._most_predicted]) if prediction else ()
            ids = np.asarray((*reference, *prompt, *start.output_token_ids), np.int32)
            history.ids[start.slot, : len(ids)] = self._ops.upload(ids)
            history.known[start.slot] = len(ids) - len(reference)
            history.references[start.slot] = len(reference)
            history.drafts[start.slot] = -1

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        del hidden
        return self._ops.ngram_drafts(self._history, slots, last_ids, lengths, rule=self._rule)


def read_rule(options: Mapping[str, str], *, max_tokens: int) -> NgramRule:
    """Raises `Refused`: an option is out of range."""
    try:
        n_max = read_integer(options.get("n_max", str(DEFAULT_N_MAX)), "n_max", 1, LONGEST_NGRAM)
        n_min = read_integer(options.get("n_min", str(min(n_max, DEFAULT_N_MIN))), "n_min", 1, n_max)
        match = options.get("match", NgramMatch.EARLIEST.value)
        if match not in set(NgramMatch):
            raise ValueError(f"match is {match!r}; possible are {', '.join(NgramMatch)}")
    except ValueError as error:
        raise Refused(f"--speculative: {error}") from error
    reference_n_max = max(n_max, PREDICTION_N_MAX)
    return NgramRule(
        n_min=n_min, n_max=n_max, reference_n_max=reference_n_max, match=NgramMatch(match), max_tokens=max_tokens
    )
