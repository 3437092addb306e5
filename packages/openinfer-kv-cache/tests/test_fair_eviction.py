"""Eviction by owner: one alone is served by plain LRU; several are brought down to one level, largest first."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openinfer_kv_cache import (
    BlockPin,
    BlockPool,
    BlockState,
    FairLeastRecentlyUsed,
    KvCache,
    KvCacheOptions,
    LeastRecentlyUsed,
    StoredBlocks,
)
from openinfer_kv_cache.eviction.fair import MAX_PROTECTED_OWNERS, TURNOVERS
from openinfer_kv_cache.testing import check_eviction_policy

NUM_BLOCKS = 12
OWNERS = st.sampled_from(["a", "b", "c", "d"])


class Removed:
    """A listener that keeps the digests of evicted blocks."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def stored(self, blocks: StoredBlocks) -> None:
        del blocks

    def removed(self, digests: Sequence[bytes]) -> None:
        self.digests += digests

    def cleared(self) -> None:
        self.digests.clear()


class FairPoolMachine(RuleBasedStateMachine):
    """Some owners take, find, pin and give back blocks; a slow model says which are evicted, one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 1)
        self.pool.listener = self.removed = Removed()
        self.num_digests = 0
        self.taken = 0
        self.held: list[tuple[list[int], str]] = []
        self.pins: list[BlockPin] = []
        self.owner_of: dict[int, str] = {}  # of blocks that are not free
        self.idle: list[int] = []  # longest idle first
        self.last_taken: dict[str, int] = {}
        self.dormant: list[str] = []

    # The model.

    def num_held(self, owner: str) -> int:
        return list(self.owner_of.values()).count(owner)

    def touch(self, owner: str) -> None:
        self.last_taken.pop(owner, None)
        self.last_taken[owner] = self.taken
        if owner in self.dormant:
            self.dormant.remove(owner)

    def drop_unheld(self) -> None:
        self.last_taken = {owner: at for owner, at in self.last_taken.items() if self.num_held(owner)}
        self.dormant = [owner for owner in self.dormant if self.num_held(owner)]

    def expire(self, taker: str) -> None:
        for owner, at in list(self.last_taken.items()):
            if at > self.taken - TURNOVERS * NUM_BLOCKS:
                break
            if owner == taker or any(
                self.owner_of[block_id] == owner for block_id in set(self.owner_of) - set(self.idle)
            ):
                self.touch(owner)
            else:
                del self.last_taken[owner]
                self.dormant.append(owner)

    def next_victim(self, taker: str, gaining: int) -> int:
        owners = {self.owner_of[block_id] for block_id in self.idle}
        while self.dormant and self.dormant[0] not in owners:
            self.touch(self.dormant[0])
        levels = {owner: self.num_held(owner) + gaining * (owner == taker) for owner in owners}
        owner = self.dormant[0] if self.dormant else min(owners, key=lambda each: (-levels[each], each))
        return next(block_id for block_id in self.idle if self.owner_of[block_id] == owner)

    def evict(self, num_blocks: int, taker: str, gaining: int) -> list[bytes | None]:
        if num_blocks > 0 and len({self.owner_of[block_id] for block_id in self.owner_of}) > 1:
            if taker in self.dormant:
                self.touch(taker)
            self.expire(taker)
        digests: list[bytes | None] = []
        for _ in range(num_blocks):
            victim = self.next_victim(taker, gaining)
            digests.append(self.pool.digest(victim))
            self.idle.remove(victim)
            del self.owner_of[victim]
            self.drop_unheld()
        return digests

    # What happens.

    @rule(owner=OWNERS, num_blocks=st.integers(1, 6), seals=st.booleans())
    def allocate(self, owner: str, num_blocks: int, seals: bool) -> None:
        if num_blocks > self.pool.available_blocks:
            assert self.pool.allocate(num_blocks, owner) is None
            return
        evicted = self.evict(num_blocks - self.pool.free_blocks, owner, num_blocks)
        self.removed.digests.clear()
        block_ids = self.pool.allocate(num_blocks, owner)
        assert block_ids is not None
        assert self.removed.digests == evicted
        self.taken += num_blocks
        self.owner_of.update(dict.fromkeys(block_ids, owner))
        self.touch(owner)
        if seals:
            first, self.num_digests = self.num_digests, self.num_digests + num_blocks
            self.pool.seal(block_ids, [number.to_bytes(16, "big") for number in range(first, first + num_blocks)])
        self.held.append((block_ids, owner))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        block_ids = block_ids[::-1]
        is_writable = {block_id for block_id in block_ids if self.pool.state(block_id) is BlockState.WRITABLE}
        self.pool.release(block_ids)
        self.note_given_back(block_ids, is_writable)

    def note_given_back(self, block_ids: Sequence[int], is_writable: set[int]) -> None:
        for block_id in block_ids:
            if block_id in is_writable:
                del self.owner_of[block_id]
            elif self.pool.is_idle(block_id):
                self.idle.append(block_id)
        self.drop_unheld()

    @precondition(lambda self: any(self.pool.digest(block_id) for block_id in self.owner_of))
    @rule(owner=OWNERS, data=st.data(), pins=st.booleans())
    def find(self, owner: str, data: st.DataObject, pins: bool) -> None:
        named = sorted(block_id for block_id in self.owner_of if self.pool.digest(block_id))
        block_ids = data.draw(st.lists(st.sampled_from(named), unique=True, min_size=1, max_size=4))
        if pins:
            self.pins.append(self.pool.pin(block_ids))
        else:
            self.pool.acquire(block_ids, owner)
            self.owner_of.update(dict.fromkeys(block_ids, owner))
            self.touch(owner)
            self.held.append((block_ids, owner))
        self.idle = [block_id for block_id in self.idle if block_id not in block_ids]
        self.drop_unheld()

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        pin = self.pins.pop()
        pin.close()
        self.note_given_back(pin.block_ids, set())

    @rule()
    def clear(self) -> None:
        if not self.held and not self.pins:
            self.pool.clear()
            self.idle.clear()
            self.owner_of.clear()
            self.drop_unheld()

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check_integrity()
        used = Counter(owner for block_id, owner in self.owner_of.items() if block_id not in self.idle)
        assert all(self.pool.used_blocks(owner) == used[owner] for owner in "abcd")
        assert len(self.owner_of) == NUM_BLOCKS - self.pool.free_blocks

    @invariant()
    def shares_fit_into_the_pool(self) -> None:
        for owner in "abcd":
            others = [self.pool.used_blocks(other) for other in "abcd" if other != owner]
            protected = self.pool.protected_blocks(owner)
            assert 0 <= protected <= self.pool.idle_blocks
            if not any(others):
                assert protected <= NUM_BLOCKS - NUM_BLOCKS // 4


FairPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_pool_of_several_owners = FairPoolMachine.TestCase


def serve(cache: KvCache, start: int, num_tokens: int, owner: str) -> int:
    """Runs a prompt of one token a block from beginning to end, and returns how many tokens were cached."""
    sequence = cache.sequence(range(start, start + num_tokens + 1), owner=owner)
    cached_tokens = sequence.match()
    assert sequence.reserve(num_tokens + 1) is not None
    sequence.seal(num_tokens)
    sequence.release()
    return cached_tokens


@pytest.fixture
def cache() -> KvCache:
    return KvCache(KvCacheOptions(num_blocks=100, block_size_tokens=1))


@pytest.mark.parametrize("owner", ["", "tenant"])
def test_one_owner_alone_is_served_by_plain_lru(owner: str) -> None:
    removed: list[list[bytes]] = []
    for policy in (LeastRecentlyUsed(), FairLeastRecentlyUsed(40)):
        cache = KvCache(KvCacheOptions(num_blocks=40, block_size_tokens=1), policy=policy, digest_key=bytes(16))
        cache.pool.listener = listener = Removed()
        for step in range(300):
            serve(cache, start=step * step % 17 * 1000, num_tokens=1 + step * 7 % 23, owner=owner)
        removed.append(listener.digests)
    assert removed[0] == removed[1]
    assert len(removed[0]) > 1000


def test_a_flood_leaves_another_owner_its_prefix(cache: KvCache) -> None:
    serve(cache, 0, 40, "b")
    for flood in range(1, 5 * TURNOVERS):
        serve(cache, flood * 1000, 50, "a")
        assert serve(cache, 0, 40, "b") == 40


def test_beyond_the_level_of_the_others_an_owner_gives_up_its_oldest(cache: KvCache) -> None:
    serve(cache, 0, 50, "b")
    serve(cache, 1000, 19, "b")
    serve(cache, 2000, 90, "a")
    # a's 91 blocks left b 9, of what it had used last
    assert serve(cache, 1000, 19, "b") == 9


def test_an_owner_that_takes_nothing_for_some_turnovers_loses_its_prefix(cache: KvCache) -> None:
    serve(cache, 0, 40, "b")
    for flood in range(1, 2 * TURNOVERS):
        serve(cache, flood * 1000, 90, "a")
    assert serve(cache, 0, 40, "b") == 0


def test_a_shared_block_is_of_who_used_it_last(cache: KvCache) -> None:
    serve(cache, 0, 40, "b")
    assert serve(cache, 0, 40, "a") == 40
    assert cache.pool.protected_blocks("b") == 40
    assert cache.pool.protected_blocks("a") == 0


def test_what_is_protected_is_the_rest_of_a_share(cache: KvCache) -> None:
    serve(cache, 0, 40, "b")
    assert cache.pool.protected_blocks("b") == 0
    assert cache.pool.protected_blocks("a") == 40
    running = cache.sequence(range(5000, 5030), owner="b")
    assert running.reserve(30) is not None
    assert cache.pool.used_blocks("b") == 30
    assert cache.pool.protected_blocks("a") == 20  # of 50, b's 30 in use left
    running.release()


def test_a_dormant_owner_that_needs_more_than_it_has_is_active_again() -> None:
    cache = KvCache(KvCacheOptions(num_blocks=12, block_size_tokens=1))
    serve(cache, 0, 3, "a")
    serve(cache, 1000, 5, "b")
    for _ in range(2 * TURNOVERS * 12 // 4):
        taken = cache.pool.allocate(4, "b")
        assert taken is not None
        cache.pool.release(taken)
    assert cache.pool.protected_blocks("b") == 0  # a is dormant
    unmatched = cache.pool.allocate(9, "a")  # as a prompt does whose log-probabilities are asked for
    assert unmatched is not None
    cache.pool.release(unmatched)
    cache.pool.check_integrity()


def test_a_dormant_owner_whose_blocks_are_pinned_has_none_to_give() -> None:
    cache = KvCache(KvCacheOptions(num_blocks=12, block_size_tokens=1))
    serve(cache, 0, 3, "a")
    kept = [block_id for block_id in range(12) if cache.pool.is_idle(block_id)]
    serve(cache, 1000, 5, "b")
    serve(cache, 2000, 2, "c")
    for _ in range(2 * TURNOVERS * 12 // 2):
        taken = cache.pool.allocate(2, "b")
        assert taken is not None
        cache.pool.release(taken)
    assert cache.pool.protected_blocks("b") == 0  # a and c are dormant
    with cache.pool.pin(kept):
        assert cache.pool.allocate(9, "b") is not None
        cache.pool.check_integrity()


def test_many_owners_leave_each_other_nothing() -> None:
    cache = KvCache(KvCacheOptions(num_blocks=2 * MAX_PROTECTED_OWNERS, block_size_tokens=1))
    for owner in range(MAX_PROTECTED_OWNERS):
        serve(cache, 1000 * owner, 1, str(owner))
    assert cache.pool.protected_blocks("0") == MAX_PROTECTED_OWNERS - 1
    assert cache.pool.protected_blocks("newcomer") == 0


def test_an_owner_without_blocks_is_forgotten() -> None:
    policy = FairLeastRecentlyUsed(8)
    cache = KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=1), policy=policy)
    for owner in range(100):
        serve(cache, 1000 * owner, 5, str(owner))
        assert policy.num_owners <= 3


def test_policy_keeps_the_contract() -> None:
    check_eviction_policy(lambda: FairLeastRecentlyUsed(10))
