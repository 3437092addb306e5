"""The scheduler's kit passes a plain scheduler that keeps the contract, and fails each of a set of broken ones."""

import dataclasses
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import (
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    RequestId,
    Scheduled,
    TokenEvent,
    Tokens,
)
from openinfer_core.scheduler_options import refuse_unknown_options
from openinfer_core.scheduling import (
    QueuePolicy,
    SchedulerCapabilities,
    SchedulerConfig,
    SlotStart,
    StepPlan,
    StepResult,
    WaitingRequest,
)
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.scheduler import SCHEDULER_CHECKS, SchedulerCheck, check_scheduler
from openinfer_core.testing.scheduler_drafts import DRAFT_CHECKS
from openinfer_core.testing.scheduler_tables import check_tables


@dataclass(eq=False)
class Job:
    request: GenerateRequest
    arrived_s: float
    key: Any
    ids: list[int]
    seed: int
    slot: int = -1
    blocks: list[int] = field(default_factory=list[int])
    computed: int = 0
    sent_blocks: int = 0
    prompt_logprobs: int = 0
    is_started: bool = False
    is_announced: bool = False
    is_spoilt: bool = False
    in_flight: int = 0
    has_ended: bool = False

    @property
    def outputs(self) -> int:
        return len(self.ids) - len(self.request.prompt_token_ids)


class PlainScheduler:
    """Blocks for the whole request at admission; one row of a sequence in flight at a time; no prefix cache.

    Its verbs are cut into many methods, so that a broken scheduler is one method of a subclass.
    """

    capabilities = SchedulerCapabilities()

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        refuse_unknown_options(config.options, known=())
        self.config = config
        self.policy = policy
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.jobs: dict[RequestId, Job] = {}
        self.free_blocks = list(range(config.num_blocks))
        self.free_slots = list(range(config.max_num_seqs))
        self.in_flight: list[list[Job]] = []
        self.released: list[int] = []
        self.arrivals = self.steps = 0
        self.seeds = 1000

    # requests

    def limit_tokens(self, request: GenerateRequest) -> int:
        return min(len(request.prompt_token_ids) + request.sampling.max_tokens, self.config.max_model_tokens)

    def blocks_for(self, request: GenerateRequest) -> int:
        last = self.limit_tokens(request) - (request.sampling.max_tokens > 0)
        return -(-last // self.config.block_size_tokens)

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        if len(request.prompt_token_ids) + (request.sampling.max_tokens > 0) > self.config.max_model_tokens:
            return [Failed(request.request_id, FailureKind.INVALID, "too long")]
        if self.blocks_for(request) > self.config.num_blocks:
            return [Failed(request.request_id, FailureKind.INVALID, "too big")]
        if len(self.waiting) >= self.config.max_waiting:
            return [Failed(request.request_id, FailureKind.OVERLOADED, "full")]
        self.seeds += 1
        self.arrivals += 1
        seed = self.seeds if request.sampling.seed is None else request.sampling.seed
        try:
            job = Job(
                request,
                now_s,
                self.policy.key(WaitingRequest(request=request, arrival=self.arrivals)),
                [*request.prompt_token_ids],
                seed,
            )
        except ValueError:
            return [Failed(request.request_id, FailureKind.INTERNAL, "policy")]
        try:
            self.waiting = self.sort_queue([*self.waiting, job])
        except TypeError:
            self.policy.withdrawn(request)
            return [Failed(request.request_id, FailureKind.INTERNAL, "policy")]
        self.jobs[request.request_id] = job
        return []

    def sort_queue(self, queue: list[Job]) -> list[Job]:
        return sorted(queue, key=attrgetter("key"))

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        if request_id not in self.jobs:
            return []
        job = self.jobs[request_id]
        if job in self.waiting:
            self.waiting.remove(job)
            with suppress(ValueError):
                self.policy.withdrawn(job.request)
        self.end(job)
        return [Finished(request_id, FinishReason.ABORT, 0, 0, 0)]

    # plan

    def plan(self, *, now_s: float) -> StepPlan | None:
        self.admit()
        budget, rows, spans = self.config.max_step_tokens, list[Job](), list[tuple[int, int]]()
        for job in self.running:
            count = min(self.chunk(job), budget)
            if count and not job.in_flight and self.may_compute(job):
                rows.append(job)
                spans.append((job.computed, count))
                budget -= count
        if not rows:
            return None
        plan = self.columns(rows, spans)
        for job, (start, count) in zip(rows, spans, strict=True):
            job.is_started, job.sent_blocks, job.computed = True, len(job.blocks), start + count
            job.in_flight += 1
        self.in_flight.append(rows)
        self.steps += 1
        return plan

    def chunk(self, job: Job) -> int:
        return len(job.ids) - job.computed

    def may_compute(self, job: Job) -> bool:
        return True

    def admit(self) -> None:
        while self.waiting and self.free_slots and self.blocks_for(self.waiting[0].request) <= self.num_free_blocks:
            job = self.waiting.pop(0)
            try:
                self.policy.admitted(job.request)
            except ValueError:
                job.is_spoilt = True
            job.slot = self.free_slots.pop()
            self.allocate(job)
            self.running.append(job)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def allocate(self, job: Job) -> None:
        job.blocks = [self.free_blocks.pop() for _ in range(self.blocks_for(job.request))]

    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        def column(values: list[int]) -> Any:
            return np.array(values, np.int32)

        is_last = [start + count == len(job.ids) for job, (start, count) in zip(rows, spans, strict=True)]
        released, self.released = self.released, []
        return StepPlan(
            step=self.steps,
            slots=column([job.slot for job in rows]),
            starts=column([start for start, _ in spans]),
            counts=column([count for _, count in spans]),
            num_host_tokens=column([count for _, count in spans]),
            max_new=column(
                [last and job.request.sampling.max_tokens > 0 for job, last in zip(rows, is_last, strict=True)]
            ),
            token_ids=column(
                [i for job, (start, count) in zip(rows, spans, strict=True) for i in job.ids[start : start + count]]
            ),
            new_block_counts=column([len(job.blocks) - job.sent_blocks for job in rows]),
            new_blocks=column([block for job in rows for block in job.blocks[job.sent_blocks :]]),
            started=tuple(self.slot_start(job) for job in rows if not job.is_started),
            released=tuple(released),
        )

    def slot_start(self, job: Job) -> SlotStart:
        return SlotStart(slot=job.slot, request=job.request, seed=job.seed)

    # apply

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for row, job in enumerate(self.in_flight.pop(0)):
            job.in_flight -= 1
            if job.has_ended:
                self.free(job)
            else:
                events += self.take_row(job, row, plan, result, now_s)
        return events

    def take_row(self, job: Job, row: int, plan: StepPlan, result: StepResult, now_s: float) -> list[TokenEvent]:
        request_id, sampling = job.request.request_id, job.request.sampling
        if row in result.failed_rows or job.is_spoilt:
            self.end(job)
            return [Failed(request_id, FailureKind.INTERNAL, result.failed_rows.get(row, "policy"))]
        events: list[TokenEvent] = []
        if not job.is_announced:
            job.is_announced = True
            events.append(Scheduled(request_id, 0, now_s - job.arrived_s))
        if row in result.prompt_logprobs:
            events.append(Tokens(request_id, (), None, result.prompt_logprobs[row]))
        if plan.max_new[row]:
            (token_id,) = result.tokens_of_rows[row]
            if token_id in sampling.stop_token_ids and job.outputs >= sampling.min_tokens:
                self.end(job)
                return [*events, Finished(request_id, FinishReason.STOP, 0, 0, 0, token_id)]
            job.ids.append(token_id)
            events.append(Tokens(request_id, (token_id,), result.logprobs.get(row)))
        if len(job.ids) == self.limit_tokens(job.request) and (plan.max_new[row] or job.computed == len(job.ids)):
            self.end(job)
            events.append(Finished(request_id, FinishReason.LENGTH, 0, 0, 0))
        return events

    def end(self, job: Job) -> None:
        del self.jobs[job.request.request_id]
        job.has_ended = True
        if job.is_started:
            self.release(job)
        if job in self.running:
            self.running.remove(job)
            if not job.in_flight:
                self.free(job)

    def release(self, job: Job) -> None:
        self.released.append(job.slot)

    def free(self, job: Job) -> None:
        self.free_slots.append(job.slot)
        self.free_blocks += job.blocks
        job.blocks = []

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        return self.jobs.keys()

    def stats(self) -> EngineStats:
        used = self.config.num_blocks - len(self.free_blocks)
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=used,
            blocks_total=self.config.num_blocks,
            steps=self.steps,
        )


@pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
def test_kit_accepts_a_scheduler_that_keeps_the_contract(check: SchedulerCheck) -> None:
    check(PlainScheduler)


def replace(plan: StepPlan, **changes: Any) -> StepPlan:
    columns = {name: getattr(plan, name) for name in StepPlan.__slots__}
    return StepPlan(**{**columns, **changes})


class LeaksABlock(PlainScheduler):
    def free(self, job: Job) -> None:
        super().free(job)
        if job.request.request_id == 3:
            self.free_blocks.pop()


class GivesABlockTwice(PlainScheduler):
    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        plan = super().columns(rows, spans)
        if len(self.running) > 1 and not self.running[-1].is_started:
            return replace(plan, new_blocks=np.full_like(plan.new_blocks, self.running[0].blocks[0]))
        return plan


class EndsTwice(PlainScheduler):
    def take_row(self, *arguments: Any) -> list[TokenEvent]:
        events = super().take_row(*arguments)
        return [*events, *(event for event in events if isinstance(event, Finished))]


class EndsInSilence(PlainScheduler):
    def take_row(self, *arguments: Any) -> list[TokenEvent]:
        return [event for event in super().take_row(*arguments) if not isinstance(event, Finished)]


class Wedges(PlainScheduler):
    """Admits on today's need, and preempts no sequence when the blocks are gone."""

    def admit(self) -> None:
        super().admit()
        for job in self.running:
            if not job.is_started:
                needed = -(-len(job.ids) // self.config.block_size_tokens)
                self.free_blocks += job.blocks[needed:]
                del job.blocks[needed:]
        if self.waiting and self.free_slots and len(self.free_blocks) < self.blocks_for(self.waiting[0].request):
            job = self.waiting[0]
            needed = -(-len(job.ids) // self.config.block_size_tokens)
            if needed <= len(self.free_blocks):
                self.policy.admitted(self.waiting.pop(0).request)
                job.slot, job.blocks = self.free_slots.pop(), [self.free_blocks.pop() for _ in range(needed)]
                self.running.append(job)

    def may_compute(self, job: Job) -> bool:
        if len(job.ids) > len(job.blocks) * self.config.block_size_tokens and self.free_blocks:
            job.blocks.append(self.free_blocks.pop())
        return len(job.ids) <= len(job.blocks) * self.config.block_size_tokens


class RunsInCircles(PlainScheduler):
    """Preempts every sequence in the middle of its prompt."""

    def plan(self, *, now_s: float) -> StepPlan | None:
        for job in self.running:
            if not job.in_flight and job.is_started and job.computed < len(job.request.prompt_token_ids):
                self.release(job)
                job.computed, job.is_started, job.sent_blocks = 0, False, 0
        return super().plan(now_s=now_s)


class ExceedsTheBudget(PlainScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        self.config = SchedulerConfig(
            **{name: getattr(self.config, name) for name in ("num_blocks", "block_size_tokens", "max_num_seqs")},
            max_step_tokens=self.config.max_step_tokens + 1,
            max_model_tokens=self.config.max_model_tokens,
        )
        return super().plan(now_s=now_s)


class ExceedsTheSlots(PlainScheduler):
    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.free_slots.append(config.max_num_seqs)


class SkipsAPosition(PlainScheduler):
    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        plan = super().columns(rows, spans)
        return replace(plan, starts=np.where(plan.starts > 4, plan.starts + 1, plan.starts).astype(np.int32))


class GivesWrongIds(PlainScheduler):
    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        plan = super().columns(rows, spans)
        return replace(plan, token_ids=plan.token_ids[::-1].copy())


class TakesAnIdThatWasNeverSampled(PlainScheduler):
    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        plan = super().columns(rows, spans)
        if len(rows) == 1 and rows[0].computed == 0 and len(plan.token_ids):
            return replace(plan, num_host_tokens=plan.num_host_tokens - 1, token_ids=plan.token_ids[1:])
        return plan


class ReservesTooLittle(PlainScheduler):
    def blocks_for(self, request: GenerateRequest) -> int:
        return max(1, super().blocks_for(request) - 1)


class SamplesEveryChunk(PlainScheduler):
    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        plan = super().columns(rows, spans)
        return replace(plan, max_new=np.ones(len(rows), np.int32))


class UsesWideColumns(PlainScheduler):
    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        plan = super().columns(rows, spans)
        return replace(plan, starts=plan.starts.astype(np.int64))


class StartsABusySlot(PlainScheduler):
    """Frees an aborted sequence's slot while its row is in flight."""

    def end(self, job: Job) -> None:
        job.in_flight, in_flight = 0, job.in_flight
        super().end(job)
        job.in_flight = in_flight

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        rows = [Job(job.request, 0, 0, [], 0, has_ended=True) if job.has_ended else job for job in self.in_flight[0]]
        self.in_flight[0] = rows
        return super().apply(plan, result, now_s=now_s)

    def free(self, job: Job) -> None:
        if job.slot >= 0:
            super().free(job)


class DropsATokenAtTheEnd(PlainScheduler):
    def take_row(self, *arguments: Any) -> list[TokenEvent]:
        events = super().take_row(*arguments)
        return [event for event in events if not (len(events) > 1 and isinstance(event, Tokens))]


class IgnoresStopTokens(PlainScheduler):
    def take_row(self, job: Job, *rest: Any) -> list[TokenEvent]:
        asked = job.request
        sampling = msgspec.structs.replace(asked.sampling, stop_token_ids=())
        job.request = msgspec.structs.replace(asked, sampling=sampling)
        try:
            return super().take_row(job, *rest)
        finally:
            job.request = asked


class ForgetsAborts(PlainScheduler):
    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        return super().abort(request_id) if request_id in self.jobs and self.jobs[request_id] in self.waiting else []


class ConfirmsAbortsOfStrangers(PlainScheduler):
    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        return super().abort(request_id) or [Finished(request_id, FinishReason.ABORT, 0, 0, 0)]


class IgnoresFailedRows(PlainScheduler):
    def take_row(self, job: Job, row: int, plan: StepPlan, result: StepResult, now_s: float) -> list[TokenEvent]:
        counts = np.maximum(result.new_counts, plan.max_new > 0).astype(np.int32)
        result = StepResult(new_counts=counts, token_ids=_filled(result, counts), logprobs=result.logprobs)
        return super().take_row(job, row, plan, result, now_s)


def _filled(result: StepResult, counts: Any) -> Any:
    """Token ids of rows of so many tokens, 0 where the result has none."""
    rows = [row or [0] * count for row, count in zip(result.tokens_of_rows, counts.tolist(), strict=True)]
    return np.array([token_id for row in rows for token_id in row], np.int32)


class FailsEverybody(PlainScheduler):
    """One failed row ends all requests of the step."""

    def take_row(self, job: Job, row: int, plan: StepPlan, result: StepResult, now_s: float) -> list[TokenEvent]:
        if result.failed_rows:
            message = next(iter(result.failed_rows.values()))
            failed_rows = dict.fromkeys(range(plan.num_rows), message)
            result = dataclasses.replace(result, failed_rows=failed_rows)
        return super().take_row(job, row, plan, result, now_s)


class AcceptsWhatNeverFits(PlainScheduler):
    """Queues it, and says so when its turn comes."""

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        events = super().add(request, now_s=now_s)
        if events and isinstance(events[0], Failed) and events[0].kind is FailureKind.INVALID:
            self.jobs[request.request_id] = Job(request, now_s, 0, [], 0)
            return []
        return events


class IgnoresTheContextLength(PlainScheduler):
    def limit_tokens(self, request: GenerateRequest) -> int:
        return len(request.prompt_token_ids) + request.sampling.max_tokens


class NeverOverloaded(PlainScheduler):
    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        names = ("num_blocks", "block_size_tokens", "max_num_seqs", "max_step_tokens", "max_model_tokens", "options")
        super().__init__(SchedulerConfig(**{name: getattr(config, name) for name in names}), policy)


class TakesAnyOption(PlainScheduler):
    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(msgspec.structs.replace(config, options={}), policy)


class PassesOverTheHead(PlainScheduler):
    def admit(self) -> None:
        self.waiting = sorted(self.waiting, key=lambda job: self.blocks_for(job.request))
        super().admit()


class IgnoresThePolicy(PlainScheduler):
    def sort_queue(self, queue: list[Job]) -> list[Job]:
        return sorted(sorted(queue, key=attrgetter("key")), key=lambda job: job.request.request_id)


class NeverTellsThePolicy(PlainScheduler):
    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.real_policy = policy

    def admit(self) -> None:
        self.policy = Deaf()
        super().admit()
        self.policy = self.real_policy


class Deaf:
    def key(self, waiting: WaitingRequest) -> int:
        return waiting.arrival

    def admitted(self, request: GenerateRequest) -> None: ...

    def withdrawn(self, request: GenerateRequest) -> None: ...


class DiesOfAFaultyPolicy(PlainScheduler):
    def admit(self) -> None:
        super().admit()
        if any(job.is_spoilt for job in self.running):
            raise RuntimeError("the policy raised")


class GivesAllTheSameSeed(PlainScheduler):
    def slot_start(self, job: Job) -> SlotStart:
        seed = 7 if job.request.sampling.seed is None else job.seed
        return SlotStart(slot=job.slot, request=job.request, seed=seed)


class IgnoresTheSeed(PlainScheduler):
    def slot_start(self, job: Job) -> SlotStart:
        return SlotStart(slot=job.slot, request=job.request, seed=job.request.request_id)


class DropsPromptLogprobs(PlainScheduler):
    def take_row(self, job: Job, row: int, plan: StepPlan, result: StepResult, now_s: float) -> list[TokenEvent]:
        kept = {} if plan.starts[row] else result.prompt_logprobs
        return super().take_row(job, row, plan, dataclasses.replace(result, prompt_logprobs=kept), now_s)


class MiscountsUnfinished(PlainScheduler):
    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        return set(sorted(self.jobs)[1:])


class NeverReleases(PlainScheduler):
    def release(self, job: Job) -> None: ...


class ReleasesTwice(PlainScheduler):
    def release(self, job: Job) -> None:
        self.released += [job.slot, job.slot]


class ReleasesWhatStillRuns(PlainScheduler):
    def take_row(self, job: Job, row: int, plan: StepPlan, result: StepResult, now_s: float) -> list[TokenEvent]:
        events = super().take_row(job, row, plan, result, now_s)
        if not job.has_ended and job.request.request_id == 7:
            self.release(job)
        return events


class PlansAfterTheEnd(PlainScheduler):
    """Forgets to take an aborted sequence off the running list."""

    def end(self, job: Job) -> None:
        was_running = job in self.running
        super().end(job)
        if was_running and job.in_flight:
            self.running.append(job)


MUTANTS = {
    AcceptsWhatNeverFits: "can never fit; add answered None",
    ConfirmsAbortsOfStrangers: "was never added, has its terminal event",
    DiesOfAFaultyPolicy: "the policy raised",
    DropsATokenAtTheEnd: "the model gives",
    DropsPromptLogprobs: "prompt_logprobs of positions",
    EndsInSilence: "have no terminal event and are not among unfinished_ids",
    EndsTwice: "was never added, has its terminal event",
    ExceedsTheBudget: "tokens in one step; max_step_tokens is",
    ExceedsTheSlots: "beyond max_num_seqs",
    FailsEverybody: "request 0 got .* the model gives",
    ForgetsAborts: "abort was answered with",
    GivesABlockTwice: "write to the same block in one step|holds the KV of another prefix",
    GivesAllTheSameSeed: "have the same seed",
    GivesWrongIds: "are given; its ids are",
    IgnoresFailedRows: "a row of request 2 failed; it ended with Finished",
    IgnoresStopTokens: "the model gives",
    IgnoresTheContextLength: "beyond max_model_tokens",
    IgnoresThePolicy: "were admitted in the order",
    IgnoresTheSeed: "starts with seed 0; it has 42",
    LeaksABlock: "1 blocks are used, with all requests ended: a leak",
    MiscountsUnfinished: "are not among unfinished_ids",
    NeverOverloaded: "the queue is full; add answered None",
    NeverTellsThePolicy: "neither admitted nor withdrawn",
    PassesOverTheHead: "were admitted in the order",
    PlansAfterTheEnd: "are running, with all of them ended",
    NeverReleases: "the slots are not among released",
    ReleasesTwice: "is released; no sequence is in it",
    ReleasesWhatStillRuns: "has a row and was never started",
    ReservesTooLittle: "blocks have room for",
    RunsInCircles: "stuck",
    SamplesEveryChunk: "samples position 16, whose id is known",
    SkipsAPosition: "its last row ended at 8",
    StartsABusySlot: "is started while a step in flight has a row in it",
    TakesAnyOption: "was made with an option that it cannot know",
    TakesAnIdThatWasNeverSampled: "no id of that position was sampled in the slot",
    UsesWideColumns: "starts must be a one-dimensional array of int32",
    Wedges: "wedged: .* no step is in flight, no plan",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=attrgetter("__name__"))
def test_kit_refuses_a_broken_scheduler(mutant: type[PlainScheduler]) -> None:
    raised = RuntimeError if mutant is DiesOfAFaultyPolicy else ConformanceError
    with pytest.raises(raised, match=MUTANTS[mutant]):
        check_scheduler(mutant)


# what a scheduler declares


class ShedsWhatIsLate(PlainScheduler):
    """Gives up waiting requests that have a deadline once others wait, too."""

    capabilities = SchedulerCapabilities(may_shed=True)
    kind = FailureKind.DEADLINE

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        events = super().apply(plan, result, now_s=now_s)
        for job in [job for job in self.waiting if self.is_hopeless(job)]:
            self.waiting.remove(job)
            with suppress(ValueError):
                self.policy.withdrawn(job.request)
            self.end(job)
            events.append(Failed(job.request.request_id, self.kind, "it would be too late"))
        return events

    def is_hopeless(self, job: Job) -> bool:
        return job.request.deadline_s is not None and len(self.waiting) > 1


class ShedsUndeclared(ShedsWhatIsLate):
    capabilities = SchedulerCapabilities()


class ShedsForADeadlineThatIsNotThere(ShedsWhatIsLate):
    def is_hopeless(self, job: Job) -> bool:
        return job.request.deadline_s is None and len(self.waiting) > 1


class ShedsAsInternal(ShedsWhatIsLate):
    kind = FailureKind.INTERNAL


class ShedsWhatIsAlone(ShedsWhatIsLate):
    kind = FailureKind.OVERLOADED

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        if not self.jobs and self.steps > 20:
            return [Failed(request.request_id, self.kind, "not today")]
        return super().add(request, now_s=now_s)


class LastComeFirstServed(PlainScheduler):
    capabilities = SchedulerCapabilities(own_order=True)

    def sort_queue(self, queue: list[Job]) -> list[Job]:
        in_order = super().sort_queue(queue)  # the policy's keys may refuse to be compared
        return sorted(in_order, key=lambda job: -job.request.request_id)


class LastComeUndeclared(LastComeFirstServed):
    capabilities = SchedulerCapabilities()


class NeverAsksThePolicy(PlainScheduler):
    capabilities = SchedulerCapabilities(own_policy=True)

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, Deaf())


class NeverAsksUndeclared(NeverAsksThePolicy):
    capabilities = SchedulerCapabilities()


class AsksInSpiteOfWhatItDeclares(PlainScheduler):
    capabilities = SchedulerCapabilities(own_policy=True)


class DeclaresByInstance(PlainScheduler):
    @property
    def capabilities(self) -> SchedulerCapabilities:
        return SchedulerCapabilities(own_order=self.config.max_waiting > 1)


@pytest.mark.parametrize(
    "factory", [ShedsWhatIsLate, LastComeFirstServed, NeverAsksThePolicy], ids=attrgetter("__name__")
)
def test_kit_leaves_out_what_a_scheduler_declares(factory: type[PlainScheduler]) -> None:
    check_scheduler(factory)


UNDECLARED = {
    AsksInSpiteOfWhatItDeclares: "own_policy is declared; the queue policy is asked about request 0",
    DeclaresByInstance: "two instances declare",
    LastComeUndeclared: "were admitted in the order",
    NeverAsksUndeclared: "it ended with|were admitted in the order|never asked",
    ShedsAsInternal: "without a fault",
    ShedsWhatIsAlone: "can be served; add answered Failed",
    ShedsForADeadlineThatIsNotThere: "ended with Failed.* after it was taken",
    ShedsUndeclared: "ended with Failed.* after it was taken",
}


@pytest.mark.parametrize("factory", UNDECLARED, ids=attrgetter("__name__"))
def test_kit_holds_a_scheduler_to_what_it_declares(factory: type[PlainScheduler]) -> None:
    with pytest.raises(ConformanceError, match=UNDECLARED[factory]):
        check_scheduler(factory)


# --- with drafts ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Span:
    start: int
    host_ids: list[int]
    from_device: bool
    drafts: int  # of the device
    max_new: int

    @property
    def count(self) -> int:
        return self.from_device + len(self.host_ids) + self.drafts


class DraftingScheduler(PlainScheduler):
    """Goes on from the last id on the device while rows are in flight, and plans as many drafts as there is room for.

    `Job.computed` is an upper bound while drafts are in flight.
    """

    capabilities = SchedulerCapabilities(plans_drafts=True)

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.next_drafts: dict[RequestId, tuple[int, ...]] = {}
        self.does_sample: dict[RequestId, bool] = {}
        self.num_drafts = 0

    def final_tokens(self, request: GenerateRequest) -> int:
        return self.limit_tokens(request) - (request.sampling.max_tokens > 0)

    def plan(self, *, now_s: float) -> StepPlan | None:
        self.admit()
        budget, jobs, spans = self.config.max_step_tokens, list[Job](), list[Span]()
        for job in self.running:
            span = self.span(job, budget) if budget else None
            if span is not None:
                jobs.append(job)
                spans.append(span)
                budget -= span.count
        if not jobs:
            return None
        plan = self.draft_columns(jobs, spans)
        for job, span in zip(jobs, spans, strict=True):
            job.is_started, job.sent_blocks, job.computed = True, len(job.blocks), span.start + span.count
            job.in_flight += 1
            self.does_sample[job.request.request_id] = span.max_new > 0
        self.in_flight.append(jobs)
        self.steps += 1
        return plan

    def span(self, job: Job, budget: int) -> Span | None:
        request, start, host_ids = job.request, job.computed, list[int]()
        is_masked, final = request.sampling.is_masked, self.final_tokens(request)
        if job.in_flight:
            goes_on = self.does_sample[request.request_id] and not is_masked and start < final
            if not goes_on:
                return None
        else:
            host_ids = job.ids[start : start + budget]
        known_end = start + (len(host_ids) or 1)
        if not ((job.in_flight or known_end == len(job.ids)) and request.sampling.max_tokens):
            return Span(start, host_ids, False, 0, 0)
        room = self.room(final - known_end, budget - (known_end - start))
        if is_masked:
            host_drafts = self.next_drafts.get(request.request_id, ())[:room]
            return Span(start, [*host_ids, *host_drafts], not host_ids, 0, 1 + len(host_drafts))
        self.num_drafts += room
        return Span(start, host_ids, not host_ids, room, 1 + room)

    def room(self, to_the_end: int, budget: int) -> int:
        return max(0, min(self.config.max_drafts, to_the_end, budget))

    def draft_columns(self, jobs: list[Job], spans: list[Span]) -> StepPlan:
        def column(values: list[int]) -> Any:
            return np.array(values, np.int32)

        released, self.released = self.released, []
        return StepPlan(
            step=self.steps,
            slots=column([job.slot for job in jobs]),
            starts=column([span.start for span in spans]),
            counts=column([span.count for span in spans]),
            num_host_tokens=column([len(span.host_ids) for span in spans]),
            max_new=column([span.max_new for span in spans]),
            token_ids=column([token_id for span in spans for token_id in span.host_ids]),
            new_block_counts=column([len(job.blocks) - job.sent_blocks for job in jobs]),
            new_blocks=column([block for job in jobs for block in job.blocks[job.sent_blocks :]]),
            started=tuple(self.slot_start(job) for job in jobs if not job.is_started),
            released=tuple(released),
            draft_counts=column([span.drafts for span in spans]),
            wants_drafts=np.array([job.request.sampling.is_masked for job in jobs], np.bool_),
        )

    def take_row(self, job: Job, row: int, plan: StepPlan, result: StepResult, now_s: float) -> list[TokenEvent]:
        request_id, sampling, planned = job.request.request_id, job.request.sampling, int(plan.max_new[row])
        if row in result.failed_rows or job.is_spoilt:
            self.end(job)
            return [Failed(request_id, FailureKind.INTERNAL, result.failed_rows.get(row, "policy"))]
        events: list[TokenEvent] = []
        if not job.is_announced:
            job.is_announced = True
            events.append(Scheduled(request_id, 0, now_s - job.arrived_s))
        if row in result.prompt_logprobs:
            events.append(Tokens(request_id, (), None, result.prompt_logprobs[row]))
        self.next_drafts[request_id] = result.next_drafts.get(row, ())
        sampled = result.tokens_of_rows[row]
        job.computed -= self.rejected(planned, sampled)
        kept, stop = self.cut(job, sampled)
        job.ids += kept
        if kept:
            logprobs = result.logprobs[row][: len(kept)] if sampling.logprobs is not None else None
            events.append(Tokens(request_id, tuple(kept), logprobs))
        if stop is not None:
            self.end(job)
            return [*events, Finished(request_id, FinishReason.STOP, 0, 0, 0, stop)]
        if len(job.ids) >= self.limit_tokens(job.request) and (planned or job.computed == len(job.ids)):
            self.end(job)
            events.append(Finished(request_id, FinishReason.LENGTH, 0, 0, 0))
        return events

    def rejected(self, planned: int, sampled: list[int]) -> int:
        return planned - len(sampled)

    def cut(self, job: Job, sampled: list[int]) -> tuple[list[int], int | None]:
        """The tokens before a stop token, and that."""
        sampling = job.request.sampling
        for index, token_id in enumerate(sampled):
            if token_id in sampling.stop_token_ids and job.outputs + index >= sampling.min_tokens:
                return sampled[:index], token_id
        return sampled, None


@pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
def test_kit_accepts_a_scheduler_that_plans_drafts(check: SchedulerCheck) -> None:
    made: list[DraftingScheduler] = []

    def make(config: SchedulerConfig, policy: QueuePolicy) -> DraftingScheduler:
        made.append(DraftingScheduler(config, policy))
        return made[-1]

    check(make)
    has_drafts = any(scheduler.num_drafts for scheduler in made)
    assert has_drafts == (check in DRAFT_CHECKS)


class NeverLowersTheBound(DraftingScheduler):
    def rejected(self, planned: int, sampled: list[int]) -> int:
        return 0


class LowersTheBoundByOneTooMany(DraftingScheduler):
    def rejected(self, planned: int, sampled: list[int]) -> int:
        rejected = super().rejected(planned, sampled)
        return rejected + (rejected > 0)


class LowersTheBoundBeforeItKnows(DraftingScheduler):
    """Plans the next row as if no draft were accepted."""

    def draft_columns(self, jobs: list[Job], spans: list[Span]) -> StepPlan:
        plan = super().draft_columns(jobs, spans)
        for span in spans:
            span.start -= span.drafts
        return plan

    def rejected(self, planned: int, sampled: list[int]) -> int:
        return 1 - len(sampled) if planned else 0


class KeepsTokensAfterAStop(DraftingScheduler):
    def cut(self, job: Job, sampled: list[int]) -> tuple[list[int], int | None]:
        _, stop = super().cut(job, sampled)
        return (sampled if stop is None else sampled[:-1]), stop


class DropsTokensBeforeAStop(DraftingScheduler):
    def cut(self, job: Job, sampled: list[int]) -> tuple[list[int], int | None]:
        kept, stop = super().cut(job, sampled)
        return ([] if stop is not None and len(sampled) > 1 else kept), stop


class LooksForAStopInTheFirstTokenAlone(DraftingScheduler):
    def cut(self, job: Job, sampled: list[int]) -> tuple[list[int], int | None]:
        _, stop = super().cut(job, sampled[:1])
        return ([], stop) if stop is not None else (sampled, None)


class LiftsTheBanForTheWholeSpan(DraftingScheduler):
    """Takes a stop token for the end that `min_tokens` still forbids at its place."""

    def cut(self, job: Job, sampled: list[int]) -> tuple[list[int], int | None]:
        stops, least = job.request.sampling.stop_token_ids, job.request.sampling.min_tokens
        may_stop = job.outputs + len(sampled) > least + 1 and job.outputs <= least
        for index, token_id in enumerate(sampled):
            if token_id in stops and (may_stop or job.outputs >= least) and job.outputs + index != least:
                return sampled[:index], token_id
        return sampled, None


class CountsDraftsIntoMaxTokens(DraftingScheduler):
    """Ends when the bound is at the end, whatever was accepted."""

    def take_row(self, job: Job, row: int, plan: StepPlan, *rest: Any) -> list[TokenEvent]:
        events = super().take_row(job, row, plan, *rest)
        is_over = plan.max_new[row] > 1 and plan.starts[row] + plan.counts[row] >= self.final_tokens(job.request)
        if is_over and not job.has_ended:
            self.end(job)
            events.append(Finished(job.request.request_id, FinishReason.LENGTH, 0, 0, 0))
        return events


class KeepsOneTokenOfASpan(DraftingScheduler):
    def cut(self, job: Job, sampled: list[int]) -> tuple[list[int], int | None]:
        return super().cut(job, sampled[:1])


class PlansDraftsBeyondTheEnd(DraftingScheduler):
    def room(self, to_the_end: int, budget: int) -> int:
        return super().room(to_the_end + 8, budget)


class PlansMoreDraftsThanAllowed(DraftingScheduler):
    def room(self, to_the_end: int, budget: int) -> int:
        return max(0, min(self.config.max_drafts + 1, to_the_end, budget))


class DoesNotCountDraftsIntoTheBudget(DraftingScheduler):
    def room(self, to_the_end: int, budget: int) -> int:
        return super().room(to_the_end, self.config.max_step_tokens)


class PlansDeviceDraftsForGrammars(DraftingScheduler):
    def draft_columns(self, jobs: list[Job], spans: list[Span]) -> StepPlan:
        for job, span in zip(jobs, spans, strict=True):
            host_drafts = span.max_new - 1 - span.drafts
            if job.request.sampling.is_masked and host_drafts > 0:
                del span.host_ids[-host_drafts:]
                span.drafts = host_drafts
        return super().draft_columns(jobs, spans)


class KeepsOneLogprobOfASpan(DraftingScheduler):
    def take_row(self, *arguments: Any) -> list[TokenEvent]:
        return [
            Tokens(event.request_id, event.token_ids, event.logprobs[:1])
            if isinstance(event, Tokens) and event.logprobs
            else event
            for event in super().take_row(*arguments)
        ]


class MiscountsDraftsInMaxNew(DraftingScheduler):
    def draft_columns(self, jobs: list[Job], spans: list[Span]) -> StepPlan:
        plan = super().draft_columns(jobs, spans)
        return replace(plan, max_new=np.minimum(plan.max_new, 1).astype(np.int32))


class PlansDraftsUndeclared(DraftingScheduler):
    capabilities = SchedulerCapabilities()


class PlansDraftsForAChunk(DraftingScheduler):
    """A row that does not sample has drafts."""

    def draft_columns(self, jobs: list[Job], spans: list[Span]) -> StepPlan:
        plan = super().draft_columns(jobs, spans)
        return replace(plan, max_new=np.where(plan.starts == 0, 0, plan.max_new).astype(np.int32))


DRAFT_MUTANTS = {
    CountsDraftsIntoMaxTokens: "the model gives",
    DoesNotCountDraftsIntoTheBudget: "tokens in one step; max_step_tokens is",
    DropsTokensBeforeAStop: "the model gives",
    KeepsOneLogprobOfASpan: "logprobs for . tokens",
    KeepsOneTokenOfASpan: "no tokens|are given; its ids are",
    KeepsTokensAfterAStop: "the model gives",
    LiftsTheBanForTheWholeSpan: "the model gives",
    LooksForAStopInTheFirstTokenAlone: "the model gives",
    LowersTheBoundBeforeItKnows: "its last row ended at",
    LowersTheBoundByOneTooMany: "its last row ended at",
    MiscountsDraftsInMaxNew: "drafts of the device, and max_new of 1 leaves 0",
    NeverLowersTheBound: "its last row ended at",
    PlansDeviceDraftsForGrammars: "have a grammar and drafts that no mask can be made for",
    PlansDraftsBeyondTheEnd: "have room for|beyond max_model_tokens",
    PlansDraftsForAChunk: "drafts of the device, and max_new of 0 leaves 0",
    PlansDraftsUndeclared: "plans_drafts is not declared",
    PlansMoreDraftsThanAllowed: "5 drafts; max_drafts is 4",
}


@pytest.mark.parametrize("mutant", DRAFT_MUTANTS, ids=attrgetter("__name__"))
def test_kit_refuses_a_broken_drafting_scheduler(mutant: type[DraftingScheduler]) -> None:
    def check_all() -> None:
        for check in DRAFT_CHECKS:
            check(mutant)

    with pytest.raises(ConformanceError, match=DRAFT_MUTANTS[mutant]):
        check_all()


# several block tables


@dataclass
class Table:
    window: int | None
    blocks: dict[int, int] = field(default_factory=dict[int, int])  # place -> block
    num_places: int = 0
    num_void: int = 0


class WindowedScheduler(PlainScheduler):
    """Reserves, in numbers, what a request takes of all tables at most, and takes the blocks chunk by chunk."""

    capabilities = SchedulerCapabilities(frees_windows=True)

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.tables: dict[RequestId, list[Table]] = {}
        self.reserved_blocks = 0

    def blocks_for(self, request: GenerateRequest) -> int:
        return self.config.blocks_for_context(self.limit_tokens(request) - (request.sampling.max_tokens > 0))

    @property
    def num_free_blocks(self) -> int:
        return self.config.num_blocks - self.reserved_blocks

    def allocate(self, job: Job) -> None:
        self.reserved_blocks += self.blocks_for(job.request)
        self.tables[job.request.request_id] = [Table(window) for window in self.config.table_windows]

    def chunk(self, job: Job) -> int:
        # As far as the blocks go that were reserved of each window.
        size, end = self.config.block_size_tokens, len(job.ids)
        for table in self.tables[job.request.request_id]:
            if table.window is not None:
                end = min(end, (table.num_void + -(-table.window // size) + 2) * size)
        return end - job.computed

    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        new = [self.take_blocks(job, start + count) for job, (start, count) in zip(rows, spans, strict=True)]
        counts = [[len(blocks) for blocks in column] for column in zip(*new, strict=True)]
        return replace(
            super().columns(rows, spans),
            new_block_counts=np.array(counts, np.int32),
            new_blocks=np.array(self.lay_out(new), np.int32),
            void_block_counts=self.void_counts([self.tables[job.request.request_id] for job in rows]),
        )

    def take_blocks(self, job: Job, end: int) -> list[list[int]]:
        num_places = -(-end // self.config.block_size_tokens)
        new: list[list[int]] = []
        for table in self.tables[job.request.request_id]:
            new.append([self.free_blocks.pop(0) for _ in range(table.num_places, num_places)])
            table.blocks |= dict(enumerate(new[-1], table.num_places))
            table.num_places = max(table.num_places, num_places)
        return new

    def lay_out(self, new: list[list[list[int]]]) -> list[int]:
        return [block for column in zip(*new, strict=True) for blocks in column for block in blocks]

    def void_counts(self, rows: list[list[Table]]) -> Any:
        return np.array([[table.num_void for table in tables] for tables in rows], np.int32).T

    def take_row(self, job: Job, row: int, plan: StepPlan, result: StepResult, now_s: float) -> list[TokenEvent]:
        events = super().take_row(job, row, plan, result, now_s)
        if not job.has_ended:
            self.free_windows(job)
        return events

    def free_windows(self, job: Job) -> None:
        for table in self.tables[job.request.request_id]:
            num_void = self.count_void(table, job.computed)
            for place in range(table.num_void, num_void):
                self.free_blocks.append(table.blocks.pop(place))
            table.num_void = num_void

    def count_void(self, table: Table, computed: int) -> int:
        size = self.config.block_size_tokens
        return 0 if table.window is None else max(0, computed - table.window + 1) // size

    def free(self, job: Job) -> None:
        super().free(job)
        self.reserved_blocks -= self.blocks_for(job.request)
        for table in self.tables.pop(job.request.request_id):
            self.free_blocks += table.blocks.values()


@pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
def test_kit_accepts_a_scheduler_that_frees_windows(check: SchedulerCheck) -> None:
    if check not in DRAFT_CHECKS:
        check(WindowedScheduler)


def test_scheduler_that_keeps_one_table_is_given_no_other() -> None:
    def make(config: SchedulerConfig, policy: QueuePolicy) -> PlainScheduler:
        assert config.table_windows == (None,)
        return PlainScheduler(config, policy)

    check_tables(make)


class FreesOneBlockTooEarly(WindowedScheduler):
    def count_void(self, table: Table, computed: int) -> int:
        num_void = super().count_void(table, computed)
        return min(num_void + 1, table.num_places) if num_void else 0


class FreesOneBlockTooEarlyInSilence(FreesOneBlockTooEarly):
    def void_counts(self, rows: list[list[Table]]) -> Any:
        return np.maximum(super().void_counts(rows) - 1, 0)


class NeverFrees(WindowedScheduler):
    def count_void(self, table: Table, computed: int) -> int:
        return 0

    def chunk(self, job: Job) -> int:
        return len(job.ids) - job.computed


class ReservesAllTablesInFull(WindowedScheduler):
    def blocks_for(self, request: GenerateRequest) -> int:
        return -(-self.limit_tokens(request) // self.config.block_size_tokens) * len(self.config.table_windows)


class LaysBlocksOutRowByRow(WindowedScheduler):
    def lay_out(self, new: list[list[list[int]]]) -> list[int]:
        return [block for row in new for blocks in row for block in blocks]


class SwapsTables(WindowedScheduler):
    """Tells the last table's counts as the first's."""

    def void_counts(self, rows: list[list[Table]]) -> Any:
        return super().void_counts(rows)[::-1].copy()


class GivesBlocksOfOneTableToAnother(WindowedScheduler):
    """The last table begins with the first's block in place of its own."""

    def lay_out(self, new: list[list[list[int]]]) -> list[int]:
        for first, *_, last in (row for row in new if len(row) > 1):
            last[: len(first[:1])] = first[: len(last[:1])]
        return super().lay_out(new)


class ForgetsWhatWasVoid(WindowedScheduler):
    def void_counts(self, rows: list[list[Table]]) -> Any:
        return super().void_counts(rows) * (self.steps % 8 != 7)


class TellsOneTable(WindowedScheduler):
    def columns(self, rows: list[Job], spans: list[tuple[int, int]]) -> StepPlan:
        plan = super().columns(rows, spans)
        return replace(plan, new_block_counts=plan.new_block_counts[0], void_block_counts=plan.void_block_counts[0])


TABLE_MUTANTS = {
    ForgetsWhatWasVoid: "0 blocks are void, and .* were before",
    FreesOneBlockTooEarly: "blocks of table 1 are void, and it reads that table from position",
    FreesOneBlockTooEarlyInSilence: "holds the KV of|write to the same block|have the same block",
    GivesBlocksOfOneTableToAnother: "tables 0 and 1 have the same block",
    LaysBlocksOutRowByRow: "holds the KV of|write to the same block|have the same block",
    NeverFrees: "what lies behind a window is not given back",
    ReservesAllTablesInFull: "request 0 can be served; add answered Failed",
    SwapsTables: "blocks of table 0 are void, and it reads that table from position 0 on",
    TellsOneTable: r"new_block_counts is of shape \(1, 1\); \[tables, rows\] are \(2, 1\)",
}


@pytest.mark.parametrize("mutant", TABLE_MUTANTS, ids=attrgetter("__name__"))
def test_kit_refuses_a_scheduler_that_mistakes_its_tables(mutant: type[WindowedScheduler]) -> None:
    with pytest.raises(ConformanceError, match=TABLE_MUTANTS[mutant]):
        check_tables(mutant)
