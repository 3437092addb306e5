"""`OutputProcessor`: what the result of one step means for its sequences."""

from openinfer_core.events import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Scheduled,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.request import RequestId
from openinfer_core.scheduling import StepResult
from openinfer_engine.scheduler.counters import Counters
from openinfer_engine.scheduler.drafts.pace import DraftPace
from openinfer_engine.scheduler.run_queue import RunQueue
from openinfer_engine.scheduler.sequence import Sequence, SequenceState
from openinfer_engine.scheduler.step_builder import StepInFlight

_NOTHING_SAMPLED = "the step gave no token"
_FINISHED = SequenceState.FINISHED
_RUNNING = SequenceState.RUNNING


class OutputProcessor:
    """Takes in the rows of one step; `events` (in row order) and `ended` fill up."""

    __slots__ = (
        "_counters",
        "_draft_pace",
        "_queue",
        "_record",
        "_result",
        "_seals_blocks",
        "_takes_drafts",
        "_windows",
        "ended",
        "events",
    )

    def __init__(
        self,
        record: StepInFlight,
        result: StepResult,
        *,
        queue: RunQueue,
        counters: Counters,
        seals_blocks: bool,
        takes_drafts: bool,
        draft_pace: DraftPace | None = None,
    ) -> None:
        self.events: list[TokenEvent] = []
        self.ended: list[RequestId] = []
        self._record = record
        self._result = result
        self._queue = queue
        self._counters = counters
        self._seals_blocks = seals_blocks
        self._takes_drafts = takes_drafts
        self._draft_pace = draft_pace
        self._windows = queue.windows

    def process(self) -> None:
        """Takes all rows. What a sequence holds is given back with its last row in flight, if it runs no longer."""
        failures = {**self._result.failed_rows, **self._record.faults}
        computed: set[int] = set()
        tokens = self._result.tokens_of_rows
        if self._takes_drafts:
            self._take_drafts(tokens)
        for row, sequence in enumerate(self._record.rows):
            if sequence.state is _FINISHED:
                # It ended after this row was planned, by a stop token of the step before or an abort.
                self._counters.wasted_rows += 1
            elif row in failures:
                self._fail(sequence, failures[row])
            else:
                self._take_row(row, sequence, tokens[row])
                computed.add(row)
            sequence.rows_in_flight -= 1
            if sequence.state is not _RUNNING and not sequence.rows_in_flight:
                self._queue.give_back(sequence)
        # After the rows: a copy of states is good only if its row was computed.
        for row, copy in self._record.snapshots.items():
            self._queue.end_snapshot(copy, good=row in computed)
        for hold in self._record.holds:
            self._queue.end_hold(hold)

    def _take_drafts(self, tokens: list[list[int]]) -> None:
        """Lowers bounds by what was not accepted, and takes the drafts of rows that asked."""
        for row, (sequence, max_new) in enumerate(zip(self._record.rows, self._record.max_new, strict=True)):
            if max_new == 0 or sequence.state is _FINISHED:
                continue
            if sequence.is_masked:
                sequence.drafts = self._result.next_drafts.get(row, ())
            num_tokens = len(tokens[row])
            if max_new > 1 and num_tokens:
                sequence.accepted_drafts += num_tokens - 1
                sequence.rejected_drafts += int(self._result.draft_counts[row]) - (num_tokens - 1)
                if self._draft_pace is not None:
                    self._draft_pace.note_row(sequence, planned=max_new - 1, accepted=num_tokens - 1)
                sequence.drafts_in_flight -= max_new - 1
                sequence.reject(max_new - num_tokens)

    def _take_row(self, row: int, sequence: Sequence, token_ids: list[int]) -> None:
        record, result = self._record, self._result
        max_new = record.max_new[row]
        # What is computed and kept: with drafts in flight the planned end is a bound, and before the next token is
        # taken the known ids are those that were computed.
        end = sequence.known_tokens if max_new else record.ends[row]
        if self._seals_blocks and (sealed := sequence.kv.seal(end)) and self._queue.saves is not None:
            self._queue.saves.note(sealed)
        if self._windows is not None:
            self._windows.free(sequence, end)
        if not sequence.is_announced:
            self._announce(sequence)
        prompt_logprobs = result.prompt_logprobs.get(row)
        if prompt_logprobs is not None:
            prompt_logprobs = _take_unsent(sequence, record.starts[row], prompt_logprobs)
        if max_new:
            self._take_tokens(sequence, token_ids, result.logprobs.get(row), prompt_logprobs)
            return
        if prompt_logprobs:
            self.events.append(Tokens(sequence.request_id, (), None, prompt_logprobs))
        if end == sequence.final_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _take_tokens(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: tuple[TokenLogprobs, ...] | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> None:
        if len(token_ids) != 1:
            self._take_span(sequence, token_ids, logprobs, prompt_logprobs)
            return
        (token_id,) = token_ids
        self._counters.generated_tokens += 1
        if token_id in sequence.stop_token_ids and sequence.may_stop:
            if prompt_logprobs:
                self.events.append(Tokens(sequence.request_id, (), None, prompt_logprobs))
            self._finish(sequence, FinishReason.STOP, stop_token_id=token_id)
            return
        sequence.kv.append(token_id)
        sequence.known_tokens += 1
        self.events.append(Tokens(sequence.request_id, (token_id,), logprobs, prompt_logprobs or None))
        if sequence.known_tokens == sequence.limit_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _take_span(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: tuple[TokenLogprobs, ...] | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> None:
        """Takes several tokens in one event; what was sampled after a stop token is dropped."""
        if not token_ids:
            self._fail(sequence, _NOTHING_SAMPLED)
            return
        num_kept = sequence.count_before_stop(token_ids)
        kept, stop_token_id = token_ids[:num_kept], None
        if num_kept < len(token_ids):
            stop_token_id = token_ids[num_kept]
            self._counters.generated_tokens += 1
            num_dropped = len(token_ids) - num_kept - 1  # after the stop token
            sequence.accepted_drafts -= num_dropped
            sequence.rejected_drafts += num_dropped
        self._counters.generated_tokens += num_kept
        sequence.kv.extend(kept)
        sequence.known_tokens += num_kept
        # All but the last one are computed, and that one, too, where the stop token was sampled after it.
        computed_tokens = sequence.known_tokens - (stop_token_id is None)
        if self._seals_blocks and (sealed := sequence.kv.seal(computed_tokens)) and self._queue.saves is not None:
            self._queue.saves.note(sealed)
        if self._windows is not None:
            self._windows.free(sequence, computed_tokens)
        if kept or prompt_logprobs:
            shown = logprobs[:num_kept] if kept and logprobs is not None else None
            self.events.append(Tokens(sequence.request_id, tuple(kept), shown, prompt_logprobs or None))
        if stop_token_id is not None:
            self._finish(sequence, FinishReason.STOP, stop_token_id=stop_token_id)
        elif sequence.known_tokens == sequence.limit_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _announce(self, sequence: Sequence) -> None:
        sequence.is_announced = True
        queued_s = self._record.planned_s - sequence.arrived_s
        self.events.append(Scheduled(sequence.request_id, sequence.cached_tokens, queued_s))

    def _finish(self, sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None) -> None:
        self._end(sequence)
        self.events.append(finished(sequence, reason, stop_token_id=stop_token_id))

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._end(sequence)
        self._counters.failed_requests += 1
        self.events.append(Failed(sequence.request_id, FailureKind.INTERNAL, message))

    def _end(self, sequence: Sequence) -> None:
        self._queue.finish(sequence)
        self.ended.append(sequence.request_id)


def finished(sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None) -> Finished:
    return Finished(
        sequence.request_id,
        reason,
        prompt_tokens=sequence.prompt_tokens,
        completion_tokens=sequence.completion_tokens + (stop_token_id is not None),
        cached_tokens=sequence.cached_tokens,
        stop_token_id=stop_token_id,
        accepted_drafts=sequence.accepted_drafts,
        rejected_drafts=sequence.rejected_drafts,
    )


def _take_unsent(sequence: Sequence, start: int, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
    """Prompt log-probabilities of a row not sent before a preemption; the first is of the token after `start`."""
    unsent = logprobs[max(0, sequence.prompt_logprobs_sent - start) :]
    sequence.prompt_logprobs_sent += len(unsent)
    return unsent
