"""Blocks run short: the youngest gives way, and resumes before another is admitted."""

from typing import Any

import pytest

from openinfer_core.scheduling import StepPlan

OVERLAPS = pytest.mark.parametrize("max_in_flight", [1, 2])


def slots(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else plan.slots.tolist()


def test_youngest_gives_way_to_the_oldest(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=6, max_num_seqs=3)
    for index in range(3):
        driver.submit(make_request(index, (index,) * 4, max_tokens=12))
    assert slots(driver.step()) == [0, 1, 2]  # 1 block each, 3 spare
    assert slots(driver.step()) == [0, 1, 2]  # 2 blocks each, none left
    for _ in range(3):
        assert slots(driver.step()) == [0, 1, 2]
    assert slots(driver.step()) == [0, 1]  # 3 blocks each, all of them
    stats = driver.scheduler.stats()
    assert (stats.preemptions, stats.running, stats.waiting, stats.blocks_used) == (1, 2, 1, 6)
    driver.run()


def test_preempted_sequence_resumes_with_its_outputs_as_given_ids(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=4, max_num_seqs=2, prefix_cache=False)
    driver.submit(make_request(0, (1,) * 4, max_tokens=8))
    driver.submit(make_request(1, (2,) * 4, max_tokens=8))
    for _ in range(5):
        driver.step()
    resumed = None
    while resumed is None:
        plan = driver.step()
        resumed = plan if plan.started else None
    (start,) = resumed.started
    assert (start.request.request_id, start.output_token_ids) == (1, tuple(driver.accounts[1].token_ids[:5]))
    assert (resumed.starts.tolist(), resumed.counts.tolist()) == ([0], [9])
    assert resumed.num_host_tokens.tolist() == [9]
    driver.run()


def test_resumption_finds_its_sealed_blocks_in_the_cache(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=5, max_num_seqs=2)
    driver.submit(make_request(0, (1,) * 4, max_tokens=9))
    driver.submit(make_request(1, (2,) * 4, max_tokens=9))
    starts: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        starts += [plan.starts[plan.slots == start.slot][0] for start in plan.started]
    assert driver.scheduler.stats().preemptions == 1
    assert starts[:2] == [0, 0]
    assert starts[2] > 0
    driver.run()


@OVERLAPS
def test_the_preempted_resume_oldest_first_and_before_anybody_is_admitted(
    make_driver: Any, make_request: Any, max_in_flight: int
) -> None:
    driver = make_driver(num_blocks=8, max_num_seqs=4, max_in_flight=max_in_flight)
    for index in range(12):
        driver.submit(make_request(index, (index,) * 5, max_tokens=20))
    running: list[int] = []
    preempted: list[int] = []
    num_preemptions = num_admitted = 0
    while driver.scheduler.unfinished_ids:
        plan = driver.plan()
        for _ in range(driver.scheduler.stats().preemptions - num_preemptions):
            preempted.append(running.pop())  # the youngest
            num_preemptions += 1
        for start in plan.started if plan else ():
            expected = preempted.pop() if preempted else num_admitted
            num_admitted += expected == num_admitted
            assert start.request.request_id == expected
            running.append(expected)
        if plan is None or driver.num_in_flight == max_in_flight:
            driver.apply()
        running = [i for i in running if driver.accounts[i].terminal is None]
        preempted = [i for i in preempted if driver.accounts[i].terminal is None]
    assert num_admitted == 12
    assert num_preemptions > 5
    driver.run()


@OVERLAPS
def test_oldest_is_never_preempted(make_driver: Any, make_request: Any, max_in_flight: int) -> None:
    driver = make_driver(num_blocks=8, max_num_seqs=4, max_in_flight=max_in_flight, prefix_cache=False)
    for index in range(4):
        driver.submit(make_request(index, (index,) * 2, max_tokens=30))
    starts: list[int] = []
    while driver.accounts[0].terminal is None:
        plan = driver.step()
        starts += [start.request.request_id for start in plan.started] if plan else []
    assert starts.count(0) == 1
    assert driver.scheduler.stats().preemptions > 0
    driver.run()


def test_with_a_row_in_flight_the_victim_keeps_its_blocks_until_it_is_applied(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver(num_blocks=4, max_num_seqs=2, max_in_flight=2, prefix_cache=False)
    driver.submit(make_request(0, (1,) * 4, max_tokens=9))
    driver.submit(make_request(1, (2,) * 4, max_tokens=9))
    for _ in range(5):
        driver.step()
    assert driver.scheduler.stats().preemptions == 0
    assert slots(driver.step()) == []  # 0 sits out: the blocks of 1 are still written to
    stats = driver.scheduler.stats()
    assert (stats.preemptions, stats.blocks_used) == (1, 2)  # applied by now
    assert slots(driver.step()) == [0]
    driver.run()


@OVERLAPS
def test_preempted_request_can_be_aborted(make_driver: Any, make_request: Any, max_in_flight: int) -> None:
    driver = make_driver(num_blocks=6, max_num_seqs=3, max_in_flight=max_in_flight)
    for index in range(3):
        driver.submit(make_request(index, (index,) * 4, max_tokens=12))
    while not driver.scheduler.stats().preemptions:
        driver.plan()
        if driver.num_in_flight == max_in_flight:
            driver.apply()
    assert driver.scheduler.stats().waiting == 1
    driver.abort(2)
    assert driver.scheduler.stats().waiting == 0
    driver.run()


def test_blocks_about_to_come_back_save_a_sequence_from_preemption(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=4, max_num_seqs=2, max_in_flight=2)
    driver.submit(make_request(0, (1,) * 8, max_tokens=8))
    driver.submit(make_request(1, (2,) * 3, max_tokens=2))
    driver.run()
    assert driver.scheduler.stats().preemptions == 0


def test_preempted_sequence_does_not_resume_before_its_result_is_there(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=4, max_num_seqs=2, max_in_flight=2, prefix_cache=False)
    driver.submit(make_request(0, (1,) * 4, max_tokens=9))
    driver.submit(make_request(1, (2,) * 4, max_tokens=9))
    for _ in range(5):
        driver.step()
    assert driver.num_in_flight == 1
    assert driver.plan() is None
    assert driver.scheduler.stats().preemptions == 1
    driver.abort(0)  # now nothing stands in the way of 1, but what it has just sampled is not known
    assert driver.plan() is None
    driver.apply()
    (start,) = driver.plan().started
    assert start.output_token_ids == tuple(driver.accounts[1].token_ids)
    driver.run()


def test_resumption_after_all_prompt_logprobs_uses_the_cache(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=5, max_num_seqs=2)
    driver.submit(make_request(0, (1,) * 4, max_tokens=9))
    driver.submit(make_request(1, (2,) * 4, max_tokens=9, prompt_logprobs=0))
    starts: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        starts += [plan.starts[plan.slots == start.slot][0] for start in plan.started]
    assert starts[:2] == [0, 0]
    assert starts[2] > 0
    driver.run()
