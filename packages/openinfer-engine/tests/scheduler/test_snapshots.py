"""Recurrent states: a prefix is shared where a copy of the states is kept, and nowhere else.

The driver's device has a state in every slot, and notices a row that goes on from another one than its prefix's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from openinfer_core import GenerateRequest
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StateCopy, StepPlan
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_engine.scheduler import TokenBudgetScheduler

PROMPT = tuple(range(18))
STATES = {"prefix_cache": False, "num_snapshots": 6}


@pytest.fixture
def driver(make_driver: Any) -> Any:
    return make_driver(**STATES)


def cached(driver: Any, request: Any) -> int:
    driver.submit(request)
    driver.run()
    return driver.accounts[request.request_id].scheduled.cached_tokens


def test_second_request_begins_where_the_states_of_the_first_prompt_are_kept(driver: Any, make_request: Any) -> None:
    assert cached(driver, make_request(0, PROMPT)) == 0
    assert cached(driver, make_request(1, PROMPT)) == 16
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.state_snapshots) == (20, 16, 1)


def test_row_ends_where_states_are_kept_and_copies_are_planned_around_it(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**STATES, max_step_tokens=32)
    driver.submit(make_request(0, PROMPT))
    first = driver.step()
    assert (first.starts.tolist(), first.counts.tolist()) == ([0], [16])
    assert first.state_snapshots == (StateCopy(source=0, target=4),)
    second = driver.step()
    assert (second.starts.tolist(), second.counts.tolist(), second.state_snapshots) == ([16], [2], ())
    driver.run()
    driver.submit(make_request(1, PROMPT))
    third = driver.step()
    assert third.state_restores == (StateCopy(source=4, target=0),)
    assert third.starts.tolist() == [16]
    driver.run()


def test_third_prompt_begins_where_the_second_left_the_first(driver: Any, make_request: Any) -> None:
    """Only then is it known that prompts part there."""
    other, third = (*PROMPT[:10], *range(40, 50)), (*PROMPT[:10], *range(60, 64))
    assert cached(driver, make_request(0, PROMPT)) == 0
    assert cached(driver, make_request(1, other)) == 0
    assert cached(driver, make_request(2, third)) == 8
    assert cached(driver, make_request(3, other)) == 16


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"cache_salt": None}, {"lora": "x", "cache_salt": "a"}])
def test_other_salt_or_adapter_finds_nothing(driver: Any, make_request: Any, other: dict[str, str]) -> None:
    cached(driver, make_request(0, PROMPT, cache_salt="a"))
    assert cached(driver, make_request(1, PROMPT, **other)) == 0
    assert cached(driver, make_request(2, PROMPT, cache_salt="a")) == 16


def test_copies_are_evicted_oldest_first_within_their_number(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(prefix_cache=False, num_snapshots=2)
    prompts = [tuple(range(begin, begin + 9)) for begin in (0, 20, 40)]
    for index, prompt in enumerate(prompts):
        assert cached(driver, make_request(index, prompt)) == 0
    stats = driver.scheduler.stats()
    assert (stats.state_snapshots, stats.evicted_state_snapshots) == (2, 1)
    assert cached(driver, make_request(3, prompts[2])) == 8
    assert cached(driver, make_request(4, prompts[0])) == 0


def test_states_of_a_row_that_failed_are_not_kept(driver: Any, make_request: Any) -> None:
    driver.submit(make_request(0, PROMPT[:16], max_tokens=4))
    driver.device.fail_next_row(0)
    driver.run()
    assert driver.scheduler.stats().state_snapshots == 0


def test_states_of_a_request_that_was_aborted_are_not_kept(driver: Any, make_request: Any) -> None:
    driver.submit(make_request(0, PROMPT))
    driver.plan()
    driver.abort(0)
    driver.run()
    assert driver.scheduler.stats().state_snapshots == 0
    assert cached(driver, make_request(1, PROMPT)) == 0


def test_kv_without_states_is_computed_again(make_driver: Any, make_request: Any) -> None:
    """The copy was evicted, the blocks were not."""
    driver = make_driver(prefix_cache=False, num_snapshots=1)
    cached(driver, make_request(0, PROMPT))
    cached(driver, make_request(1, tuple(range(30, 48))))
    assert cached(driver, make_request(2, PROMPT)) == 0
    assert driver.scheduler.stats().prompt_tokens == 3 * 18


def test_states_without_kv_are_of_no_use(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**STATES, num_blocks=16)
    cached(driver, make_request(0, PROMPT))
    cached(driver, make_request(1, tuple(range(100, 150)), max_tokens=14))  # takes every block
    assert driver.scheduler.stats().state_snapshots == 2
    assert cached(driver, make_request(2, PROMPT)) == 0


def serve_all(driver: SchedulerDriver, requests: list[GenerateRequest]) -> None:
    for request in requests:
        cached(driver, request)


def forgets_restores(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, state_restores=())


def copies_before_the_boundary(plan: StepPlan) -> StepPlan:
    """Takes the copy of a row that ends one token too early for it."""
    copies = tuple(StateCopy(source=slot, target=4) for slot in plan.slots.tolist() if plan.step == 0)
    return dataclasses.replace(plan, state_snapshots=copies)


def copies_over_running_states(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, state_snapshots=tuple(StateCopy(source=0, target=1) for _ in plan.state_snapshots))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (forgets_restores, "holds the states of another prefix"),
        (copies_before_the_boundary, "holds the states of another prefix"),
        (copies_over_running_states, "slot 1 is copied to; it is not one for copies"),
    ],
)
def test_device_of_the_kit_notices_wrong_copies(
    make_request: Any, spoil: Callable[[StepPlan], StepPlan], message: str
) -> None:
    class Spoilt(TokenBudgetScheduler):
        def plan(self, *, now_s: float) -> StepPlan | None:
            plan = super().plan(now_s=now_s)
            return None if plan is None else spoil(plan)

    config = SchedulerConfig(
        num_blocks=64, block_size_tokens=4, max_num_seqs=4, max_step_tokens=9, max_model_tokens=64, **STATES
    )
    policy = FirstComeFirstServed(QueuePolicyConfig())
    driver = SchedulerDriver(Spoilt, config, policy=policy, max_in_flight=1)
    requests = [make_request(index, PROMPT) for index in range(2)]
    with pytest.raises(ConformanceError, match=message):
        serve_all(driver, requests)
