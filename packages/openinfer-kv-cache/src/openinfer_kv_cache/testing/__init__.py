"""For code that extends or embeds the package: a conformance test and a measurement.

`check_eviction_policy` is the contract of `EvictionPolicy` as code: call it from a test of your policy.
`measure_bookkeeping` times the four verbs of a sequence on this machine.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from openinfer_kv_cache.cache import KvCache, KvCacheOptions
from openinfer_kv_cache.eviction.policy import EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class BookkeepingTimes:
    """CPU seconds per block of each verb, over the blocks that the verb handled."""

    num_blocks: int
    match_s: float  # making the sequence, hashing and finding, per block found
    reserve_s: float  # per block allocated; every one evicts another
    seal_s: float  # hashing and registering, per block sealed
    release_s: float  # per block given back

    @property
    def total_s(self) -> float:
        return self.match_s + self.reserve_s + self.seal_s + self.release_s


def measure_bookkeeping(
    *,
    prompt_blocks: int = 128,
    block_size_tokens: int = 16,
    num_prompts: int = 40,
    num_rounds: int = 5,
    num_owners: int = 1,
) -> BookkeepingTimes:
    """Times match, reserve, seal and release in this thread, with a pool that is full and evicts all the time.

    Each prompt is new: it is reserved, sealed and released as if computed; then a second sequence of the same
    prompt finds all of its full blocks. The fastest round counts: what else the machine does only ever adds time.
    The prompts are of `num_owners` owners in turn; the pool has room for one of each, and for four.
    """
    num_filling = max(4, num_owners)
    cache = KvCache(KvCacheOptions(num_blocks=(prompt_blocks + 1) * num_filling, block_size_tokens=block_size_tokens))
    _run_prompts(cache, range(num_filling), prompt_blocks, num_owners)
    starts = range(num_filling, num_filling + num_rounds * num_prompts, num_prompts)
    rounds = [_run_prompts(cache, range(start, start + num_prompts), prompt_blocks, num_owners) for start in starts]
    cache.check_integrity()
    return min(rounds, key=lambda times: times.total_s)


def _run_prompts(cache: KvCache, prompts: range, prompt_blocks: int, num_owners: int) -> BookkeepingTimes:
    watch = _Stopwatch()
    for index in prompts:
        _run_prompt(cache, index, prompt_blocks, watch, owner=str(index % num_owners))
    num_blocks = len(prompts) * prompt_blocks
    return BookkeepingTimes(
        num_blocks=num_blocks,
        match_s=watch.seconds["match"] / num_blocks,
        reserve_s=watch.seconds["reserve"] / num_blocks,
        seal_s=watch.seconds["seal"] / num_blocks,
        release_s=watch.seconds["release"] / num_blocks,
    )


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"match": 0.0, "reserve": 0.0, "seal": 0.0, "release": 0.0}

    @contextmanager
    def on(self, name: str) -> Generator[None]:
        start_s = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - start_s


def _run_prompt(cache: KvCache, index: int, prompt_blocks: int, watch: _Stopwatch, *, owner: str) -> None:
    # One more than full blocks: a match leaves a token to compute, and is to find all of the full ones.
    num_tokens = prompt_blocks * cache.pool.block_size_tokens + 1
    token_ids = tuple(range(index * num_tokens, (index + 1) * num_tokens))
    cold = cache.sequence(token_ids, owner=owner)
    with watch.on("reserve"):
        reserved = cold.reserve(num_tokens)
    with watch.on("seal"):
        sealed = cold.seal(num_tokens)
    with watch.on("release"):
        cold.release()
    with watch.on("match"):
        warm = cache.sequence(token_ids, owner=owner)
        cached_tokens = warm.match()
    warm.release()
    assert reserved is not None
    assert len(reserved) == prompt_blocks + 1
    assert len(sealed) * cache.pool.block_size_tokens == cached_tokens == num_tokens - 1


def check_eviction_policy(make_policy: Callable[[], EvictionPolicy]) -> None:
    """Runs the contract of `EvictionPolicy` against new, empty policies; `AssertionError` names the broken rule."""
    _check_selects_each_block_once(make_policy())
    _check_never_selects_what_left(make_policy())
    _check_pool_stays_whole(make_policy())


def _check_selects_each_block_once(policy: EvictionPolicy) -> None:
    policy.admit([5, 3, 9])
    policy.admit([0])
    victims = [*policy.select(1), *policy.select(3)]
    assert sorted(victims) == [0, 3, 5, 9], f"select gave {victims} of the blocks 0, 3, 5, 9"
    policy.admit([3])
    again = policy.select(1)
    assert again == [3], f"block 3 was admitted again after its eviction, and select gave {again}"


def _check_never_selects_what_left(policy: EvictionPolicy) -> None:
    policy.admit([0, 1, 2, 3, 4, 5])
    policy.reuse([1, 4])
    policy.forget([2])
    victims = policy.select(3)
    assert sorted(victims) == [0, 3, 5], f"1 and 4 are in use and 2 is gone, and select gave {victims}"
    policy.admit([4, 1])
    assert sorted(policy.select(2)) == [1, 4], "blocks admitted again after reuse were not selected"
    assert policy.select(0) == [], "select(0) must give no block"


def _check_pool_stays_whole(policy: EvictionPolicy) -> None:
    """Prompts that share prefixes in a pool that is too small for them."""
    cache = KvCache(KvCacheOptions(num_blocks=7, block_size_tokens=2), policy=policy)
    for step in range(60):
        kept = cache.sequence([0, 0, step % 3, 1, step % 5, 2, 9])
        kept.match()
        added = kept.reserve(7)
        assert added is not None, "the pool was empty of users and had no room"
        kept.seal(6)
        kept.release()
        cache.check_integrity()
