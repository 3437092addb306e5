"""What `add` refuses and says, what `apply` refuses, and what the gauges show."""

from typing import Any

import numpy as np
import pytest

from openinfer_core import Failed, FailureKind, Finished, FinishReason, Scheduled, Tokens
from openinfer_core.errors import ContractViolation
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepResult
from openinfer_engine.scheduler import TokenBudgetScheduler

SIZES: dict[str, Any] = {
    "num_blocks": 8,
    "block_size_tokens": 4,
    "max_num_seqs": 2,
    "max_step_tokens": 16,
    "max_model_tokens": 64,
}


def make_scheduler(**limits: Any) -> TokenBudgetScheduler:
    return TokenBudgetScheduler(SchedulerConfig(**{**SIZES, **limits}), FirstComeFirstServed(QueuePolicyConfig()))


def result(*token_ids: int, **fields: Any) -> StepResult:
    return StepResult.of_single_tokens(np.array(token_ids, np.int32), **fields)


def refusal(events: list[Any]) -> tuple[FailureKind, str]:
    (event,) = events
    assert isinstance(event, Failed)
    return event.kind, event.message


def test_prompt_as_long_as_the_context_is_refused_unless_it_is_only_scored(make_request: Any) -> None:
    scheduler = make_scheduler(max_model_tokens=8)
    kind, message = refusal(scheduler.add(make_request(0, (1,) * 8), now_s=0.0))
    assert (kind, message) == (
        FailureKind.INVALID,
        "the prompt has 8 tokens; a context of 8 has room for at most 7",
    )
    assert scheduler.add(make_request(1, (1,) * 8, max_tokens=0, prompt_logprobs=0), now_s=0.0) == []
    assert scheduler.add(make_request(2, (1,) * 7), now_s=0.0) == []


def test_request_larger_than_the_pool_is_refused_and_the_largest_that_fits_is_taken(make_request: Any) -> None:
    scheduler = make_scheduler()  # 32 tokens of KV
    kind, message = refusal(scheduler.add(make_request(0, (1,) * 10, max_tokens=24), now_s=0.0))
    assert kind is FailureKind.INVALID
    assert message == (
        "prompt and completion need KV memory for 33 tokens and this engine has it for 32; "
        "shorten the prompt or lower max_tokens"
    )
    assert scheduler.add(make_request(1, (1,) * 10, max_tokens=23), now_s=0.0) == []


@pytest.mark.parametrize("hook", ["key", "admitted"])
def test_policy_that_raises_is_named_in_the_answer(make_request: Any, hook: str) -> None:
    class LastOneWins(FirstComeFirstServed):
        pass

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    setattr(LastOneWins, hook, staticmethod(fail))
    scheduler = TokenBudgetScheduler(SchedulerConfig(**SIZES), LastOneWins(QueuePolicyConfig()))
    events = scheduler.add(make_request(0, (1,)), now_s=0.0)
    if hook == "admitted":
        plan = scheduler.plan(now_s=0.0)
        assert plan is not None
        events = scheduler.apply(plan, result(5), now_s=0.0)
    assert refusal(events) == (
        FailureKind.INTERNAL,
        f"the queue policy {__name__}:{LastOneWins.__qualname__} failed on this request",
    )


def test_full_queue_is_overloaded_until_it_drains(make_request: Any) -> None:
    scheduler = make_scheduler(max_waiting=1)
    assert scheduler.add(make_request(0, (1,)), now_s=0.0) == []
    kind, message = refusal(scheduler.add(make_request(1, (1,)), now_s=0.0))
    assert (kind, message) == (FailureKind.OVERLOADED, "the queue is full: 1 requests are waiting; try again later")
    scheduler.plan(now_s=0.0)
    assert scheduler.add(make_request(1, (1,)), now_s=0.0) == []
    assert scheduler.stats().failed_requests == 1


def test_id_in_use_is_a_contract_violation(make_request: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, (1,)), now_s=0.0)
    with pytest.raises(ContractViolation, match="request id 0 is in use"):
        scheduler.add(make_request(0, (1,)), now_s=0.0)


def test_events_tell_queueing_time_tokens_and_end(make_request: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(7, (1, 2, 3), max_tokens=2), now_s=10.0)
    plan = scheduler.plan(now_s=12.5)
    assert plan is not None
    assert scheduler.apply(plan, result(40), now_s=13.0) == [Scheduled(7, 0, 2.5), Tokens(7, (40,))]
    plan = scheduler.plan(now_s=13.0)
    assert plan is not None
    assert scheduler.apply(plan, result(41), now_s=14.0) == [
        Tokens(7, (41,)),
        Finished(7, FinishReason.LENGTH, prompt_tokens=3, completion_tokens=2, cached_tokens=0),
    ]


def test_stop_token_is_counted_and_not_delivered(make_request: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, (1, 2, 3), stop_token_ids=(9,)), now_s=0.0)
    plan = scheduler.plan(now_s=0.0)
    assert plan is not None
    events = scheduler.apply(plan, result(9), now_s=0.0)
    assert events[1:] == [Finished(0, FinishReason.STOP, 3, 1, 0, stop_token_id=9)]


def test_stop_token_before_min_tokens_is_a_token_like_any_other(make_request: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, (1, 2, 3), stop_token_ids=(9,), min_tokens=1), now_s=0.0)
    events: list[Any] = []
    for _ in range(2):
        plan = scheduler.plan(now_s=0.0)
        assert plan is not None
        events += scheduler.apply(plan, result(9), now_s=0.0)
    assert events[1:] == [Tokens(0, (9,)), Finished(0, FinishReason.STOP, 3, 2, 0, stop_token_id=9)]


def test_row_without_a_token_fails_its_request(make_request: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, (1, 2, 3)), now_s=0.0)
    scheduler.add(make_request(1, (1, 2, 3)), now_s=0.0)
    plan = scheduler.plan(now_s=0.0)
    assert plan is not None
    events = scheduler.apply(plan, result(-1, 5), now_s=0.0)
    assert [event for event in events if isinstance(event, Failed)] == [
        Failed(0, FailureKind.INTERNAL, "the step gave no token")
    ]
    assert len(scheduler.unfinished_ids) == 1


def test_apply_out_of_order_is_a_contract_violation(make_request: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, (1, 2, 3)), now_s=0.0)
    first, second = scheduler.plan(now_s=0.0), scheduler.plan(now_s=0.0)
    assert first is not None
    assert second is not None
    with pytest.raises(ContractViolation, match="step 1 was applied; the oldest step in flight is 0"):
        scheduler.apply(second, result(1), now_s=0.0)
    scheduler.apply(first, result(1), now_s=0.0)
    scheduler.apply(second, result(1), now_s=0.0)
    with pytest.raises(ContractViolation, match="the oldest step in flight is none"):
        scheduler.apply(second, result(1), now_s=0.0)


def test_result_of_another_size_is_a_contract_violation_and_changes_nothing(make_request: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, (1, 2, 3)), now_s=0.0)
    plan = scheduler.plan(now_s=0.0)
    assert plan is not None
    with pytest.raises(ContractViolation, match="step 0 has 1 rows; its result has 2"):
        scheduler.apply(plan, result(1, 2), now_s=0.0)
    assert len(scheduler.apply(plan, result(1), now_s=0.0)) == 2


def test_stats_count_what_happened(make_request: Any) -> None:
    scheduler = make_scheduler()
    for index in range(3):
        scheduler.add(make_request(index, (index,) * 5, max_tokens=2), now_s=0.0)
    plan = scheduler.plan(now_s=0.0)
    assert plan is not None
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_total) == (2, 1, 4, 8)
    assert stats.waiting_tokens == 5  # of the one that waits
    scheduler.apply(plan, result(1, 2), now_s=0.0)
    stats = scheduler.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (1, 10, 2)
