"""What drafters share that make one token after the other: `HiddenBefore`, and `draft_in_chains`.

A pair of the hidden state at `p - 1` and the token at `p` stands at position `p`. So a step's first pair needs the
hidden state of the step before, and a row with refused drafts goes on from that of its last accepted token.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from openinfer_engine.drafters.contract import DraftMemory, ObservedStep
from openinfer_kernels import Array, AttentionBatch, Ops

Forward: TypeAlias = Callable[[Array, Array, AttentionBatch], tuple[Array, Array]]
"""Token ids `[n]`, hidden states before them `[n, h]` and where they stand -> what logits are made of, and the hidden
state before the next token."""


class HiddenBefore:
    """The hidden state before each slot's next token, on the device.

    Args:
        last: `[slots, h]`, kept here from step to step; whatever it holds where a sequence begins at position 0.
        max_num_seqs: sequence slots.
        ops: of the device.
    """

    def __init__(self, last: Array, *, max_num_seqs: int, ops: Ops) -> None:
        self.last = last
        self._ops = ops
        self._begins: Array = ops.zeros((max_num_seqs,), np.int32)  # in the step that was shown last
        self._positions: Array = ops.zeros((max_num_seqs,), np.int32)
        self._hidden: Array = last[:0]

    def of(self, step: ObservedStep, hidden: Array) -> Array:
        """`[T, h]`: before each token of a step, whose own are `hidden [T, h]`; zeros before position 0."""
        before = self._ops.zeros(hidden.shape)
        before[1:] = hidden[:-1]
        firsts = step.batch.query_starts[:-1]
        before[firsts] = self.last[step.slots]
        before[step.batch.positions == 0] = 0  # no key: whatever a slot holds, nothing is made of it
        return before

    def take(self, step: ObservedStep, hidden: Array) -> None:
        """The step is over; its hidden states are what later ones go on from."""
        firsts = step.batch.query_starts[:-1]
        self._hidden = hidden
        self._begins[step.slots] = firsts
        self._positions[step.slots] = step.batch.positions[firsts]
        self.last[step.slots] = hidden[step.last_tokens]

    def settle(self, slots: Array, lengths: Array) -> Array:
        """`[n, h]`: the states before the last known tokens of rows of that step; later steps go on from them.

        Not for models with recurrent states: of these, the step shown last may be of few rows, computed again.
        """
        hidden = self._hidden[self._begins[slots] + (lengths - 2 - self._positions[slots])]
        self.last[slots] = hidden
        return hidden


def draft_in_chains(
    memory: DraftMemory,
    slots: Array,
    last_ids: Array,
    hidden: Array,
    lengths: Array,
    *,
    max_drafts: int,
    forward: Forward,
    likeliest: Callable[[Array], Array],
    ops: Ops,
) -> Array:
    """`[n, max_drafts]` int32: each draft is made of the one before, and of the hidden state that made it.

    Args:
        memory: of the drafter.
        slots: as in `Drafter.draft`.
        last_ids: likewise.
        hidden: what `forward` takes with `last_ids`.
        lengths: as in `Drafter.draft`.
        max_drafts: columns.
        forward: of one token of each row.
        likeliest: what logits are made of, `[n, h]` -> token ids of the model, `[n]` int32.
        ops: of the device.
    """
    drafts = ops.zeros((len(slots), max_drafts), np.int32)
    for first in range(0, len(slots), memory.max_rows):
        some = slice(first, first + memory.max_rows)
        span, ids, state = memory.span(slots[some], lengths[some]), last_ids[some], hidden[some]
        for index in range(max_drafts):
            out, state = forward(ids, state, span.rows(index, 1))
            ids = likeliest(out)
            drafts[some, index] = ids
    return drafts
