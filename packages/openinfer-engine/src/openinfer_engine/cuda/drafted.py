"""`DraftedSteps`: steps of an engine with a drafter, whose rows yield as many tokens as were accepted.

    plan ─► record ─► corrected on the device ─► forward ─► position by position: sample, accept ─► draft ─► to the host

The host waits for nothing: which drafts are accepted, and so where each sequence stands, is decided on the device. Each
position is sampled by a launch of its own, as a step of its own would have sampled it: with the penalties of the tokens
before, the bias and the random number of its true position. Rows that do not reach a position take no part in it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StepPlan
from openinfer_engine.cpu.worker import PROMPT_LOGPROB_ROWS, WorkerLimits
from openinfer_engine.cuda.captured_spans import CapturedDrafts, CapturedSpans, SpanArrays, SpanGraphs
from openinfer_engine.cuda.drafted_sampling import DraftedSamplingState
from openinfer_engine.cuda.drafted_states import DraftedStates
from openinfer_engine.cuda.graphs import CapturedDecode
from openinfer_engine.cuda.late_steps import LateSteps
from openinfer_engine.cuda.mixed import MixedForward, ReadTokens, RowColumns
from openinfer_engine.cuda.replayed_states import ReplayedStates
from openinfer_engine.cuda.results import DraftedTokens, PositionLogprobs, ScoredPrompt
from openinfer_engine.cuda.sampler import CudaSampler, download_logprobs
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.model import Model
from openinfer_kernels import Array, HostArray
from openinfer_kernels.cuda.common.graphs import Stream
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.common.pinned import StagingBuffer
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.cuda.sampling.draft_state import SPAN_LINES, Spans
from openinfer_kernels.cuda.sampling.step_inputs import DecodeInputs, MixedInputs

ScorePrompts: TypeAlias = Callable[[StepPlan, Array, StagingBuffer], list[ScoredPrompt]]


_MOST_READ_TOKENS = 10 << 10
"""Of contexts, once for each token of their rows, in steps whose tokens are taken for rows. On an H200 eight tokens of
one row of 1,100 gained 14 us a layer, and 24 tokens of eight rows of 600 lost 5."""


class DraftedSteps:
    """Queues the steps of one worker. Every rank accepts alike, by the ids and drafts of rank 0."""

    def __init__(
        self,
        model: Model,
        *,
        mixed: MixedForward,
        slots: DraftedSamplingState,
        sampler: CudaSampler,
        ops: CudaOps,
        drafter: SharedDrafter,
        limits: WorkerLimits,
        states: DraftedStates | None,
        replayed: ReplayedStates | None,
        late: LateSteps | None,
        score_prompts: ScorePrompts,
    ) -> None:
        self.model = model
        self._mixed = mixed
        self._slots = slots
        self._drafts = slots.drafts
        self._sampler = sampler
        self._ops = ops
        self._drafter = drafter
        self._limits = limits
        self._states = states
        self._replayed_states = replayed
        self._late = late
        self._score_prompts = score_prompts
        self._pending: _Pending | None = None
        self._decode_spans: dict[int, Spans] = {}
        self._most_logits = limits.max_num_seqs + PROMPT_LOGPROB_ROWS  # that the memory ledger has room for
        self.graphs = SpanGraphs(
            max_num_seqs=limits.max_num_seqs,
            max_drafts=drafter.max_drafts,
            most_logits=self._most_logits,
            accept=self._queue_accept,
            # A drafter that is captured does no more than to call operators.
            draft=self._queue_draft if drafter.observes and drafter.requirements.is_queued else None,
        )

    @property
    def most_tokens(self) -> int:
        """Of a row with drafts."""
        return 1 + self._drafter.max_drafts

    def draft_pending(self, plan: StepPlan, *, is_decode: bool) -> None:
        """Before the slots are brought up to date for a plan: has done what was put off until something asks for it.

        A drafter that observes steps is asked for drafts where the plan has some. Where it has none, the drafter hears
        what was accepted of others, which it goes on from, and need not be shown a step of one token a row yet.

        Args:
            plan: the next one.
            is_decode: whether `run_decode` will queue it.
        """
        if self._late is not None and not (is_decode and self._late.goes_on(plan)):
            self._late.show()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # A row that is not in this step may have its drafts in a later one.
        sits_out = pending.had_drafts and not np.isin(pending.slots, plan.slots).all()
        if sits_out or plan.draft_counts.any():
            self._draft(pending)
        else:
            self._leave(pending)

    def _leave(self, pending: "_Pending") -> None:
        """Rows go on without drafts."""
        spans = pending.spans
        if pending.had_drafts:
            self._drafter.settle(spans.slots, spans.last_ids, pending.hidden, spans.lengths)
        if not pending.is_advanced:
            self._drafts.keep_drafts(spans, None, num_token_ids=self._limits.num_token_ids)

    def place(self, plan: StepPlan) -> StepPlan:
        """The plan with true positions where the host knows them: of states that are not replayed, but waited for."""
        if self._replayed_states is not None:
            return self._replayed_states.place(plan)
        return plan if self._states is None else self._states.place(plan)

    def run(self, plan: StepPlan, staging: StagingBuffer) -> tuple[DraftedTokens, list[ScoredPrompt]]:
        """Queues a placed step whose slots are up to date."""
        self._drafter.start(plan.started)
        if self._states is not None:
            self._states.save(plan)
        num_planned, max_new = staging.upload(plan.draft_counts, plan.max_new.astype(np.int32))
        replayed = self._replayed(plan)
        inputs, hidden = self._mixed.run(
            columns_of(plan, num_token_ids=self._limits.num_token_ids),
            staging,
            correct=lambda inputs: self._drafts.place_rows(inputs, num_planned, max_new),
            least_tokens=0 if replayed is None else len(replayed.mixed.inputs.token_ids),
            by_token=replayed is not None and plan.counts.max() <= self.most_tokens and _reads_little(plan),
            read=self._sampled_tokens(plan),
        )
        prompts = self._score_prompts(plan, hidden, staging)
        rows = np.flatnonzero(plan.max_new)
        if replayed is not None and hidden is replayed.mixed.hidden:
            tokens = self._replay(plan, rows, replayed, staging)
        elif len(rows):
            spans, logprobs = self._sample(plan, rows, inputs, hidden, staging)
            tokens = self._finish(plan, rows, spans, logprobs=logprobs, hidden=hidden, staging=staging)
        else:
            tokens = nothing_sampled()
        if self._states is not None:
            self._states.settle(plan, tokens, inputs, staging)
        return tokens, prompts

    def _sampled_tokens(self, plan: StepPlan) -> ReadTokens | None:
        """What rows sample from, where nothing else is read of hidden states."""
        # Which rows keep inputs is told by row, and tokens are rows of their own where there is one block table.
        takes_one = self._replayed_states is not None or self._limits.num_tables > 1
        if self._slots.unscored(plan) or (takes_one and (plan.max_new > 1).any()):
            return None
        rows = np.repeat(np.arange(plan.num_rows), plan.max_new)
        before = np.repeat(np.cumsum(plan.max_new) - plan.max_new, plan.max_new)
        firsts = np.repeat(np.cumsum(plan.counts) - plan.max_new, plan.max_new)
        return ReadTokens(rows, firsts + np.arange(len(rows)) - before)

    def begin_decode(self, inputs: DecodeInputs) -> None:
        """Queues what corrects a step of rows of one token each before it is computed; captured with it."""
        self._drafts.place_decode(inputs)

    def end_decode(self, inputs: DecodeInputs, token_ids: Array) -> None:
        """Queues that such rows sampled these ids; captured with their sampling."""
        num_rows = inputs.rows.shape[1]
        if num_rows not in self._decode_spans:
            # Drafts are captured before the first step has filled these.
            columns, nothing = cupy.zeros((SPAN_LINES, num_rows), np.int32), cupy.zeros((2, num_rows), np.int32)
            made = Spans.make(columns, positions=1)
            self._decode_spans[num_rows] = replace(made, last_ids=nothing[0], lengths=nothing[1])
        self._drafts.advance(inputs, token_ids, self._decode_spans[num_rows])

    def capture_decode(self, stream: Stream, decode: Mapping[int, CapturedDecode]) -> None:
        """Drafts after captured decode steps, by rows."""
        fewest = 1
        for rows, captured in sorted(decode.items()):
            self.graphs.capture_after_decode(stream, self._decode_spans[rows], captured.hidden, fewest=fewest)
            fewest = rows + 1

    def run_decode(self, plan: StepPlan, replay: Callable[[], CapturedDecode]) -> None:
        """Queues a placed step of rows of one token each, without drafts, whose slots are up to date.

        Args:
            plan: of the step.
            replay: replays it, what `begin_decode` and `end_decode` queued included.
        """
        self._drafter.start(plan.started)
        captured = replay()
        spans = self._decode_spans[captured.inputs.rows.shape[1]].first(plan.num_rows)
        pending = _Pending(
            plan.slots,
            spans,
            captured.hidden[: plan.num_rows],
            had_drafts=False,
            is_advanced=True,
            captured=self.graphs.after_decode(plan.num_rows, captured.hidden),
        )
        if self._late is not None:
            self._late.note(plan, captured.inputs)
        if self._drafter.observes:
            self._pending = pending
        else:
            self._draft(pending)
        if self._states is not None:
            self._states.advance(plan)

    def _replayed(self, plan: StepPlan) -> CapturedSpans | None:
        """What replays sampling of a plan, where nothing else is asked of it than tokens."""
        slots = plan.slots
        if plan.token_masks or plan.wants_drafts.any() or (self._slots.logprobs[slots] >= 0).any():
            return None
        return self.graphs.of(plan)

    def _replay(
        self, plan: StepPlan, rows: HostArray, replayed: CapturedSpans, staging: StagingBuffer
    ) -> DraftedTokens:
        arrays, spans = replayed.arrays, replayed.arrays.spans
        firsts = np.cumsum(plan.counts) - plan.max_new
        staging.upload_into(arrays.lines(plan.slots, firsts, plan.max_new, plan.draft_counts), arrays.columns)
        accept = replayed.full if self._slots.changes_logits(plan) else replayed.plain
        accept.launch()
        pending = _Pending(plan.slots, spans, replayed.last_hidden, had_drafts=True, captured=replayed.drafts)
        if self._drafter.observes:
            self._pending = pending
        else:
            self._draft(pending)
        return self._downloaded(plan, rows, spans, logprobs=[], drafts=None, num_drafts=None, staging=staging)

    def _queue_accept(self, arrays: SpanArrays, inputs: MixedInputs, hidden: Array, changes: bool) -> Array:  # noqa: FBT001 - as `Accept`
        """Samples the rows of a captured step at all its positions."""
        spans, count = arrays.spans, len(arrays.chosen)
        logits = self.model.logits(self._ops.embedding(arrays.tokens, hidden))
        for position in range(arrays.positions):
            sampled = self._drafts.open_position(spans, arrays.chosen, position, inputs)
            token_ids = self._sampler.sample(logits[position * count :][:count], sampled, changes=changes)
            self._drafts.accept(spans, arrays.chosen, position, token_ids, inputs)
        self._finish_spans(spans, inputs)
        return self._ops.embedding(spans.last_tokens, hidden)

    def _queue_draft(self, spans: Spans, hidden: Array) -> tuple[Array, Array]:
        drafts = self._drafter.propose(spans.slots, spans.last_ids, hidden, spans.lengths)
        kept = self._drafts.keep_drafts(spans, drafts, num_token_ids=self._limits.num_token_ids)
        return kept if drafts is None else drafts, kept

    def _draft(self, pending: "_Pending") -> tuple[Array | None, Array]:
        """The drafts of spans, and how many of them are kept."""
        spans = pending.spans
        captured = pending.captured
        if captured is not None and self._drafter.observes:
            captured.launch()
            return captured.drafts, captured.num_drafts
        drafts = self._drafter.propose(spans.slots, spans.last_ids, pending.hidden, spans.lengths)
        return drafts, self._drafts.keep_drafts(spans, drafts, num_token_ids=self._limits.num_token_ids)

    def _sample(
        self, plan: StepPlan, rows: HostArray, inputs: MixedInputs, hidden: Array, staging: StagingBuffer
    ) -> tuple[Spans, list[PositionLogprobs]]:
        """Samples `rows` at their first position, those whose token is their draft at the next, and so on."""
        slots, max_new = plan.slots[rows], plan.max_new[rows]
        firsts = (np.cumsum(plan.counts)[rows] - max_new).astype(np.int32)
        (columns,) = staging.upload(np.stack([slots, firsts, max_new, plan.draft_counts[rows]]).astype(np.int32))
        spans = Spans.make(columns, positions=int(max_new.max()))
        changes = self._slots.changes_logits(plan)
        logprobs: list[PositionLogprobs] = []
        for position, having, logits in self._logits(firsts, max_new, hidden, staging):
            (chosen,) = staging.upload(having)
            sampled = self._drafts.open_position(spans, chosen, position, inputs)
            masks = [
                (place, plan.token_masks[row, position])
                for place, row in enumerate(rows[having].tolist())
                if (row, position) in plan.token_masks
            ]
            mask = self._sampler.token_mask(masks, len(having), staging) if masks else None
            token_ids = self._sampler.sample(logits, sampled, changes=changes, mask=mask)
            self._drafts.accept(spans, chosen, position, token_ids, inputs)
            top = int(self._slots.logprobs[slots[having]].max())
            if top >= 0:
                found = self._ops.logprobs(logits, token_ids, top=top)
                logprobs.append(PositionLogprobs(spans=having, logprobs=download_logprobs(found, staging)))
        self._finish_spans(spans, inputs)
        return spans, logprobs

    def _finish_spans(self, spans: Spans, inputs: MixedInputs) -> None:
        self._drafts.finish(spans, inputs)
        if self._replayed_states is not None:
            self._replayed_states.take_in(spans)

    def _logits(
        self, firsts: HostArray, max_new: HostArray, hidden: Array, staging: StagingBuffer
    ) -> Iterator[tuple[int, HostArray, Array]]:
        """For each sampled position the spans that have it, and their logits, whose head is read once for many rows."""
        position, most = 0, int(max_new.max())
        while position < most:
            of_positions = [np.flatnonzero(max_new > position).astype(np.int32)]
            while position + len(of_positions) < most:
                later = np.flatnonzero(max_new > position + len(of_positions)).astype(np.int32)
                if sum(map(len, of_positions)) + len(later) > self._most_logits:
                    break
                of_positions.append(later)
            places = [firsts[having] + np.int32(position + i) for i, having in enumerate(of_positions)]
            (tokens,) = staging.upload(np.concatenate(places))
            logits = self.model.logits(self._ops.embedding(tokens, hidden))
            begin = 0
            for having in of_positions:
                yield position, having, logits[begin : begin + len(having)]
                begin, position = begin + len(having), position + 1

    def _finish(
        self,
        plan: StepPlan,
        rows: HostArray,
        spans: Spans,
        *,
        logprobs: list[PositionLogprobs],
        hidden: Array,
        staging: StagingBuffer,
    ) -> DraftedTokens:
        """Asks for the next drafts, and begins to bring to the host what the step's result has."""
        last_hidden = self._ops.embedding(spans.last_tokens, hidden)
        pending = _Pending(plan.slots[rows], spans, last_hidden, had_drafts=bool((plan.max_new > 1).any()))
        wants_drafts = plan.wants_drafts[rows]
        drafts, num_drafts = None, None
        if self._drafter.observes and not wants_drafts.any():
            self._pending = pending
        else:
            drafts, num_drafts = self._draft(pending)
        return self._downloaded(
            plan, rows, spans, logprobs=logprobs, drafts=drafts, num_drafts=num_drafts, staging=staging
        )

    def _downloaded(
        self,
        plan: StepPlan,
        rows: HostArray,
        spans: Spans,
        *,
        logprobs: list[PositionLogprobs],
        drafts: Array | None,
        num_drafts: Array | None,
        staging: StagingBuffer,
    ) -> DraftedTokens:
        """Begins to bring to the host what the step's result has."""
        wants_drafts = plan.wants_drafts[rows]
        return DraftedTokens(
            rows=rows,
            token_ids=staging.download(spans.token_ids),
            new_counts=staging.download(spans.new_counts),
            compared=staging.download(spans.compared),
            drafts=staging.download(drafts) if drafts is not None and wants_drafts.any() else None,
            num_drafts=np.zeros(len(rows), np.int32) if num_drafts is None else staging.download(num_drafts),
            wants_drafts=wants_drafts,
            logprobs=logprobs,
            tops=self._slots.logprobs[plan.slots[rows]],
        )


def _reads_little(plan: StepPlan) -> bool:
    """Whether contexts are short enough to be read once for each token of a row."""
    return int((plan.counts * (plan.starts + plan.counts)).sum()) <= _MOST_READ_TOKENS


@dataclass(frozen=True, slots=True)
class _Pending:
    """Rows that sampled, and were drafted nothing yet."""

    slots: HostArray
    spans: Spans
    hidden: Array
    had_drafts: bool
    is_advanced: bool = False
    """Whether the slots are known to have no drafts."""
    captured: CapturedDrafts | None = None


def nothing_sampled() -> DraftedTokens:
    """Of a step without a row that samples."""
    none = np.zeros(0, np.int32)
    return DraftedTokens(
        rows=none,
        token_ids=np.zeros((1, 0), np.int32),
        new_counts=none,
        compared=none,
        drafts=None,
        num_drafts=none,
        wants_drafts=np.zeros(0, np.bool_),
        logprobs=[],
        tops=none,
    )


def columns_of(plan: StepPlan, *, num_token_ids: int) -> RowColumns:
    """The rows of a plan, with 0 where the device will put drafts, and host ids that an embedding has.

    Raises:
        ContractViolation: a row has ids that are neither its slot's last, nor the host's, nor drafts.
    """
    num_host_tokens = plan.num_host_tokens + plan.draft_counts
    num_last_ids = plan.counts - num_host_tokens
    num_drafts = np.maximum(plan.max_new - 1, 0)
    is_astray = (num_last_ids < 0) | (num_last_ids > 1) | (plan.draft_counts > num_drafts)
    is_astray |= plan.max_new > plan.counts
    if is_astray.any():
        row = int(np.flatnonzero(is_astray)[0])
        raise ContractViolation(
            f"row {row} is planned with {plan.counts[row]} ids, {plan.num_host_tokens[row]} from the host and "
            f"{plan.draft_counts[row]} drafts, and max_new {plan.max_new[row]}: one id at most may be the slot's last, "
            "and drafts stand after the first sampled position"
        )
    # Where each host id stands among ids and gaps for drafts: after the drafts of all rows before its own.
    gaps = np.repeat(np.cumsum(plan.draft_counts) - plan.draft_counts, plan.num_host_tokens)
    host_ids = np.zeros(int(num_host_tokens.sum()), np.int32)
    host_ids[np.arange(len(plan.token_ids)) + gaps] = plan.token_ids.clip(0, num_token_ids - 1)
    return RowColumns(plan.slots, plan.starts, plan.counts, num_host_tokens, host_ids)
