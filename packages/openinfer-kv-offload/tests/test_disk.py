import json
import os
import time

import pytest

from openinfer_kv_cache import KvTierError, LayoutMismatchError, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, check_completed, empty, ended, filled, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import FaultInjector
from openinfer_kv_offload import DiskTier, DiskTierOptions, StoreAccess, StoreError, TierConfigError

LAYOUT = kit_layout()
RECORD_BYTES = 4096
FIELDS = "layout digest checksum bytes".split()


@pytest.fixture
def open_disk(tmp_path):
    tiers = []

    def opened(*, layout=LAYOUT, records=16, segment_records=4, access=StoreAccess.WRITE, **given):
        options = DiskTierOptions(
            folder=str(tmp_path / "store"),
            budget_bytes=records * RECORD_BYTES,
            segment_bytes=segment_records * RECORD_BYTES,
            access=access,
        )
        tiers.append(DiskTier(layout, options, **given))
        return tiers[-1]

    yield opened
    for tier in tiers:
        tier.check_integrity()
        tier.close()


@pytest.fixture
def segments(tmp_path):
    return lambda: sorted((tmp_path / "store").glob("*.kv"))


def test_another_layout_is_refused_by_name_of_what_differs(open_disk):
    open_disk().close()
    with pytest.raises(LayoutMismatchError, match="model_tag is 'tier kit', ours 'other'"):
        open_disk(layout=kit_layout(model_tag="other"))
    open_disk().close()


def test_a_second_writer_is_refused_until_the_first_closes(open_disk):
    first = open_disk()
    with pytest.raises(StoreError, match="another process writes"):
        open_disk()
    first.close()
    open_disk()


def test_a_thread_that_hangs_keeps_the_folder_until_it_has_ended(open_disk):
    faults = FaultInjector()
    tier = open_disk(wrap_medium=faults.wrap)
    save(tier, chain(1, 2))
    gate = faults.hold_next_read()
    transfer = tier.load(tier.find(chain(1, 2)), empty(2, LAYOUT))
    gate.wait_entered()
    assert not tier.close_within(0.0)
    assert transfer.poll() is TransferState.PARTIAL
    assert transfer.failure is TierFailure.CLOSED
    with pytest.raises(StoreError, match="another process writes"):
        open_disk()
    gate.release()
    assert tier.close_within(30.0)
    assert load(open_disk(), chain(1, 2)) == 2


def test_readers_see_what_the_writer_adds_and_may_not_write(open_disk):
    writer = open_disk()
    save(writer, chain(1, 3))
    readers = [open_disk(access=StoreAccess.READ) for _ in range(2)]
    assert [load(reader, chain(1, 3)) for reader in readers] == [3, 3]
    save(writer, chain(2, 3))
    for reader in readers:
        reader.refresh()
    assert [load(reader, chain(2, 3)) for reader in readers] == [3, 3]
    with pytest.raises(KvTierError, match="access=read"):
        readers[0].save(chain(3, 1), filled(chain(3, 1), LAYOUT))


def test_a_reader_looks_again_by_itself_after_a_miss(open_disk):
    now_s = [0.0]
    writer = open_disk()
    reader = open_disk(access=StoreAccess.READ, clock=lambda: now_s[0])
    save(writer, chain(1, 1))
    now_s[0] = 2.0
    give_up_s = time.monotonic() + 30
    while not (found := load(reader, chain(1, 1))):
        assert time.monotonic() < give_up_s, "a miss made the reader look for nothing"
    assert found == 1


def test_a_reader_notices_a_segment_that_was_replaced_under_its_name(open_disk, segments):
    first = open_disk()
    save(first, chain(1, 2))
    reader = open_disk(access=StoreAccess.READ)
    first.close()
    (path,) = segments()
    path.unlink()
    save(open_disk(), chain(2, 2))
    assert segments() == [path]
    reader.refresh()
    assert [load(reader, chain(seed, 2)) for seed in (1, 2)] == [0, 2]


def test_a_hit_outlives_the_deletion_of_its_segment_in_every_process(open_disk, segments):
    writer = open_disk(records=8)
    save(writer, chain(1, 4))
    reader = open_disk(access=StoreAccess.READ, records=8)
    hits = [(tier, tier.find(chain(1, 4))) for tier in (writer, reader)]
    first = segments()[0]
    save(writer, chain(2, 8))
    assert not first.exists()
    reader.refresh()
    for tier, hit in hits:
        assert len(tier.find(chain(1, 4)).digests) == 0
        blocks = empty(4, LAYOUT)
        transfer = tier.load(hit, blocks)
        assert ended(transfer) is TransferState.COMPLETED
        check_completed(transfer, chain(1, 4), blocks, LAYOUT)


def test_the_budget_is_kept_by_giving_up_the_least_recently_used_segment(open_disk, segments):
    tier = open_disk(records=12)
    for seed in (1, 2, 3):
        save(tier, chain(seed, 4))
    assert load(tier, chain(1, 4)) == 4
    save(tier, chain(4, 4))
    assert sum(path.stat().st_size for path in segments()) <= 12 * RECORD_BYTES
    assert [load(tier, chain(seed, 4)) for seed in (1, 2, 3, 4)] == [4, 0, 4, 4]
    assert tier.counters()[0].evicted_blocks == 4


def test_a_torn_end_is_cut_and_written_over(open_disk, segments):
    tier = open_disk()
    save(tier, chain(1, 3))
    tier.close()
    os.truncate(segments()[0], 2 * RECORD_BYTES + 1000)
    again = open_disk()
    assert segments()[0].stat().st_size == 2 * RECORD_BYTES
    assert load(again, chain(1, 3)) == 2
    assert save(again, chain(1, 3)) is TransferState.COMPLETED
    again.close()
    assert load(open_disk(), chain(1, 3)) == 3


@pytest.mark.parametrize(("offset", "found"), [(20, 0), (30, 0), (50, 1), (2000, 1)], ids=FIELDS)
def test_any_bit_flipped_at_rest_is_dropped_and_counted(offset, found, open_disk, segments):
    tier = open_disk()
    save(tier, chain(1, 1))
    tier.close()
    content = bytearray(segments()[0].read_bytes())
    content[offset] ^= 1
    segments()[0].write_bytes(content)
    again = open_disk()
    hit = again.find(chain(1, 1))
    assert len(hit.digests) in (0, found)
    hit.close()
    assert load(again, chain(1, 1)) == 0
    assert again.counters()[0].corrupt_blocks == 1
    assert save(again, chain(1, 1)) is TransferState.COMPLETED
    assert load(again, chain(1, 1)) == 1


def test_swapped_records_are_never_given_back_under_the_other_digest(open_disk, segments):
    tier = open_disk()
    save(tier, chain(1, 2))
    content = segments()[0].read_bytes()
    segments()[0].write_bytes(content[RECORD_BYTES:] + content[:RECORD_BYTES])
    transfer = tier.load(tier.find(chain(1, 2)), empty(2, LAYOUT))
    assert ended(transfer) is TransferState.PARTIAL
    assert transfer.failure is TierFailure.CORRUPT
    assert transfer.completed_blocks == 0


def test_a_deadline_is_met_while_the_disk_hangs(open_disk):
    faults = FaultInjector()
    now_s = [0.0]
    tier = open_disk(wrap_medium=faults.wrap, clock=lambda: now_s[0])
    save(tier, chain(1, 2))
    gate = faults.hold_next_read()
    blocks = empty(2, LAYOUT)
    transfer = tier.load(tier.find(chain(1, 2)), blocks, timeout_s=1.0)
    gate.wait_entered()
    assert transfer.poll() is TransferState.PENDING
    now_s[0] = 1.5
    assert transfer.poll() is TransferState.PARTIAL
    assert transfer.failure is TierFailure.DEADLINE
    before = [bytes(block) for block in blocks]
    gate.release()
    tier.close()
    assert [bytes(block) for block in blocks] == before


def test_a_folder_that_is_no_store_of_this_release_is_refused(open_disk, tmp_path):
    with pytest.raises(StoreError, match="holds no KV store"):
        open_disk(access=StoreAccess.READ)
    tier = open_disk()
    save(tier, chain(1, 1))
    tier.close()
    path = tmp_path / "store" / "store.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(StoreError, match="format 2"):
        open_disk()
    path.write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        open_disk()
    path.unlink()
    with pytest.raises(StoreError, match="missing next to segments"):
        open_disk()


def test_budgets_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(TierConfigError, match="two records need 8192"):
        DiskTier(LAYOUT, DiskTierOptions(folder=str(tmp_path), budget_bytes=5000))
    with pytest.raises(TierConfigError, match="at most half"):
        DiskTierOptions(folder=str(tmp_path), budget_bytes=100, segment_bytes=80)
