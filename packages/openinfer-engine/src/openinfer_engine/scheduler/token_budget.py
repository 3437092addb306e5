"""`TokenBudgetScheduler`: every step has a budget of tokens, and everything that runs is a row of it.

Requests stand in one line: running, then preempted, then waiting. Running and preempted ones are sorted by first
admission, oldest in front, and a plan is made by walking along the line until the budget is spent:

    running sequences with one more id on the device   one token each; blocks run short → the youngest is preempted
    running sequences with given ids left              chunks of prompts, or of what a preemption made them lose
    preempted ones, then the head of the queue         admitted while slots, blocks and budget last

Nobody is passed over, so nobody starves; the oldest alone always fits, because `add` refused what does not; so a
step is always possible. An admission leaves one spare block per running sequence, so that those admitted do not
preempt each other at their next block.

A step's result is applied up to one plan late. Ends by length are known in advance and never planned past; an end by
a stop token leaves one wasted row in the step that is in flight. Slots and blocks come back when no step in flight
has a row of their sequence.
"""

import secrets
from collections import deque
from collections.abc import Sequence as ListLike

from openinfer_core.engine import EngineStats
from openinfer_core.errors import ContractViolation
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
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import QueuePolicy, SchedulerConfig, StepPlan, StepResult
from openinfer_engine.scheduler.books import check_books
from openinfer_engine.scheduler.draft import StepDraft, StepInFlight
from openinfer_engine.scheduler.sequence import NO_SLOT, Sequence, SequenceState, count_final_tokens
from openinfer_engine.scheduler.waiting import WaitingQueue
from openinfer_kv_cache import KvCache, KvCacheOptions

_RUNNING = SequenceState.RUNNING
_FINISHED = SequenceState.FINISHED
_POLICY_FAULT = "the queue policy failed on this request"
_NOTHING_SAMPLED = "the step gave no token"


class TokenBudgetScheduler:
    """Implements `openinfer_core.scheduling.Scheduler`. Owns the KV blocks; called from one thread, but for `stats`."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        self._config = config
        self._waiting = WaitingQueue(policy)
        self._kv = KvCache(
            KvCacheOptions(
                num_blocks=config.num_blocks,
                block_size_tokens=config.block_size_tokens,
                layout_digest=config.layout_digest,
            )
        )
        self._open: dict[RequestId, Sequence] = {}
        self._running: list[Sequence] = []
        """Oldest first."""
        self._preempted: list[Sequence] = []
        """Youngest first: the end is resumed first. All are younger than those running."""
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[StepInFlight] = deque()
        self._admissions = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._wasted_rows = 0
        self._failed_requests = 0

    # --- requests ---------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        """Queues a request; refuses at once what can never be served, or what the queue has no room for.

        Raises:
            ContractViolation: the id is in use.
        """
        if request.request_id in self._open:
            raise ContractViolation(f"request id {request.request_id} is in use")
        if (reason := self._refusal(request)) is not None:
            return [self._failed(request.request_id, FailureKind.INVALID, reason)]
        if len(self._waiting) >= self._config.max_waiting:
            message = f"the queue is full: {self._config.max_waiting} requests are waiting; try again later"
            return [self._failed(request.request_id, FailureKind.OVERLOADED, message)]
        sequence = self._make_sequence(request, now_s)
        if not self._waiting.add(sequence):
            sequence.kv.release()
            return [self._failed(request.request_id, FailureKind.INTERNAL, _POLICY_FAULT)]
        self._open[request.request_id] = sequence
        return []

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        """Ends a request, in whatever state; unknown ids give no event."""
        sequence = self._open.get(request_id)
        if sequence is None:
            return []
        self._finish(sequence)
        return [_finished(sequence, FinishReason.ABORT)]

    def _refusal(self, request: GenerateRequest) -> str | None:
        """Why a request can never be served; None if it can."""
        prompt_tokens, longest = len(request.prompt_token_ids), self._config.max_model_tokens
        room_tokens = longest - (request.sampling.max_tokens > 0)
        if prompt_tokens > room_tokens:
            return (
                f"the prompt has {prompt_tokens} tokens; at most {room_tokens} fit into the context of {longest} tokens"
            )
        final_tokens = count_final_tokens(request, longest)
        if not self._kv.can_ever_fit(final_tokens):
            pool = self._kv.pool
            return (
                f"prompt and completion need KV memory for {final_tokens} tokens; this engine has room for "
                f"{pool.num_blocks * pool.block_size_tokens}; shorten the prompt or lower max_tokens"
            )
        return None

    def _make_sequence(self, request: GenerateRequest, now_s: float) -> Sequence:
        kv = self._kv.sequence(request.prompt_token_ids, lora_name=request.lora, cache_salt=request.cache_salt)
        seed = request.sampling.seed
        return Sequence(
            request,
            kv,
            seed=secrets.randbits(64) if seed is None else seed,
            arrived_s=now_s,
            max_model_tokens=self._config.max_model_tokens,
        )

    # --- plan -------------------------------------------------------------------------------------------

    def plan(self, *, now_s: float) -> StepPlan | None:
        """The next step, or None if nothing can run before a step in flight is applied, or at all."""
        draft = StepDraft(self._config.max_step_tokens)
        unfilled, is_short = self._plan_decode_rows(draft)
        self._plan_chunks(draft, unfilled)
        if not is_short:
            self._admit(draft)
        if not draft.rows:
            return None
        plan, record = draft.finish(self._steps, planned_s=now_s)
        self._in_flight.append(record)
        self._steps += 1
        return plan

    def _plan_decode_rows(self, draft: StepDraft) -> tuple[list[Sequence], bool]:
        """One token for every sequence that has its next id on the device.

        Returns:
            The running sequences with given ids left, and whether blocks ran short.
        """
        unfilled: list[Sequence] = []
        is_short = False
        for sequence in self._running:  # a preemption takes from its end, behind or at this sequence
            computed_tokens = sequence.computed_tokens
            if computed_tokens < sequence.given_tokens:
                unfilled.append(sequence)
            elif computed_tokens < sequence.target_tokens:
                if computed_tokens < sequence.capacity_tokens:
                    draft.add_decode_row(sequence, ())
                elif not is_short and (new_blocks := self._grow(sequence)) is not None:
                    draft.add_decode_row(sequence, new_blocks)
                else:
                    is_short = True
        draft.close_decode_rows()
        return unfilled, is_short

    def _plan_chunks(self, draft: StepDraft, unfilled: list[Sequence]) -> None:
        for sequence in unfilled:
            if not draft.budget_tokens:
                return
            self._add_chunk(draft, sequence)

    def _admit(self, draft: StepDraft) -> None:
        """Lets sequences in, in order, until one does not fit."""
        while draft.budget_tokens and self._free_slots:
            sequence = self._next_to_admit()
            if sequence is None or (cached_tokens := self._reserve(sequence)) is None:
                return
            if sequence.state is SequenceState.PREEMPTED:
                self._preempted.pop()
            else:
                if not self._waiting.admit_head():
                    draft.faults[len(draft.rows)] = _POLICY_FAULT
                sequence.admission, self._admissions = self._admissions, self._admissions + 1
                sequence.cached_tokens = cached_tokens
                self._cached_tokens += cached_tokens
            sequence.move(_RUNNING)
            self._running.append(sequence)
            draft.started.append(sequence.take_slot(self._free_slots.pop(), cached_tokens=cached_tokens))
            self._add_chunk(draft, sequence)

    def _next_to_admit(self) -> Sequence | None:
        """Preempted before waiting; None while the first of them has a result outstanding."""
        if not self._preempted:
            return self._waiting.head
        sequence = self._preempted[-1]
        return None if sequence.rows_in_flight else sequence

    def _add_chunk(self, draft: StepDraft, sequence: Sequence) -> None:
        before = sequence.computed_tokens
        draft.add_chunk(sequence)
        self._prompt_tokens += sequence.computed_tokens - before

    # --- blocks -----------------------------------------------------------------------------------------

    def _reserve(self, sequence: Sequence) -> int | None:
        """Takes blocks for every id a sequence knows, cached ones first.

        Returns:
            The tokens found in the cache; None if blocks are short, and then nothing has changed.
        """
        kv, spare_blocks = sequence.kv, len(self._running)
        if self._config.prefix_cache and sequence.may_match:
            if not kv.would_fit(sequence.known_tokens, spare_blocks=spare_blocks):
                return None
            cached_tokens = kv.match()
        else:
            pool = self._kv.pool
            if pool.blocks_for(sequence.known_tokens) + spare_blocks > pool.available_blocks:
                return None
            cached_tokens = 0
        if kv.reserve(sequence.known_tokens) is None:
            raise ContractViolation(f"blocks for request {sequence.request_id} were there and could not be reserved")
        return cached_tokens

    def _grow(self, sequence: Sequence) -> ListLike[int] | None:
        """Room for one more token, preempting as needed; None if the sequence has to sit this step out."""
        while (new_blocks := sequence.kv.reserve(sequence.computed_tokens + 1)) is None:
            if self._are_blocks_coming():
                return None
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        sequence.capacity_tokens = sequence.kv.capacity_tokens
        return new_blocks

    def _are_blocks_coming(self) -> bool:
        """Whether a step in flight, once applied, gives blocks back: rather wait for it than preempt one more."""
        return any(
            sequence.state is not _RUNNING or sequence.computed_tokens == sequence.target_tokens
            for record in self._in_flight
            for sequence in record.rows
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the youngest running sequence off its slot; what it has generated will be given when it resumes."""
        self._running.pop()
        self._preempted.append(sequence)
        sequence.move(SequenceState.PREEMPTED)
        self._preemptions += 1
        if not sequence.rows_in_flight:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Frees slot and blocks of a sequence that runs no longer and has no row in flight."""
        if sequence.slot != NO_SLOT:
            self._free_slots.append(sequence.slot)
            sequence.slot = NO_SLOT
        if sequence.state is _FINISHED:
            sequence.kv.release()
        else:
            sequence.kv.shrink(0)

    # --- apply ------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        """Takes a step's result; returns what happened to its requests, in row order.

        Raises:
            ContractViolation: `plan` is not the oldest one in flight, or the result has another number of rows.
        """
        del now_s
        record = self._land(plan, result)
        failures = {**result.failed_rows, **record.faults}
        token_ids: list[int] = result.token_ids.tolist()
        events: list[TokenEvent] = []
        for row, sequence in enumerate(record.rows):
            if sequence.state is _FINISHED:
                self._wasted_rows += 1
            elif row in failures:
                self._fail(sequence, failures[row], events)
            else:
                self._take_row(sequence, row, token_ids[row], record, result, events)
            sequence.rows_in_flight -= 1
            if sequence.state is not _RUNNING and not sequence.rows_in_flight:
                self._give_back(sequence)
        return events

    def _land(self, plan: StepPlan, result: StepResult) -> StepInFlight:
        """Takes the oldest step in flight off the books."""
        if not self._in_flight or self._in_flight[0].step != plan.step:
            expected = self._in_flight[0].step if self._in_flight else None
            raise ContractViolation(f"step {plan.step} was applied; the oldest step in flight is {expected}")
        num_rows = len(self._in_flight[0].rows)
        if len(result.token_ids) != num_rows:
            raise ContractViolation(f"step {plan.step} has {num_rows} rows; its result has {len(result.token_ids)}")
        return self._in_flight.popleft()

    def _take_row(
        self,
        sequence: Sequence,
        row: int,
        token_id: int,
        record: StepInFlight,
        result: StepResult,
        events: list[TokenEvent],
    ) -> None:
        """Takes what one row gave to a sequence that has not ended."""
        end = record.ends[row]
        if self._config.prefix_cache:
            sequence.kv.seal(end)
        if not sequence.is_announced:
            events.append(_announce(sequence, record.planned_s))
        prompt_logprobs = result.prompt_logprobs.get(row)
        if prompt_logprobs is not None:
            prompt_logprobs = _unsent(sequence, record.starts[row], prompt_logprobs)
        if record.samples[row]:
            self._take_token(sequence, token_id, result.logprobs.get(row), prompt_logprobs, events)
            return
        if prompt_logprobs:
            events.append(Tokens(sequence.request_id, (), None, prompt_logprobs))
        if end == sequence.final_tokens:
            self._end(sequence, FinishReason.LENGTH, events)

    def _take_token(
        self,
        sequence: Sequence,
        token_id: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
        events: list[TokenEvent],
    ) -> None:
        """Takes a sampled id."""
        if token_id < 0:
            self._fail(sequence, _NOTHING_SAMPLED, events)
            return
        self._generated_tokens += 1
        if token_id in sequence.stop_token_ids and sequence.completion_tokens >= sequence.request.sampling.min_tokens:
            if prompt_logprobs:
                events.append(Tokens(sequence.request_id, (), None, prompt_logprobs))
            self._end(sequence, FinishReason.STOP, events, stop_token_id=token_id)
            return
        sequence.kv.append(token_id)
        sequence.known_tokens += 1
        events.append(
            Tokens(sequence.request_id, (token_id,), None if logprobs is None else (logprobs,), prompt_logprobs or None)
        )
        if sequence.known_tokens == sequence.limit_tokens:
            self._end(sequence, FinishReason.LENGTH, events)

    # --- ends -------------------------------------------------------------------------------------------

    def _end(
        self, sequence: Sequence, reason: FinishReason, events: list[TokenEvent], *, stop_token_id: int | None = None
    ) -> None:
        self._finish(sequence)
        events.append(_finished(sequence, reason, stop_token_id))

    def _fail(self, sequence: Sequence, message: str, events: list[TokenEvent]) -> None:
        self._finish(sequence)
        events.append(self._failed(sequence.request_id, FailureKind.INTERNAL, message))

    def _failed(self, request_id: RequestId, kind: FailureKind, message: str) -> Failed:
        self._failed_requests += 1
        return Failed(request_id, kind, message)

    def _finish(self, sequence: Sequence) -> None:
        """Takes a sequence out of the line, wherever it stands."""
        del self._open[sequence.request_id]
        match sequence.state:
            case SequenceState.WAITING:
                self._waiting.withdraw(sequence)
            case SequenceState.PREEMPTED:
                self._preempted.remove(sequence)
            case _:
                self._running.remove(sequence)
        sequence.move(_FINISHED)
        if not sequence.rows_in_flight:
            self._give_back(sequence)

    # --- questions --------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests added and not ended."""
        return len(self._open)

    def stats(self) -> EngineStats:
        """Gauges and counters; may be called from any thread, and is then true of some recent moment."""
        pool = self._kv.pool
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._preempted),
            blocks_used=pool.num_blocks - pool.available_blocks,
            blocks_total=pool.num_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            wasted_rows=self._wasted_rows,
            failed_requests=self._failed_requests,
            policy_faults=self._waiting.faults,
        )

    def check_integrity(self) -> None:
        """Compares the books with each other; for tests and after faults, O(blocks + tokens).

        Raises:
            IntegrityError: the KV blocks contradict themselves.
            ContractViolation: the line, the slots or the rows in flight do.
        """
        self._kv.check_integrity()
        check_books(
            open_=self._open.values(),
            running=self._running,
            preempted=self._preempted,
            num_waiting=len(self._waiting),
            free_slots=self._free_slots,
            num_slots=self._config.max_num_seqs,
            in_flight=self._in_flight,
            num_live=self._kv.num_live_sequences,
        )


def _announce(sequence: Sequence, planned_s: float) -> Scheduled:
    sequence.is_announced = True
    return Scheduled(sequence.request_id, sequence.cached_tokens, planned_s - sequence.arrived_s)


def _finished(sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
    return Finished(
        sequence.request_id,
        reason,
        prompt_tokens=sequence.prompt_tokens,
        completion_tokens=sequence.completion_tokens + (stop_token_id is not None),
        cached_tokens=sequence.cached_tokens,
        stop_token_id=stop_token_id,
    )


def _unsent(sequence: Sequence, start: int, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of prompt tokens that were not sent yet; a preemption makes rows give some of them again.

    Args:
        sequence: whose row it is.
        start: first position of the row; its first entry is of the prompt token behind that.
        logprobs: of the row.
    """
    unsent = logprobs[max(0, sequence.prompt_logprobs_sent - start) :]
    sequence.prompt_logprobs_sent += len(unsent)
    return unsent
