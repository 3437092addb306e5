"""Drafts of the default scheduler: they change no token, take nothing from others, and their bounds are exact."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import RequestId, TokenEvent
from openinfer_core.queue_policies import FirstComeFirstServed, Priority
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.fake_drafter import DraftScript
from openinfer_core.testing.fake_model import NUM_TOKEN_IDS
from openinfer_core.testing.scheduler_drafts import DRAFT_CHECKS
from openinfer_core.testing.scheduler_driver import RunsAt, SchedulerDriver
from openinfer_core.testing.scheduler_traffic import GRAMMAR, check_serves_on, drive_at_random, random_config
from openinfer_core.testing.scheduler_traffic import make_request as kit_request
from openinfer_engine.guard.plan_check import PlanCheck
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.itl_limit import ItlLimiter
from openinfer_engine.scheduler.step_builder import StepInFlight

LIMITS: dict[str, Any] = {
    "num_blocks": 64,
    "block_size_tokens": 4,
    "max_num_seqs": 4,
    "max_step_tokens": 24,
    "max_model_tokens": 64,
    "max_drafts": 3,
}


@pytest.fixture
def drive(checked_scheduler: type[TokenBudgetScheduler]) -> Callable[..., SchedulerDriver]:
    def make(
        drafts: DraftScript | None = DraftScript.RIGHT,
        *,
        max_in_flight: int = 2,
        runs_at: RunsAt = RunsAt.PLAN,
        **limits: Any,
    ) -> SchedulerDriver:
        config = SchedulerConfig(**{**LIMITS, **limits})
        policy = FirstComeFirstServed(QueuePolicyConfig())
        return SchedulerDriver(
            checked_scheduler, config, policy=policy, max_in_flight=max_in_flight, runs_at=runs_at, drafts=drafts
        )

    return make


def columns(plan: StepPlan | None) -> list[tuple[int, int, int, int, int]]:
    """(slot, start, host tokens, drafts, max_new) of each row."""
    assert plan is not None
    names = ("slots", "starts", "num_host_tokens", "draft_counts", "max_new")
    return list(zip(*(getattr(plan, name).tolist() for name in names), strict=True))


# --- what is planned ------------------------------------------------------------------------------------


def test_decode_rows_have_drafts_and_the_next_begin_at_the_bound(drive: Any, make_request: Any) -> None:
    driver = drive(DraftScript.WRONG)
    driver.submit(make_request(0, (1, 2, 3), max_tokens=40))
    assert columns(driver.plan()) == [(0, 0, 3, 0, 1)]
    assert columns(driver.plan()) == [(0, 3, 0, 3, 4)]
    driver.apply()
    assert columns(driver.plan()) == [(0, 7, 0, 3, 4)]
    driver.apply()  # none of the first three was accepted
    assert columns(driver.plan()) == [(0, 8, 0, 3, 4)]
    driver.run()


def test_without_max_drafts_columns_of_drafts_are_empty(drive: Any, make_request: Any) -> None:
    driver = drive(max_drafts=0)
    driver.submit(make_request(0, (1, 2, 3), max_tokens=4))
    plans = [driver.step() for _ in range(3)]
    assert [columns(plan) for plan in plans] == [[(0, 0, 3, 0, 1)], [(0, 3, 0, 0, 1)], [(0, 4, 0, 0, 1)]]
    assert not any(plan.wants_drafts.any() for plan in plans)
    driver.run()
    assert driver.stats().spec_decode_num_accepted_tokens_per_pos == ()


@pytest.mark.parametrize(("max_tokens", "drafts"), [(1, None), (2, 0), (3, 1), (4, 2), (5, 3), (6, 3)])
def test_drafts_end_with_the_request(drive: Any, make_request: Any, max_tokens: int, drafts: int | None) -> None:
    driver = drive(max_in_flight=1)
    driver.submit(make_request(0, (1, 2, 3), max_tokens=max_tokens))
    driver.step()
    plan = driver.step()
    assert (None if plan is None else columns(plan)[0][3]) == drafts
    driver.run()


def test_drafts_keep_to_the_budget_and_leave_half_of_it_to_prompts(drive: Any, make_request: Any) -> None:
    driver = drive(max_in_flight=1, max_step_tokens=8)
    driver.submit(make_request(0, (1,), max_tokens=60))
    driver.submit(make_request(1, (2,), max_tokens=60))
    driver.step()
    assert [row[3] for row in columns(driver.step())] == [3, 3]
    driver.submit(make_request(2, tuple(range(30)), max_tokens=4))
    assert [row[2:4] for row in columns(driver.step())] == [(0, 3), (0, 0), (3, 0)]
    driver.run()


def test_drafts_take_no_block_that_another_may_need(drive: Any, make_request: Any) -> None:
    """Two sequences, and two blocks are free: each keeps one, so drafts stay within the blocks that there are."""
    driver = drive(max_in_flight=1, num_blocks=4, max_model_tokens=16)
    driver.submit(make_request(0, (1, 2), max_tokens=12))
    driver.submit(make_request(1, (3, 4), max_tokens=12))
    driver.step()
    assert [row[3] for row in columns(driver.step())] == [1, 1]
    assert driver.stats().blocks_used == 2
    driver.run()


def test_a_bound_preempts_nobody(drive: Any, make_request: Any) -> None:
    """The bound is past the last block while drafts are in flight: the row waits for their step, and then fits."""
    driver = drive(DraftScript.WRONG, num_blocks=4, max_model_tokens=16, max_num_seqs=2)
    driver.submit(make_request(0, (1, 2, 3, 4, 5), max_tokens=3))
    driver.submit(make_request(1, (3, 4, 5, 6, 7), max_tokens=3))
    driver.run()
    assert driver.stats().preemptions == 0


def test_masked_rows_have_the_drafts_that_came_to_the_host(drive: Any, make_request: Any) -> None:
    driver = drive()
    request = make_request(0, (1, 2, 3), max_tokens=9, grammar=GRAMMAR)
    driver.submit(request)
    first = driver.plan()
    assert first.wants_drafts.tolist() == [True]
    assert driver.plan() is None  # its last token is in flight
    driver.apply()
    second = driver.plan()
    assert columns(second) == [(0, 3, 3, 0, 4)]
    assert second.token_ids.tolist() == list(driver.outcome(request).token_ids[1:4])
    driver.run()
    assert driver.accounts[RequestId(0)].token_ids == list(driver.outcome(request).token_ids)
    assert driver.stats().spec_decode_num_accepted_tokens == 6


def test_counters_say_what_was_drafted_and_accepted(drive: Any, make_request: Any) -> None:
    for script, accepted in ((DraftScript.RIGHT, (4, 4, 4)), (DraftScript.WRONG, (0, 0, 0))):
        driver = drive(script, max_in_flight=1)
        driver.submit(make_request(0, (1, 2, 3), max_tokens=17))
        driver.run()
        stats = driver.stats()
        assert stats.spec_decode_num_accepted_tokens_per_pos == accepted
        assert stats.spec_decode_num_accepted_tokens == sum(accepted)
        assert stats.spec_decode_num_draft_tokens >= 3 * stats.spec_decode_num_drafts - 3
        assert stats.generated_tokens == 17
    assert stats.steps == 17


def test_drafts_that_the_device_did_not_have_are_not_counted(drive: Any, make_request: Any) -> None:
    driver = drive(None)
    driver.submit(make_request(0, (1, 2, 3), max_tokens=9))
    driver.run()
    assert driver.stats().spec_decode_num_drafts == 0


def test_right_drafts_save_steps(drive: Any, make_request: Any) -> None:
    driver = drive(max_in_flight=1)
    driver.submit(make_request(0, (1, 2, 3), max_tokens=41))
    driver.run()
    assert driver.stats().steps == 11


def test_itl_limit_counts_the_tokens_of_a_span_as_decoding() -> None:
    limiter, now_s = ItlLimiter(10), 0.0
    for index in range(40):
        prompt = 100 * (index % 2)
        ends = [4] * 8 + [prompt] * (prompt > 0)
        fields: dict[str, Any] = {"rows": ends, "max_new": ends, "starts": [0] * len(ends), "faults": {}}
        step = StepInFlight(step=index, planned_s=now_s, ends=ends, decode_tokens=32, **fields)
        now_s += (4.0 + 0.02 * prompt) * 1e-3
        limiter.note(step, applied_s=now_s)
    assert limiter.budget_tokens(2048, decode_rows=8) == pytest.approx((10 - 4.0) / 0.02, rel=0.05)


# --- exactness ------------------------------------------------------------------------------------------


class PlanChecked(TokenBudgetScheduler):
    """Its plans are looked at by the guard's check, too, which knows plans and results alone."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.plan_check = PlanCheck(config, num_token_ids=NUM_TOKEN_IDS)

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is not None:
            self.plan_check.check(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        self.plan_check.applied(plan, result)
        return super().apply(plan, result, now_s=now_s)


@pytest.mark.parametrize("script", DraftScript)
@pytest.mark.parametrize("kind", ["plain", "states", "pressure"])
def test_random_traffic_has_the_tokens_that_it_has_without_drafts(script: DraftScript, kind: str) -> None:
    """3,000 requests over all cases; the driver compares every token and every KV entry that is read."""
    num_requests, seed, preemptions, drafts = 0, 100, 0, 0
    while num_requests < 250:
        seed += 1
        rng = random.Random(seed)
        driver = _random_driver(script, kind, rng)
        if kind == "pressure":
            _submit_long_outputs(driver, rng)
        drive_at_random(driver, rng)
        check_serves_on(driver)
        num_requests += len(driver.accounts)
        stats = driver.stats()
        preemptions += stats.preemptions
        drafts += stats.spec_decode_num_drafts
        if script is DraftScript.WRONG:
            assert stats.spec_decode_num_accepted_tokens == 0
    assert drafts > 500
    assert preemptions > (50 if kind == "pressure" else 0)


def _random_driver(script: DraftScript, kind: str, rng: random.Random) -> SchedulerDriver:
    config = msgspec.structs.replace(random_config(rng), max_drafts=rng.choice((1, 2, 4, 7)))
    if kind == "states":
        config = msgspec.structs.replace(config, prefix_cache=False, num_snapshots=rng.choice((1, 3, 8)))
    if kind == "pressure":
        blocks_of_one = -(-config.max_model_tokens // config.block_size_tokens)
        config = msgspec.structs.replace(
            config, num_blocks=blocks_of_one + rng.randrange(3), max_num_seqs=5, max_step_tokens=rng.choice((5, 9, 40))
        )
    return SchedulerDriver(
        PlanChecked,
        config,
        policy=Priority(QueuePolicyConfig()),
        max_in_flight=rng.choice((1, 2, 2)),
        runs_at=rng.choice(list(RunsAt)),
        drafts=script,
    )


def _submit_long_outputs(driver: SchedulerDriver, rng: random.Random) -> None:
    """Requests that each could fill the pool; ids are far from those of the random ones."""
    for index in range(5):
        prompt = (index, rng.randrange(NUM_TOKEN_IDS))
        driver.submit(kit_request(1000 + index, prompt=prompt, max_tokens=driver.config.max_model_tokens))


# --- the kit catches a broken one -----------------------------------------------------------------------


class NeverLowersTheBound(TokenBudgetScheduler):
    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> Any:
        rows = list(self._in_flight[0].rows)
        marks = [(sequence.computed_tokens, sequence.target_tokens) for sequence in rows]
        events = super().apply(plan, result, now_s=now_s)
        for sequence, (computed_tokens, target_tokens) in zip(rows, marks, strict=True):
            sequence.computed_tokens, sequence.target_tokens = computed_tokens, target_tokens
        return events


class SealsUpToTheBound(TokenBudgetScheduler):
    """Takes the planned end of a row for what is computed, and so shares the KV of rejected drafts."""

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> Any:
        sealing = list(zip(self._in_flight[0].rows, self._in_flight[0].ends, strict=True))
        for sequence, end in sealing:
            sequence.kv = _SealsMore(sequence.kv, end)
        events = super().apply(plan, result, now_s=now_s)
        for sequence, _ in sealing:
            sequence.kv = sequence.kv.real
        return events


class _SealsMore:
    def __init__(self, real: Any, end: int) -> None:
        self.real = real
        self._end = end

    def seal(self, num_computed_tokens: int) -> Any:
        return self.real.seal(max(num_computed_tokens, self._end))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class PlansMoreDraftsThanItKnows(TokenBudgetScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is None or not plan.draft_counts.any():
            return plan
        more = ((plan.draft_counts > 0) & (plan.draft_counts < self._config.max_drafts)).astype(np.int32)
        more *= plan.num_tokens + more.sum() <= self._config.max_step_tokens
        fields = {name: getattr(plan, name) for name in StepPlan.__slots__}
        fields.update(counts=plan.counts + more, max_new=plan.max_new + more, draft_counts=plan.draft_counts + more)
        return StepPlan(**fields)


class KeepsDraftsOfAGrammarOnTheDevice(TokenBudgetScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        for sequence in self._queue.running:
            sequence.is_masked = False
        return super().plan(now_s=now_s)


MUTANTS = {
    KeepsDraftsOfAGrammarOnTheDevice: "have a grammar and",
    NeverLowersTheBound: "its last row ended at|wedged|no id of that position",
    PlansMoreDraftsThanItKnows: "its last row ended at|have room for",
    SealsUpToTheBound: "holds the KV of another prefix",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_kit_refuses_a_scheduler_whose_drafts_are_wrong(mutant: type[TokenBudgetScheduler]) -> None:
    def check_all() -> None:
        for check in DRAFT_CHECKS:
            check(mutant)

    with pytest.raises(ConformanceError, match=MUTANTS[mutant]):
        check_all()
