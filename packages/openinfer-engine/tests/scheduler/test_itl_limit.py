"""Prompt tokens next to decode rows, by what steps took; seconds are the test's."""

from typing import Any

import pytest

from openinfer_core import GenerateRequest, InvalidRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.itl_limit import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    LONE_MS,
    LONE_TOKENS,
    OTHERS_MS,
    ItlLimiter,
)
from openinfer_engine.scheduler.step_builder import StepInFlight

DECODE_MS = 4.0
TOKEN_MS = 0.02


def make_step(*, planned_s: float, decode_rows: int, prompt_tokens: int) -> StepInFlight:
    counts = [1] * decode_rows + [prompt_tokens] * (prompt_tokens > 0)
    fields: dict[str, Any] = {"step": 0, "rows": [None] * len(counts), "max_new": [1] * len(counts), "faults": {}}
    return StepInFlight(planned_s=planned_s, starts=[0] * len(counts), ends=counts, decode_tokens=decode_rows, **fields)


def teach(pace: ItlLimiter, *, steps: int = 40, token_ms: float = TOKEN_MS) -> None:
    now_s = 0.0
    for index in range(steps):
        tokens = 100 if index % 2 else 0
        took_s = (DECODE_MS + tokens * token_ms) * 1e-3
        pace.note(make_step(planned_s=now_s, decode_rows=8, prompt_tokens=tokens), applied_s=now_s + took_s)
        now_s += took_s


def test_without_a_limit_or_decode_rows_the_budget_is_whole() -> None:
    assert ItlLimiter(None).budget_tokens(2048, decode_rows=8) == 2048
    assert ItlLimiter(10).budget_tokens(2048, decode_rows=0) == 2048


def test_the_budget_fills_the_time_that_decode_rows_leave() -> None:
    pace = ItlLimiter(10)
    teach(pace)
    assert pace.budget_tokens(2048, decode_rows=8) == pytest.approx((10 - DECODE_MS) / TOKEN_MS, rel=0.05)
    assert pace.budget_tokens(100, decode_rows=8) == 100


def test_prompts_go_on_where_decode_rows_alone_take_too_long() -> None:
    pace = ItlLimiter(2)
    teach(pace)
    assert pace.budget_tokens(2048, decode_rows=8) == LEAST_TOKENS


def test_before_anything_was_timed_chunks_are_small() -> None:
    assert ItlLimiter(10).budget_tokens(2048, decode_rows=1) == FIRST_TOKENS


def test_costs_near_the_dearer_of_uneven_steps_are_expected() -> None:
    pace = ItlLimiter(10)
    for _ in range(8):
        teach(pace, steps=4)
        teach(pace, steps=4, token_ms=1.5 * TOKEN_MS)
    assert pace.budget_tokens(2048, decode_rows=8) < (10 - DECODE_MS) / (1.3 * TOKEN_MS)


def test_costs_follow_a_change_and_one_slow_step_hardly_counts() -> None:
    pace = ItlLimiter(10)
    teach(pace)
    before = pace.budget_tokens(2048, decode_rows=8)
    pace.note(make_step(planned_s=9.0, decode_rows=8, prompt_tokens=100), applied_s=9.0 + 5.0)
    assert pace.budget_tokens(2048, decode_rows=8) > before / 2
    teach(pace, token_ms=2 * TOKEN_MS, steps=80)
    assert pace.budget_tokens(2048, decode_rows=8) == pytest.approx(before / 2, rel=0.1)


def test_prompts_next_to_rows_of_others_have_so_many_milliseconds() -> None:
    pace = ItlLimiter(None)
    teach(pace)
    assert pace.budget_tokens(2048, decode_rows=8) == 2048
    assert pace.budget_tokens(2048, decode_rows=8, others_ms=10) == pytest.approx(10 / TOKEN_MS, rel=0.05)
    assert pace.budget_tokens(2048, decode_rows=0, others_ms=10) == pytest.approx(10 / TOKEN_MS, rel=0.05)
    assert pace.budget_tokens(2048, decode_rows=8, others_ms=-5) == LEAST_TOKENS
    limited = ItlLimiter(10)
    teach(limited)
    assert limited.budget_tokens(2048, decode_rows=8, others_ms=10) == limited.budget_tokens(2048, decode_rows=8)
    assert limited.budget_tokens(2048, decode_rows=0) == 2048


def test_steps_of_prompts_alone_are_no_longer_than_a_newcomer_may_wait() -> None:
    pace = ItlLimiter(None)
    for index in range(20):  # short ones say little of what a token costs in long ones
        step = make_step(planned_s=index, decode_rows=0, prompt_tokens=4)
        pace.note(step, applied_s=index + 0.01)
    assert pace.budget_tokens(4096, decode_rows=0) == 4096
    pace.note(make_step(planned_s=20, decode_rows=0, prompt_tokens=4096), applied_s=20 + 4096 * 0.3e-3)
    assert pace.budget_tokens(4096, decode_rows=0) == pytest.approx(LONE_MS / 0.3, rel=0.05)
    for begin_s in (30, 40, 50, 60):  # one that took long says little, and less with each one after
        pace.note(make_step(planned_s=begin_s, decode_rows=0, prompt_tokens=500), applied_s=begin_s + 0.01)
    assert pace.budget_tokens(4096, decode_rows=0) > 2500
    for begin_s in (100, 200, 300, 400, 500, 600, 700, 800):
        pace.note(make_step(planned_s=begin_s, decode_rows=0, prompt_tokens=500), applied_s=begin_s + 60)
    assert pace.budget_tokens(4096, decode_rows=0) == LONE_TOKENS


@pytest.mark.parametrize("knows_decode_rows", [True, False])
def test_what_a_step_takes_without_tokens_does_not_make_tokens_dearer(*, knows_decode_rows: bool) -> None:
    """Steps of two tenants' prompts: each is as short as the one before made it."""
    pace, now_s, step_ms, token_ms = ItlLimiter(None), 0.0, 6.5, 0.041
    steps = [(1, 0)] * 10 if knows_decode_rows else []
    steps += [(0, 8192)]

    def play(decode_rows: int, tokens: int) -> float:
        took_s = (step_ms + tokens * token_ms) * 1e-3
        step = make_step(planned_s=now_s, decode_rows=decode_rows, prompt_tokens=tokens)
        pace.note(step, applied_s=now_s + took_s)
        return now_s + took_s

    for decode_rows, tokens in steps:
        now_s = play(decode_rows, tokens)
    now_s = play(0, FIRST_TOKENS)
    budgets: list[int] = []
    for _ in range(300):
        budgets.append(pace.budget_tokens(8192, decode_rows=0, others_ms=OTHERS_MS))
        now_s = play(0, budgets[-1])
    assert min(budgets) > 0.9 * OTHERS_MS / token_ms
    assert max(budgets) < 1.1 * OTHERS_MS / token_ms


def test_two_steps_that_say_nothing_of_the_time_without_tokens_change_nothing() -> None:
    pace, now_s = ItlLimiter(None), 0.0
    for tokens, took_ms in ((100, 10.0), (150, 10.5), (400, 9.0)):
        step = make_step(planned_s=now_s, decode_rows=0, prompt_tokens=tokens)
        now_s += took_ms * 1e-3
        pace.note(step, applied_s=now_s)
    assert pace.budget_tokens(8192, decode_rows=0, others_ms=OTHERS_MS) < OTHERS_MS / (0.9 * 10.0 / 150)


def test_flood_of_prompts_leaves_another_tenants_rows_their_pace() -> None:
    config = SchedulerConfig(
        num_blocks=4096, block_size_tokens=4, max_num_seqs=64, max_step_tokens=2048, max_model_tokens=4096
    )
    for flood, most_ms in (("", 2 * DECODE_MS + TOKEN_MS * 2048), ("flood", 1.2 * (DECODE_MS + OTHERS_MS))):
        scheduler = TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))
        device, now_s, took_ms = FakeDevice(config), 0.0, list[float]()
        scheduler.add(make_request(0, prompt_tokens=8, max_tokens=400), now_s=now_s)
        for step in range(100):
            if step % 10 == 9:
                scheduler.add(make_request(100 + step, prompt_tokens=2000, max_tokens=1, tenant=flood), now_s=now_s)
            plan = scheduler.plan(now_s=now_s)
            assert plan is not None
            step_ms = DECODE_MS + TOKEN_MS * int(plan.num_host_tokens.sum())
            took_ms.append(step_ms)
            now_s += step_ms * 1e-3
            scheduler.apply(plan, device.run(plan), now_s=now_s)
        assert max(took_ms[20:]) <= most_ms
        assert (max(took_ms[20:]) > DECODE_MS + TOKEN_MS * 1900) == (not flood)  # one tenant has whole steps
        assert scheduler.stats().prompt_tokens > 3 * 2000


def test_mixed_steps_of_the_scheduler_stay_within_the_limit() -> None:
    config = SchedulerConfig(
        num_blocks=4096, block_size_tokens=4, max_num_seqs=8, max_step_tokens=2048, max_model_tokens=4096, max_itl_ms=8
    )
    scheduler = TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))
    device, now_s, took_ms = FakeDevice(config), 0.0, list[float]()
    for index in range(4):
        scheduler.add(make_request(index, prompt_tokens=8, max_tokens=400), now_s=now_s)
    for step in range(120):
        if step % 20 == 10:
            scheduler.add(make_request(100 + step, prompt_tokens=1500, max_tokens=1), now_s=now_s)
        plan = scheduler.plan(now_s=now_s)
        assert plan is not None
        prompt_tokens = int(plan.num_host_tokens.sum())
        step_ms = DECODE_MS + TOKEN_MS * prompt_tokens
        if prompt_tokens and step > 40:
            took_ms.append(step_ms)
        now_s += step_ms * 1e-3
        scheduler.apply(plan, device.run(plan), now_s=now_s)
    assert took_ms
    assert max(took_ms) < 8.5
    assert scheduler.stats().prompt_tokens > 5 * 1500


def test_a_limit_below_a_millisecond_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_itl_ms"):
        SchedulerConfig(
            num_blocks=4, block_size_tokens=4, max_num_seqs=1, max_step_tokens=4, max_model_tokens=16, max_itl_ms=0
        )


def make_request(request_id: int, *, prompt_tokens: int, max_tokens: int, tenant: str = "") -> GenerateRequest:
    prompt = tuple((request_id + i) % 64 for i in range(prompt_tokens))
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=sampling, tenant=tenant)
