import msgspec
import pytest

from openinfer_kv_cache import (
    BlockStateError,
    IntegrityError,
    KvCache,
    KvCacheError,
    KvCacheOptions,
    KvConfigError,
    PrefixHasher,
    SequenceStateError,
)


@pytest.fixture
def cache():
    return KvCache(KvCacheOptions(num_blocks=4, block_size_tokens=2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 2**31}, "num_blocks is 2147483648"),
        ({"block_size_tokens": 0}, "block_size_tokens is 0"),
        ({"idle_ttl_s": 0.0}, "idle_ttl_s is 0.0"),
        ({"idle_ttl_s": float("inf")}, "idle_ttl_s is inf"),
        ({"num_state_slots": -1}, "num_state_slots is -1"),
        ({"num_state_slots": 2, "max_snapshots": 2}, "max_snapshots is 2"),
        ({"max_snapshots": 1}, "max_snapshots is 1"),
    ],
)
def test_options_out_of_range_are_refused(values, message):
    with pytest.raises(KvConfigError, match=message):
        KvCacheOptions(**({"num_blocks": 1} | values))


def test_options_from_json_are_validated_by_name():
    assert msgspec.json.decode(b'{"num_blocks": 3}', type=KvCacheOptions).block_size_tokens == 16
    with pytest.raises(msgspec.ValidationError, match="num_blocks is 0"):
        msgspec.json.decode(b'{"num_blocks": 0}', type=KvCacheOptions)
    with pytest.raises(msgspec.ValidationError, match="num_block"):
        msgspec.json.decode(b'{"num_blocks": 1, "num_block": 2}', type=KvCacheOptions)


def test_can_ever_fit_is_about_the_whole_pool(cache):
    cache.sequence([1]).reserve(8)
    assert cache.can_ever_fit(8)
    assert not cache.can_ever_fit(9)


def test_slots_exist_only_when_asked_for(cache):
    assert cache.slots is None
    options = KvCacheOptions(num_blocks=4, num_state_slots=3, max_snapshots=1)
    assert KvCache(options).slots.num_state_slots == 3


def test_layout_digest_and_key_reach_the_digests():
    options = KvCacheOptions(num_blocks=4, block_size_tokens=2, layout_digest="0f")
    cache = KvCache(options, digest_key=bytes(16))
    expected = PrefixHasher(2, key=bytes(16), layout_digest="0f")
    assert cache.sequence(range(4)).prefix_digests() == expected.chain(expected.root(), range(4))


def test_clear_refuses_while_a_slot_copy_is_in_flight():
    cache = KvCache(KvCacheOptions(num_blocks=4, block_size_tokens=2, num_state_slots=3, max_snapshots=1))
    sequence = cache.sequence(range(5))
    sequence.reserve(5)
    sequence.seal(4)
    slot = cache.slots.allocate()
    copy = cache.slots.begin_snapshot(slot, sequence.prefix_digests()[1], num_tokens=4)
    with pytest.raises(BlockStateError, match="1 copies"):
        cache.clear()
    assert cache.sequence(range(5)).count_cached_tokens() == 4
    cache.slots.complete(copy)
    cache.clear()
    assert cache.sequence(range(5)).count_cached_tokens() == 0
    cache.check_integrity()


@pytest.mark.parametrize("table_windows", [(None,), (None, 4)])
def test_renewed_cache_finds_no_kv_of_another_version_and_that_of_the_same(table_windows):
    key, options = b"k" * 16, KvCacheOptions(num_blocks=16, block_size_tokens=2, table_windows=table_windows)
    cache, restarted = KvCache(options, digest_key=key), KvCache(options, digest_key=key)
    sequence, waiting = cache.sequence(range(9)), cache.sequence(range(9))
    first = list(sequence.prefix_digests())
    assert sequence.reserve(9) is not None
    sequence.seal(8)
    assert waiting.count_cached_tokens() == 8
    with pytest.raises(SequenceStateError, match="hold blocks"):
        cache.renew("a")
    assert waiting.count_cached_tokens() == 8
    sequence.shrink(0)
    versions = [first]
    for version in ("a", "b"):
        cache.renew(version)
        assert waiting.count_cached_tokens() == 0
        assert sequence.reserve(9) is not None
        sequence.seal(8)
        assert cache.sequence(range(9)).count_cached_tokens() == 8
        cache.check_integrity()
        versions.append(list(sequence.prefix_digests()))
        sequence.shrink(0)
    assert len({digest for digests in versions for digest in digests}) == 3 * len(first)
    restarted.renew("b")
    assert list(restarted.sequence(range(9)).prefix_digests()) == versions[2]
    restarted.renew("")
    assert list(restarted.sequence(range(9)).prefix_digests()) == first


def test_live_sequences_are_counted_until_released(cache):
    sequences = [cache.sequence([1]) for _ in range(3)]
    assert cache.num_live_sequences == 3
    sequences[1].release()
    assert cache.num_live_sequences == 2


def test_check_integrity_finds_a_block_released_behind_a_sequences_back(cache):
    sequence = cache.sequence(range(3))
    sequence.reserve(3)
    cache.check_integrity()
    cache.pool.release(sequence.blocks[:1])
    with pytest.raises(IntegrityError, match="position 0 of table 0 of a sequence is free"):
        cache.check_integrity()


def test_check_integrity_finds_a_user_that_nobody_is(cache):
    sequence = cache.sequence(range(3))
    sequence.reserve(3)
    sequence.seal(2)
    cache.pool.acquire(sequence.blocks[:1])
    with pytest.raises(IntegrityError, match=r"counts 2 users.*account for 1"):
        cache.check_integrity()


def test_check_integrity_finds_ids_changed_after_hashing(cache):
    sequence = cache.sequence(range(3))
    sequence.reserve(3)
    sequence.seal(2)
    sequence.token_ids[0] = 77
    with pytest.raises(IntegrityError, match="digests are not those of the ids"):
        cache.check_integrity()


def test_errors_share_one_root():
    from openinfer_core.errors import OpenInferError

    assert issubclass(KvCacheError, OpenInferError)
    for error in (BlockStateError, IntegrityError, KvConfigError):
        assert issubclass(error, KvCacheError)
    assert issubclass(KvConfigError, ValueError)
