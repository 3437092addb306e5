"""Loads of prefixes into several block tables, against the plainest search."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_kv_cache import KvCache, KvCacheOptions, KvTransfers, PrefixHit, begin_table_load, table_digest

BLOCK = 2
KEY = bytes(16)


class Hit:
    def __init__(self, port, digests):
        self.port, self.digests = port, digests
        port.held += 1

    def close(self):
        self.port.held -= 1


class Transfer:
    begin_s = 0.0

    def __init__(self, digests, places):
        self.digests, self.places = digests, places
        self.num_blocks, self.completed_blocks = len(digests), 0
        self.is_ended = self.is_cancelled = False

    def is_over(self):
        return self.is_ended

    def cancel(self):
        self.is_cancelled = True

    def wait(self, timeout_s):
        raise AssertionError("a scheduler never waits")


class Port:
    """Tiers with given contents, which are found in hits of two blocks, and a memory of what is in which place."""

    chunks_per_slot = 0

    def __init__(self, contents=(), *, can_load=True):
        self.contents, self.can_load = set(contents), can_load
        self.memory, self.loads, self.saves, self.held = {}, [], [], 0

    def find(self, digests):
        found = []
        for digest in digests:
            if digest not in self.contents:
                break
            found.append(digest)
        return PrefixHit([Hit(self, found[begin : begin + 2]) for begin in range(0, len(found), 2)])

    def load(self, found, places):
        digests = [digest for hit in found.hits for digest in hit.digests]
        found.close()
        if not digests or not self.can_load:
            return None
        places = list(places[: len(digests)])
        assert len(digests) == len(places) == len(set(places))
        self.loads.append(Transfer(digests, places))
        return self.loads[-1]

    def end(self, completed_blocks=None):
        transfer = self.loads[-1]
        transfer.completed_blocks = transfer.num_blocks if completed_blocks is None else completed_blocks
        transfer.is_ended = True
        for digest, place in list(zip(transfer.digests, transfer.places, strict=True))[: transfer.completed_blocks]:
            self.memory[place] = digest

    def save(self, digests, places):
        self.saves.append((list(digests), list(places)))

    def clock(self):
        return 0.0


def make(num_blocks=64, windows=(None, 5)):
    options = KvCacheOptions(num_blocks=num_blocks, block_size_tokens=BLOCK, table_windows=windows)
    return KvCache(options, digest_key=KEY)


def identities(kv, num_blocks, windows=(None, 5)):
    """Of each table the digests of what the token after so many blocks sees."""
    position = num_blocks * BLOCK
    return {
        (table, block): table_digest(kv.prefix_digests()[block], table)
        for table, window in enumerate(windows)
        for block in range(num_blocks)
        if window is None or (block + 1) * BLOCK - 1 > position - window
    }


def admitted(cache, token_ids, *, chunk=None):
    kv = cache.sequence(token_ids)
    kv.match()
    assert kv.reserve(kv.num_tokens, windowed_tokens=chunk) is not None
    return kv


def computed(cache, port, token_ids):
    """A sequence that has been computed whole, and released."""
    kv = cache.sequence(token_ids)
    kv.match()
    kv.reserve(kv.num_tokens)
    kv.seal(kv.num_tokens)
    for index, table in enumerate(kv.tables):
        for digest, block_id in zip(kv.prefix_digests(), table.blocks, strict=False):
            port.memory[block_id] = table_digest(digest, index)
    kv.free_behind_windows(kv.num_tokens)
    kv.release()


def test_windows_of_the_longest_prefix_are_loaded_and_what_is_before_them_is_not():
    cache = make()
    kv = admitted(cache, range(21), chunk=2)
    port = Port(identities(kv, 10).values())
    load = begin_table_load(port, kv)
    assert load.num_blocks == 12  # ten blocks of table 0; position 20 sees 16 .. 20
    assert (kv.tables[1].num_void, len(kv.tables[1].blocks)) == (8, 10)
    cache.check_integrity()
    assert not load.is_over()
    port.end()
    assert load.finish() == 20
    assert (kv.num_sealed_blocks, load.loaded_tokens, kv.capacity_tokens) == (10, 20, 20)
    cache.check_integrity()
    assert kv.reserve(21) is not None
    kv.release()
    assert cache.sequence(range(21)).count_cached_tokens() == 20


def test_what_the_pool_has_beyond_the_match_is_taken_and_not_loaded():
    cache, port = make(num_blocks=14), Port()
    computed(cache, port, range(10))
    blocks = [cache.pool.find(digest) for digest in cache.sequence(range(10)).prefix_digests()]
    evicted = cache.pool.allocate(cache.pool.free_blocks + 5)  # what was behind the window, and the last of each
    kv = cache.sequence(range(11))
    assert kv.count_cached_tokens() == 0
    cache.pool.release(evicted)
    kv = admitted(cache, range(11), chunk=2)
    port.contents = set(identities(kv, 5).values())
    load = begin_table_load(port, kv)
    assert load.num_blocks == 2
    assert kv.tables[0].blocks[:4] == blocks[:4]
    cache.check_integrity()
    port.end()
    assert load.finish() == 10
    assert not any(table.found for table in kv.tables)
    cache.check_integrity()


def test_a_load_that_completes_in_part_is_worth_nothing_with_windows():
    cache = make()
    kv = admitted(cache, range(21))
    port = Port(identities(kv, 10).values())
    load = begin_table_load(port, kv)
    port.end(load.num_blocks - 1)
    assert load.finish() is None
    assert (list(kv.blocks), load.loaded_tokens) == ([], 0)
    assert cache.pool.available_blocks == 64
    cache.check_integrity()


def test_a_load_of_one_table_keeps_what_has_completed():
    cache = make(windows=(None,))
    kv = admitted(cache, range(21))
    port = Port(kv.prefix_digests())
    load = begin_table_load(port, kv)
    load.cancel()
    assert port.loads[0].is_cancelled
    port.end(4)
    assert (load.finish(), load.loaded_tokens) == (8, 8)
    cache.check_integrity()


def test_tiers_that_can_not_load_leave_a_sequence_that_is_matched_again():
    cache = make()
    kv = admitted(cache, range(21))
    load = begin_table_load(Port(identities(kv, 10).values(), can_load=False), kv)
    load.cancel()
    assert (load.is_over(), load.num_blocks, load.completed_blocks) == (True, 0, 0)
    assert load.finish() is None
    assert cache.pool.available_blocks == 64


def test_a_pool_without_room_for_the_windows_changes_nothing():
    cache = make(num_blocks=12)
    kv = admitted(cache, range(21), chunk=2)
    port = Port(identities(kv, 10).values())
    before = [list(table.blocks) for table in kv.tables]
    assert cache.pool.available_blocks == 0
    assert begin_table_load(port, kv) is None
    assert [table.blocks for table in kv.tables] == before
    assert (port.loads, port.held) == ([], 0)


def test_nothing_is_placed_after_the_weights_have_changed():
    cache = make()
    kv = admitted(cache, range(21))
    port = Port(identities(kv, 10).values())
    cache.clear()
    assert begin_table_load(port, kv) is None
    assert port.held == 0


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_chunk_that_goes_beyond_the_prefix_is_asked_for_again(gives_up):
    cache = make()
    kv = admitted(cache, range(21), chunk=2)
    chain = list(kv.prefix_digests())
    port = Port([*chain, *identities(kv, 7).values()])  # 7 is the longest prefix, and hits have two blocks
    find = port.find

    def find_and_forget(digests):
        found = find(digests)
        if gives_up:
            port.contents.discard(chain[6])
        return found

    port.find = find_and_forget
    load = begin_table_load(port, kv)
    assert port.held == 0
    if gives_up:
        assert load is None
        assert kv.tables[1].num_void == 0
    else:
        assert load.num_blocks == 7 + 2
        port.end()
        assert load.finish() == 14


def test_transfers_give_back_a_sequence_that_is_to_be_matched_again():
    cache = make()
    transfers = KvTransfers(cache.pool)
    kv = admitted(cache, range(21), chunk=2)
    port = Port(identities(kv, 10).values())
    transfers.use(port)
    assert transfers.begin_load("owner", kv)
    port.end(3)
    assert transfers.settle() == [("owner", 0)]
    assert (list(kv.blocks), transfers.loaded_tokens) == ([], 0)
    kv.match()
    kv.reserve(21)
    assert transfers.begin_load("owner", kv)
    port.end()
    assert transfers.settle() == [("owner", 20)]
    assert transfers.loaded_tokens == 20
    cache.check_integrity()


def test_saves_name_the_blocks_of_every_table():
    cache, port = make(), Port()
    transfers = KvTransfers(cache.pool)
    transfers.use(port)
    kv = admitted(cache, range(5))
    transfers.seal(kv, 5)
    transfers.begin_saves()
    ((digests, places),) = port.saves
    assert digests == [table_digest(digest, table) for table in (0, 1) for digest in kv.prefix_digests()]
    assert places == [*kv.tables[0].blocks[:2], *kv.tables[1].blocks[:2]]


def test_blocks_of_weights_that_have_changed_are_not_saved():
    cache, port = make(windows=(None,)), Port()
    transfers = KvTransfers(cache.pool)
    transfers.use(port)
    kv = admitted(cache, range(5))
    cache.clear()
    assert len(transfers.seal(kv, 5)) == 2
    transfers.begin_saves()
    assert port.saves == []
    cache.check_integrity()


def longest(cache, port, kv, windows):
    """The most blocks for which every table finds what is seen, in the pool or in the tiers."""
    for count in range(len(kv.matchable_digests()), -1, -1):
        needed = identities(kv, count, windows).values()
        if all(cache.pool.find(digest) is not None or digest in port.contents for digest in needed):
            return count
    raise AssertionError("no blocks are always found")


@settings(max_examples=200, deadline=None)
@given(
    windows=st.lists(st.sampled_from([None, 1, 2, 3, 4, 5, 8]), min_size=1, max_size=4).filter(lambda w: w != [None]),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
    lost=st.integers(0, 20),
    completes=st.booleans(),
)
def test_a_load_brings_the_longest_prefix_that_pool_and_tiers_have_together(windows, seed, share, lost, completes):
    rng, windows = random.Random(seed), tuple(windows)
    cache, port = make(num_blocks=40 * len(windows), windows=windows), Port()
    num_tokens = rng.randint(2, 24)
    computed(cache, port, range(rng.randint(1, num_tokens)))
    # Some of what the pool had is evicted.
    evicted = cache.pool.allocate(min(cache.pool.free_blocks + lost, cache.pool.available_blocks))
    cache.pool.release(evicted)
    kv = cache.sequence(range(num_tokens))
    for table in range(len(windows)):
        for digest in kv.prefix_digests():
            if rng.random() < share:
                port.contents.add(table_digest(digest, table))
    matched = kv.match() // BLOCK
    assert kv.reserve(num_tokens, windowed_tokens=rng.choice([None, 0, kv.num_tokens // 2])) is not None
    expected = longest(cache, port, kv, windows)
    load = begin_table_load(port, kv)
    assert port.held == 0
    assert (load is not None) == (expected > matched)
    cache.check_integrity()
    if load is not None:
        port.end(None if completes else rng.randrange(load.num_blocks))
        cached_tokens = load.finish()
        assert cached_tokens == (expected * BLOCK if completes else None)
        if completes:
            for (table, block), digest in identities(kv, expected, windows).items():
                assert kv.tables[table].num_void <= block
                assert port.memory[kv.tables[table].blocks[block]] == digest
    cache.check_integrity()
    kv.release()
    cache.check_integrity()
    assert cache.pool.available_blocks == cache.pool.num_blocks


@pytest.mark.parametrize("num_tokens", [2, 3000])
def test_tiers_without_any_window_are_asked_a_bounded_number_of_times(num_tokens):
    cache, port = make(num_blocks=4000, windows=(4,)), Port()
    kv = admitted(cache, range(num_tokens), chunk=2)
    asked = []
    find = port.find
    port.find = lambda digests: asked.append(len(digests)) or find(digests)
    assert begin_table_load(port, kv) is None
    assert len(asked) <= 1024
