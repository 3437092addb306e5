"""Long sessions in a small pool: what is admitted runs to its end, mostly, and is not preempted again and again."""

from typing import Any

import pytest

from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_engine.scheduler import TokenBudgetScheduler, run_queue
from openinfer_engine.scheduler.growth import Growth
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_kv_cache import KvCache, KvCacheOptions

SESSIONS, TURNS, FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 12, 3, 60, 10, 100
POOL = {"num_blocks": 150, "block_size_tokens": 4, "max_num_seqs": 12, "max_step_tokens": 64, "max_model_tokens": 600}


def play(make_request: Any, **kind: Any) -> tuple[int, int]:
    """Preemptions, and prompt tokens computed, of twelve sessions of which the pool holds two or three."""
    config, policy = SchedulerConfig(**POOL | kind), FirstComeFirstServed(QueuePolicyConfig())
    driver = SchedulerDriver(TokenBudgetScheduler, config, policy=policy, max_in_flight=2)
    prompts = {number: (number + 1, *(each % 47 for each in range(FIRST_TOKENS))) for number in range(SESSIONS)}
    turns = dict.fromkeys(prompts, 0)
    running: dict[int, int] = {}
    num_requests = 0

    def submit(session: int) -> None:
        nonlocal num_requests
        driver.submit(make_request(num_requests, prompts[session], max_tokens=OUTPUT_TOKENS))
        running[num_requests], num_requests = session, num_requests + 1

    for session in prompts:
        submit(session)
    while running:
        driver.step()
        for ended in [each for each in running if each not in driver.scheduler.unfinished_ids]:
            session = running.pop(ended)
            turns[session] += 1
            if turns[session] < TURNS:
                said = driver.accounts[ended].token_ids
                prompts[session] = (*prompts[session], *said, *(each % 43 for each in range(NEW_TOKENS)))
                submit(session)
    driver.run()
    stats = driver.scheduler.stats()
    return stats.preemptions, stats.prompt_tokens


class NothingExpected(Growth):
    """Keeps one block for each that runs, as if nothing were known of lengths."""

    def note(self, generated_tokens: int) -> None:
        del generated_tokens


@pytest.mark.parametrize("kind", [{}, {"prefix_cache": False, "num_snapshots": 24}], ids=["dense", "hybrid"])
def test_twelve_long_sessions_in_a_small_pool_do_not_thrash(
    make_request: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    preemptions, prompt_tokens = play(make_request, **kind)
    monkeypatch.setattr(run_queue, "Growth", NothingExpected)
    before, tokens_before = play(make_request, **kind)
    # before the first one has ended nothing is known of lengths
    assert preemptions <= SESSIONS
    assert before >= 2 * SESSIONS
    assert prompt_tokens < tokens_before


def test_one_session_needs_nothing_in_reserve(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(**POOL | {"num_blocks": 40})
    for number in range(3):
        driver.submit(make_request(number, tuple(range(1, 61)), max_tokens=OUTPUT_TOKENS))
        driver.run()
    assert driver.scheduler.stats().preemptions == 0


def test_most_that_is_needed_is_found_where_the_shortest_end_first(make_request: Any) -> None:
    growth = Growth(block_size_tokens=4, num_lasting=1)
    cache = KvCache(KvCacheOptions(num_blocks=64, block_size_tokens=4))
    sequences: list[Sequence] = []
    for number in range(3):
        request = make_request(number, (number,) * 8, max_tokens=16)
        kv = cache.sequence_of(request)
        sequences.append(Sequence(request, kv, seed=0, arrived_s=0.0, max_model_tokens=64))
    assert growth.blocks(sequences) == growth.most_blocks(3) == 0
    for _ in range(400):
        growth.note(16)
    # none has begun, each holds 8 and grows by 15 (the last token is not fed back): 3 x 15 tokens more at their end
    assert growth.blocks(sequences) == 12
    assert growth.most_blocks(3) == 12


def test_window_tables_grow_by_nothing() -> None:
    config = SchedulerConfig(**POOL | {"table_windows": (None, 8)})
    growth = Growth(block_size_tokens=config.block_size_tokens, num_lasting=1)
    for _ in range(400):
        growth.note(16)
    assert growth.most_blocks(5) == 20
