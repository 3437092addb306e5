"""Retained blocks are given up after others until their deadline, and make nothing wait."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from openinfer_kv_cache import BlockPool, FairLeastRecentlyUsed, KvCache, KvCacheOptions, LeastRecentlyUsed
from openinfer_kv_cache.digest import PrefixHasher
from openinfer_kv_cache.state_slots import StateSlotPool

NUM_BLOCKS = 12
OWNERS = ("", "a", "b")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sealed(cache: KvCache, first: int, num_blocks: int, owner: str = ""):
    """A sequence of so many full blocks, and one token more."""
    sequence = cache.sequence(range(first, first + 4 * num_blocks + 1), owner=owner)
    sequence.match()
    assert sequence.reserve(4 * num_blocks) is not None
    sequence.seal(4 * num_blocks)
    return sequence


def cached(cache: KvCache, first: int, num_blocks: int) -> int:
    """Blocks of the prefix that are in the cache."""
    sequence = cache.sequence(range(first, first + 4 * num_blocks + 1))
    found = sequence.count_cached_tokens() // 4
    sequence.release()
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock) -> KvCache:
    return KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=4), clock=clock)


def keep(cache: KvCache, first: int, num_blocks: int, for_s: float | None, owner: str = "") -> None:
    sequence = sealed(cache, first, num_blocks, owner)
    if for_s is not None:
        sequence.retain(for_s)
    sequence.release()


def test_retained_prefix_outlives_what_came_later(cache):
    keep(cache, 0, 3, 60.0)
    for turn in range(1, 10):
        keep(cache, 1000 * turn, 4, None)
    assert cached(cache, 0, 3) == 3


def test_without_retention_the_oldest_goes(cache):
    keep(cache, 0, 3, None)
    for turn in range(1, 3):
        keep(cache, 1000 * turn, 4, None)
    assert cached(cache, 0, 3) == 0


def test_after_its_deadline_a_prefix_goes_first_tail_before_head(cache, clock):
    keep(cache, 0, 3, 60.0)
    keep(cache, 1000, 4, None)
    clock.now_s = 60.0
    keep(cache, 2000, 2, None)
    assert cached(cache, 0, 3) == 2
    assert cached(cache, 1000, 4) == 4


def test_of_several_that_ask_the_longest_counts(cache, clock):
    keep(cache, 0, 3, 60.0)
    keep(cache, 0, 3, 5.0)
    clock.now_s = 30.0
    for turn in range(1, 10):
        keep(cache, 1000 * turn, 4, None)
    assert cached(cache, 0, 3) == 3


@pytest.mark.parametrize(("num_tokens", "kept"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (12, 3), (13, 3), (1000, 3)])
def test_prefix_is_retained_up_to_the_block_that_holds_its_last_token(cache, num_tokens, kept):
    sequence = sealed(cache, 0, 3)
    sequence.retain(60.0, num_tokens=num_tokens)
    assert cache.pool.retained_blocks == kept
    sequence.release()
    for turn in range(1, 10):
        keep(cache, 1000 * turn, 4, None)
    assert cached(cache, 0, 3) == kept
    cache.check_integrity()


def test_retention_makes_nothing_wait(cache):
    keep(cache, 0, 8, 60.0)
    keep(cache, 1000, 8, None)
    assert cached(cache, 1000, 8) == 8
    assert cached(cache, 0, 8) == 0
    cache.check_integrity()
    assert cache.pool.retained_blocks == 0


def test_retained_blocks_go_longest_idle_first_tail_before_head(cache):
    keep(cache, 0, 4, 600.0)
    keep(cache, 1000, 4, 60.0)
    keep(cache, 2000, 2, None)
    assert (cached(cache, 0, 4), cached(cache, 1000, 4)) == (2, 4)


def test_retention_is_taken_back(cache):
    keep(cache, 0, 4, 60.0)
    keep(cache, 1000, 2, None)
    cache.pool.retain([cache.pool.find(digest) for digest in cache.hasher.chain(cache.hasher.root(), range(16))], 0)
    assert cache.pool.retained_blocks == 0
    keep(cache, 2000, 3, None)
    assert (cached(cache, 0, 4), cached(cache, 1000, 2)) == (3, 2)


def test_found_again_it_stays_retained(cache):
    keep(cache, 0, 3, 60.0)
    keep(cache, 0, 3, None)
    keep(cache, 1000, 4, None)
    keep(cache, 2000, 4, None)
    assert cached(cache, 0, 3) == 3


def test_owner_that_retains_all_gives_up_what_others_need(cache):
    keep(cache, 0, 8, 3600.0, "greedy")
    keep(cache, 1000, 4, None, "other")
    assert cached(cache, 1000, 4) == 4
    keep(cache, 2000, 4, 3600.0, "greedy")
    assert cached(cache, 1000, 4) == 4  # its share, retained or not


def test_owner_with_retained_blocks_is_not_dormant(cache, clock):
    keep(cache, 0, 3, 60.0, "patient")
    for turn in range(1, 40):
        keep(cache, 1000 * turn, 4, None, "busy")
    assert cached(cache, 0, 3) == 3
    clock.now_s = 61.0
    for turn in range(40, 80):
        keep(cache, 1000 * turn, 4, None, "busy")
    assert cached(cache, 0, 3) == 0


def test_policy_that_cannot_retain_is_not_asked(clock):
    pool = BlockPool(4, 4, policy=LeastRecentlyUsed(), clock=clock)
    (block,) = pool.allocate(1)
    pool.seal([block], PrefixHasher(4).chain(PrefixHasher(4).root(), range(4)))
    pool.retain([block], 60.0)
    assert pool.retained_blocks == 0


def test_retained_states_outlive_others_until_their_deadline(clock):
    pool = StateSlotPool(4, max_snapshots=2, clock=clock)
    slot = pool.allocate()
    one, two, three, four = (bytes([number]) * 16 for number in range(4))

    def snapshot(digest) -> None:
        copy = pool.begin_snapshot(slot, digest, num_tokens=4)
        pool.complete(copy)

    snapshot(one)
    pool.retain(one, 60.0)
    pool.retain(one, 5.0)  # it stays as it is
    pool.retain(four, 60.0)  # which is not there
    snapshot(two)
    snapshot(three)
    assert pool.find(one) is not None
    assert pool.find(two) is None
    clock.now_s = 60.0
    snapshot(four)
    assert pool.find(one) is None
    pool.check_integrity()


class Retaining(RuleBasedStateMachine):
    """Blocks of several owners, retained or not, against what a list says of them."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.pool = BlockPool(
            NUM_BLOCKS, 4, policy=FairLeastRecentlyUsed(NUM_BLOCKS, clock=self.clock), clock=self.clock
        )
        self.used: list[tuple[int, str]] = []
        self.idle: dict[int, str] = {}
        self.deadlines: dict[int, float] = {}
        self.next_digest = 0

    @rule(count=st.integers(1, NUM_BLOCKS), owner=st.sampled_from(OWNERS))
    def allocate(self, count: int, owner: str) -> None:
        available = self.pool.available_blocks
        retained = self.retained()
        plain = {name: {b for b, o in self.idle.items() if o == name and b not in retained} for name in OWNERS}
        taken = self.pool.allocate(count, owner)
        assert (taken is not None) == (count <= available)  # whatever is retained
        gone = [block for block in self.idle if not self.pool.is_idle(block)]
        for block in gone:
            if block in retained:
                left = plain[self.idle[block]] - set(gone)
                assert not left, "a retained block went before its owner's others"
        for block in gone:
            del self.idle[block]
            self.deadlines.pop(block, None)
        self.used += [(block, owner) for block in taken or []]

    @rule(keep=st.booleans(), data=st.data())
    def leave(self, keep: bool, data: st.DataObject) -> None:
        if not self.used:
            return
        block, owner = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.next_digest += 1
        self.pool.seal([block], [self.next_digest.to_bytes(16, "little")])
        if keep:
            self.retain_one(block, data.draw(st.sampled_from((1.0, 5.0, 60.0))))
        self.pool.release([block])
        self.idle[block] = owner

    @rule(for_s=st.sampled_from((0.0, 1.0, 30.0)), data=st.data())
    def retain(self, for_s: float, data: st.DataObject) -> None:
        if self.idle:
            self.retain_one(data.draw(st.sampled_from(sorted(self.idle))), for_s)

    @rule(owner=st.sampled_from(OWNERS), data=st.data())
    def find(self, owner: str, data: st.DataObject) -> None:
        if self.idle:
            block = data.draw(st.sampled_from(sorted(self.idle)))
            self.pool.acquire([block], owner)
            self.pool.release([block])
            self.idle[block] = owner

    @rule(seconds=st.sampled_from((0.5, 2.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.idle.clear()
        self.deadlines.clear()

    def retain_one(self, block: int, for_s: float) -> None:
        self.pool.retain([block], for_s)
        if for_s:
            self.deadlines[block] = max(self.clock.now_s + for_s, self.deadlines.get(block, 0.0))
        else:
            self.deadlines.pop(block, None)

    def retained(self) -> set[int]:
        return {block for block, deadline_s in self.deadlines.items() if deadline_s > self.clock.now_s}

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.idle_blocks == len(self.idle)
            assert self.pool.retained_blocks >= len(self.retained() & self.idle.keys())


TestRetaining = Retaining.TestCase
TestRetaining.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
