"""`SchedulerDriver`: the step loop of a test. Drives a scheduler on a `FakeDevice` and keeps the books on it."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ParamSpec, TypeAlias, TypeVar

import msgspec

from openinfer_core.engine import EngineStats
from openinfer_core.events import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Scheduled,
    TerminalEvent,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.ledger import Ledger
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.request import GenerateRequest, LoadedAdapter, RequestId
from openinfer_core.scheduling import (
    HoldsRows,
    QueuePolicy,
    QueuePolicyConfig,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from openinfer_core.scheduling.draft_counter import DraftCounter
from openinfer_core.testing import fake_model
from openinfer_core.testing.errors import require
from openinfer_core.testing.fake_device import FAULT, FakeDevice
from openinfer_core.testing.fake_drafter import DraftScript, FakeDrafter
from openinfer_core.testing.queue_policy import WatchedPolicy

P = ParamSpec("P")
T = TypeVar("T")

SchedulerFactory: TypeAlias = Callable[[SchedulerConfig, QueuePolicy], Scheduler]

# How many steps a token may cost, recomputation after preemptions included, before a scheduler counts as stuck.
STEPS_PER_TOKEN = 10

# A call of the scheduler is slow beyond this; a few may be the machine's fault.
SLOW_CALL_S, SLOW_CALLS = 1.0, 3


class RunsAt(StrEnum):
    """When a fake device runs a step; a device may run it at any time between."""

    PLAN = "plan"  # as soon as it is planned
    APPLY = "apply"  # as late as its result is taken


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    num_applied: int  # steps that were applied when it was planned
    result: StepResult | None  # None until a device that runs late has run it


@dataclass(slots=True)
class Account:
    """What a request has been told."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    scheduled: Scheduled | None = None
    terminal: TerminalEvent | None = None
    is_aborted: bool = False

    @property
    def what(self) -> str:
        return f"request {self.request.request_id}"


class SchedulerDriver:
    """Submits, aborts and steps; every call checks what the contract demands of it.

    Args:
        factory: makes the scheduler.
        config: its limits.
        policy: of the waiting queue; first come first served if None.
        max_in_flight: plans made before the first of them is applied: 1 without overlap, 2 with it.
        is_moving: whether blocks are on their way from or to KV tiers; then there may be no plan, and asking helps.
        runs_at: when a step runs: as soon as it is planned, or as late as its result is taken.
        drafts: how good the device's drafts are; it has none where it is None, or `max_drafts` is 0.
    """

    def __init__(
        self,
        factory: SchedulerFactory,
        config: SchedulerConfig,
        *,
        policy: QueuePolicy | None = None,
        max_in_flight: int = 2,
        is_moving: Callable[[], bool] = lambda: False,
        runs_at: RunsAt = RunsAt.PLAN,
        drafts: DraftScript | None = None,
    ) -> None:
        self.config = config
        self.policy = WatchedPolicy(FirstComeFirstServed(QueuePolicyConfig()) if policy is None else policy)
        self.scheduler = factory(config, self.policy)
        drafter = None if drafts is None else FakeDrafter(drafts, max_drafts=config.max_drafts)
        self.device = FakeDevice(config, drafter=drafter)
        self.accounts: dict[RequestId, Account] = {}
        # Requests that the test's queue policy spoils: they may end with `Failed(INTERNAL)`.
        self.may_fail: set[RequestId] = set()
        self._max_in_flight = max_in_flight
        self._is_moving = is_moving
        self._runs_at = runs_at
        self._in_flight: deque[_InFlight] = deque()
        self._num_applied = 0
        self._drafts = DraftCounter(config.max_drafts)
        self._owners: dict[int, RequestId] = {}  # slot -> the request that was started in it and not released from it
        self._masked_slots: dict[int, bool] = {}  # slot -> whether its request has a grammar
        self._held: AbstractSet[RequestId] = frozenset()
        self._ledger = Ledger()
        self._budget_steps = 100
        self._now_s = 0.0
        self._slow_calls = 0

    # --- what a test does -------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> TerminalEvent | None:
        self._ledger.open(request)
        account = self.accounts[request.request_id] = Account(request)
        tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        self._budget_steps += STEPS_PER_TOKEN * tokens
        self._take(self._timed(self.scheduler.add, request, now_s=self._tick()), is_answer_to_add=True)
        require(
            account.terminal is None or isinstance(account.terminal, Failed),
            f"{account.what}: add answered {account.terminal}; it can only refuse",
        )
        return account.terminal

    def abort(self, request_id: RequestId) -> None:
        was_open = request_id in self._ledger
        if was_open:
            self.accounts[request_id].is_aborted = True
        events = self._timed(self.scheduler.abort, request_id)
        self._take(events)
        if was_open:
            terminal = self.accounts[request_id].terminal
            is_abort = isinstance(terminal, Finished) and terminal.reason is FinishReason.ABORT
            require(is_abort, f"request {request_id}: abort was answered with {events}, not with Finished(ABORT)")
        else:
            require(not events, f"request {request_id} is not open; abort was answered with {events}")

    def hold(self, request_ids: AbstractSet[RequestId]) -> None:
        """Tells the scheduler, if it is a `HoldsRows`, which requests have no mask; none of these may sample."""
        if isinstance(self.scheduler, HoldsRows):
            self._held = request_ids
            self._timed(self.scheduler.hold, request_ids)

    @property
    def running_ids(self) -> set[RequestId]:
        """Requests that have a slot after the last plan, and have not ended."""
        return {owner for owner in self._owners.values() if owner in self._ledger}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def plan(self) -> StepPlan | None:
        """Plans a step and executes it, unless that is done late; its result is kept until `apply`."""
        plan = self._timed(self.scheduler.plan, now_s=self._tick())
        if plan is None:
            require(
                self._in_flight or not self.scheduler.unfinished_ids or self._is_moving() or self._held,
                f"wedged: {len(self.scheduler.unfinished_ids)} requests are unfinished, no step is in flight, no plan",
            )
            return None
        self._budget_steps -= 1
        require(self._budget_steps > 0, f"stuck: {self.device.steps} steps and no end; {self.scheduler.stats()}")
        self._check_released(plan)
        self._check_starts(plan)
        self._check_masked_rows(plan)
        has_drafts = bool((plan.max_new > 1).any()) or plan.wants_drafts.any()
        declares = self.scheduler.capabilities.plans_drafts
        require(declares or not has_drafts, "rows have drafts or want them, and plans_drafts is not declared")
        result = self.device.run(plan, num_applied=self._num_applied) if self._runs_at is RunsAt.PLAN else None
        self._in_flight.append(_InFlight(plan, self._num_applied, result))
        return plan

    def apply(self) -> None:
        step = self._in_flight.popleft()
        result = step.result
        if result is None:
            result = self.device.run(step.plan, num_applied=step.num_applied)
        self._num_applied += 1
        self._drafts.count(result)
        self._take(self._timed(self.scheduler.apply, step.plan, result, now_s=self._tick()))

    def step(self) -> StepPlan | None:
        """Plans a step, and applies the oldest one if enough are in flight, or if nothing could be planned."""
        plan = self.plan()
        if self._in_flight and (plan is None or len(self._in_flight) == self._max_in_flight):
            self.apply()
        return plan

    def run(self) -> None:
        """Steps until every request has ended and every step is applied, then checks that nothing is left."""
        while self._in_flight or self.scheduler.unfinished_ids or self._is_moving():
            self.step()
        require(self.scheduler.plan(now_s=self._tick()) is None, "a plan, with all requests finished")
        self._check_nothing_is_left()
        for account in self.accounts.values():
            self._check_account(account)

    def stats(self) -> EngineStats:
        """The scheduler's, with what became of drafts, as an engine's loop counts it."""
        return self._drafts.told_in(self.scheduler.stats())

    def outcome(self, request: GenerateRequest) -> fake_model.ExpectedOutcome:
        return fake_model.outcome(request, max_model_tokens=self.config.max_model_tokens)

    # --- events -----------------------------------------------------------------------------------------

    def _timed(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        begin_s = time.perf_counter()
        result = call(*args, **named)
        if time.perf_counter() - begin_s > SLOW_CALL_S:
            self._slow_calls += 1
            name = getattr(call, "__name__", "a call")
            few = self._slow_calls < SLOW_CALLS
            require(few, f"{name} took longer than {SLOW_CALL_S:g} s, {SLOW_CALLS} times: all requests wait meanwhile")
        return result

    def _tick(self) -> float:
        self._now_s += 0.001
        return self._now_s

    def _take(self, events: list[TokenEvent], *, is_answer_to_add: bool = False) -> None:
        self.policy.check()
        for event in events:
            recorded = self._ledger.record([event])
            require(
                recorded,
                f"request {event.request_id} was never added, has its terminal event or is scheduled twice: {event}",
            )
            account = self.accounts[event.request_id]
            self._note(account, recorded[0])
            if isinstance(event, Failed) and not is_answer_to_add:
                self._check_failure(account, event)
        unfinished, open_ids = set(self.scheduler.unfinished_ids), set(self._ledger.open_ids)
        lost, ended = sorted(open_ids - unfinished), sorted(unfinished - open_ids)
        require(not lost, f"lost: requests {lost} have no terminal event and are not among unfinished_ids")
        require(not ended, f"requests {ended} have ended, or were never added, and are among unfinished_ids")

    def _note(self, account: Account, event: TokenEvent) -> None:
        if isinstance(event, Scheduled):
            require(not account.token_ids, f"{account.what} has tokens before it is scheduled")
            require(0 <= event.cached_tokens < len(account.request.prompt_token_ids), f"{account.what}: {event}")
            require(0 <= event.queued_s <= self._now_s, f"{account.what}: {event}")
            account.scheduled = event
        elif isinstance(event, Tokens):
            require(account.scheduled is not None, f"{account.what} has tokens and was not scheduled")
            require(not (event.prompt_logprobs and account.token_ids), f"{account.what}: prompt_logprobs after tokens")
            num_logprobs = len(event.token_ids) if event.logprobs is None else len(event.logprobs)
            require(
                num_logprobs == len(event.token_ids),
                f"{account.what}: {num_logprobs} logprobs for {len(event.token_ids)} tokens",
            )
            account.token_ids += event.token_ids
            account.logprobs += event.logprobs or ()
            account.prompt_logprobs += event.prompt_logprobs or ()
        else:
            account.terminal = event

    # --- checks -----------------------------------------------------------------------------------------

    def is_shed(self, account: Account) -> bool:
        """Whether the scheduler has given a request up before it ran, as one that declares `may_shed` may."""
        terminal = account.terminal
        if not isinstance(terminal, Failed) or account.scheduled is not None:
            return False
        is_late = terminal.kind is FailureKind.DEADLINE and account.request.deadline_s is not None
        return self.scheduler.capabilities.may_shed and (is_late or terminal.kind is FailureKind.OVERLOADED)

    def _check_failure(self, account: Account, event: Failed) -> None:
        require(
            event.kind is FailureKind.INTERNAL or self.is_shed(account),
            f"{account.what} ended with {event} after it was taken; one that declares may_shed may end a request that "
            "waits with overloaded, or with deadline if it has one",
        )

    def _check_released(self, plan: StepPlan) -> None:
        for slot in plan.released:
            require(slot in self._owners, f"slot {slot} is released; no sequence is in it")
            del self._owners[slot]
        kept = {slot: owner for slot, owner in self._owners.items() if owner not in self._ledger}
        require(not kept, f"the requests of slots {kept} have ended, and the slots are not among released")
        for start in plan.started:
            owner, request_id = self._owners.get(start.slot), start.request.request_id
            require(owner is None, f"slot {start.slot} is started; request {owner} was not released from it")
            held = [slot for slot, other in self._owners.items() if other == request_id]
            require(not held, f"request {request_id} is started in slot {start.slot} and was not released from {held}")
            self._owners[start.slot] = request_id

    def _check_starts(self, plan: StepPlan) -> None:
        busy = {slot for earlier in self._in_flight for slot in earlier.plan.slots.tolist()}
        for start in plan.started:
            request_id = start.request.request_id
            require(start.slot not in busy, f"slot {start.slot} is started while a step in flight has a row in it")
            require(request_id in self._ledger, f"request {request_id} is started and not open")
            require(
                _without_slot(start.request) == _without_slot(self.accounts[request_id].request),
                f"request {request_id} is started as {start.request}; {self.accounts[request_id].request} was added",
            )

    def _check_masked_rows(self, plan: StepPlan) -> None:
        self._masked_slots.update((start.slot, start.request.sampling.is_masked) for start in plan.started)
        plans = [earlier.plan for earlier in self._in_flight]
        sampled = {slot for earlier in plans for slot in earlier.slots[earlier.max_new > 0].tolist()}
        masked = [slot for slot in plan.slots.tolist() if self._masked_slots.get(slot)]
        early = [slot for slot in masked if slot in sampled]
        require(not early, f"slots {early} have a grammar and a row, while their last token is in flight")
        held = [slot for slot in plan.slots[plan.max_new > 0].tolist() if self._owners.get(slot) in self._held]
        require(not held, f"slots {held} sample, and were to be held: their masks are not there")
        drafting = [slot for slot in plan.slots[plan.draft_counts > 0].tolist() if slot in masked]
        require(not drafting, f"slots {drafting} have a grammar and drafts that no mask can be made for")

    def _check_nothing_is_left(self) -> None:
        stats = self.scheduler.stats()
        require(not len(self._ledger), f"requests {self._ledger.open_ids} have no terminal event")
        require(stats.blocks_used == 0, f"{stats.blocks_used} blocks are used, with all requests ended: a leak")
        require(stats.running == 0, f"{stats.running} requests are running, with all of them ended")
        require(stats.waiting == 0, f"{stats.waiting} requests are waiting, with all of them ended")
        require(stats.blocks_total == self.config.num_blocks, f"blocks_total is {stats.blocks_total}")
        self.policy.check_is_empty()

    def _check_account(self, account: Account) -> None:
        right, got, what = self.outcome(account.request), tuple(account.token_ids), account.what
        require(got == right.token_ids[: len(got)], f"{what} got {got}; the model gives {right.token_ids}")
        terminal = account.terminal
        if isinstance(terminal, Finished) and terminal.reason is not FinishReason.ABORT:
            require(
                got == right.token_ids
                and (terminal.reason, terminal.stop_token_id) == (right.reason, right.stop_token_id),
                f"{what} ended with {terminal} after {got}; the model gives {right}",
            )
            self._check_logprobs(account)
        elif isinstance(terminal, Finished):
            require(account.is_aborted, f"{what} ended with {terminal} and was not aborted")
        elif isinstance(terminal, Failed) and terminal.kind is FailureKind.INTERNAL:
            is_expected = terminal.message == FAULT or account.request.request_id in self.may_fail
            require(is_expected, f"{what} ended with {terminal}, without a fault")

    def _check_logprobs(self, account: Account) -> None:
        sampling, first = account.request.sampling, len(account.request.prompt_token_ids)
        if sampling.logprobs is not None:
            positions = [entry.rank for entry in account.logprobs]
            right = list(range(first, first + len(account.token_ids)))
            require(positions == right, f"{account.what} has logprobs of positions {positions}, not {right}")
        if sampling.prompt_logprobs is not None:
            positions = [entry.rank for entry in account.prompt_logprobs]
            require(
                positions == list(range(1, first)),
                f"{account.what} has prompt_logprobs of positions {positions}, not 1 .. {first - 1}",
            )


def _without_slot(request: GenerateRequest) -> GenerateRequest:
    """Where its adapter lies is the scheduler's to say."""
    if request.adapter is None:
        return request
    return msgspec.structs.replace(request, adapter=LoadedAdapter(request.adapter.digest))
