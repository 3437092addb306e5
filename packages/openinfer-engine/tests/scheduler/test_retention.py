"""What ended turns asked to be kept is there when their conversation goes on, and makes no other request wait."""

from typing import Any

import pytest

from openinfer_core import RetainedPrefix
from openinfer_core.queue_policies import FairShare
from openinfer_core.scheduling import QueuePolicyConfig

PROMPT = tuple(range(1, 34))  # eight blocks and a token
STATES = {"prefix_cache": False, "num_snapshots": 3}
SMALL = {"num_blocks": 24, "max_model_tokens": 96, "max_step_tokens": 64}
KINDS = pytest.mark.parametrize("kind", [{}, STATES], ids=["dense", "hybrid"])


def cached(driver: Any, request: Any) -> int:
    driver.submit(request)
    driver.run()
    return driver.accounts[request.request_id].scheduled.cached_tokens


def others(make_request: Any, count: int, **fields: Any) -> list[Any]:
    """Requests that share nothing with any, each of eight blocks."""
    return [make_request(100 + n, tuple(range(1000 + 50 * n, 1033 + 50 * n)), **fields) for n in range(count)]


@KINDS
@pytest.mark.parametrize(("retain_s", "kept"), [(None, 0), (3600.0, 32)])
def test_retained_turn_outlives_others(
    make_driver: Any, make_request: Any, kind: Any, retain_s: Any, kept: int
) -> None:
    driver = make_driver(**SMALL, **kind)
    cached(driver, make_request(0, PROMPT, retain_s=retain_s))
    for request in others(make_request, 6):
        cached(driver, request)
    assert cached(driver, make_request(1, (*PROMPT, 40))) == kept


@KINDS
@pytest.mark.parametrize(  # states are at the prompt's last boundary, and where the block of another end begins
    ("num_tokens", "kept", "with_states"), [(32, 32, 32), (30, 32, 32), (13, 16, 12), (12, 12, 12), (1, 4, 0)]
)
def test_prefix_is_retained_up_to_the_block_that_holds_its_end(
    make_driver: Any, make_request: Any, kind: Any, num_tokens: int, kept: int, with_states: int
) -> None:
    driver = make_driver(**SMALL, **kind)
    prefixes = (RetainedPrefix(num_tokens, 3600.0),)
    cached(driver, make_request(0, PROMPT, retained_prefixes=prefixes))
    assert driver.scheduler.stats().retained_blocks == kept // 4
    for request in others(make_request, 6):
        cached(driver, request)
    assert cached(driver, make_request(1, (*PROMPT[:kept], *range(7000, 7030)))) == (with_states if kind else kept)


def test_each_prefix_has_its_time_and_the_longest_counts(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**SMALL)
    prefixes = (RetainedPrefix(16, 3600.0), RetainedPrefix(24, 1e-9))
    cached(driver, make_request(0, PROMPT, retained_prefixes=prefixes))
    for request in others(make_request, 6):
        cached(driver, request)
    assert cached(driver, make_request(1, (*PROMPT, 40))) == 16


@KINDS
def test_everything_retained_makes_nothing_wait(make_driver: Any, make_request: Any, kind: Any) -> None:
    plain, retained = make_driver(**SMALL, **kind, max_in_flight=2), make_driver(**SMALL, **kind, max_in_flight=2)
    for driver, fields in ((plain, {}), (retained, {"retain_s": 86_400.0, "cache_key": "k"})):
        for request in others(make_request, 12, **fields):
            driver.submit(request)
        driver.run()
    assert retained.scheduler.stats().steps == plain.scheduler.stats().steps
    assert retained.scheduler.stats().preemptions == plain.scheduler.stats().preemptions
    assert all(len(account.token_ids) == 8 for account in retained.accounts.values())


def test_newer_turn_of_a_key_supersedes_what_it_does_not_share(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**SMALL | {"num_blocks": 64})
    fields = {"retain_s": 3600.0, "cache_key": "conversation", "max_tokens": 1}
    first, second = (*PROMPT, *range(500, 516)), (*PROMPT[:16], *range(600, 616), 1)
    cached(driver, make_request(0, first, **fields))
    assert driver.scheduler.stats().retained_blocks == 12
    cached(driver, make_request(1, second, **fields))
    assert driver.scheduler.stats().retained_blocks == 8  # the four that are common, and its own
    cached(driver, make_request(2, first, retain_s=3600.0, cache_key="another", max_tokens=1))
    assert driver.scheduler.stats().retained_blocks == 16


FORK = (*PROMPT, *range(500, 516))
"""A conversation that goes on in one way, in twelve blocks; by others it goes on in another."""
SHORT, LONG = {"retain_s": 600.0, "max_tokens": 1}, {"retain_s": 86_400.0, "max_tokens": 1}


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        ({**SHORT, "cache_key": "another"}, 12),
        ({**LONG, "cache_key": "another"}, 12),
        (SHORT, 12),
        ({"max_tokens": 1, "retained_prefixes": (RetainedPrefix(40, 300.0),)}, 10),
        ({"max_tokens": 1, "retained_prefixes": (RetainedPrefix(40, 1e-9),)}, 4),
        ({"max_tokens": 1}, 4),
    ],
    ids=["key", "key for longer", "no key", "mark", "mark that is over", "nothing"],
)
@pytest.mark.parametrize("comes_first", [True, False])
def test_newer_turn_leaves_what_others_asked_to_retain(
    make_driver: Any, make_request: Any, other: Any, kept: int, comes_first: bool
) -> None:
    driver = make_driver(**SMALL | {"num_blocks": 64})
    mine = {**SHORT, "cache_key": "conversation"}
    for number, fields in enumerate((other, mine) if comes_first else (mine, other)):
        cached(driver, make_request(number, FORK, **fields))
    cached(driver, make_request(2, (*PROMPT[:16], *range(600, 616), 1), **mine))
    own = 4  # of the newer turn, after the four blocks that are common
    assert driver.scheduler.stats().retained_blocks == kept + own


def test_what_others_retain_is_given_up_when_their_newer_turn_leaves_it_too(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver(**SMALL | {"num_blocks": 64})
    newer = (*PROMPT[:16], *range(600, 616), 1)
    for number, key in enumerate(("one", "two")):
        cached(driver, make_request(number, FORK, **SHORT, cache_key=key))
    for number, (key, left) in enumerate((("one", 16), ("two", 8)), start=2):
        cached(driver, make_request(number, newer, **SHORT, cache_key=key))
        assert driver.scheduler.stats().retained_blocks == left


def test_keys_of_other_tenants_and_salts_are_others(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**SMALL | {"num_blocks": 64}, policy=FairShare(QueuePolicyConfig()))
    turns = [{"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}]
    for number, turn in enumerate(turns):
        prompt = tuple(range(2000 + 40 * number, 2033 + 40 * number))
        cached(driver, make_request(number, prompt, retain_s=60.0, cache_key="k", max_tokens=1, **turn))
    assert driver.scheduler.stats().retained_blocks == 24


def test_flush_forgets_what_was_retained(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**SMALL)
    cached(driver, make_request(0, PROMPT, retain_s=60.0, cache_key="k"))
    driver.scheduler.flush_cache()
    assert driver.scheduler.stats().retained_blocks == 0
    assert cached(driver, make_request(1, PROMPT, retain_s=60.0, cache_key="k")) == 0


def test_cancelled_turn_is_retained_as_far_as_it_came(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**SMALL | {"max_step_tokens": 16})
    driver.submit(make_request(0, PROMPT, retain_s=60.0))
    driver.step()
    driver.abort(0)
    driver.run()
    assert driver.scheduler.stats().retained_blocks == 4
