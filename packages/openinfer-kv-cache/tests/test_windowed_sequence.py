"""Sequences with several block tables over one pool."""

import pytest

from openinfer_kv_cache import KvCache, KvCacheOptions, KvConfigError, SequenceStateError, table_digest

BLOCK = 4
VOID = 0


def make(num_blocks=64, windows=(None, 6)):
    options = KvCacheOptions(num_blocks=num_blocks, block_size_tokens=BLOCK, table_windows=windows)
    return KvCache(options, digest_key=bytes(16))


@pytest.fixture
def cache():
    cache = make()
    cache.pool.allocate(1)  # so that no block is 0, as void entries are
    yield cache
    cache.pool.release([0])
    cache.check_integrity()


def computed(cache, token_ids, *, is_freed=True):
    """A sequence whose ids are all computed and sealed as far as they go, and what is behind windows given back."""
    sequence = cache.sequence(token_ids)
    sequence.match()
    assert sequence.reserve(sequence.num_tokens) is not None
    sequence.seal(sequence.num_tokens)
    if is_freed:
        sequence.free_behind_windows(sequence.num_tokens)
    return sequence


def test_tables_draw_from_one_pool(cache):
    sequence = cache.sequence(range(9))
    added = sequence.reserve(9)
    assert list(added) == [*sequence.tables[0].blocks, *sequence.tables[1].blocks]
    assert len(set(added)) == 6
    assert sequence.blocks is sequence.tables[0].blocks
    assert cache.pool.available_blocks == 63 - 6
    sequence.release()
    assert cache.pool.available_blocks == 63


def test_one_table_without_a_window_is_a_table_too():
    sequence = make(windows=(None,)).sequence(range(9))
    sequence.reserve(9, windowed_tokens=1)
    (table,) = sequence.tables
    assert (table.index, table.window_tokens, table.num_void) == (0, None, 0)
    assert table.blocks is sequence.blocks
    assert list(table.held) == table.blocks
    assert not sequence.free_behind_windows(9)
    sequence.release()
    assert sequence.tables[0] is table
    assert table.blocks == []


def test_reserve_gives_tables_with_windows_room_for_a_chunk_alone(cache):
    sequence = cache.sequence(range(40))
    sequence.reserve(40, windowed_tokens=8)
    assert [len(table.blocks) for table in sequence.tables] == [10, 2]
    assert sequence.capacity_tokens == 8
    assert sequence.reserve(8) == ()
    assert len(sequence.reserve(40, windowed_tokens=17)) == 3
    assert sequence.reserve(30, windowed_tokens=9) == []  # it never shrinks
    assert [len(table.blocks) for table in sequence.tables] == [10, 5]


def test_reserve_in_a_short_pool_changes_no_table():
    cache = make(num_blocks=9)
    sequence = cache.sequence(range(40))
    sequence.reserve(16, windowed_tokens=4)
    held = [list(table.blocks) for table in sequence.tables]
    assert sequence.reserve(24, windowed_tokens=16) is None
    assert [table.blocks for table in sequence.tables] == held
    assert sequence.reserve(24, windowed_tokens=12) is not None


def test_sealed_blocks_behind_a_window_are_given_back_and_stay_cached(cache):
    sequence = computed(cache, range(21), is_freed=False)
    seen = list(sequence.tables[1].blocks)
    assert sequence.free_behind_windows(17)  # position 17 sees 12 .. 17
    table = sequence.tables[1]
    assert (table.num_void, table.blocks[:3], table.blocks[3:]) == (3, [VOID] * 3, seen[3:])
    assert sequence.tables[0].num_void == 0
    assert cache.pool.idle_blocks == 3
    assert not sequence.free_behind_windows(20)  # 15 is in block 3
    assert sequence.free_behind_windows(21)
    assert not sequence.free_behind_windows(17)
    assert sequence.num_sealed_blocks == 5


def test_blocks_that_are_not_sealed_are_kept_unless_nothing_is_to_be_found_again(cache):
    sequence = cache.sequence(range(5))
    sequence.reserve(21)
    sequence.seal(21)  # the host knows 5 ids
    assert sequence.free_behind_windows(21)
    assert sequence.tables[1].num_void == 1
    assert sequence.free_behind_windows(21, unsealed=True)
    assert sequence.tables[1].num_void == 4
    assert cache.pool.idle_blocks == 1
    sequence.extend(range(5, 21))
    sealed = sequence.seal(21)
    assert list(sealed) == [*sequence.tables[0].blocks[1:5], *sequence.tables[1].blocks[4:5]]


def test_free_beyond_the_room_is_refused(cache):
    sequence = cache.sequence(range(40))
    sequence.reserve(40, windowed_tokens=8)
    with pytest.raises(SequenceStateError, match="cannot free behind 12 computed tokens: there is room for 8"):
        sequence.free_behind_windows(12)


def test_seal_names_the_blocks_of_each_table(cache):
    sequence = cache.sequence(range(9))
    sequence.reserve(9)
    assert list(sequence.seal(9)) == [*sequence.tables[0].blocks[:2], *sequence.tables[1].blocks[:2]]
    for index, table in enumerate(sequence.tables):
        for digest, block_id in zip(sequence.prefix_digests(), table.blocks, strict=False):
            assert cache.pool.digest(block_id) == table_digest(digest, index)
            assert cache.pool.find(table_digest(digest, index)) == block_id


def test_match_takes_what_the_next_token_sees(cache):
    computed(cache, range(21), is_freed=False).release()
    sequence = cache.sequence(range(21))
    assert sequence.count_cached_tokens() == 20
    assert sequence.match() == 20
    assert sequence.tables[1].num_void == 3  # 20 sees 15 .. 20
    assert [len(table.blocks) for table in sequence.tables] == [5, 5]
    assert sequence.capacity_tokens == 20


def test_match_goes_back_to_where_the_window_is_still_cached(cache):
    shorter = computed(cache, range(20))
    computed(cache, range(40)).release()
    taken = cache.pool.allocate(cache.pool.free_blocks + 6)  # evicts first what was given back first
    digests = [table_digest(digest, 1) for digest in shorter.prefix_digests()]
    assert [cache.pool.find(digest) is None for digest in digests] == [True] * 3 + [False] * 2
    assert cache.sequence(range(41)).count_cached_tokens() == 40
    assert cache.sequence(range(37)).count_cached_tokens() == 20
    assert cache.sequence(range(17)).count_cached_tokens() == 0
    cache.pool.release(taken)


def test_match_counts_the_blocks_of_the_prefix_whatever_the_tables(cache):
    computed(cache, range(9)).release()
    cache.sequence(range(9)).match()
    counters = cache.pool.counters()
    assert (counters.hit_blocks, counters.missed_blocks) == (2, 2)


def test_window_of_one_token_needs_no_block_of_the_prefix():
    cache = make(windows=(None, 1))
    computed(cache, range(9)).release()
    sequence = cache.sequence(range(9))
    assert sequence.match() == 8
    assert (sequence.tables[1].num_void, sequence.tables[1].blocks) == (2, [VOID, VOID])
    cache.check_integrity()


def test_would_fit_counts_what_a_match_takes_of_windows():
    cache = make(num_blocks=18, windows=(None, 17))
    computed(cache, range(33), is_freed=False).release()
    other = cache.sequence(range(100, 104))
    for num_tokens in (4, 32, 33, 36, 40, 44, 48):
        for windowed_tokens in (None, 0, 4, 36):
            for held in (0, 4, 8, 12, 16):
                other.reserve(held, windowed_tokens=0)
                sequence = cache.sequence(range(33))
                fits = sequence.would_fit(num_tokens, windowed_tokens=windowed_tokens)
                sequence.match()
                assert (sequence.reserve(num_tokens, windowed_tokens=windowed_tokens) is not None) == fits
                sequence.release()
                cache.check_integrity()
        other.shrink(0)


def test_shrink_keeps_what_needs_no_void_entry(cache):
    sequence = computed(cache, range(21))
    sequence.reserve(40)
    assert sequence.tables[1].num_void == 4
    assert sequence.shrink(30) == 30
    assert [len(table.blocks) for table in sequence.tables] == [8, 8]
    assert sequence.shrink(21) == 21
    assert sequence.tables[1].num_void == 4


def test_shrink_to_where_void_entries_are_seen_drops_all(cache):
    sequence = computed(cache, range(21))
    assert sequence.shrink(20) == 0  # position 20 sees 15, of block 3
    assert [table.blocks for table in sequence.tables] == [[], []]
    assert sequence.num_sealed_blocks == 0
    assert sequence.match() == 20


def test_a_sequence_would_wait_for_one_that_computes_its_prefix(cache):
    first = cache.sequence(range(21))
    first.reserve(21, windowed_tokens=8)
    second = cache.sequence(range(21))
    assert second.would_wait_for(first)
    first.seal(8)
    assert second.would_wait_for(first)
    assert not first.would_wait_for(second)


@pytest.mark.parametrize(("num_tokens", "fits"), [(16, True), (20, True), (400, False), (28, True), (29, False)])
def test_can_ever_fit_counts_a_window_once(num_tokens, fits):
    cache = make(num_blocks=11, windows=(None, 6))  # a window of six tokens needs four blocks at most
    assert cache.can_ever_fit(num_tokens) == fits
    assert make(num_blocks=4, windows=(6,)).can_ever_fit(100_000)


@pytest.mark.parametrize("windows", [(), (0,), (None, -1), (1,) * 257])
def test_windows_out_of_range_are_refused(windows):
    with pytest.raises(KvConfigError, match="table_windows"):
        KvCacheOptions(num_blocks=4, table_windows=windows)
