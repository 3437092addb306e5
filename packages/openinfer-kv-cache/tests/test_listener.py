"""What a pool's listener hears is exactly what the pool finds."""

import random
from array import array

from openinfer_kv_cache import BlockPool, KvCache, KvCacheOptions, StoredBlocks, table_digest


class Router:
    """What a listener can know of a pool; refuses what contradicts what it has heard."""

    def __init__(self):
        self.known = set()
        self.heard = []

    def stored(self, blocks):
        assert not self.known & set(blocks.digests), "a block was named twice"
        self.known |= set(blocks.digests)
        self.heard.append(blocks)

    def removed(self, digests):
        assert digests
        self.known -= set(digests)
        self.heard.append(("removed", list(digests)))

    def cleared(self):
        self.known.clear()
        self.heard.append("cleared")


def listened(num_blocks=8, **options):
    cache = KvCache(KvCacheOptions(num_blocks=num_blocks, block_size_tokens=2, **options))
    cache.pool.listener = router = Router()
    return cache, router


def computed(cache, token_ids, **origin):
    sequence = cache.sequence(token_ids, **origin)
    sequence.match()
    sequence.reserve(len(token_ids))
    sequence.seal(len(token_ids))
    return sequence


def test_sealed_blocks_are_told_with_their_tokens_parent_and_origin():
    cache, router = listened()
    first = computed(cache, [1, 2, 3, 4, 5], lora_name="adapter", cache_salt="tenant")
    a, b = first.prefix_digests()
    assert router.heard == [StoredBlocks(None, [a, b], array("I", [1, 2, 3, 4]), "adapter", "tenant")]
    first.append(6)
    first.seal(6)
    (c,) = first.prefix_digests()[2:]
    assert router.heard[1:] == [StoredBlocks(b, [c], array("I", [5, 6]), "adapter", "tenant")]


def test_each_table_tells_of_its_own_blocks():
    cache, router = listened(num_blocks=16, table_windows=(None, 1))
    first = cache.sequence([1, 2, 3, 4, 5])
    first.reserve(5)
    first.seal(2)
    first.free_behind_windows(4)
    first.seal(4)
    a, b = first.prefix_digests()
    c, d = (table_digest(digest, 1) for digest in (a, b))
    assert router.heard == [
        StoredBlocks(None, [a], array("I", [1, 2]), None, None, 0),
        StoredBlocks(None, [c], array("I", [1, 2]), None, None, 1),
        StoredBlocks(a, [b], array("I", [3, 4]), None, None, 0),
        StoredBlocks(c, [d], array("I", [3, 4]), None, None, 1),
    ]


def test_loaded_blocks_are_told_of_and_those_that_the_pool_had_are_not():
    cache, router = listened(num_blocks=32, table_windows=(None, 2))
    one = computed(cache, range(12))
    one.free_behind_windows(12)
    cache.pool.release(cache.pool.allocate(cache.pool.available_blocks))  # what was behind the window is evicted
    two = cache.sequence(range(11))
    assert two.match() == 0
    two.reserve(11, windowed_tokens=2)
    told = len(router.heard)
    assert two.place_prefix(5)
    assert two.tables[0].blocks[:5] == one.tables[0].blocks[:5]
    two.seal(10)
    d, e = (table_digest(digest, 1) for digest in two.prefix_digests()[3:5])
    assert router.heard[told:] == [StoredBlocks(d, [e], array("I", [8, 9]), None, None, 1)]
    assert router.known == {cache.pool.digest(block) for block in range(32)} - {None}
    cache.check_integrity()


def test_a_duplicate_is_not_told_and_splits_what_is():
    cache, router = listened()
    one, two = cache.sequence([1, 2, 3, 4]), cache.sequence([1, 2, 3, 4, 5, 6])
    for sequence in (one, two):
        sequence.reserve(6)
    one.seal(4)
    two.seal(6)
    assert [each.digests for each in router.heard] == [one.prefix_digests(), two.prefix_digests()[2:]]
    assert router.heard[1].parent == one.prefix_digests()[1]


def test_a_copy_that_is_evicted_is_not_told_while_another_one_is_found():
    cache, router = listened(num_blocks=3)
    one, two = cache.sequence([1, 2]), cache.sequence([1, 2])
    for sequence in (one, two):
        sequence.reserve(2)
        sequence.seal(2)
    told = len(router.heard)
    one.release()
    assert cache.pool.allocate(2) is not None  # the first copy is evicted
    assert router.heard[told:] == []
    assert cache.sequence([1, 2, 3]).match() == 2
    two.release()
    assert router.heard[told:] == []
    cache.pool.allocate(1)
    assert router.heard[told:] == []  # the sequence that matched holds it


def test_evictions_and_expiry_are_told_and_clearing_once():
    now = [0.0]
    cache = KvCache(KvCacheOptions(num_blocks=2, block_size_tokens=2, idle_ttl_s=5), clock=lambda: now[0])
    cache.pool.listener = router = Router()
    sequence = computed(cache, [1, 2, 3, 4])
    digests = list(sequence.prefix_digests())
    sequence.release()
    cache.pool.allocate(1)
    assert router.heard[1:] == [("removed", digests[1:])]  # the tail first
    now[0] = 6.0
    cache.pool.expire()
    assert router.heard[2:] == [("removed", digests[:1])]
    cache.clear()
    assert router.heard[3:] == ["cleared"]


def test_what_is_sealed_after_a_clear_of_its_beginning_is_not_told():
    cache, router = listened()
    sequence = cache.sequence([1, 2, 3, 4])
    sequence.reserve(4)
    cache.clear()
    sequence.seal(4)
    assert router.heard == ["cleared"]


def test_over_random_use_the_listener_knows_nothing_that_the_pool_does_not_find():
    rng = random.Random(4)
    cache, router = listened(num_blocks=12)
    live = []
    for _ in range(600):
        if live and (rng.random() < 0.4 or len(live) == 3):
            live.pop(rng.randrange(len(live))).release()
        elif rng.random() < 0.02:
            cache.clear()
        else:
            sequence = cache.sequence([rng.randrange(3) for _ in range(rng.randrange(1, 9))])
            sequence.match()
            if sequence.reserve(sequence.num_tokens) is None:
                sequence.release()
                continue
            sequence.seal(sequence.num_tokens)
            live.append(sequence)
        missing = {digest for digest in router.known if cache.pool.find(digest) is None}
        assert not missing
        cache.check_integrity()
    assert len(router.heard) > 200


def test_a_pool_without_a_listener_tells_nobody():
    assert BlockPool(2, 2).listener is None
