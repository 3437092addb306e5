"""Planning a step before the last one's result is there."""

from typing import Any

from openinfer_core import Finished, FinishReason
from openinfer_core.testing.fake_model import NUM_TOKEN_IDS

ANY_TOKEN = tuple(range(NUM_TOKEN_IDS))
"""As stop tokens: the first token sampled ends the request."""


def test_next_step_is_planned_from_the_device_before_the_result_is_applied(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_in_flight=2)
    driver.submit(make_request(0, (1, 2, 3)))
    first, second = driver.plan(), driver.plan()
    assert (first.starts.tolist(), second.starts.tolist()) == ([0], [3])
    assert (second.num_host_tokens.tolist(), second.max_new.tolist()) == ([0], [1])
    driver.run()


def test_end_by_length_wastes_no_row(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_in_flight=2)
    for index in range(4):
        driver.submit(make_request(index, (index,) * 5, max_tokens=1 + index))
    driver.run()
    assert driver.scheduler.stats().wasted_rows == 0


def test_end_by_context_length_wastes_no_row(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_in_flight=2, max_model_tokens=10)
    driver.submit(make_request(0, (1,) * 5, max_tokens=100))
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.wasted_rows, stats.generated_tokens) == (0, 5)


def test_end_by_a_stop_token_wastes_one_row(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_in_flight=2)
    driver.submit(make_request(0, (1, 2, 3), stop_token_ids=ANY_TOKEN))
    driver.run()
    assert driver.scheduler.stats().wasted_rows == 1


def test_without_overlap_no_row_is_wasted(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_in_flight=1)
    driver.submit(make_request(0, (1, 2, 3), stop_token_ids=ANY_TOKEN))
    driver.run()
    assert driver.scheduler.stats().wasted_rows == 0


def test_slot_and_blocks_of_a_stopped_sequence_are_held_until_its_wasted_row_is_applied(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver(max_in_flight=2, max_num_seqs=1)
    driver.submit(make_request(0, (1, 2, 3), stop_token_ids=ANY_TOKEN))
    driver.submit(make_request(1, (4, 5)))
    driver.plan()
    driver.plan()
    driver.apply()
    terminal = driver.accounts[0].terminal
    assert isinstance(terminal, Finished)
    assert terminal.reason is FinishReason.STOP
    assert driver.scheduler.stats().blocks_used == 1
    assert driver.plan() is None
    driver.apply()
    assert driver.scheduler.stats().blocks_used == 0
    assert [start.request.request_id for start in driver.plan().started] == [1]
    driver.run()


def test_abort_in_flight_holds_slot_and_blocks_until_the_last_row_is_applied(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver(max_in_flight=2)
    driver.submit(make_request(0, (1, 2, 3)))
    driver.plan()
    driver.plan()
    driver.abort(0)
    assert not driver.scheduler.unfinished_ids
    assert driver.plan() is None
    assert driver.scheduler.stats().blocks_used == 1
    driver.apply()
    driver.apply()
    stats = driver.scheduler.stats()
    assert (stats.blocks_used, stats.wasted_rows) == (0, 2)


def test_min_tokens_keeps_a_stop_token_from_ending(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_in_flight=2)
    driver.submit(make_request(0, (1, 2, 3), stop_token_ids=ANY_TOKEN[:-1], min_tokens=3))
    driver.run()
    assert driver.accounts[0].token_ids[:3] == [NUM_TOKEN_IDS - 1] * 3
