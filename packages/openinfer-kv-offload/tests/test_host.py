import pytest

from openinfer_kv_cache import KvTierError, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, empty, ended, filled, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import FaultInjector, InjectedFault
from openinfer_kv_offload import HostTier, HostTierOptions, QueueOptions, TierConfigError

LAYOUT = kit_layout()
PLACE_BYTES = 3904


@pytest.fixture
def open_host():
    tiers = []

    def opened(num_blocks=4, **settings):
        given = {name: settings.pop(name) for name in ("clock", "wrap_medium") if name in settings}
        tiers.append(HostTier(LAYOUT, HostTierOptions(capacity_bytes=num_blocks * PLACE_BYTES, **settings), **given))
        return tiers[-1]

    yield opened
    for tier in tiers:
        tier.check_integrity()
        tier.close()


def test_least_recently_used_blocks_make_room(open_host):
    tier = open_host()
    save(tier, chain(1, 4))
    assert load(tier, chain(1, 2)) == 2
    save(tier, chain(2, 2))
    assert load(tier, chain(1, 4)) == 2
    assert tier.counters()[0].evicted_blocks == 2


def test_a_tier_full_of_held_blocks_is_busy_and_not_broken(open_host):
    tier = open_host(queue=QueueOptions(breaker_failures=1))
    save(tier, chain(1, 4))
    hit = tier.find(chain(1, 4))
    transfer = tier.save(chain(2, 1), filled(chain(2, 1), LAYOUT))
    assert ended(transfer) is TransferState.PARTIAL
    assert transfer.failure is TierFailure.BUSY
    hit.close()
    assert save(tier, chain(2, 1)) is TransferState.COMPLETED


def test_blocks_expire(open_host):
    now_s = [0.0]
    tier = open_host(ttl_s=5.0, clock=lambda: now_s[0])
    save(tier, chain(1, 2))
    now_s[0] = 6.0
    assert load(tier, chain(1, 2)) == 0
    assert tier.counters()[0].evicted_blocks == 2


def test_what_is_evicted_goes_to_the_sink_before_its_place_is_filled(open_host):
    tier = open_host(2)
    demoted = {}
    tier.demote_to(lambda digest, block: demoted.update({digest: bytes(block)}))
    save(tier, chain(1, 2))
    save(tier, chain(2, 2))
    assert demoted == {
        digest: bytes(block) for digest, block in zip(chain(1, 2), filled(chain(1, 2), LAYOUT), strict=True)
    }
    tier.demote_all()
    assert set(demoted) == {*chain(1, 2), *chain(2, 2)}


def test_a_corrupt_block_is_not_handed_on(open_host):
    faults = FaultInjector()
    tier = open_host(1, wrap_medium=faults.wrap)
    demoted = []
    tier.demote_to(lambda digest, block: demoted.append(digest))
    faults.on_next_writes(InjectedFault.BIT_FLIP)
    save(tier, chain(1, 1))
    save(tier, chain(2, 1))
    assert demoted == []
    assert tier.counters()[0].corrupt_blocks == 1


def test_a_sink_that_raises_fails_the_save_and_loses_no_place(open_host):
    tier = open_host(1)

    def sink(digest, block):
        raise ConnectionResetError("below is gone")

    tier.demote_to(sink)
    save(tier, chain(1, 1))
    transfer = tier.save(chain(2, 1), filled(chain(2, 1), LAYOUT))
    assert ended(transfer) is TransferState.PARTIAL
    assert transfer.failure is TierFailure.GONE
    tier.check_integrity()
    assert save(tier, chain(2, 1)) is TransferState.COMPLETED


def test_concurrent_saves_of_one_chain_store_it_once(open_host):
    tier = open_host(8, queue=QueueOptions(num_threads=4))
    transfers = [tier.save(chain(1, 4), filled(chain(1, 4), LAYOUT)) for _ in range(16)]
    assert {ended(each) for each in transfers} == {TransferState.COMPLETED}
    assert tier.counters()[0].stored_blocks == tier.counters()[0].saved_blocks == 4


def test_an_empty_hit_lands_at_once(open_host):
    tier = open_host()
    transfer = tier.load(tier.find(chain(1, 3)), empty(0, LAYOUT))
    assert transfer.poll() is TransferState.COMPLETED


def test_a_hit_of_another_tier_is_refused_and_stays_open(open_host):
    tier, other = open_host(), open_host()
    save(other, chain(1, 2))
    hit = other.find(chain(1, 2))
    with pytest.raises(KvTierError, match="an open hit of its own"):
        tier.load(hit, empty(2, LAYOUT))
    assert ended(other.load(hit, empty(2, LAYOUT))) is TransferState.COMPLETED


def test_an_arena_too_small_for_a_block_is_refused():
    with pytest.raises(TierConfigError, match="one block needs 3904"):
        HostTier(LAYOUT, HostTierOptions(capacity_bytes=100))
    with pytest.raises(TierConfigError, match="ttl_s"):
        HostTierOptions(capacity_bytes=100, ttl_s=0.0)
