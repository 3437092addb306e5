"""What one forward pass is: `StepPlan`, columns with an entry per row, and `StepResult`. No tensors, no model names.

Public as names of `openinfer_core.scheduling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openinfer_core.events import TokenLogprobs
from openinfer_core.grammars import MaskWords
from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling.adapters import AdapterLoad

Int32Column: TypeAlias = NDArray[np.int32]
BoolColumn: TypeAlias = NDArray[np.bool_]

_NONE: Int32Column = np.zeros(0, np.int32)
_NO: BoolColumn = np.zeros(0, np.bool_)
_NO_LOGPROBS: Mapping[int, TokenLogprobs] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStart:
    """A sequence takes a sequence slot in this step: for the first time, or again after a preemption."""

    slot: int
    request: GenerateRequest
    seed: int
    """The request's, or drawn when it was added; the same after every preemption."""
    output_token_ids: tuple[int, ...] = ()
    """What was generated before a preemption; the penalties need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """All recurrent states of one state slot are copied to another; see `SchedulerConfig.num_snapshots`."""

    source: int
    target: int
    loaded_tokens: int | None = None
    """Tokens that the source has consumed, where a KV tier has written it since the last step that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass as columns, one entry per row; a row is a chunk of one sequence.

    A scheduler plans at least one row. A worker takes a plan of none, with all columns empty, and answers an empty
    result: where ranks have requests of their own, one may have none to run while the others do.

    Row `i` computes `counts[i]` positions of the sequence in `slots[i]`, from `starts[i]` on. Its input ids are, in
    this order:

        [the last id sampled in the slot, on the device]  0 or 1: `counts[i] - num_host_tokens[i] - draft_counts[i]`
        host ids                                          `num_host_tokens[i]`, from `token_ids`
        device drafts                                     `draft_counts[i]`, that a drafter left for the slot

    A row samples at its last `max_new[i]` positions. The id at the first of these is known; those after it are
    drafts, wherever they came from: `max_new[i] - 1 - draft_counts[i]` of them are host ids. The row yields the token
    sampled at the first, and goes on to the next position as long as the token is the draft that stands there. So it
    yields 1 .. `max_new[i]` tokens, the same as that many steps of one token each.

    Drafts beyond what the device has are padding: they are computed and never accepted. How many tokens a row with
    drafts yields is known when its step is applied. Until then `starts` of the slot's later rows, which begin with the
    last sampled id, is an upper bound, as if all drafts had been accepted; the worker knows the true position.
    A scheduler that knows no drafts leaves `draft_counts` and `wants_drafts` out and plans `max_new` of 0 or 1.

    The KV of a sequence is found by block tables, one per entry of `SchedulerConfig.table_windows`, which all draw
    from one pool: entry `i` of each is the block of positions `i * block_size_tokens` and on, in that table's layers.
    A scheduler that knows one table leaves `void_block_counts` out.
    """

    step: int
    """Number of the step, from 0, without gaps."""
    slots: Int32Column
    starts: Int32Column
    counts: Int32Column
    num_host_tokens: Int32Column
    max_new: Int32Column
    """Tokens that the row may yield; 0 where it does not sample."""
    token_ids: Int32Column
    """`[sum(num_host_tokens)]`, one row's after the other's."""
    new_block_counts: Int32Column
    """`[tables, rows]` blocks appended to each row's block tables since its last row; after a `SlotStart` they begin
    empty. `[rows]` is taken as one table's."""
    new_blocks: Int32Column
    """`[sum(new_block_counts)]`, one table's after the other's, and in each one row's after the other's."""
    started: tuple[SlotStart, ...] = ()
    """Slots that begin anew before this step runs; all state of their last owner is void.

    Each has a row in this step. A slot with a row in a step that was not applied yet is not among them.
    """
    state_restores: tuple[StateCopy, ...] = ()
    """Run before the step's rows: a slot of `started` begins with the states that its sequence had at `starts`."""
    state_snapshots: tuple[StateCopy, ...] = ()
    """Run after the step's rows."""
    draft_counts: Int32Column = field(default_factory=lambda: _NONE)
    """Positions whose ids are device drafts, at most `max(0, max_new - 1)`; by default none."""
    void_block_counts: Int32Column = field(default_factory=lambda: _NONE)
    """`[tables, rows]` first entries of each row's block tables that neither the row nor a later one reads, because
    they lie behind the table's window (`SchedulerConfig.table_windows`); by default none.
    `[rows]` is taken as one table's.

    It never decreases before the slot is started anew, and new blocks are appended after these entries: a table may
    begin with some that were never there. Their blocks may be another sequence's from this step on.
    """
    wants_drafts: BoolColumn = field(default_factory=lambda: _NO)
    """Whether the next drafts of the row's slot are to come back in `StepResult.next_drafts`; by default none."""
    released: tuple[int, ...] = ()
    """Sequence slots whose sequence left them since the last plan, by its end or a preemption.

    A slot that was released has no row before a `SlotStart`, which may be in this plan.
    """
    adapter_loads: tuple[AdapterLoad, ...] = ()
    """Run before the step's rows: no row of a step that was not applied yet uses these adapter slots otherwise than
    after its own load."""
    token_masks: Mapping[tuple[int, int], MaskWords] = field(default_factory=dict[tuple[int, int], MaskWords])
    """(row, sampled position from 0) -> the tokens that may be sampled there.

    The loop adds them to a scheduler's plan, for requests that are masked. A masked row has no mask after the first
    draft that is forbidden: that position is not reached.
    """

    def __post_init__(self) -> None:
        if self.draft_counts is _NONE:
            object.__setattr__(self, "draft_counts", np.zeros(len(self.slots), np.int32))
        if self.wants_drafts is _NO:
            object.__setattr__(self, "wants_drafts", np.zeros(len(self.slots), np.bool_))
        for name in ("new_block_counts", "void_block_counts"):
            counts = getattr(self, name)
            if counts is _NONE:
                object.__setattr__(self, name, np.zeros(np.shape(self.new_block_counts), np.int32))
            elif getattr(counts, "ndim", None) == 1:
                object.__setattr__(self, name, counts[np.newaxis])

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step produced, in row order."""

    new_counts: Int32Column
    """`[rows]` tokens that each row yields: 0 only where it does not sample or failed."""
    token_ids: Int32Column
    """`[sum(new_counts)]`, one row's after the other's."""
    draft_counts: Int32Column = field(default_factory=lambda: _NONE)
    """`[rows]` drafts that were compared, host and device drafts together: fewer than planned where the device had
    fewer; by default none."""
    next_drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Row -> drafts that follow its last token, for rows of `wants_drafts`: ids of the model, at most
    `SchedulerConfig.max_drafts`. The worker ends them before an id of the drafter's that is none."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict[int, tuple[TokenLogprobs, ...]])
    """Row -> log-probabilities of each of its new tokens, for rows whose request asked."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs, ...]]
    )
    """Row -> those of the prompt tokens that this row's positions predict, for rows whose request asked."""
    failed_rows: Mapping[int, str] = field(default_factory=dict[int, str])
    """Row -> message, safe to show: the request fails, the others live."""

    def __post_init__(self) -> None:
        if self.draft_counts is _NONE:
            object.__setattr__(self, "draft_counts", np.zeros(len(self.new_counts), np.int32))

    @property
    def tokens_of_rows(self) -> list[list[int]]:
        """The new token ids of each row."""
        token_ids: list[int] = self.token_ids.tolist()
        ends = accumulate(self.new_counts.tolist())
        first, rows = 0, list[list[int]]()
        for end in ends:
            rows.append(token_ids[first:end])
            first = end
        return rows

    @classmethod
    def of_single_tokens(
        cls, token_ids: Int32Column, *, logprobs: Mapping[int, TokenLogprobs] = _NO_LOGPROBS, **others: Any
    ) -> "StepResult":
        """The result of a step without drafts.

        Args:
            token_ids: `[rows]` the sampled id; -1 where the row does not sample or failed.
            logprobs: row -> those of its sampled id.
            others: further fields.
        """
        has_token = token_ids >= 0
        return cls(
            new_counts=has_token.astype(np.int32),
            token_ids=token_ids[has_token],
            logprobs={row: (logprob,) for row, logprob in logprobs.items()},
            **others,
        )
