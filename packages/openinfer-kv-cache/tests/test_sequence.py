from array import array

import pytest

from openinfer_kv_cache import BlockState, KvCache, KvCacheOptions, SequenceStateError

KEY = bytes(16)


@pytest.fixture
def cache():
    cache = KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=4), digest_key=KEY)
    yield cache
    cache.check_integrity()


def computed(cache: KvCache, token_ids, **names):
    """A sequence whose ids are all computed and sealed as far as they go."""
    sequence = cache.sequence(token_ids, **names)
    sequence.match()
    assert sequence.reserve(sequence.num_tokens) is not None
    sequence.seal(sequence.num_tokens)
    return sequence


def test_match_empty_pool_finds_nothing_and_counts_misses(cache):
    sequence = cache.sequence(range(10))
    assert sequence.match() == 0
    assert sequence.blocks == []
    assert (cache.pool.counters().hit_blocks, cache.pool.counters().missed_blocks) == (0, 2)


@pytest.mark.parametrize(("prompt_tokens", "cached_tokens"), [(4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8)])
def test_match_leaves_at_least_one_token_to_compute(cache, prompt_tokens, cached_tokens):
    computed(cache, range(12)).release()
    sequence = cache.sequence(range(prompt_tokens))
    assert sequence.count_cached_tokens() == cached_tokens
    assert sequence.match() == cached_tokens
    assert sequence.num_sealed_blocks == len(sequence.blocks) == cached_tokens // 4


def test_match_stops_at_the_first_different_block(cache):
    first = computed(cache, range(12))
    sequence = cache.sequence([0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11, 12])
    assert sequence.match() == 4
    assert sequence.blocks == first.blocks[:1]


def test_match_shares_blocks_in_use(cache):
    first = computed(cache, range(9))
    second = cache.sequence(range(9))
    assert second.match() == 8
    assert second.blocks == first.blocks[:2]
    assert [cache.pool.num_users(block) for block in first.blocks] == [2, 2, 1]


def test_a_sequence_would_wait_for_whoever_has_its_next_block_still_to_seal(cache):
    first = cache.sequence(range(12))
    first.reserve(12)
    second, shorter, other = cache.sequence(range(12)), cache.sequence(range(6)), cache.sequence([9, *range(11)])
    assert second.would_wait_for(first)
    assert shorter.would_wait_for(first)
    assert not other.would_wait_for(first)
    assert not first.would_wait_for(second)  # that has no blocks
    first.seal(4)
    assert second.would_wait_for(first)  # for the second block
    assert not shorter.would_wait_for(first)  # whose second block is not full
    first.seal(12)
    assert not second.would_wait_for(first)
    assert second.match() == 8


def test_a_sequence_of_another_world_would_not_wait(cache):
    first = cache.sequence(range(12), cache_salt="a")
    first.reserve(12)
    assert not cache.sequence(range(12)).would_wait_for(first)
    assert cache.sequence(range(12), cache_salt="a").would_wait_for(first)
    assert not cache.sequence(range(3), cache_salt="a").would_wait_for(first)


WORLDS = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_name": "a"}, {"lora_name": "a", "cache_salt": "a"}]


@pytest.mark.parametrize("own", WORLDS)
def test_match_never_crosses_salts_or_adapters(cache, own):
    computed(cache, range(9), **own).release()
    found = {str(names): cache.sequence(range(9), **names).count_cached_tokens() for names in WORLDS}
    assert found == {str(names): 8 if names == own else 0 for names in WORLDS}


def test_match_while_holding_blocks_raises(cache):
    sequence = cache.sequence(range(5))
    sequence.reserve(5)
    with pytest.raises(SequenceStateError, match="holds 2 blocks"):
        sequence.match()


def test_match_after_release_raises(cache):
    sequence = cache.sequence(range(5))
    sequence.release()
    with pytest.raises(SequenceStateError, match="released"):
        sequence.match()
    with pytest.raises(SequenceStateError, match="released"):
        sequence.reserve(5)


def test_match_long_prefix_beyond_one_batch_of_digests_finds_all_of_it():
    cache = KvCache(KvCacheOptions(num_blocks=200, block_size_tokens=2))
    computed(cache, range(301)).release()
    assert cache.sequence(range(301)).match() == 300
    assert cache.sequence([*range(150), *range(301)]).match() == 150
    assert cache.sequence([*range(128), 1, 1]).match() == 128


def test_reserve_grows_by_whole_blocks_and_keeps_ids(cache):
    sequence = cache.sequence(range(5))
    first = list(sequence.reserve(5))
    assert len(first) == 2
    assert sequence.capacity_tokens == 8
    assert sequence.reserve(8) == ()
    added = list(sequence.reserve(9))
    assert sequence.blocks == first + added
    assert sequence.reserve(3) == ()


def test_reserve_short_pool_returns_none_and_changes_nothing(cache):
    other = cache.sequence(range(4 * 6))
    other.reserve(4 * 6)
    sequence = cache.sequence(range(5))
    sequence.reserve(4)
    held = list(sequence.blocks)
    assert sequence.reserve(4 * 3 + 1) is None
    assert sequence.blocks == held
    assert cache.pool.available_blocks == 1
    assert sequence.reserve(8) is not None


def test_reserve_evicts_the_tail_of_a_chain_before_its_head(cache):
    computed(cache, range(32)).release()
    assert cache.pool.idle_blocks == 8
    other = cache.sequence([99])
    other.reserve(4 * 3)
    assert cache.sequence(range(33)).count_cached_tokens() == 4 * 5


def test_seal_needs_both_ids_and_kv(cache):
    sequence = cache.sequence(range(6))
    sequence.reserve(12)
    assert sequence.seal(3) == ()
    assert sequence.seal(4) == sequence.blocks[:1]
    assert sequence.seal(8) == ()
    sequence.append(6)
    assert sequence.seal(8) == ()
    sequence.append(7)
    assert sequence.seal(7) == ()
    assert sequence.seal(8) == sequence.blocks[1:2]
    assert sequence.seal(8) == ()
    assert sequence.num_sealed_blocks == 2


def test_seal_stops_at_what_is_computed(cache):
    sequence = cache.sequence(range(16))
    sequence.reserve(16)
    assert sequence.seal(9) == sequence.blocks[:2]
    assert sequence.num_sealed_blocks == 2


def test_seal_with_one_step_of_overlap(cache):
    """Room for a token is made, and its KV is written, before its id is known."""
    sequence = cache.sequence(range(7))
    sequence.reserve(7)
    sequence.reserve(8)
    assert sequence.seal(7) == sequence.blocks[:1]
    sequence.reserve(9)
    assert sequence.seal(8) == ()
    sequence.append(50)
    assert sequence.seal(8) == sequence.blocks[1:2]
    assert cache.sequence([*range(7), 50, 51]).match() == 8


def test_seal_more_than_there_is_room_for_raises(cache):
    sequence = cache.sequence(range(12))
    sequence.reserve(5)
    with pytest.raises(SequenceStateError, match=r"9 computed tokens.*room for 8"):
        sequence.seal(9)
    assert sequence.num_sealed_blocks == 0


def test_seal_hands_out_the_digests_that_tiers_ask_for(cache):
    sequence = computed(cache, range(9))
    digests = sequence.prefix_digests()
    assert [cache.pool.digest(block) for block in sequence.blocks] == [*digests, None]
    assert digests == cache.hasher.chain(cache.hasher.root(), range(9))


def test_seal_duplicate_keeps_the_blocks_handed_out(cache):
    first, second = cache.sequence(range(9)), cache.sequence(range(9))
    for sequence in (first, second):
        sequence.match()
        sequence.reserve(9)
    table = list(second.blocks)
    first.seal(9)
    assert second.seal(9) == table[:2]
    assert second.blocks == table
    assert cache.pool.counters().duplicate_blocks == 2
    assert cache.sequence(range(9)).match() == 8


def test_release_is_idempotent_and_keeps_the_prefix_cached(cache):
    sequence = computed(cache, range(9))
    sequence.release()
    sequence.release()
    assert sequence.is_released
    assert sequence.blocks == []
    assert cache.num_live_sequences == 0
    assert (cache.pool.idle_blocks, cache.pool.free_blocks) == (2, 6)
    assert cache.sequence(range(9)).match() == 8


def test_append_after_release_or_preemption_is_allowed(cache):
    """The last step's ids arrive when the sequence is already gone."""
    sequence = computed(cache, range(9))
    sequence.shrink(0)
    sequence.append(9)
    assert sequence.match() == 8
    sequence.release()
    sequence.extend([10, 11])
    assert list(sequence.token_ids) == list(range(12))


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_append_id_out_of_range_raises(cache, token_id):
    sequence = cache.sequence([])
    with pytest.raises(OverflowError):
        sequence.append(token_id)
    with pytest.raises(OverflowError):
        cache.sequence([token_id])


def test_shrink_zero_is_preemption_and_finds_its_blocks_again(cache):
    sequence = computed(cache, range(6))
    sequence.extend([6, 7, 8])
    sequence.reserve(9)
    sequence.seal(9)
    table = list(sequence.blocks)
    assert sequence.shrink(0) == 0
    assert cache.pool.available_blocks == 8
    assert sequence.match() == 8
    assert sequence.blocks == table[:2]


def test_shrink_gives_back_the_room_behind(cache):
    sequence = computed(cache, range(6))
    sequence.reserve(20)
    assert sequence.shrink(6) == 6
    assert len(sequence.blocks) == 2
    assert sequence.shrink(100) == 8
    assert list(sequence.token_ids) == list(range(6))


def test_shrink_inside_a_sealed_block_gives_the_block_back(cache):
    sequence = computed(cache, range(12))
    sharer = cache.sequence(range(13))
    sharer.match()
    assert sequence.shrink(6) == 4
    assert sequence.num_sealed_blocks == len(sequence.blocks) == 1
    assert [cache.pool.state(block) for block in sharer.blocks] == [BlockState.SEALED] * 3
    assert sequence.num_tokens == 12


def test_shrink_inside_the_last_sealed_block_gives_it_back(cache):
    sequence = computed(cache, range(12))
    assert sequence.shrink(10) == 8
    assert sequence.num_sealed_blocks == len(sequence.blocks) == 2


def test_shrink_at_a_sealed_boundary_keeps_the_block(cache):
    sequence = computed(cache, range(12))
    assert sequence.shrink(8) == 8
    assert sequence.num_sealed_blocks == 2


def test_truncate_rejected_speculation_never_meets_a_sealed_block(cache):
    sequence = computed(cache, range(6))
    sequence.reserve(6 + 5)
    sequence.extend([60, 61, 62, 63, 64])
    assert sequence.truncate(7) == 7
    assert list(sequence.token_ids) == [0, 1, 2, 3, 4, 5, 60]
    assert len(sequence.blocks) == 2
    sequence.append(70)
    assert sequence.seal(8) == sequence.blocks[1:2]
    assert cache.sequence([0, 1, 2, 3, 4, 5, 60, 70, 1]).match() == 8


def test_truncate_into_a_sealed_block_recomputes_under_a_new_digest(cache):
    sequence = computed(cache, range(12))
    old = list(sequence.blocks)
    assert sequence.truncate(6) == 4
    sequence.extend([90, 91])
    assert sequence.reserve(8) != old[1:2]
    sequence.seal(8)
    assert cache.sequence(range(13)).count_cached_tokens() == 12
    assert cache.sequence([0, 1, 2, 3, 4, 5, 90, 91, 0]).count_cached_tokens() == 8


def test_truncate_beyond_the_ids_gives_back_blocks_only(cache):
    sequence = computed(cache, range(6))
    sequence.reserve(20)
    assert sequence.truncate(10) == 10
    assert (sequence.num_tokens, len(sequence.blocks)) == (6, 3)


@pytest.mark.parametrize("verb", ["shrink", "truncate"])
def test_shrink_negative_raises_and_changes_nothing(cache, verb):
    sequence = computed(cache, range(6))
    with pytest.raises(SequenceStateError, match="-1 tokens"):
        getattr(sequence, verb)(-1)
    assert (sequence.num_tokens, len(sequence.blocks)) == (6, 2)


def test_would_fit_counts_cached_blocks_once(cache):
    """Idle blocks that would be found cannot be evicted to make room for the rest."""
    computed(cache, range(16)).release()
    blocker = cache.sequence([7])
    blocker.reserve(4 * 3)
    sequence = cache.sequence(range(40))
    assert cache.pool.available_blocks == 5
    assert sequence.would_fit(20)
    assert not sequence.would_fit(24)
    assert sequence.match() == 16
    assert sequence.reserve(20) is not None
    assert sequence.reserve(24) is None


def test_would_fit_counts_blocks_in_use_as_free_of_charge(cache):
    keeper = computed(cache, range(17))
    blocker = cache.sequence([7])
    blocker.reserve(4 * 2)
    sequence = cache.sequence(range(17))
    assert cache.pool.available_blocks == 1
    assert sequence.would_fit(17)
    assert not sequence.would_fit(17, spare_blocks=1)
    assert not sequence.would_fit(21)
    assert sequence.match() == 16
    assert sequence.reserve(17) is not None
    assert keeper.blocks[:4] == sequence.blocks[:4]


def test_would_fit_changes_nothing(cache):
    computed(cache, range(8)).release()
    before = (cache.pool.counters(), cache.pool.idle_blocks, cache.pool.free_blocks)
    sequence = cache.sequence(range(64))
    assert not sequence.would_fit(64)
    assert sequence.would_fit(32)
    assert sequence.would_fit(9, spare_blocks=5)
    assert not sequence.would_fit(9, spare_blocks=6)
    assert (cache.pool.counters(), cache.pool.idle_blocks, cache.pool.free_blocks) == before
    assert sequence.blocks == []


def test_would_fit_holding_blocks_is_about_reserve(cache):
    sequence = computed(cache, range(8))
    assert sequence.would_fit(8, spare_blocks=100)
    assert sequence.would_fit(32)
    assert not sequence.would_fit(33)
    assert not sequence.would_fit(32, spare_blocks=1)


def test_clear_in_mid_sequence_keeps_old_kv_private(cache):
    sequence = computed(cache, range(8))
    cache.clear()
    sequence.extend(range(8, 12))
    sequence.reserve(12)
    (old,) = sequence.seal(12)
    assert cache.pool.digest(old) is None
    assert cache.pool.find(sequence.prefix_digests()[2]) is None
    cache.check_integrity()
    sequence.shrink(0)
    sequence.reserve(12)
    sequence.seal(12)
    assert cache.sequence(range(13)).count_cached_tokens() == 12


def test_clear_before_match_does_not_make_new_kv_private(cache):
    early = cache.sequence(range(12))
    cache.clear()
    computed(cache, range(5)).release()
    assert early.match() == 4
    early.reserve(12)
    early.seal(12)
    assert cache.sequence(range(13)).count_cached_tokens() == 12


def test_ttl_makes_match_miss():
    now_s = [0.0]
    cache = KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=4, idle_ttl_s=60.0), clock=lambda: now_s[0])
    computed(cache, range(9)).release()
    now_s[0] = 59.0
    sequence = cache.sequence(range(9))
    assert sequence.match() == 8
    sequence.release()
    now_s[0] = 119.5
    assert cache.sequence(range(9)).match() == 0
    cache.check_integrity()


def test_token_ids_speak_the_buffer_protocol(cache):
    sequence = cache.sequence((1, 2, 3))
    with memoryview(sequence.token_ids) as view:
        assert (view.format, view.itemsize, list(view)) == ("I", 4, [1, 2, 3])
    assert isinstance(sequence.token_ids, array)


def test_sequence_copies_its_prompt(cache):
    prompt = [1, 2, 3]
    sequence = cache.sequence(prompt)
    prompt.append(4)
    assert sequence.num_tokens == 3
