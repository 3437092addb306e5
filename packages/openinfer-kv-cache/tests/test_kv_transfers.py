"""`KvTransfers` and `BlockSaves` over a port whose transfers end when a test says so."""

import pytest

from openinfer_core.errors import ContractViolation, Refused
from openinfer_kv_cache import KvCache, KvCacheOptions, KvTransfers, PrefixHit

BLOCK = 4
KEY = b"a key of 16 bytes or more"


class Hit:
    def __init__(self, digests):
        self.digests = digests

    def close(self):
        pass


class Transfer:
    begin_s = 0.0

    def __init__(self, num_blocks):
        self.num_blocks, self.completed_blocks = num_blocks, 0
        self.is_ended = self.is_cancelled = False

    def end(self, completed_blocks):
        self.is_ended, self.completed_blocks = True, completed_blocks

    def is_over(self):
        return self.is_ended

    def cancel(self):
        self.is_cancelled = True

    def wait(self, timeout_s):
        raise AssertionError("a scheduler never waits")


class Port:
    """Holds what it is told; asks and answers nothing else."""

    def __init__(self, chunks_per_slot=0):
        self.chunks_per_slot = chunks_per_slot
        self.held, self.loads, self.saves = set(), [], []
        self.accepts_saves, self.now_s = True, 0.0

    def find(self, digests):
        found = []
        for digest in digests:
            if digest not in self.held:
                break
            found.append(digest)
        return PrefixHit([Hit(found)] if found else [])

    def load(self, found, places):
        if not found.num_blocks:
            return None
        self.loads.append((Transfer(found.num_blocks), list(places[: found.num_blocks])))
        return self.loads[-1][0]

    def save(self, digests, places):
        if not self.accepts_saves:
            return None
        self.saves.append((Transfer(len(digests)), list(digests), list(places)))
        return self.saves[-1][0]

    def state_places(self, slot):
        raise AssertionError("there are no states")

    def clock(self):
        return self.now_s


def make(num_blocks=16, port=None):
    cache = KvCache(KvCacheOptions(num_blocks=num_blocks, block_size_tokens=BLOCK), digest_key=KEY)
    transfers = KvTransfers(cache.pool)
    if port is not None:
        transfers.use(port)
    return cache, transfers


def admitted(cache, token_ids):
    kv = cache.sequence(token_ids)
    kv.match()
    assert kv.reserve(kv.num_tokens) is not None
    return kv


def test_without_tiers_nothing_is_found_and_nothing_is_saved():
    cache, transfers = make()
    kv = admitted(cache, range(13))
    assert not transfers.begin_load("owner", kv)
    assert list(transfers.seal(kv, 13)) == list(kv.blocks[:3])
    transfers.begin_saves()
    transfers.hurry()
    assert transfers.settle() == []
    assert (transfers.num_loading, transfers.unsaved_blocks, transfers.loaded_tokens) == (0, 0, 0)


def test_load_begins_behind_the_cached_prefix_and_seals_what_has_completed():
    port = Port()
    cache, transfers = make(port=port)
    first = admitted(cache, range(4))
    first.seal(4)
    kv = admitted(cache, range(17))
    port.held |= set(kv.prefix_digests())
    assert transfers.begin_load("owner", kv)
    transfer, places = port.loads[0]
    assert places == list(kv.blocks[1:4])
    assert transfers.settle() == []
    assert transfers.num_loading == 1
    transfer.end(2)
    assert transfers.settle() == [("owner", 12)]
    assert (kv.num_sealed_blocks, transfers.loaded_tokens, transfers.num_loading) == (3, 8, 0)
    assert cache.sequence(range(17)).count_cached_tokens() == 12
    cache.check_integrity()


def test_nothing_found_is_no_load():
    cache, transfers = make(port=Port())
    assert not transfers.begin_load("owner", admitted(cache, range(13)))


def test_cancelled_load_is_given_back_when_it_is_over():
    port = Port()
    cache, transfers = make(port=port)
    kv = admitted(cache, range(13))
    port.held |= set(kv.prefix_digests())
    transfers.begin_load("owner", kv)
    transfers.cancel_load("owner")
    assert port.loads[0][0].is_cancelled
    assert transfers.settle() == []
    port.loads[0][0].end(0)
    assert transfers.settle() == [("owner", 0)]
    with pytest.raises(ContractViolation, match="not on its way"):
        transfers.cancel_load("owner")


def test_sealed_blocks_go_out_together_and_stay_until_their_save_is_over():
    port = Port()
    cache, transfers = make(port=port)
    one, two = admitted(cache, range(9)), admitted(cache, range(50, 59))
    transfers.seal(one, 9)
    transfers.seal(two, 9)
    assert port.saves == []
    transfers.begin_saves()
    ((transfer, digests, places),) = port.saves
    assert digests == [*one.prefix_digests(), *two.prefix_digests()]
    assert places == [*one.blocks[:2], *two.blocks[:2]]
    one.release()
    two.release()
    assert cache.pool.available_blocks == 12
    transfer.end(4)
    transfers.settle()
    assert cache.pool.available_blocks == 16
    cache.check_integrity()


def test_tiers_that_take_no_saves_hold_no_block():
    port = Port()
    port.accepts_saves = False
    cache, transfers = make(port=port)
    kv = admitted(cache, range(9))
    transfers.seal(kv, 9)
    transfers.begin_saves()
    kv.release()
    assert cache.pool.available_blocks == 16


def test_more_than_half_of_the_pool_is_not_saved_at_a_time_and_counted():
    cache, transfers = make(num_blocks=16, port=Port())
    kv = admitted(cache, range(40))
    transfers.seal(kv, 32)
    transfers.seal(kv, 40)
    assert transfers.unsaved_blocks == 2


def test_saves_that_take_long_are_cancelled_where_blocks_are_short():
    port = Port()
    cache, transfers = make(port=port)
    transfers.seal(admitted(cache, range(9)), 9)
    transfers.begin_saves()
    transfers.hurry()
    assert not port.saves[0][0].is_cancelled
    port.now_s = 1.0
    transfers.hurry()
    assert port.saves[0][0].is_cancelled


def test_a_model_with_recurrent_states_is_refused():
    with pytest.raises(Refused, match=r"recurrent states .* plans no copies"):
        make(port=Port(chunks_per_slot=2))
