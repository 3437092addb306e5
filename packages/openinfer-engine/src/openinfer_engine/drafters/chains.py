"""What drafters share that make one token after the other: `HiddenBefore`, and `draft_in_chains`.

A pair of the hidden state at `p - 1` and the token at `p` stands at position `p`. So a step's first pair needs the
hidden state of the step before, and a row with refused drafts goes on from that of its last accepted token
(`openinfer_kernels.DraftingOps`).

All that is done here is queued on the device, of arrays whose sizes alone are known, so that a GPU's steps can be
captured with it.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from openinfer_engine.drafters.contract import DraftMemory, ObservedStep
from openinfer_kernels import Array, AttentionBatch, HiddenMemory, Ops, PagedCache

Forward: TypeAlias = Callable[[Array, Array, AttentionBatch], tuple[Array, Array]]
"""Token ids `[n]`, hidden states before them `[n, h]` and where they stand -> what logits are made of, and the hidden
state before the next token."""


class HiddenBefore:
    """The hidden state before each slot's next token, on the device.

    Args:
        last: `[slots, h]`, kept here from step to step; whatever it holds where a sequence begins at position 0.
        max_drafts: of a row.
        ops: of the device.
        boundary: the layers that hold hidden states at the ends of blocks (`boundary_group`); none where a prefix's
            comes with the recurrent states that `last` is one of.
    """

    def __init__(self, last: Array, *, max_drafts: int, ops: Ops, boundary: tuple[PagedCache, ...] = ()) -> None:
        self._ops = ops
        slots, width = last.shape
        self._memory = HiddenMemory(
            last=last,
            # A scheduler of another package may plan more drafts than there are.
            tail=ops.zeros((slots, kept_states(max_drafts), width)),
            ends=ops.zeros((slots,), np.int32),
            begun=ops.zeros((slots,), np.int32),
            boundary=boundary[0] if boundary else None,
            boundary_layers=len(boundary),
        )
        self._one: Array = ops.upload(np.ones(1, np.int32))

    def start(self, slots: Iterable[int]) -> None:
        """Sequences begin in these slots: they go on from what lies at the end of the block before them."""
        for slot in slots:
            self._memory.begun[slot : slot + 1] = self._one

    def of(self, step: ObservedStep, hidden: Array) -> Array:
        """`[T, h]`: before each token of a step, whose own are `hidden [T, h]`; zeros before position 0."""
        return self._ops.hidden_before(hidden, self._memory, step.slots, step.batch)

    def take(self, step: ObservedStep, hidden: Array) -> None:
        """The step is over; its hidden states are what later ones go on from."""
        self._ops.keep_hidden(hidden, self._memory, step.slots, step.batch)

    def settle(self, slots: Array, lengths: Array, *, hidden: Array | None = None) -> Array:
        """`[n, h]`: the states before the last known tokens of rows of that step; later steps go on from them.

        Of models with recurrent states the step shown last may be of few rows, computed again: `hidden` says them.
        """
        return self._ops.settle_hidden(self._memory, slots, lengths, hidden=hidden)


def kept_states(max_drafts: int) -> int:
    """Hidden states that `HiddenBefore` keeps of a row's last tokens."""
    return 2 * (1 + max_drafts)


def draft_in_chains(
    memory: DraftMemory,
    slots: Array,
    last_ids: Array,
    hidden: Array,
    lengths: Array,
    *,
    max_drafts: int,
    forward: Forward,
    likeliest: Callable[[Array, Array, int], Array],
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
        likeliest: what logits are made of, `[n, h]`, the rows' drafts and a column of these -> token ids of the model,
            `[n]` int32, which that column has then, too: `Ops.draft_ids`.
        ops: of the device.
    """
    drafts = ops.zeros((len(slots), max_drafts), np.int32)
    for first in range(0, len(slots), memory.max_rows):
        some = slice(first, first + memory.max_rows)
        span, ids, state = memory.span(slots[some], lengths[some]), last_ids[some], hidden[some]
        for index in range(max_drafts):
            out, state = forward(ids, state, span.rows(index, 1))
            ids = likeliest(out, drafts[some], index)
    return drafts
