"""Slots and KV blocks are divided between tenants: one alone may have all, and gives way when another comes."""

from collections import Counter
from typing import Any

import pytest

from openinfer_core import RequestId
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig
from openinfer_engine.scheduler.row_shares import LEAST_PROGRESS_TOKENS

A_WAIT = 40  # steps: what a newcomer waits, at most; requests of the flood take longer


def fair(**weights: float) -> FairShare:
    return FairShare(QueuePolicyConfig(tenant_weights=weights))


def flood(driver: Any, make_request: Any, *, num: int, prompt_tokens: int, max_tokens: int, first_id: int = 0) -> None:
    for index in range(first_id, first_id + num):
        prompt = (1 + index % 250, *((7 * index + place) % 250 for place in range(prompt_tokens - 1)))
        driver.submit(make_request(index, prompt, tenant="a", max_tokens=max_tokens, cache_salt="a"))


def steps_until_running(driver: Any, request_id: int, *, most: int) -> int:
    for step in range(most):
        if request_id in driver.running_ids:
            return step
        driver.step()
    pytest.fail(f"request {request_id} does not run after {most} steps")


def rows_of(driver: Any) -> Counter[str]:
    return Counter(driver.accounts[request_id].request.tenant for request_id in driver.running_ids)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("choices", [1, 16])
def test_a_newcomer_gets_slots_of_one_that_has_them_all(
    make_driver: Any, make_request: Any, max_in_flight: int, choices: int
) -> None:
    driver = make_driver(
        max_in_flight=max_in_flight, policy=fair(), max_num_seqs=8, max_model_tokens=128, num_blocks=256
    )
    for index in range(10):
        driver.submit(make_request(index, (index + 1,) * 8, tenant="a", max_tokens=80, choice=index % choices))
    while len(driver.running_ids) < 8:
        driver.step()
    for index in range(100, 105):
        driver.submit(make_request(index, (index,) * 8, tenant="b", max_tokens=50))
    for index in range(100, 104):
        steps_until_running(driver, index, most=A_WAIT)
    assert rows_of(driver) == {"a": 4, "b": 4}
    preemptions = driver.scheduler.stats().share_preemptions
    assert preemptions == 4
    for _ in range(20):  # each has its share now, and none gives way to the other
        driver.step()
    assert driver.scheduler.stats().preemptions == preemptions
    driver.run()


def test_shares_are_by_weight(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(policy=fair(b=3.0), max_num_seqs=8, max_model_tokens=128, num_blocks=256)
    flood(driver, make_request, num=9, prompt_tokens=8, max_tokens=110)
    while len(driver.running_ids) < 8:
        driver.step()
    for index in range(100, 108):
        driver.submit(make_request(index, (index,) * 8, tenant="b", max_tokens=50))
    for _ in range(4 * A_WAIT):
        driver.step()
        if rows_of(driver) == {"a": 2, "b": 6}:
            break
    assert rows_of(driver) == {"a": 2, "b": 6}
    driver.run()


def test_one_tenant_alone_is_never_held_back(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(policy=fair(), max_num_seqs=8, max_model_tokens=128, num_blocks=256)
    flood(driver, make_request, num=20, prompt_tokens=8, max_tokens=20)
    driver.run()
    assert driver.scheduler.stats().share_preemptions == 0
    assert driver.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_newcomer_gets_blocks_of_one_that_has_the_pool(
    make_driver: Any, make_request: Any, max_in_flight: int
) -> None:
    driver = make_driver(
        max_in_flight=max_in_flight,
        policy=fair(),
        max_num_seqs=16,
        max_step_tokens=64,
        max_model_tokens=128,
        num_blocks=64,
    )
    flood(driver, make_request, num=12, prompt_tokens=20, max_tokens=100)
    for _ in range(40):
        driver.step()
    driver.submit(make_request(100, (250,) * 80, tenant="b", max_tokens=8))  # 20 blocks of 64
    steps_until_running(driver, 100, most=A_WAIT)
    assert driver.scheduler.stats().share_preemptions > 0
    driver.run()


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(("num_rows", "prompt_tokens"), [(16, 20), (16, 80), (2, 120)])
def test_a_flood_leaves_another_tenant_its_prefix(
    make_driver: Any, make_request: Any, max_in_flight: int, num_rows: int, prompt_tokens: int
) -> None:
    driver = make_driver(
        max_in_flight=max_in_flight,
        policy=fair(),
        max_num_seqs=num_rows,
        max_step_tokens=64,
        max_model_tokens=128,
        num_blocks=64,
    )
    chat = tuple(range(1, 97))  # 24 blocks of 64, below half
    driver.submit(make_request(1000, chat, tenant="b", max_tokens=1, cache_salt="b"))
    driver.run()
    for turn in range(1, 6):
        flood(driver, make_request, num=6, prompt_tokens=prompt_tokens, max_tokens=6, first_id=100 * turn)
        for _ in range(15):
            driver.step()
        before = driver.scheduler.stats().cached_tokens
        driver.submit(make_request(1000 + turn, (*chat, turn), tenant="b", max_tokens=4, cache_salt="b"))
        steps_until_running(driver, 1000 + turn, most=A_WAIT)
        assert driver.scheduler.stats().cached_tokens - before >= 96
    driver.run()


def test_without_a_policy_that_shares_the_order_of_keys_is_kept(make_driver: Any, make_request: Any) -> None:
    policy = FirstComeFirstServed(QueuePolicyConfig())
    driver = make_driver(policy=policy, max_num_seqs=2, max_model_tokens=64, num_blocks=64)
    flood(driver, make_request, num=4, prompt_tokens=8, max_tokens=LEAST_PROGRESS_TOKENS + 30)
    driver.submit(make_request(100, (9,) * 8, tenant="b", max_tokens=4))
    for _ in range(LEAST_PROGRESS_TOKENS + 20):
        driver.step()
        assert 100 not in driver.running_ids
    driver.run()
    assert driver.scheduler.stats().share_preemptions == 0


def test_choices_of_one_request_weigh_as_one_among_a_tenants(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(policy=fair(), max_num_seqs=1, max_model_tokens=64, num_blocks=64)
    driver.submit(make_request(1, (1,) * 8, tenant="a"))
    for choice in range(4):
        driver.submit(make_request(10 + choice, (2,) * 8, tenant="a", choice=choice))
    for index in range(3):
        driver.submit(make_request(20 + index, (3 + index,) * 8, tenant="a"))
    order: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        order += [start.request.request_id for start in plan.started] if plan else []
    driver.run()
    assert order == [1, 10, 20, 11, 21, 12, 22, 13]


def test_what_a_tenant_keeps_idle_is_room_for_what_it_held_lately(make_driver: Any, make_request: Any) -> None:
    """Both are left to it, and one of them: else nothing of a small pool is left for the tenant that asks."""
    driver = make_driver(policy=fair(), max_num_seqs=8, max_step_tokens=256, max_model_tokens=256, num_blocks=72)
    driver.submit(make_request(1, tuple(range(80)), tenant="a", max_tokens=2))  # 21 blocks, 20 of them kept
    driver.run()
    driver.submit(make_request(10, (102,) * 60, tenant="b", max_tokens=2))  # 15 of b's own, which may go
    driver.run()
    driver.submit(make_request(2, (100,) * 80, tenant="b", max_tokens=100))
    driver.step()
    driver.submit(make_request(3, (101,) * 80, tenant="b", max_tokens=2))  # beyond the half that is b's
    assert steps_until_running(driver, 3, most=4) <= 1
    assert driver.scheduler.stats().protected_blocks == 0  # none waits
    driver.submit(make_request(4, tuple(range(80)), tenant="a", max_tokens=2))
    driver.run()
    assert driver.accounts[RequestId(4)].scheduled.cached_tokens >= 76
