"""What is found in the cache is not computed again; what must not be shared is not found."""

from typing import Any

import pytest

PROMPT = tuple(range(18))


def cached(driver: Any, request: Any) -> int:
    driver.submit(request)
    driver.run()
    return driver.accounts[request.request_id].scheduled.cached_tokens


def test_second_request_finds_the_full_blocks_of_the_first(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    assert cached(driver, make_request(0, PROMPT)) == 0
    assert cached(driver, make_request(1, PROMPT)) == 16
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (20, 16)


def test_one_token_at_least_is_computed(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    cached(driver, make_request(0, PROMPT[:16]))
    assert cached(driver, make_request(1, PROMPT[:16])) == 12


def test_generated_tokens_are_found_as_part_of_a_later_prompt(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    cached(driver, make_request(0, PROMPT, max_tokens=8))
    turn = (*PROMPT, *driver.accounts[0].token_ids, 3)
    assert cached(driver, make_request(1, turn)) == 24  # 18 + 8 tokens, the last of them never computed


def test_request_that_is_still_running_shares_its_prompt(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_step_tokens=32)
    driver.submit(make_request(0, PROMPT, max_tokens=20))
    driver.step()
    driver.submit(make_request(1, PROMPT))
    plan = driver.step()
    assert plan.starts.tolist() == [18, 16]
    assert plan.new_block_counts.tolist() == [[0, 5]]
    driver.run()


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"cache_salt": None}, {"lora": "x", "cache_salt": "a"}])
def test_other_salt_or_adapter_finds_nothing(make_driver: Any, make_request: Any, other: dict[str, str]) -> None:
    driver = make_driver()
    cached(driver, make_request(0, PROMPT, cache_salt="a"))
    assert cached(driver, make_request(1, PROMPT, **other)) == 0
    assert cached(driver, make_request(2, PROMPT, cache_salt="a")) == 16


def test_without_prefix_cache_nothing_is_found(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(prefix_cache=False)
    cached(driver, make_request(0, PROMPT))
    assert cached(driver, make_request(1, PROMPT)) == 0
    assert driver.scheduler.stats().cached_tokens == 0


def test_prompt_logprobs_compute_the_whole_prompt_and_leave_it_for_others(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    cached(driver, make_request(0, PROMPT))
    assert cached(driver, make_request(1, PROMPT, prompt_logprobs=0)) == 0
    assert len(driver.accounts[1].prompt_logprobs) == 17
    fresh = tuple(range(30, 47))
    assert cached(driver, make_request(2, fresh, prompt_logprobs=0)) == 0
    assert cached(driver, make_request(3, fresh)) == 16


def test_row_that_failed_leaves_nothing_in_the_cache(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_step_tokens=32)
    driver.submit(make_request(0, PROMPT))
    driver.device.fail_next_row(0)
    driver.run()
    assert cached(driver, make_request(1, PROMPT)) == 0


def test_scoring_a_prompt_samples_nothing(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_step_tokens=7)
    driver.submit(make_request(0, PROMPT, max_tokens=0, prompt_logprobs=0))
    driver.run()
    assert driver.accounts[0].token_ids == []
    assert driver.scheduler.stats().generated_tokens == 0


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_equal_prompts_that_come_together_are_computed_once(
    make_driver: Any, make_request: Any, max_in_flight: int
) -> None:
    driver = make_driver(max_in_flight=max_in_flight, max_step_tokens=64)
    for index in range(4):
        driver.submit(make_request(index, PROMPT, max_tokens=20))
    first = driver.step()
    assert first.counts.tolist() == [18]
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (18 + 3 * 2, 3 * 16)


def test_prompts_of_many_steps_with_a_common_beginning_share_it(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_in_flight=2)
    common = tuple(range(40))
    driver.submit(make_request(0, (*common, 1, 2, 3)))
    driver.submit(make_request(1, (*common, 4, 5, 6)))
    driver.run()
    assert driver.scheduler.stats().prompt_tokens == 43 + 3


def test_prompts_that_share_nothing_that_is_being_computed_do_not_wait(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(max_step_tokens=64)
    driver.submit(make_request(0, PROMPT))
    driver.submit(make_request(1, (50, *PROMPT)))
    driver.submit(make_request(2, PROMPT[:3]))
    driver.submit(make_request(3, PROMPT, cache_salt="other"))
    assert driver.step().counts.tolist() == [18, 19, 3, 18]
    driver.run()


def test_one_that_waited_for_an_aborted_prompt_computes_it_itself(make_driver: Any, make_request: Any) -> None:
    driver = make_driver()
    driver.submit(make_request(0, tuple(range(40))))
    driver.submit(make_request(1, tuple(range(40))))
    driver.step()
    driver.abort(0)
    driver.run()
    assert driver.accounts[1].scheduled.cached_tokens == 16  # of the one step that was applied
