"""Steps timed at the start: they keep the contract of plans, end in time, leave nothing, and decide the first step."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import (
    DecodeStepTime,
    QueuePolicyConfig,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TakesStepTimes,
)
from openinfer_core.testing import fake_model
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_core.testing.fake_drafter import DraftScript, FakeDrafter
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.speculation.step_times import MOST_S, measure_step_times

CONFIG = SchedulerConfig(
    num_blocks=512,
    block_size_tokens=16,
    max_num_seqs=8,
    max_step_tokens=256,
    max_model_tokens=256,
    max_drafts=3,
    adapts_drafts=True,
)
Cost = Callable[[int, int], float]
"""Rows and drafts of a step -> seconds."""


@dataclass(slots=True)
class Device:
    """A runner whose steps take what `cost` says, in virtual time, on a device that notices what plans do wrong."""

    config: SchedulerConfig
    cost: Cost
    script: DraftScript = DraftScript.MIX
    fails: bool = False
    now_s: float = 100.0
    plans: list[StepPlan] = field(default_factory=list[StepPlan])
    num_applied: int = 0
    most_in_flight: int = 0
    _device: FakeDevice | None = None
    _free_s: float = 0.0

    @property
    def failure(self) -> None:
        return None

    def clock(self) -> float:
        return self.now_s

    def launch(self, plan: StepPlan) -> "_Pending":
        if self._device is None:
            drafter = FakeDrafter(self.script, max_drafts=self.config.max_drafts)
            self._device = FakeDevice(self.config, drafter=drafter)
        assert plan.step == -1 - len(self.plans)
        self.plans.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.plans) - self.num_applied)
        numbered = replace(plan, step=-1 - plan.step)
        result = self._device.run(numbered, num_applied=self.num_applied)
        if self.fails and plan.draft_counts.any():
            result = replace(result, failed_rows={0: "not finite"})
        self._free_s = max(self._free_s, self.now_s) + self.cost(plan.num_rows, int(plan.draft_counts.sum()))
        return _Pending(self, result, self._free_s)

    def close(self) -> None: ...

    def measure(self, *, most_s: float = MOST_S) -> list[DecodeStepTime]:
        return measure_step_times(
            self, self.config, num_token_ids=fake_model.NUM_TOKEN_IDS, clock=self.clock, most_s=most_s
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    device: Device
    done: StepResult
    done_s: float

    def result(self) -> StepResult:
        self.device.now_s = max(self.device.now_s, self.done_s)
        self.device.num_applied += 1
        return self.done


def worth_it(num_rows: int, num_drafts: int) -> float:
    return 0.004 + 0.001 * (num_drafts > 0)


def never_worth_it(num_rows: int, num_drafts: int) -> float:
    return 0.004 * (1 + num_drafts / num_rows) * (1.2 if num_drafts else 1.0)


@pytest.mark.parametrize("script", [DraftScript.RIGHT, DraftScript.WRONG, DraftScript.MIX])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 6, "max_drafts": 7},  # rows that are no power of two
        {"table_windows": (None, 32)},
        {"max_step_tokens": 8},  # drafts of few rows alone
        {"max_model_tokens": 12, "num_blocks": 9},
        {"max_num_seqs": 256, "max_step_tokens": 1024, "num_blocks": 1024, "max_drafts": 1},
    ],
)
def test_all_plans_are_as_a_scheduler_has_to_plan(script: DraftScript, changes: dict[str, object]) -> None:
    config = msgspec.structs.replace(CONFIG, **changes)
    device = Device(config, worth_it, script=script)
    times = device.measure(most_s=1000.0)

    assert device.num_applied == len(device.plans)
    assert device.most_in_flight == 2  # one step ahead, as the loop
    assert all(each.ms == pytest.approx(1e3 * worth_it(each.num_rows, each.num_drafts)) for each in times)
    assert {each.num_rows for each in times} >= {1, 2}


def test_the_sizes_are_those_that_a_pace_weighs() -> None:
    times = Device(CONFIG, worth_it).measure(most_s=1000.0)
    sizes = {rows: sorted({each.num_drafts for each in times if each.num_rows == rows}) for rows in (1, 2, 4, 8)}
    assert sizes == {1: [0, 1, 3], 2: [0, 1, 3, 6], 4: [0, 1, 3, 7, 12], 8: [0, 1, 3, 7, 15, 24]}


@pytest.mark.parametrize("step_s", [0.0001, 0.003, 0.02, 0.05, 0.09, 0.15, 5.0])
def test_it_takes_no_longer_than_it_may(step_s: float) -> None:
    config = msgspec.structs.replace(CONFIG, max_num_seqs=256, max_step_tokens=2048, num_blocks=4096)
    device = Device(config, lambda num_rows, num_drafts: step_s)
    times = device.measure()

    assert device.now_s - 100.0 <= max(MOST_S, step_s) + 1e-9
    assert bool(times) == (step_s <= 0.05)
    assert (len(device.plans) == 1) == (step_s >= 0.15)  # one that takes long is the only one


def test_a_slow_first_step_does_not_end_it() -> None:
    """Something is loaded then that later steps need not wait for."""
    slow = iter([0.09])
    device = Device(CONFIG, lambda num_rows, num_drafts: next(slow, 0.004))
    assert {each.num_rows for each in device.measure()} == {1, 2, 4, 8}
    assert device.now_s - 100.0 <= MOST_S


def test_few_rows_are_timed_first() -> None:
    config = msgspec.structs.replace(CONFIG, max_num_seqs=256, max_step_tokens=2048, num_blocks=4096)
    times = Device(config, lambda num_rows, num_drafts: 0.02).measure()
    rows = [each.num_rows for each in times]
    assert rows == sorted(rows)
    assert max(rows) < 256


def test_a_pool_or_context_without_room_is_not_measured() -> None:
    for changes in ({"max_model_tokens": 4}, {"num_blocks": 1, "block_size_tokens": 2}):
        device = Device(msgspec.structs.replace(CONFIG, **changes), worth_it)
        assert device.measure() == []
        assert device.plans == []


def test_rows_that_fail_end_the_measurement() -> None:
    device = Device(CONFIG, worth_it, fails=True)
    assert {each.num_drafts for each in device.measure()} == {0}
    assert {plan.num_rows for plan in device.plans} == {1}


def test_the_first_and_the_last_step_sample_nothing() -> None:
    """Nothing is put off until the first request's step, which may find its blocks filled by a tier."""
    device = Device(CONFIG, worth_it)
    device.measure()
    first, *_, last = device.plans
    assert not first.max_new.any()
    assert not last.max_new.any()


# --- what a scheduler makes of it ---------------------------------------------------------------------------


def make_scheduler(times: list[DecodeStepTime] | None, config: SchedulerConfig = CONFIG) -> TokenBudgetScheduler:
    scheduler = TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))
    assert isinstance(scheduler, TakesStepTimes)
    if times is not None:
        scheduler.take_step_times(times)
    return scheduler


def drafts_of(scheduler: TokenBudgetScheduler, cost: Cost, *, num_rows: int, steps: int) -> list[int]:
    """Drafts that each of the first decode steps of so many requests is planned with."""
    for index in range(num_rows):
        sampling = SamplingParams(max_tokens=200, seed=index)
        request = GenerateRequest(request_id=RequestId(index), prompt_token_ids=(1, 2, index), sampling=sampling)
        assert scheduler.add(request, now_s=0.0) == []
    device = FakeDevice(CONFIG, drafter=FakeDrafter(DraftScript.RIGHT, max_drafts=CONFIG.max_drafts))
    now_s, found = 0.0, list[int]()
    for step in range(1 + steps):
        plan = scheduler.plan(now_s=now_s)
        assert plan is not None
        num_drafts = int(plan.draft_counts.sum())
        now_s += cost(num_rows, num_drafts)
        scheduler.apply(plan, device.run(plan), now_s=now_s)
        if step:
            found.append(num_drafts)
    return found


@pytest.mark.parametrize("num_rows", [1, 3, 5, 8])
def test_the_first_decode_step_has_the_drafts_that_are_worth_it(num_rows: int) -> None:
    times = Device(CONFIG, worth_it).measure()
    assert drafts_of(make_scheduler(times), worth_it, num_rows=num_rows, steps=1)[0] > 0
    assert drafts_of(make_scheduler(None), worth_it, num_rows=num_rows, steps=3) == [0, 0, 0]


@pytest.mark.parametrize("num_rows", [1, 3, 5, 8])
def test_drafts_that_cannot_pay_are_never_tried(num_rows: int) -> None:
    times = Device(CONFIG, never_worth_it).measure()
    assert not any(drafts_of(make_scheduler(times), never_worth_it, num_rows=num_rows, steps=30))
    assert any(drafts_of(make_scheduler(None), never_worth_it, num_rows=num_rows, steps=30))


def test_what_steps_take_later_is_learned() -> None:
    """Contexts are longer than those that were timed: drafts that seemed worth it are not."""
    scheduler = make_scheduler(Device(CONFIG, worth_it).measure())
    found = drafts_of(scheduler, never_worth_it, num_rows=4, steps=60)
    assert found[0] > 0
    assert sum(found[-20:]) <= 2 * CONFIG.max_drafts


def test_a_scheduler_that_does_not_adapt_takes_no_times() -> None:
    config = msgspec.structs.replace(CONFIG, adapts_drafts=False)
    scheduler = make_scheduler([DecodeStepTime(1, 0, 1.0)], config)
    assert drafts_of(scheduler, worth_it, num_rows=1, steps=2) == [3, 3]


def test_the_scheduler_is_as_if_nothing_had_run() -> None:
    scheduler = make_scheduler(Device(CONFIG, worth_it).measure())
    scheduler.check_integrity()
    assert scheduler.stats() == make_scheduler(None).stats()
