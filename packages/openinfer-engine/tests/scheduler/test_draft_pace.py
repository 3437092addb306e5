"""When drafts are not worth their time, in virtual time: never slower than without, and as fast as is published."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams, Tokens
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_core.testing.fake_drafter import DraftScript, FakeDrafter
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.drafts.pace import FIRST_ALLOWANCE, DraftPace
from openinfer_engine.scheduler.drafts.record import MOST_RETRY_TOKENS
from openinfer_engine.scheduler.drafts.times import PLAIN_STEPS
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.step_builder import StepInFlight
from openinfer_kv_cache import KvCache, KvCacheOptions

Cost = Callable[[int], float]  # tokens of a step -> ms
CONFIG = SchedulerConfig(
    num_blocks=4096, block_size_tokens=16, max_num_seqs=64, max_step_tokens=2048, max_model_tokens=1024
)


def memory_bound(num_tokens: int) -> float:
    return 5.0 + 0.002 * num_tokens


def arithmetic_bound(num_tokens: int) -> float:
    return 0.1 * num_tokens


def roofline(num_tokens: int) -> float:
    """Weights are read in 4 ms; from 32 tokens on arithmetic takes longer."""
    return max(4.0, 0.125 * num_tokens)


def launch_bound(num_tokens: int) -> float:
    """A step with further tokens takes a third longer, however many they are."""
    return 3.0 if num_tokens <= 8 else 4.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run took and yielded."""

    ms: float
    steps: int
    answers: dict[int, list[int]]


def run(
    cost: Cost, *, num_rows: int, acceptance: float, max_drafts: int, adapts: bool = True, num_tokens: int = 400
) -> Ran:
    """Requests of one batch through the scheduler, one step ahead, on a device whose steps take what `cost` says."""
    config = msgspec.structs.replace(CONFIG, max_drafts=max_drafts, adapts_drafts=adapts)
    scheduler = TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))
    drafter = FakeDrafter(DraftScript.RIGHT, max_drafts=max_drafts, acceptance=acceptance) if max_drafts else None
    device = FakeDevice(config, drafter=drafter)
    now_s, free_s, num_applied, steps = 0.0, 0.0, 0, 0
    for index in range(num_rows):
        sampling = SamplingParams(max_tokens=num_tokens, seed=index)
        request = GenerateRequest(request_id=RequestId(index), prompt_token_ids=(1, 2, index % 50), sampling=sampling)
        assert scheduler.add(request, now_s=now_s) == []
    answers: dict[int, list[int]] = {index: [] for index in range(num_rows)}
    before: tuple[StepPlan, Any, float] | None = None
    while True:
        plan, launched = scheduler.plan(now_s=now_s), None
        if plan is not None:
            free_s = max(free_s, now_s) + cost(plan.num_tokens) / 1e3
            launched = plan, device.run(plan, num_applied=num_applied), free_s
            steps += 1
        if before is not None:
            now_s = max(now_s, before[2])
            for event in scheduler.apply(before[0], before[1], now_s=now_s):
                if isinstance(event, Tokens):
                    answers[event.request_id] += event.token_ids
            num_applied += 1
        elif launched is None:
            return Ran(now_s * 1e3, steps, answers)
        before = launched


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 300), (16, 100)])
@pytest.mark.parametrize("cost", [memory_bound, arithmetic_bound, roofline, launch_bound])
def test_speculation_is_never_slower(cost: Cost, num_rows: int, num_tokens: int) -> None:
    size = {"num_rows": num_rows, "num_tokens": num_tokens}
    off = run(cost, acceptance=0.0, max_drafts=0, adapts=False, **size)
    for acceptance in (0.0, 0.3, 0.7):
        on = run(cost, acceptance=acceptance, max_drafts=4, **size)
        assert on.answers == off.answers
        assert off.ms / on.ms >= 0.98, acceptance


def test_without_the_policy_it_is_much_slower_where_steps_are_bound_by_arithmetic() -> None:
    off = run(arithmetic_bound, num_rows=16, acceptance=0.0, max_drafts=0, adapts=False, num_tokens=60)
    naive = run(arithmetic_bound, num_rows=16, acceptance=0.1, max_drafts=4, adapts=False, num_tokens=60)
    assert off.ms / naive.ms < 0.5


@pytest.mark.parametrize(
    ("max_drafts", "tokens_a_round", "costs", "at_least"),
    [
        # What is published (specs/speculative.md, section 8), and what a step with drafts may cost for it.
        (15, 3.74, 1.35, 2.5),  # Qwen3-8B, DFlash
        (2, 1.99, 1.15, 1.6),  # Qwen3-8B, EAGLE-3
        (2, 2.22, 1.25, 1.6),  # Qwen3.6-27B, MTP
    ],
)
def test_gains_are_those_published_at_the_published_acceptance(
    max_drafts: int, tokens_a_round: float, costs: float, at_least: float
) -> None:
    def cost(num_tokens: int) -> float:
        return 4.5 if num_tokens == 1 else 4.5 * costs

    acceptance = _acceptance(tokens_a_round, max_drafts)
    off = run(cost, num_rows=1, acceptance=0.0, max_drafts=0, adapts=False, num_tokens=900)
    on = run(cost, num_rows=1, acceptance=acceptance, max_drafts=max_drafts, num_tokens=900)
    assert on.answers == off.answers
    assert off.ms / on.ms >= at_least


def _acceptance(tokens_a_round: float, max_drafts: int) -> float:
    """The probability of each draft with which a round yields so many tokens in the mean."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        mean = math.fsum(middle**place for place in range(max_drafts + 1))
        low, high = (middle, high) if mean < tokens_a_round else (low, middle)
    return high


def test_a_row_that_drafts_in_vain_stops_and_tries_again() -> None:
    pace, drafted, sequence = DraftPace(None), list[int](), make_sequence()
    now_s = 0.0
    for step in range(1000):  # a step takes a second, and a tenth longer for each draft
        budget = pace.begin_step([sequence], max_drafts=4, budget_tokens=100)
        num_drafts = pace.most_drafts(0, sequence, min(budget, 4)) if budget else 0
        now_s += 1.0 + num_drafts / 10
        pace.note_step(decode_step(step, num_drafts=num_drafts), num_tokens=1, applied_s=now_s)
        if num_drafts:
            pace.note_row(sequence, planned=num_drafts, accepted=0)
            drafted.append(sequence.known_tokens)
        sequence.known_tokens += 1
    assert drafted[0] == sequence.prompt_tokens + PLAIN_STEPS
    assert [after - before for before, after in itertools.pairwise(drafted)][-2:] == [MOST_RETRY_TOKENS] * 2
    assert now_s < 1020.0


def test_drafts_next_to_prompts_are_paid_for() -> None:
    """After a few steps without, every step has a chunk of a prompt, and takes long: that is no draft's cost."""
    pace, sequence, drafted, now_s = DraftPace(None), make_sequence(), 0, 0.0
    for step in range(1000):
        budget = pace.begin_step([sequence], max_drafts=4, budget_tokens=100)
        num_drafts = pace.most_drafts(0, sequence, min(budget, 4)) if budget else 0
        chunk = 64 if step > 20 else 0
        now_s += (3.0 if chunk else 1.0) + num_drafts / 10
        record = decode_step(step, num_drafts=num_drafts, chunk=chunk)
        assert (record.has_chunks, record.decode_rows) == (bool(chunk), 1)
        pace.note_step(record, num_tokens=1, applied_s=now_s)
        if num_drafts:
            pace.note_row(sequence, planned=num_drafts, accepted=0)
            drafted += num_drafts
        sequence.known_tokens += 1
    # A draft costs a tenth of a step: a hundredth of a thousand steps, and what there is at the beginning.
    assert 20 < drafted <= 100 + 10 * FIRST_ALLOWANCE


def test_a_step_with_drafts_keeps_to_max_itl_ms() -> None:
    paces = [DraftPace(each) for each in (1100, None)]
    for pace in paces:
        assert pace.begin_step([make_sequence()], max_drafts=4, budget_tokens=100) == 0  # without drafts first
        for step, num_drafts in enumerate((0, 0, 0, 0, 1, 3)):
            took_s = 1.0 if num_drafts < 3 else 1.2
            pace.note_step(decode_step(step, num_drafts=num_drafts), num_tokens=1 + num_drafts, applied_s=step + took_s)
    budgets = [pace.begin_step([make_sequence()], max_drafts=3, budget_tokens=100) for pace in paces]
    assert budgets == [1, 3]


def decode_step(step: int, *, num_drafts: int, chunk: int = 0) -> StepInFlight:
    """A step of one row, and of a chunk of a prompt, planned when the one before was applied."""
    of_prompt = [chunk] if chunk else []
    return StepInFlight(
        step=step,
        planned_s=0.0,
        rows=[make_sequence() for _ in range(1 + len(of_prompt))],
        starts=[10, *(0 for _ in of_prompt)],
        ends=[11 + num_drafts, *of_prompt],
        max_new=[1 + num_drafts, *(0 for _ in of_prompt)],
        faults={},
        decode_tokens=1 + num_drafts,
    )


def make_sequence() -> Sequence:
    request = GenerateRequest(request_id=RequestId(1), prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=500))
    cache = KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=16, layout_digest=""), digest_key=b"k" * 16)
    return Sequence(request, cache.sequence_of(request), seed=1, arrived_s=0.0, max_model_tokens=600)
