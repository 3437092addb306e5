import pytest

from openinfer_kv_cache import (
    BlockPool,
    BlockState,
    BlockStateError,
    EvictionPolicyError,
    EvictionReason,
    KvConfigError,
    LeastRecentlyUsed,
    PrefixHasher,
)

HASHER = PrefixHasher(1, key=bytes(32))
DIGESTS = HASHER.chain(HASHER.root(), range(16))


@pytest.fixture
def pool():
    pool = BlockPool(4, 1)
    yield pool
    pool.check_integrity()


def sealed(pool: BlockPool, *digests: int) -> list[int]:
    blocks = pool.allocate(len(digests))
    assert blocks is not None
    pool.seal(blocks, [DIGESTS[digest] for digest in digests])
    return blocks


def test_allocate_hands_out_every_block_once(pool):
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) == [3]
    assert pool.allocate(0) == []
    assert pool.available_blocks == 0


def test_allocate_more_than_available_returns_none_and_changes_nothing(pool):
    idle = sealed(pool, 0, 1)
    pool.release(idle)
    held = pool.allocate(1)
    assert pool.allocate(4) is None
    assert [pool.find(digest) for digest in DIGESTS[:2]] == idle
    assert (pool.free_blocks, pool.idle_blocks, pool.available_blocks) == (1, 2, 3)
    pool.release(held)


def test_allocate_takes_free_blocks_before_it_evicts(pool):
    idle = sealed(pool, 0)
    pool.release(idle)
    pool.allocate(3)
    assert pool.find(DIGESTS[0]) == idle[0]
    assert pool.allocate(1) == idle
    assert pool.find(DIGESTS[0]) is None
    assert pool.counters().evicted_blocks[EvictionReason.CAPACITY] == 1


def test_states_follow_the_diagram(pool):
    (block,) = pool.allocate(1)
    assert pool.state(block) is BlockState.WRITABLE
    pool.seal([block], DIGESTS[:1])
    assert pool.state(block) is BlockState.SEALED
    pool.release([block])
    assert pool.state(block) is BlockState.IDLE
    pool.acquire([block])
    assert pool.state(block) is BlockState.SEALED
    pool.release([block])
    pool.allocate(4)
    assert pool.state(block) is BlockState.WRITABLE
    pool.release([block])
    assert pool.state(block) is BlockState.FREE


@pytest.mark.parametrize("state", ["free", "sealed", "idle"])
def test_seal_what_is_not_writable_raises_and_changes_nothing(pool, state):
    blocks = sealed(pool, 0)
    if state == "idle":
        pool.release(blocks)
    if state == "free":
        blocks = [3]
    (writable,) = pool.allocate(1)
    with pytest.raises(BlockStateError, match=f"cannot seal block {blocks[0]}: it is {state}"):
        pool.seal([writable, *blocks], DIGESTS[4:6])
    assert pool.state(writable) is BlockState.WRITABLE
    assert pool.find(DIGESTS[4]) is None


def test_seal_one_block_twice_in_a_call_raises(pool):
    (block,) = pool.allocate(1)
    with pytest.raises(BlockStateError, match="listed twice"):
        pool.seal([block, block], DIGESTS[:2])
    assert pool.state(block) is BlockState.WRITABLE


def test_seal_wrong_number_of_digests_raises(pool):
    blocks = pool.allocate(2)
    with pytest.raises(BlockStateError, match="2 blocks with 1 digests"):
        pool.seal(blocks, DIGESTS[:1])


@pytest.mark.parametrize("state", ["free", "writable"])
def test_acquire_what_is_not_sealed_raises_and_changes_nothing(pool, state):
    idle = sealed(pool, 0)
    pool.release(idle)
    wrong = 3 if state == "free" else pool.allocate(1)[0]
    with pytest.raises(BlockStateError, match=f"block {wrong}: it is {state}"):
        pool.acquire([*idle, wrong])
    with pytest.raises(BlockStateError, match=f"block {wrong}: it is {state}"):
        pool.pin([*idle, wrong])
    assert pool.state(idle[0]) is BlockState.IDLE
    assert pool.num_users(idle[0]) == 0


@pytest.mark.parametrize("state", ["free", "idle"])
def test_release_without_user_raises_and_changes_nothing(pool, state):
    idle = sealed(pool, 0)
    pool.release(idle)
    (held,) = pool.allocate(1)
    wrong = idle[0] if state == "idle" else 3
    with pytest.raises(BlockStateError, match=f"cannot release block {wrong}: it is {state}"):
        pool.release([held, wrong])
    assert pool.state(held) is BlockState.WRITABLE
    assert pool.num_users(held) == 1


def test_release_same_block_twice_in_a_call_raises_and_changes_nothing(pool):
    (block,) = pool.allocate(1)
    with pytest.raises(BlockStateError, match="without a user"):
        pool.release([block, block])
    assert pool.num_users(block) == 1


def test_release_shared_block_stays_sealed_until_the_last_user(pool):
    (block,) = sealed(pool, 0)
    pool.acquire([block])
    pool.acquire([block])
    pool.release([block])
    pool.release([block])
    assert pool.state(block) is BlockState.SEALED
    assert pool.available_blocks == 3
    pool.release([block])
    assert pool.state(block) is BlockState.IDLE


def test_duplicate_keeps_its_block_and_goes_free_at_the_end(pool):
    (first,) = sealed(pool, 0)
    (second,) = sealed(pool, 0)
    assert pool.find(DIGESTS[0]) == first != second
    assert pool.state(second) is BlockState.SEALED
    assert pool.digest(second) == DIGESTS[0]
    pool.release([second])
    assert pool.state(second) is BlockState.FREE
    assert pool.counters().duplicate_blocks == 1
    assert pool.counters().evicted_blocks[EvictionReason.DUPLICATE] == 1


def test_duplicate_takes_over_a_vacant_registration(pool):
    (first,) = sealed(pool, 0)
    (second,) = sealed(pool, 0)
    pool.release([first])
    rest = pool.allocate(3)
    assert first in rest
    assert pool.find(DIGESTS[0]) == second
    pool.check_integrity()
    pool.release([second])
    assert pool.find(DIGESTS[0]) == second
    assert pool.state(second) is BlockState.IDLE


def test_third_copy_takes_over_where_the_second_has_gone(pool):
    (first,), (second,), (third,) = sealed(pool, 0), sealed(pool, 0), sealed(pool, 0)
    pool.release([second])
    pool.release([first])
    pool.allocate(3)
    assert pool.find(DIGESTS[0]) == third
    pool.check_integrity()
    pool.clear()
    pool.release([third])
    assert pool.find(DIGESTS[0]) is None
    pool.check_integrity()


def test_seal_private_is_never_found_and_goes_free(pool):
    (block,) = pool.allocate(1)
    pool.seal([block], None)
    assert pool.state(block) is BlockState.SEALED
    assert pool.digest(block) is None
    pool.release([block])
    assert pool.state(block) is BlockState.FREE


def test_eviction_order_is_least_recently_used(pool):
    blocks = sealed(pool, 0, 1, 2, 3)
    pool.release([blocks[2]])
    pool.release([blocks[0]])
    pool.release([blocks[3]])
    pool.release([blocks[1]])
    pool.acquire([blocks[2]])
    pool.release([blocks[2]])
    assert [pool.allocate(1)[0] for _ in range(4)] == [blocks[0], blocks[3], blocks[1], blocks[2]]


def test_eviction_order_is_the_policys():
    class MostRecentlyUsed(LeastRecentlyUsed):
        def select(self, num_blocks):
            return [self._order.popitem()[0] for _ in range(num_blocks)]

    pool = BlockPool(3, 1, policy=MostRecentlyUsed())
    blocks = sealed(pool, 0, 1, 2)
    pool.release(blocks)
    assert pool.allocate(2) == [blocks[1], blocks[2]]
    assert pool.find(DIGESTS[0]) == blocks[0]


@pytest.mark.parametrize("victims", [[], [0], [0, 0], [0, 3], [0, 99], [0, -1], [0, 1, 2]])
def test_eviction_policy_that_breaks_its_contract_is_named(victims):
    class Broken(LeastRecentlyUsed):
        def select(self, num_blocks):
            return victims

    pool = BlockPool(4, 1, policy=Broken())
    idle = sealed(pool, 0, 1)
    pool.allocate(2)
    pool.release(idle)
    with pytest.raises(EvictionPolicyError, match=r"Broken\.select\(2\)"):
        pool.allocate(2)
    assert [pool.state(block) for block in idle] == [BlockState.IDLE] * 2
    pool.check_integrity()


def test_pin_keeps_an_idle_block_from_eviction(pool):
    blocks = sealed(pool, 0, 1)
    pool.release(blocks)
    pin = pool.pin(blocks[:1])
    assert pool.available_blocks == 3
    assert pool.allocate(4) is None
    assert blocks[0] not in pool.allocate(3)
    assert pool.num_pins(blocks[0]) == 1
    pin.close()
    assert pool.state(blocks[0]) is BlockState.IDLE
    assert pool.available_blocks == 1


def test_pin_outlives_the_sequence_and_counts(pool):
    blocks = sealed(pool, 0)
    with pool.pin(blocks) as outer:
        pool.release(blocks)
        with pool.pin(outer.block_ids):
            assert pool.num_pins(blocks[0]) == pool.num_users(blocks[0]) == 2
            pool.check_integrity()
        assert pool.state(blocks[0]) is BlockState.SEALED
    assert pool.state(blocks[0]) is BlockState.IDLE


def test_pin_close_twice_is_once(pool):
    blocks = sealed(pool, 0)
    pin = pool.pin(blocks)
    pin.close()
    pin.close()
    assert pool.num_users(blocks[0]) == 1
    assert pool.num_pins(blocks[0]) == 0


def test_clear_forgets_idle_and_used_content(pool):
    used, duplicate = sealed(pool, 0)[0], sealed(pool, 0)[0]
    idle = sealed(pool, 1)
    pool.release(idle)
    assert pool.clear() == 1
    assert pool.find(DIGESTS[0]) is pool.find(DIGESTS[1]) is None
    assert pool.state(idle[0]) is BlockState.FREE
    assert pool.state(used) is pool.state(duplicate) is BlockState.SEALED
    assert pool.digest(used) is None
    pool.check_integrity()
    pool.release([used, duplicate])
    assert pool.free_blocks == 4
    assert pool.counters().evicted_blocks[EvictionReason.CLEARED] == 3


class Clock:
    now_s = 0.0
    reads = 0

    def __call__(self):
        self.reads += 1
        return self.now_s


def test_ttl_expires_idle_blocks_only():
    clock = Clock()
    pool = BlockPool(4, 1, idle_ttl_s=10.0, clock=clock)
    early, late, used = sealed(pool, 0, 1, 2)
    pool.release([early])
    clock.now_s = 5.0
    pool.release([late])
    clock.now_s = 9.9
    assert pool.expire() == 0
    clock.now_s = 10.0
    assert pool.expire() == 1
    assert pool.state(early) is BlockState.FREE
    clock.now_s = 1000.0
    assert pool.expire() == 1
    assert pool.state(used) is BlockState.SEALED
    assert pool.counters().evicted_blocks[EvictionReason.EXPIRED] == 2
    pool.check_integrity()


def test_ttl_starts_anew_when_a_block_is_used_again():
    clock = Clock()
    pool = BlockPool(4, 1, idle_ttl_s=10.0, clock=clock)
    blocks = sealed(pool, 0, 1)
    pool.release(blocks)
    clock.now_s = 8.0
    pool.acquire(blocks[:1])
    pool.release(blocks[:1])
    clock.now_s = 12.0
    assert pool.expire() == 1
    assert pool.find(DIGESTS[0]) == blocks[0]
    pool.allocate(4)
    pool.check_integrity()


def test_ttl_unused_never_reads_the_clock():
    clock = Clock()
    pool = BlockPool(4, 1, clock=clock)
    blocks = sealed(pool, 0, 1)
    pool.release(blocks)
    pool.expire()
    pool.acquire(blocks)
    assert clock.reads == 0


def test_ttl_reads_the_clock_per_call_not_per_block():
    clock = Clock()
    pool = BlockPool(8, 1, idle_ttl_s=1.0, clock=clock)
    pool.release(sealed(pool, *range(8)))
    assert clock.reads == 1


def test_counters_are_a_read_only_snapshot(pool):
    before = pool.counters()
    pool.count_match(hit_blocks=3, missed_blocks=2)
    after = pool.counters()
    assert (before.num_matches, before.hit_blocks, before.missed_blocks) == (0, 0, 0)
    assert (after.num_matches, after.hit_blocks, after.missed_blocks) == (1, 3, 2)
    assert set(after.evicted_blocks) == set(EvictionReason)
    with pytest.raises(TypeError):
        after.evicted_blocks[EvictionReason.EXPIRED] = 1
    with pytest.raises(AttributeError):
        after.hit_blocks = 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size_tokens": 0}, "block_size_tokens is 0"),
        ({"idle_ttl_s": 0.0}, "idle_ttl_s is 0.0"),
        ({"idle_ttl_s": float("nan")}, "idle_ttl_s is nan"),
    ],
)
def test_construction_out_of_range_is_refused(arguments, message):
    with pytest.raises(KvConfigError, match=message):
        BlockPool(**({"num_blocks": 1, "block_size_tokens": 1} | arguments))


def test_blocks_for_rounds_up():
    pool = BlockPool(1, 16)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
