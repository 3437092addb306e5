"""Newcomers of tenants that hold less come before what was preempted or finds no room, which goes on all the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from openinfer_core import RequestId
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig
from openinfer_engine.scheduler.row_shares import RowShares

LIMITS = {"max_num_seqs": 8, "max_step_tokens": 64, "max_model_tokens": 64, "num_blocks": 48}


def fair(**weights: float) -> FairShare:
    return FairShare(QueuePolicyConfig(tenant_weights=weights))


def preempted_of(driver: Any, tenant: str) -> set[int]:
    """Those that have begun and do not run."""
    return {
        request_id
        for request_id, account in driver.accounts.items()
        if account.request.tenant == tenant
        and account.scheduled is not None
        and request_id in driver.scheduler.unfinished_ids - driver.running_ids
    }


def grow_until_some_give_way(driver: Any, make_request: Any, *, tenant: str = "long", num: int = 6) -> None:
    """Rows of one tenant that together need more blocks than there are."""
    for index in range(num):
        driver.submit(make_request(index, (index + 1,) * 8, tenant=tenant, max_tokens=50))
    for _ in range(200):
        driver.step()
        if len(preempted_of(driver, tenant)) >= 2:
            return
    pytest.fail("none has given way")


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_newcomers", [1, 3])
def test_newcomers_of_one_that_holds_less_come_before_those_that_resume(
    make_driver: Any, make_request: Any, max_in_flight: int, num_newcomers: int
) -> None:
    driver = make_driver(max_in_flight=max_in_flight, policy=fair(), **LIMITS)
    grow_until_some_give_way(driver, make_request)
    waiting = preempted_of(driver, "long")
    new = {RequestId(100 + index) for index in range(num_newcomers)}
    for request_id in new:
        driver.submit(make_request(request_id, (request_id,) * 8, tenant="new", max_tokens=4))
    came: list[int] = []
    while not new <= set(came):
        before = set(driver.running_ids)
        driver.step()
        came += sorted(driver.running_ids - before)
    assert not waiting & set(came)
    driver.run()


def came_first(driver: Any, waiting: set[int], request_id: int) -> bool:
    """Whether all that wait resume, or have ended, before a request runs."""
    while request_id not in driver.running_ids:
        driver.step()
        waiting = waiting & driver.scheduler.unfinished_ids - driver.running_ids
    return not waiting


@pytest.mark.parametrize(("weight", "resume_first"), [(0.01, True), (1.0, False)])
def test_what_a_tenant_holds_counts_by_its_weight(
    make_driver: Any, make_request: Any, weight: float, resume_first: bool
) -> None:
    """One row of a tenant of little weight is more than several of the tenant that gave way."""
    driver = make_driver(policy=fair(new=weight), **LIMITS)
    grow_until_some_give_way(driver, make_request, num=8)
    driver.submit(make_request(50, (50,) * 4, tenant="new", max_tokens=60))
    while 50 not in driver.running_ids:
        driver.step()
    waiting = preempted_of(driver, "long")
    assert len(waiting) > 1
    driver.submit(make_request(100, (100,) * 4, tenant="new", max_tokens=2))
    assert came_first(driver, waiting, 100) is resume_first
    driver.run()


def newcomers() -> Iterator[tuple[int, str]]:
    """Each of a tenant that was never seen before."""
    request_id = 1000
    while True:
        yield request_id, f"new-{request_id}"
        request_id += 1


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 12])
@pytest.mark.parametrize("weights", [{}, {"long": 0.01}])
def test_newcomers_without_end_do_not_keep_those_that_gave_way(
    make_driver: Any, make_request: Any, max_in_flight: int, num_tokens: int, weights: dict[str, float]
) -> None:
    """Always more of other tenants than there are slots: one tenant with a thousand names."""
    driver = make_driver(max_in_flight=max_in_flight, policy=fair(**weights), **LIMITS)
    grow_until_some_give_way(driver, make_request)
    waiting, coming = preempted_of(driver, "long"), newcomers()
    kept: set[int] = set()
    for _ in range(1500):
        kept = {each for each in kept if each in driver.scheduler.unfinished_ids}
        while len(kept) < 12:
            request_id, tenant = next(coming)
            kept.add(request_id)
            driver.submit(make_request(request_id, (request_id % 250,) * 8, tenant=tenant, max_tokens=num_tokens))
        driver.step()
        if not waiting & driver.scheduler.unfinished_ids:
            break
    else:
        pytest.fail(f"{waiting & driver.scheduler.unfinished_ids} have not ended")
    driver.run()


def test_of_several_tenants_that_gave_way_each_goes_on(make_driver: Any, make_request: Any) -> None:
    """Four tenants whose rows all give way to each other, and newcomers of a fifth all the while."""
    driver = make_driver(policy=fair(c=4.0), **LIMITS)
    for index in range(16):
        driver.submit(make_request(index, (index + 1,) * 8, tenant="abcd"[index % 4], max_tokens=50))
    old = set(range(16))
    gave_way = dict[str, int]()
    for step in range(4000):
        if not old & driver.scheduler.unfinished_ids:
            break
        if not any(each >= 1000 for each in driver.scheduler.unfinished_ids):
            driver.submit(make_request(1000 + step, (step % 250,) * 8, tenant="e", max_tokens=3))
        driver.step()
        for tenant in "abcd":
            gave_way[tenant] = max(gave_way.get(tenant, 0), len(preempted_of(driver, tenant)))
    assert not old & driver.scheduler.unfinished_ids
    assert sum(map(bool, gave_way.values())) >= 3
    driver.run()


def test_without_a_policy_that_divides_those_that_gave_way_come_first(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(policy=FirstComeFirstServed(QueuePolicyConfig()), **LIMITS)
    grow_until_some_give_way(driver, make_request)
    waiting = preempted_of(driver, "long")
    driver.submit(make_request(100, (100,) * 4, tenant="new", max_tokens=2))
    assert came_first(driver, waiting, 100)
    driver.run()


def make_full(make_driver: Any, make_request: Any, **options: Any) -> Any:
    """Two rows of `long` that leave no room for its third, which is next in the policy's order."""
    limits = {"max_num_seqs": 8, "max_step_tokens": 256, "max_model_tokens": 128, "num_blocks": 60}
    driver = make_driver(policy=fair(long=4.0), **limits, **options)
    for index in range(2):
        driver.submit(make_request(index, (index + 1,) * 50, tenant="long", max_tokens=24))
    while driver.running_ids != {0, 1}:
        driver.step()
    driver.submit(make_request(200, (7,) * 40, tenant="before", max_tokens=1))
    while 200 in driver.scheduler.unfinished_ids:  # after it, `long` has had no more than is its due
        driver.step()
    driver.submit(make_request(2, (3,) * 120, tenant="long", max_tokens=4))
    return driver


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_newcomers_pass_another_tenants_next_that_finds_no_room(
    make_driver: Any, make_request: Any, max_in_flight: int
) -> None:
    driver = make_full(make_driver, make_request, max_in_flight=max_in_flight)
    for request_id in (100, 101, 102):
        driver.submit(make_request(request_id, (request_id,) * 4, tenant=f"new-{request_id % 3}", max_tokens=2))
        while request_id in driver.scheduler.unfinished_ids:
            driver.step()
        assert {0, 1} < driver.scheduler.unfinished_ids  # it did not wait for these to end
        assert 2 not in driver.running_ids
    driver.run()


def test_if_all_held_alike_newcomers_would_wait_for_another_tenants_next(
    make_driver: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: RowShares, tenant: str) -> float:
        return 0.0

    monkeypatch.setattr(RowShares, "held", nothing)
    driver = make_full(make_driver, make_request)
    driver.submit(make_request(100, (100,) * 4, tenant="new-1", max_tokens=2))
    while 100 not in driver.running_ids:
        driver.step()
    assert not {0, 1} <= driver.scheduler.unfinished_ids
    driver.run()


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 12])
def test_newcomers_without_end_do_not_keep_one_from_running_that_found_no_room(
    make_driver: Any, make_request: Any, num_tokens: int, max_in_flight: int
) -> None:
    driver = make_full(make_driver, make_request, max_in_flight=max_in_flight)
    kept, next_id = set[int](), 1000
    for _ in range(600):
        kept &= driver.scheduler.unfinished_ids
        while len(kept) < 12:
            kept.add(next_id)
            request = make_request(next_id, (next_id % 250,) * 8, tenant=f"new-{next_id % 3}", max_tokens=num_tokens)
            driver.submit(request)
            next_id += 1
        driver.step()
        if 2 not in driver.scheduler.unfinished_ids:
            break
    else:
        pytest.fail("it has not ended")
    driver.run()
