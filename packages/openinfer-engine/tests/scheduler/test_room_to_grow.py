"""Long sessions in a small pool: after preemptions what is admitted runs to its end, mostly."""

from typing import Any

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.order.room_to_grow import RoomToGrow
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


@pytest.mark.parametrize("kind", [{}, {"prefix_cache": False, "num_snapshots": 24}], ids=["dense", "hybrid"])
def test_twelve_long_sessions_in_a_small_pool_do_not_thrash(make_request: Any, kind: Any) -> None:
    preemptions, _ = play(make_request, **kind)
    assert preemptions <= SESSIONS


def test_other_tenants_wait_for_no_room_and_it_is_given_back() -> None:
    room = RoomToGrow(block_size_tokens=4)
    cache = KvCache(KvCacheOptions(num_blocks=64, block_size_tokens=4))

    def sequence_of(number: int, tenant: str, max_tokens: int = 100) -> Sequence:
        request = GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=(number,) * 8,
            sampling=SamplingParams(max_tokens=max_tokens),
            tenant=tenant,
        )
        return Sequence(request, cache.sequence_of(request), seed=0, arrived_s=0.0, max_model_tokens=200)

    mine, short, other = sequence_of(0, "a"), sequence_of(1, "a", 4), sequence_of(2, "b")
    assert room.blocks_for(mine, [short, other]) == 0
    for _ in range(3):
        room.preempted(mine)
    assert room.blocks_for(mine, [short, other]) == 7 + 1  # a row is left no more than it can grow by
    assert room.blocks_for(mine, [other]) == 0  # nothing of the tenant runs
    assert room.blocks_for(other, [mine, short]) == 0
    for _ in range(8):
        room.ended(mine)
    assert room.blocks_for(mine, [short]) == 0
