"""Prompts with a common beginning compute it once, and stop no others meanwhile."""

from typing import Any

import pytest

from openinfer_core.queue_policies import FairShare, FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig
from openinfer_engine.scheduler.followers import MAX_FOLLOWERS

COMMON = tuple(range(1, 97))
OTHER = tuple(range(200, 208))
STATES = {"prefix_cache": False, "num_snapshots": 8}
WIDE = {"max_model_tokens": 256, "num_blocks": 256, "max_num_seqs": 8}
KINDS = pytest.mark.parametrize("kind", [{}, STATES], ids=["dense", "hybrid"])


def agent(make_request: Any, number: int, **fields: Any) -> Any:
    """A sub-agent: what all of them begin with, and a task of its own."""
    return make_request(number, (*COMMON, 100 + number, 120 + number, 140 + number), **fields)


@KINDS
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_common_prefix_is_computed_once(make_driver: Any, make_request: Any, kind: Any, max_in_flight: int) -> None:
    driver = make_driver(**WIDE, **kind, max_in_flight=max_in_flight)
    for number in range(5):
        driver.submit(agent(make_request, number))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.prompt_tokens <= len(COMMON) + 5 * 7  # each its own three, and what does not fill a block
    assert stats.cached_tokens == 4 * len(COMMON)
    assert all(len(driver.accounts[number].token_ids) == 8 for number in range(5))


@KINDS
def test_others_pass_while_a_prefix_is_computed(make_driver: Any, make_request: Any, kind: Any) -> None:
    driver = make_driver(**WIDE, **kind, max_step_tokens=128)
    for number in range(3):
        driver.submit(agent(make_request, number))
    driver.submit(make_request(9, OTHER))
    assert len(driver.step().slots) == 2  # a row of the leader, and one of the other
    assert driver.scheduler.stats().waiting == 2
    driver.run()
    assert driver.scheduler.stats().prompt_tokens <= len(COMMON) + 3 * 7 + len(OTHER)


@KINDS
def test_another_tenant_passes_while_a_long_prefix_is_computed(make_driver: Any, make_request: Any, kind: Any) -> None:
    driver = make_driver(**WIDE, **kind, policy=FairShare(QueuePolicyConfig()), max_step_tokens=16)
    for number in range(3):
        driver.submit(agent(make_request, number, tenant="a"))
    driver.step()
    driver.submit(make_request(9, OTHER, tenant="b"))
    assert len(driver.step().slots) == 2  # half of the step's tokens are another tenant's
    assert driver.accounts[9].scheduled is not None
    driver.run()


@KINDS
def test_followers_come_before_what_came_after_them(make_driver: Any, make_request: Any, kind: Any) -> None:
    driver = make_driver(**WIDE | {"max_num_seqs": 2}, **kind, max_step_tokens=16)
    driver.submit(agent(make_request, 0, max_tokens=1))
    driver.submit(agent(make_request, 1))
    flood = range(10, 16)  # would take every slot for ever
    for number in flood:
        driver.submit(make_request(number, tuple(range(300 + 10 * number, 308 + 10 * number)), max_tokens=6))
    for _ in range(100):
        if driver.accounts[1].scheduled is not None:
            break
        driver.step()
    assert sum(driver.accounts[number].scheduled is not None for number in flood) <= 2
    driver.run()


@KINDS
def test_followers_of_an_aborted_leader_go_on_without_it(make_driver: Any, make_request: Any, kind: Any) -> None:
    driver = make_driver(**WIDE, **kind, max_step_tokens=16)
    for number in range(3):
        driver.submit(agent(make_request, number))
    driver.step()
    driver.step()
    driver.abort(0)
    driver.run()
    assert [len(driver.accounts[number].token_ids) for number in (1, 2)] == [8, 8]
    assert driver.scheduler.stats().cached_tokens >= len(COMMON)  # the third found what the second computed


@KINDS
def test_follower_that_is_aborted_leaves_nothing(make_driver: Any, make_request: Any, kind: Any) -> None:
    policy = FairShare(QueuePolicyConfig())
    driver = make_driver(**WIDE, **kind, policy=policy, max_step_tokens=16)
    for number in range(3):
        driver.submit(agent(make_request, number))
    driver.step()
    driver.abort(1)
    driver.step()
    driver.abort(2)
    driver.run()
    assert driver.scheduler.stats().waiting == 0
    assert not driver.scheduler.unfinished_ids


@KINDS
@pytest.mark.parametrize("policy", [FirstComeFirstServed, FairShare])
def test_followers_of_several_tenants_all_end(make_driver: Any, make_request: Any, kind: Any, policy: Any) -> None:
    made = policy(QueuePolicyConfig())
    driver = make_driver(**WIDE | {"num_blocks": 80, "max_num_seqs": 3}, **kind, policy=made, max_in_flight=2)
    for number in range(12):
        driver.submit(agent(make_request, number, tenant="ab"[number % 2], max_tokens=20))
    driver.run()
    assert all(len(driver.accounts[number].token_ids) == 20 for number in range(12))


def test_more_than_a_bound_wait_in_the_queue(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**WIDE, max_step_tokens=16)
    for number in range(MAX_FOLLOWERS + 5):
        driver.submit(agent(make_request, number, max_tokens=1))
    driver.submit(make_request(999, OTHER, max_tokens=1))
    driver.step()
    driver.step()
    assert not driver.accounts[999].token_ids  # waits as it did before
    driver.run()
    assert driver.accounts[999].token_ids


def test_short_common_prefix_of_states_is_computed_by_each(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**WIDE, **STATES, max_step_tokens=64)
    for number in range(2):
        driver.submit(make_request(number, (*range(1, 17), 50 + number, 60 + number)))
    driver.step()
    assert driver.scheduler.stats().waiting == 0
    driver.run()
