"""What goes into a step: decode rows, then chunks, then admissions, within budget, slots and blocks."""

from typing import Any

import numpy as np

from openinfer_core import GenerateRequest
from openinfer_core.scheduling import StepPlan


def rows(plan: StepPlan | None) -> list[tuple[int, int, int, int, int]]:
    """(slot, start, count, host tokens, max_new) of each row."""
    assert plan is not None
    columns = (plan.slots, plan.starts, plan.counts, plan.num_host_tokens, plan.max_new)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_plan_without_requests_is_none(make_driver: Any) -> None:
    assert make_driver().plan() is None


def test_prompt_within_the_budget_is_one_sampled_row(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    driver.submit(make_request(0, (5, 6, 7, 8, 9)))
    plan = driver.plan()
    assert rows(plan) == [(0, 0, 5, 5, 1)]
    assert plan.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert plan.new_block_counts.tolist() == [[2]]
    assert [start.slot for start in plan.started] == [0]
    assert plan.token_ids.dtype == np.int32


def test_decode_row_takes_its_id_on_the_device_and_a_block_only_at_a_boundary(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver()
    driver.submit(make_request(0, (1, 2, 3)))
    driver.step()
    plans = [driver.step() for _ in range(3)]
    assert [rows(plan) for plan in plans] == [[(0, 3, 1, 0, 1)], [(0, 4, 1, 0, 1)], [(0, 5, 1, 0, 1)]]
    assert [plan.new_block_counts.tolist() for plan in plans] == [[[0]], [[1]], [[0]]]
    assert all(len(plan.token_ids) == 0 and plan.started == () for plan in plans)


def test_long_prompt_is_cut_into_chunks_and_sampled_at_its_end_only(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_step_tokens=7)
    driver.submit(make_request(0, tuple(range(17))))
    plans = [driver.step() for _ in range(3)]
    assert [rows(plan) for plan in plans] == [[(0, 0, 7, 7, 0)], [(0, 7, 7, 7, 0)], [(0, 14, 3, 3, 1)]]
    assert [len(plan.started) for plan in plans] == [1, 0, 0]
    assert [plan.new_block_counts.tolist() for plan in plans] == [[[5]], [[0]], [[0]]]


def test_decode_rows_come_before_an_older_prompts_chunks_and_those_before_admissions(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver(max_step_tokens=8)
    driver.submit(make_request(0, tuple(range(20))))  # too long for one step
    driver.step()
    driver.submit(make_request(1, (1,)))
    driver.submit(make_request(2, (2,) * 9))
    assert rows(driver.step()) == [(0, 8, 8, 8, 0)]
    assert rows(driver.step()) == [(0, 16, 4, 4, 1), (1, 0, 1, 1, 1), (2, 0, 3, 3, 0)]
    assert rows(driver.step()) == [(0, 20, 1, 0, 1), (1, 1, 1, 0, 1), (2, 3, 6, 6, 1)]


def test_decode_rows_alone_may_fill_the_budget(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_step_tokens=4)
    for index in range(3):
        driver.submit(make_request(index, (index,)))
    driver.submit(make_request(3, tuple(range(9))))
    driver.step()
    for _ in range(7):
        assert len(rows(driver.step())) == 4
    driver.run()


def test_one_token_prompt_is_given_not_taken_from_the_device(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    driver.submit(make_request(0, (9,)))
    assert rows(driver.plan()) == [(0, 0, 1, 1, 1)]


def test_admission_stops_at_max_num_seqs(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_num_seqs=2)
    for index in range(5):
        driver.submit(make_request(index, (index,), max_tokens=2))
    assert len(rows(driver.step())) == 2
    assert driver.scheduler.stats().waiting == 3
    driver.run()


def test_admission_leaves_a_spare_block_per_running_sequence(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=8)
    driver.submit(make_request(0, (1,) * 12, max_tokens=12))  # 3 blocks
    driver.submit(make_request(1, (2,) * 4, max_tokens=12))  # 1 block, 1 spare
    driver.submit(make_request(2, (3,) * 8, max_tokens=8))  # 2 blocks, 2 spare: would need all 4 that are left
    driver.submit(make_request(3, (4,), max_tokens=8))  # would fit, and may not pass
    first = driver.step()
    assert first.slots.tolist() == [0, 1]
    second = driver.plan()  # the two decode rows took a block each
    assert second.slots.tolist() == [0, 1]
    assert driver.scheduler.stats().blocks_used == 6


def test_alone_a_request_may_take_every_block(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(num_blocks=4)
    driver.submit(make_request(0, (1,) * 15, max_tokens=2))
    driver.plan()
    assert driver.scheduler.stats().blocks_used == 4


def test_columns_of_a_large_step_agree(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_num_seqs=32, max_step_tokens=64, num_blocks=400)
    requests: list[GenerateRequest] = [make_request(i, (i,) * (1 + i % 7), max_tokens=20) for i in range(50)]
    for request in requests:
        driver.submit(request)
    largest = max((driver.step() for _ in range(12)), key=lambda plan: plan.num_rows)
    assert largest.num_rows == 32
    driver.run()


def test_prompt_of_a_newcomer_is_begun_next_to_a_long_one_of_another_tenant(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver()  # 16 tokens a step
    driver.submit(make_request(0, tuple(range(40)), tenant="a"))
    driver.submit(make_request(1, (1, 2, 3), tenant="a"))
    assert rows(driver.step()) == [(0, 0, 16, 16, 0)]
    assert rows(driver.step()) == [(0, 16, 16, 16, 0)]  # the next one of its own tenant waits
    driver.abort(1)
    driver.submit(make_request(2, (1, 2, 3), tenant="b"))
    assert rows(driver.plan()) == [(1, 0, 3, 3, 1), (0, 32, 8, 8, 1)]


def test_newcomers_take_half_of_a_step_from_a_prompt_that_has_begun(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    driver.submit(make_request(0, tuple(range(60)), tenant="a"))
    driver.step()
    driver.submit(make_request(1, tuple(range(100, 130)), tenant="b"))
    assert rows(driver.step()) == [(1, 0, 8, 8, 0), (0, 16, 8, 8, 0)]
    driver.submit(make_request(2, tuple(range(60, 90)), tenant="b"))
    assert rows(driver.step()) == [(0, 24, 8, 8, 0), (1, 8, 8, 8, 0)]
    assert rows(driver.plan()) == [(0, 32, 8, 8, 0), (1, 16, 8, 8, 0)]
