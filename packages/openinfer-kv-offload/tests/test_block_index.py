"""What is in which block: policies, pins and time-to-live."""

import pytest

from openinfer_kv_cache import EvictionPolicyError, LeastRecentlyUsed
from openinfer_kv_cache.testing import check_eviction_policy
from openinfer_kv_cache.testing.tier_cases import chain
from openinfer_kv_offload import LeastFrequentlyUsed
from openinfer_kv_offload.host.block_index import ArenaIndex

STAMP = b"s" * 16


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def make(num_blocks, *, policy=None, ttl_s=None, clock=None):
    return ArenaIndex(num_blocks, policy or LeastRecentlyUsed(), ttl_s=ttl_s, clock=clock or Clock())


def store(index, digests):
    for digest in digests:
        block_id, _ = index.take()
        index.publish(block_id, digest, STAMP)
    index.check_integrity()


def use(index, digests):
    index.release(index.hold_prefix(digests))


def test_least_frequently_used_keeps_the_contract_of_policies():
    check_eviction_policy(LeastFrequentlyUsed)


def test_lfu_keeps_what_was_found_often_and_lru_does_not():
    popular, *others = chain(1, 4)
    kept = {}
    for policy in (LeastFrequentlyUsed(), LeastRecentlyUsed()):
        index = make(3, policy=policy)
        store(index, [popular])
        use(index, [popular])
        use(index, [popular])
        store(index, others)
        kept[type(policy)] = popular in index
    assert kept == {LeastFrequentlyUsed: True, LeastRecentlyUsed: False}


def test_lfu_forgets_old_popularity_when_as_much_was_evicted_as_is_held():
    popular = chain(1, 1)
    index = make(3, policy=LeastFrequentlyUsed())
    store(index, popular)
    use(index, popular)
    store(index, chain(2, 12))
    assert popular[0] not in index


def test_a_chain_is_given_up_from_its_end():
    digests = chain(1, 3)
    index = make(3)
    store(index, digests)
    use(index, digests)
    store(index, chain(2, 1))
    assert [digest in index for digest in digests] == [True, True, False]


def test_held_places_are_never_taken():
    index = make(2)
    store(index, chain(1, 2))
    held = index.hold_prefix(chain(1, 2))
    assert index.take() is None
    index.release(held)
    block_id, left = index.take()
    assert left.digest == chain(1, 2)[1]
    index.give_back(block_id)
    index.check_integrity()


def test_a_dropped_block_is_not_found_and_its_place_is_free_after_the_last_holder():
    index = make(1)
    (digest,) = chain(1, 1)
    store(index, [digest])
    first, second = index.hold_prefix([digest]), index.hold_prefix([digest])
    assert index.drop(first[0])
    assert not index.drop(second[0])
    index.check_integrity()
    assert index.hold_prefix([digest]) == []
    index.release(first)
    assert index.take() is None
    index.release(second)
    assert index.take() is not None


def test_time_to_live_counts_from_the_last_use():
    clock = Clock()
    index = make(4, ttl_s=10.0, clock=clock)
    store(index, chain(1, 2))
    clock.now_s = 6.0
    use(index, chain(1, 1))
    clock.now_s = 11.0
    assert index.expire() == 1
    assert chain(1, 1)[0] in index
    index.check_integrity()
    clock.now_s = 16.0
    assert index.expire() == 1
    assert len(index) == 0


def test_the_second_of_two_equal_blocks_is_not_kept():
    index = make(2)
    block_ids = [index.take()[0], index.take()[0]]
    assert [index.publish(block_id, chain(1, 1)[0], STAMP) for block_id in block_ids] == [True, False]
    index.check_integrity()


def test_a_policy_that_names_a_held_place_is_an_error():
    class Wrong(LeastRecentlyUsed):
        def select(self, num_blocks):
            super().select(num_blocks)
            return [7]

    index = make(1, policy=Wrong())
    store(index, chain(1, 1))
    with pytest.raises(EvictionPolicyError, match="one idle block"):
        index.take()
