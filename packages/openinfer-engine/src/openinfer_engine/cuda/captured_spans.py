"""Steps of a few rows with drafts, captured from sampling on: launched one by one, their kernels wait for the host.

    forward (captured by tokens) ─► replay: { sample, accept } per position, finish ─► to the host
                                                     before the next step ─► replay: the drafter, keep

The first drafts of a run follow a decode step, and are captured for few rows of one, too.

Rows with fewer drafts than a graph has room for end early, which the device sees: `max_new` of a row is its data.

What the drafter reads lies in the same arrays after any step of as many rows, so that it is captured once for each
number of rows: it has most of the kernels, and a start waits while they are queued.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from openinfer_core.scheduling import StepPlan
from openinfer_engine.cuda.graphs import CapturedMixed
from openinfer_engine.cuda.step_buckets import TOKEN_BUCKETS, bucket_of
from openinfer_kernels import Array, HostArray
from openinfer_kernels.cuda.common.graphs import Graph, Stream
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.draft_state import SPAN_LINES, Spans
from openinfer_kernels.cuda.sampling.step_inputs import MixedInputs
from openinfer_kernels.cuda.sampling.steps import copy_array

MOST_ROWS = 8
"""More rows keep the device busy for longer than it takes to launch what follows a forward pass."""
_POSITIONS = 2, 4, 8
"""Sampled positions of a row that are captured, next to the most there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanArrays:
    """What rows of one number sample at up to `positions` positions."""

    positions: int
    columns: Array
    """`[SPAN_LINES + positions, R]` int32, which the host writes: `Spans.columns`, then of each sampled position the
    token of the step, or the row's last one for a position that it does not have."""
    chosen: Array
    """`[R]` int32: all of them."""
    spans: Spans

    @classmethod
    def make(cls, rows: int, positions: int) -> "SpanArrays":
        first: HostArray = np.zeros((SPAN_LINES + positions, rows), np.int32)
        first[0], first[2] = np.arange(rows), 1
        columns = cupy.asarray(first)
        chosen = cupy.asarray(np.arange(rows, dtype=np.int32))
        spans = Spans.make(columns[:SPAN_LINES], positions=positions)
        return cls(positions=positions, columns=columns, chosen=chosen, spans=spans)

    def of(self, positions: int) -> "SpanArrays":
        """The same arrays for fewer positions."""
        spans = replace(self.spans, token_ids=self.spans.token_ids[:positions])
        columns = self.columns[: SPAN_LINES + positions]
        return SpanArrays(positions=positions, columns=columns, chosen=self.chosen, spans=spans)

    @property
    def tokens(self) -> Array:
        """`[positions * R]` of the step, position by position."""
        return self.columns[SPAN_LINES:].reshape(-1)

    def lines(self, slots: HostArray, firsts: HostArray, max_new: HostArray, num_planned: HostArray) -> HostArray:
        """What the host writes for these rows."""
        steps = np.minimum(np.arange(self.positions)[:, None], max_new - 1)
        return np.concatenate((np.stack([slots, firsts, max_new, num_planned]), firsts + steps)).astype(np.int32)


Accept: TypeAlias = Callable[[SpanArrays, MixedInputs, Array, bool], Array]
"""Queues sampling and accepting, of the step's hidden states `[T, h]`, with changes of logits or without; returns those
of each row's last token, `[R, h]`."""
Draft: TypeAlias = Callable[[Spans, Array], tuple[Array, Array]]
"""Queues the drafter and keeping its drafts; returns them, and how many each row has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedDrafts:
    """The drafter's graph, and what it leaves."""

    graph: Graph
    drafts: Array
    num_drafts: Array
    before: Graph | None = None
    """Copies what the drafter reads to where it reads it."""

    def launch(self) -> None:
        if self.before is not None:
            self.before.launch()
        self.graph.launch()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSpans:
    """Steps of so many rows, from the hidden states of `mixed` on."""

    arrays: SpanArrays
    mixed: CapturedMixed
    plain: Graph
    full: Graph
    """With penalties and biases."""
    last_hidden: Array
    """What either leaves."""
    drafts: CapturedDrafts | None
    """None for a drafter that is asked as it is in other steps."""


class SpanGraphs:
    """By rows and positions.

    Args:
        max_num_seqs: of the engine.
        max_drafts: of a row.
        most_logits: rows of logits that there is room for.
        accept: what is captured.
        draft: what is captured of a drafter that allows it, else None.
    """

    def __init__(
        self, *, max_num_seqs: int, max_drafts: int, most_logits: int, accept: Accept, draft: Draft | None
    ) -> None:
        self._accept, self._draft = accept, draft
        ladder = sorted({*(each for each in _POSITIONS if each <= max_drafts), max_drafts + 1})
        self._sizes = [
            (rows, positions)
            for positions in ladder
            for rows in range(1, min(MOST_ROWS, max_num_seqs) + 1)
            if rows * positions <= min(most_logits, TOKEN_BUCKETS[-1])
        ]
        self._captured: dict[tuple[int, int], CapturedSpans] = {}
        self._after_decode: dict[int, tuple[Array, CapturedDrafts]] = {}
        self._drafts: dict[int, CapturedDrafts] = {}
        self._ladder = ladder
        # Steps of as many rows use the same arrays one after the other.
        self._arrays = {rows: SpanArrays.make(rows, ladder[-1]) for rows in {rows for rows, _ in self._sizes}}
        self._last_hidden: dict[int, Array] = {}

    def warm_up(self, inputs: MixedInputs, hidden: Array) -> None:
        """Queues once what will be captured with these inputs: nothing is loaded or uploaded in a capture."""
        for rows, positions in self._of_bucket(len(inputs.token_ids)):
            arrays = self._arrays[rows].of(positions)
            *_, last = [self._accept(arrays, inputs, hidden, changes) for changes in (True, False)]
            if self._draft is not None and rows not in self._last_hidden:
                self._draft(arrays.spans, last)
            self._last_hidden.setdefault(rows, last)

    def capture(self, stream: Stream, captured: Mapping[int, CapturedMixed]) -> None:
        for bucket, mixed in captured.items():
            for rows, positions in self._of_bucket(bucket):
                arrays = self._arrays[rows].of(positions)
                self._captured[rows, positions] = self._capture(stream, arrays, mixed)

    def capture_after_decode(self, stream: Stream, spans: Spans, hidden: Array, *, fewest: int) -> None:
        """Drafts of `fewest` and more of the rows of a captured decode step, up to all of them."""
        for rows in range(fewest, min(len(hidden), MOST_ROWS) + 1):
            drafts = self._capture_drafts(stream, rows)
            if drafts is not None:
                work = partial(self._copy, spans.first(rows), hidden[:rows])
                before, _ = stream.capture(work)
                self._after_decode[rows] = hidden, replace(drafts, before=before)

    def after_decode(self, num_rows: int, hidden: Array) -> CapturedDrafts | None:
        """Of a step whose hidden states are there, which steps with adapters have elsewhere."""
        of, found = self._after_decode.get(num_rows, (None, None))
        return found if of is hidden else None

    def clear(self) -> None:
        self._captured.clear()
        self._after_decode.clear()
        self._drafts.clear()

    def of(self, plan: StepPlan) -> CapturedSpans | None:
        """What replays a plan whose rows all sample, some at several positions; None if nothing does."""
        most = int(plan.max_new.max())
        positions = next((each for each in self._ladder if each >= most), None)
        if most < 2 or positions is None or not plan.max_new.all() or plan.num_tokens > plan.num_rows * positions:
            return None
        return self._captured.get((plan.num_rows, positions))

    def _of_bucket(self, bucket: int) -> list[tuple[int, int]]:
        return [size for size in self._sizes if bucket_of(TOKEN_BUCKETS, size[0] * size[1]) == bucket]

    def _capture(self, stream: Stream, arrays: SpanArrays, mixed: CapturedMixed) -> CapturedSpans:
        rows = len(arrays.chosen)
        last_hidden = self._last_hidden[rows]

        def accept(changes: bool) -> None:  # noqa: FBT001 - as `Accept`
            copy_array(self._accept(arrays, mixed.inputs, mixed.hidden, changes), last_hidden)

        # Drafts go on from the same array whichever way was taken.
        (plain, _), (full, _) = (stream.capture(partial(accept, changes)) for changes in (False, True))
        drafts = self._capture_drafts(stream, rows)
        return CapturedSpans(arrays=arrays, mixed=mixed, plain=plain, full=full, last_hidden=last_hidden, drafts=drafts)

    def _capture_drafts(self, stream: Stream, rows: int) -> CapturedDrafts | None:
        """Of so many rows, whatever step they had; None where none of them was warmed up, or nothing is captured."""
        if self._draft is None or rows not in self._last_hidden:
            return None
        if rows not in self._drafts:
            work = partial(self._draft, self._arrays[rows].spans, self._last_hidden[rows])
            graph, (ids, num_ids) = stream.capture(work)
            self._drafts[rows] = CapturedDrafts(graph=graph, drafts=ids, num_drafts=num_ids)
        return self._drafts[rows]

    def _copy(self, spans: Spans, hidden: Array) -> None:
        """Queues what a drafter reads of a decode step, and `keep_drafts` of its spans."""
        rows = len(hidden)
        own = self._arrays[rows].spans
        for name in ("slots", "new_counts", "last_ids", "lengths"):
            copy_array(getattr(spans, name), getattr(own, name))
        copy_array(hidden, self._last_hidden[rows])
