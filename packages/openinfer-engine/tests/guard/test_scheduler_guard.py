"""`SchedulerGuard`: what a scheduler does wrong is named, and costs what it must and no more."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openinfer_core import (
    EngineStats,
    Failed,
    FailureKind,
    GenerateRequest,
    PluginFault,
    RequestId,
    SamplingParams,
    SlowCall,
    TokenEvent,
)
from openinfer_core.plugins import place_of
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult, WaitingRequest
from openinfer_engine.guard import FaultKind, GuardOptions, PlanCheck, SchedulerGuard
from openinfer_engine.scheduler import TokenBudgetScheduler

CONFIG = SchedulerConfig(num_blocks=64, block_size_tokens=4, max_num_seqs=4, max_step_tokens=16, max_model_tokens=64)
PLUGIN = "mine (my-package 1.0)"


def request(index: int, *, max_tokens: int = 40) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(index), prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens)
    )


class Mine(TokenBudgetScheduler):
    """Ours, with what a test puts in the place of a method."""

    def __init__(self) -> None:
        super().__init__(CONFIG, FirstComeFirstServed(QueuePolicyConfig()))


class World:
    """A guard, its scheduler and its clock; steps are applied at once."""

    def __init__(self, scheduler: Any = None, *, checked: bool = False, timeout_s: float = 5.0) -> None:
        self.now_s = 100.0
        self.scheduler = scheduler or Mine()
        self.guard = SchedulerGuard(
            self.scheduler,
            GuardOptions(
                plugin=PLUGIN,
                rows=CONFIG,
                starvation_timeout_s=timeout_s,
                plan_check=PlanCheck(CONFIG, num_token_ids=100) if checked else None,
            ),
            clock=lambda: self.now_s,
        )
        self.open: set[RequestId] = set()

    def add(self, index: int, **fields: Any) -> list[TokenEvent]:
        self.open.add(RequestId(index))
        return self.guard.add(request(index, **fields), now_s=self.now_s)

    def step(self) -> StepPlan | None:
        plan = self.guard.plan()
        if plan is not None:
            token_ids = np.where(plan.max_new > 0, 7, -1).astype(np.int32)
            self.guard.apply(plan, StepResult.of_single_tokens(token_ids))
        return plan

    @property
    def counts(self) -> dict[str, int]:
        (faults,) = self.guard.stats().plugin_faults
        assert (faults.group, faults.plugin) == ("openinfer.schedulers", PLUGIN)
        return {kind: count for kind, count in faults.counts.items() if count}


def test_guard_of_a_scheduler_that_keeps_the_contract_counts_nothing() -> None:
    world = World(checked=True)
    world.add(0)
    world.add(1)
    for _ in range(5):
        world.step()
        assert world.guard.reconcile(world.open) == []
    assert world.counts == {}
    assert world.guard.stats().running == 2
    assert set(world.guard.stats().plugin_faults[0].counts) == set(FaultKind)


def test_lost_request_ends_naming_the_plug_in_and_no_other() -> None:
    world = World()
    world.add(0)
    world.add(1)
    world.scheduler.abort(RequestId(1))  # no event reaches the loop
    assert world.guard.reconcile(world.open) == [
        Failed(
            RequestId(1),
            FailureKind.INTERNAL,
            f"the scheduler {PLUGIN} lost this request: it was added, has no end, and is not there",
        )
    ]
    assert world.counts == {"lost_request": 1}


class Raising(Mine):
    """Each of its methods raises if it is named."""

    where = ""

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        self._raise("add")
        return super().add(request, now_s=now_s)

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        self._raise("abort")
        return super().abort(request_id)

    def plan(self, *, now_s: float) -> StepPlan | None:
        self._raise("plan")
        return super().plan(now_s=now_s)

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        self._raise("apply")
        return super().apply(plan, result, now_s=now_s)

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        self._raise("unfinished_ids")
        return super().unfinished_ids

    def stats(self) -> EngineStats:
        self._raise("stats")
        return super().stats()

    def _raise(self, where: str) -> None:
        if self.where == where:
            raise KeyError("a secret")


@pytest.mark.parametrize(
    ("where", "act"),
    [
        ("add", lambda world: world.add(1)),
        ("abort", lambda world: world.guard.abort(RequestId(0))),
        ("plan", lambda world: world.step()),
        ("apply", lambda world: world.step()),
        ("unfinished_ids", lambda world: world.guard.num_unfinished),
        ("unfinished_ids", lambda world: world.guard.reconcile(world.open)),
    ],
)
def test_call_that_raises_is_a_fault_of_the_plug_in(where: str, act: Callable[[World], object]) -> None:
    scheduler = Raising()
    world = World(scheduler)
    world.add(0)
    scheduler.where = where
    with pytest.raises(PluginFault) as caught:
        act(world)
    assert str(caught.value) == f"the scheduler {PLUGIN} raised KeyError in {where}; the engine ends"
    assert isinstance(caught.value.__cause__, KeyError)
    assert world.counts == {"raised": 1}


def test_stats_that_raise_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Raising()
    world = World(scheduler)
    world.add(0)
    world.step()
    assert world.guard.stats().running == 1
    scheduler.where = "stats"
    assert world.guard.stats().running == 1  # the last ones
    assert f"the scheduler {PLUGIN} raised in stats" in caplog.text
    world.step()


@pytest.mark.parametrize(
    ("method", "answer", "checked", "message"),
    [
        ("add", None, False, "returned NoneType, not a list, from add"),
        ("add", (), False, "returned tuple, not a list, from add"),
        ("abort", None, False, "returned NoneType, not a list, from abort"),
        ("apply", None, False, "returned NoneType, not a list, from apply"),
        ("apply", ["done"], True, "returned events of type str from apply"),
        ("plan", "a plan", False, "returned str from plan"),
    ],
)
def test_answer_that_the_contract_does_not_know_is_a_fault(
    method: str, answer: object, checked: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(checked=checked)
    world.add(0)
    monkeypatch.setattr(world.scheduler, method, lambda *given, **named: answer)
    acts: dict[str, Callable[[], object]] = {
        "add": lambda: world.add(1),
        "abort": lambda: world.guard.abort(RequestId(0)),
        "plan": world.step,
        "apply": world.step,
    }
    with pytest.raises(PluginFault, match=f"{message}; the engine ends"):
        acts[method]()
    assert world.counts == {"bad_answer": 1}


def test_bad_plan_is_a_fault_before_it_is_run() -> None:
    world = World(checked=True)
    world.add(0)
    real = world.scheduler.plan

    def plan(*, now_s: float) -> StepPlan:
        made = real(now_s=now_s)
        object.__setattr__(made, "slots", made.slots + np.int32(255))
        return made

    world.scheduler.plan = plan
    with pytest.raises(PluginFault, match=r"breaks the contract: slots are 0 \.\. 3; the plan names 255; the engine"):
        world.guard.plan()
    assert world.counts == {"bad_plan": 1}


def test_plan_for_a_request_that_is_not_there_is_a_fault() -> None:
    class Hiding(Mine):
        @property
        def unfinished_ids(self) -> AbstractSet[RequestId]:
            return set()

    world = World(Hiding(), checked=True)
    world.add(0)
    with pytest.raises(PluginFault, match="request 0 is started, and is not among unfinished_ids"):
        world.guard.plan()


def test_slot_of_an_ended_request_has_to_be_released() -> None:
    class Keeping(Mine):
        def plan(self, *, now_s: float) -> StepPlan | None:
            plan = super().plan(now_s=now_s)
            if plan is not None:
                object.__setattr__(plan, "released", ())
            return plan

    world = World(Keeping(), checked=True)
    world.add(0)
    world.add(1)
    world.step()
    world.guard.abort(RequestId(0))
    world.open.remove(RequestId(0))
    world.guard.reconcile(world.open)
    with pytest.raises(PluginFault, match="request 0 has ended, and its slot 0 is not among released"):
        world.step()


def test_wedge_names_the_plug_in() -> None:
    world = World()
    assert str(world.guard.wedged(3)) == (
        f"the scheduler {PLUGIN} is wedged: it has 3 requests and plans no step; the engine ends"
    )
    assert world.counts == {"wedged": 1}


def test_slow_call_is_told_while_it_lasts_and_counted_after(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[EngineStats] = []

    class Slow(Mine):
        def plan(self, *, now_s: float) -> StepPlan | None:
            world.now_s += 0.9
            seen.append(world.guard.stats())
            world.now_s += 1.6
            seen.extend((world.guard.stats(), world.guard.stats()))
            return super().plan(now_s=now_s)

    world = World(Slow())
    world.add(0)
    world.step()
    quick, slow, again = seen
    assert quick.slow_call is None
    assert slow == again
    assert slow.slow_call is not None
    assert (slow.slow_call.plugin, slow.slow_call.call) == (PLUGIN, "plan")
    assert slow.slow_call.age_s == pytest.approx(2.5)
    assert caplog.text.count(f"the scheduler {PLUGIN} has been in plan for 2.5 s") == 1
    assert f"the scheduler {PLUGIN} took 2.5 s in plan" in caplog.text
    assert world.guard.stats().slow_call is None
    assert world.counts == {"slow_call": 1}


def test_policy_that_blocks_is_named_in_the_schedulers_place(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[EngineStats] = []

    class Slow(FirstComeFirstServed):
        def key(self, waiting: WaitingRequest) -> Any:
            seen.append(world.guard.stats())
            world.now_s += 2.5
            seen.extend((world.guard.stats(), world.guard.stats()))
            return super().key(waiting)

        def admitted(self, request: GenerateRequest) -> None:
            world.now_s += 0.4  # the next 0.9 s are the scheduler's own

    class Scheduling(TokenBudgetScheduler):
        def plan(self, *, now_s: float) -> StepPlan | None:
            world.now_s += 0.9
            return super().plan(now_s=now_s)

    world = World(Scheduling(CONFIG, Slow(QueuePolicyConfig())))
    policy = place_of(Slow)
    world.add(0)
    quick, slow, again = seen
    assert quick.slow_call is None
    assert slow == again
    assert slow.slow_call == SlowCall(plugin=policy, call="key", age_s=2.5, group="openinfer.queue_policies")
    assert caplog.text.count(f"the queue policy {policy} has been in key for 2.5 s") == 1
    assert f"the queue policy {policy} took 2.5 of the 2.5 s in add" in caplog.text
    assert "the scheduler" not in caplog.text
    world.step()
    assert f"the scheduler {PLUGIN} took 1.3 s in plan" in caplog.text
    of_scheduler, of_policy = world.guard.stats().plugin_faults
    assert (of_scheduler.group, of_scheduler.counts["slow_call"]) == ("openinfer.schedulers", 1)
    assert (of_policy.group, of_policy.plugin) == ("openinfer.queue_policies", policy)
    assert of_policy.counts == {"slow_call": 1}


# --- requests without a row -------------------------------------------------------------------------------------


class Starving(Mine):
    """Counts a request that it never runs: one of `max_tokens=39`."""

    def __init__(self) -> None:
        super().__init__()
        self.starved: set[RequestId] = set()

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        if request.sampling.max_tokens != 39:
            return super().add(request, now_s=now_s)
        self.starved.add(request.request_id)
        return []

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        self.starved.discard(request_id)
        return super().abort(request_id)

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        return super().unfinished_ids | self.starved


def look_for(world: World, *, seconds: int) -> list[Failed]:
    """A step and a look at each second, until a request ends."""
    for _ in range(seconds):
        world.now_s += 1.0
        world.step()
        if failures := world.guard.reconcile(world.open):
            return failures
    return []


def test_request_that_never_gets_a_row_ends_after_the_timeout() -> None:
    world = World(Starving())
    world.add(0)
    world.add(1, max_tokens=39)
    world.step()
    began_s = world.now_s
    (failure,) = look_for(world, seconds=20)
    assert (failure.request_id, failure.kind) == (1, FailureKind.INTERNAL)
    assert failure.message.startswith(f"the scheduler {PLUGIN} did not run this request for ")
    assert 5.0 < world.now_s - began_s < 8.0
    assert world.scheduler.unfinished_ids == {0}
    assert world.counts == {"starved_request": 1}


def test_request_is_starved_beside_decode_rows_whose_ids_are_the_hosts() -> None:
    class FromHost(Starving):
        """Hands the last ids over again, as a scheduler does that waits for its results."""

        def plan(self, *, now_s: float) -> StepPlan | None:
            plan = super().plan(now_s=now_s)
            if plan is None or len(plan.token_ids):
                return plan
            return replace(plan, num_host_tokens=plan.counts, token_ids=np.full(plan.num_tokens, 7, np.int32))

    world = World(FromHost(), checked=True)
    world.add(0)
    world.add(1, max_tokens=39)
    (failure,) = look_for(world, seconds=20)
    assert failure.request_id == 1


def test_requests_that_run_or_have_just_come_are_not_starved_at_the_shortest_timeout() -> None:
    world = World(Starving(), timeout_s=1.0)
    world.add(0)
    for _ in range(5):
        world.now_s += 1.1
        world.step()
        assert world.guard.reconcile(world.open) == []
    world.add(1, max_tokens=39)
    world.now_s += 1.1
    world.step()
    assert world.guard.reconcile(world.open) == []


def test_request_that_waits_for_a_slot_is_not_starved() -> None:
    world = World(Starving())
    for index in range(CONFIG.max_num_seqs):
        world.add(index)
    world.add(9, max_tokens=39)
    assert look_for(world, seconds=20) == []


def test_request_that_waits_for_blocks_is_not_starved() -> None:
    class Full(Starving):
        def stats(self) -> EngineStats:
            return EngineStats(blocks_total=64, blocks_used=60)

    world = World(Full())
    world.add(0)
    world.add(9, max_tokens=39)
    assert look_for(world, seconds=20) == []


def test_request_that_waits_while_prompts_are_computed_is_not_starved() -> None:
    world = World(Starving())
    world.add(9, max_tokens=39)
    for index in range(20):
        world.now_s += 1.0
        world.add(index + 10, max_tokens=1)
        world.step()  # of a prompt each
        world.open.discard(RequestId(index + 10))
        assert world.guard.reconcile(world.open) == []


def test_sequence_in_a_slot_without_a_row_is_starved() -> None:
    class Pausing(Mine):
        """Leaves the first request out, once it runs."""

        def plan(self, *, now_s: float) -> StepPlan | None:
            paused = [sequence for sequence in self._queue.running if sequence.request_id == 0]
            if self._counters.steps < 3 or len(self._queue.running) < 2:
                return super().plan(now_s=now_s)
            self._queue.running = [sequence for sequence in self._queue.running if sequence not in paused]
            try:
                return super().plan(now_s=now_s)
            finally:
                self._queue.running = [*paused, *self._queue.running]

    world = World(Pausing(), checked=True)
    world.add(0)
    world.add(1)
    (failure,) = look_for(world, seconds=20)
    assert failure.request_id == 0
    assert "did not run this request" in failure.message


def test_time_in_which_the_device_hangs_is_not_counted() -> None:
    world = World(Starving())
    world.add(0)
    world.add(1, max_tokens=39)
    world.step()
    world.now_s += 1000.0  # a step that took so long
    world.step()
    assert world.guard.reconcile(world.open) == []
