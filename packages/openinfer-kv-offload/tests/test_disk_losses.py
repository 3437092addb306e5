"""A disk tier that is full, or whose files are removed from outside: noticed, said once, and over when it is over."""

import errno
import logging
import os
import shutil
import time
from pathlib import Path

import pytest

from openinfer_kv_cache import TierCondition, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, check_completed, empty, ended, filled, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import FaultInjector, InjectedFault
from openinfer_kv_offload import DiskTier, DiskTierOptions, QueueOptions, StoreAccess, StoreError

LAYOUT = kit_layout()
RECORD_BYTES = 4096
COOLDOWN_S = 10.0


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def open_disk(folder, clock):
    tiers = []

    def opened(**given):
        options = DiskTierOptions(
            folder=str(folder),
            budget_bytes=16 * RECORD_BYTES,
            segment_bytes=4 * RECORD_BYTES,
            access=given.pop("access", StoreAccess.WRITE),
            queue=QueueOptions(num_threads=2, breaker_cooldown_s=COOLDOWN_S),
        )
        tiers.append(DiskTier(LAYOUT, options, clock=clock, **given))
        return tiers[-1]

    yield opened
    for tier in tiers:
        tier.check_integrity()
        tier.close()


@pytest.fixture
def said(caplog):
    """What has been logged since the last call."""
    caplog.set_level(logging.INFO, logger="openinfer_kv_offload")

    def taken():
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    return taken


def condition(tier):
    (counters,) = tier.counters()
    return counters.condition


def failure_of(tier, digests):
    transfer = tier.save(digests, filled(digests, LAYOUT))
    assert ended(transfer) is TransferState.PARTIAL
    return transfer.failure


def look(tier, clock):
    """As a find does once a second, without its thread."""
    clock.now_s += 2
    tier.refresh()


def open_files(folder):
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    return [link for link in links if link.startswith(str(folder))]


# --- a full disk -------------------------------------------------------------------------------------------------


def test_a_full_disk_takes_no_saves_gives_back_what_it_has_and_tries_again(open_disk, clock, said):
    faults = FaultInjector()
    tier = open_disk(wrap_medium=faults.wrap)
    save(tier, chain(1, 2))
    faults.on_next_writes(*[InjectedFault.FULL] * 3)
    assert [failure_of(tier, chain(seed, 1)) for seed in (2, 3, 4)] == [TierFailure.FULL] * 3
    faults.clear()
    assert failure_of(tier, chain(5, 1)) is TierFailure.FULL  # the disk is not asked
    assert condition(tier) is TierCondition.FULL
    assert load(tier, chain(1, 2)) == 2
    assert save(tier, []) is TransferState.COMPLETED
    room, refused = said()
    assert "No space left" in room or "no space left" in room
    assert "give it less" in room
    assert refused == (
        "tier disk: its medium has no space: saves are refused, and one tries again every 10 s; loads go on"
    )
    clock.now_s += COOLDOWN_S
    faults.on_next_writes(InjectedFault.FULL)
    assert failure_of(tier, chain(6, 1)) is TierFailure.FULL
    clock.now_s += COOLDOWN_S
    assert save(tier, chain(1, 2)) is TransferState.COMPLETED  # all there: it says nothing of space
    assert condition(tier) is TierCondition.FULL
    clock.now_s += COOLDOWN_S
    assert save(tier, chain(7, 1)) is TransferState.COMPLETED
    assert condition(tier) is TierCondition.OK
    assert said() == ["tier disk: it works again"]
    assert load(tier, chain(7, 1)) == 1


class SmallDisk:
    """A disk of so many bytes below the files of a folder."""

    def __init__(self, medium, folder, num_bytes):
        self._medium, self._folder, self._num_bytes = medium, folder, num_bytes

    def write(self, offset_bytes, parts):
        used = sum(path.stat().st_size for path in self._folder.glob("*.kv"))
        if used + sum(map(len, parts)) > self._num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._medium.write(offset_bytes, parts)

    def read(self, offset_bytes, into):
        self._medium.read(offset_bytes, into)


def test_a_disk_smaller_than_the_budget_keeps_what_was_used_last(open_disk, folder, said):
    tier = open_disk(wrap_medium=lambda medium: SmallDisk(medium, folder, 8 * RECORD_BYTES))
    states = [[save(tier, chain(seed, 2)) for _ in range(2)] for seed in range(1, 7)]
    assert [state[-1] for state in states] == [TransferState.COMPLETED] * 6  # the second time at the latest
    assert [load(tier, chain(seed, 2)) for seed in (1, 6)] == [0, 2]
    assert condition(tier) is TierCondition.OK
    assert tier.counters()[0].evicted_blocks == 4
    assert len(said()) == 1


def test_a_tier_that_fails_and_recovers_says_both_once(open_disk, clock, said):
    faults = FaultInjector()
    tier = open_disk(wrap_medium=faults.wrap)
    faults.on_next_writes(*[InjectedFault.ERROR] * 5)
    for seed in range(8):
        save(tier, chain(seed, 1))
    assert condition(tier) is TierCondition.FAILING
    assert said() == [
        "tier disk: 5 transfers in a row failed (io_error): it is left alone, and one tries again every 10 s"
    ]
    clock.now_s += COOLDOWN_S
    save(tier, chain(9, 1))
    assert condition(tier) is TierCondition.OK
    assert said() == ["tier disk: it works again"]


# --- files that are removed from outside ----------------------------------------------------------------------------


@pytest.mark.parametrize("notice", ["save", "look"])
def test_a_removed_folder_is_made_anew_with_the_same_key_and_its_blocks_are_misses(
    notice, open_disk, folder, clock, said
):
    tier = open_disk()
    save(tier, chain(1, 6))
    key = tier.digest_key
    shutil.rmtree(folder)
    if notice == "look":
        look(tier, clock)
        assert load(tier, chain(1, 6)) == 0
    assert save(tier, chain(2, 3)) is TransferState.COMPLETED
    assert [load(tier, chain(seed, 6)) for seed in (1, 2)] == [0, 3]
    assert said() == [
        f"tier disk: {folder} was removed or replaced from outside: its 6 blocks are lost",
        f"tier disk: it goes on in {folder}",
    ]
    assert condition(tier) is TierCondition.OK
    assert not [name for name in open_files(folder) if name.endswith("(deleted)")]
    tier.close()
    again = open_disk()
    assert again.digest_key == key
    assert load(again, chain(2, 3)) == 3


@pytest.mark.parametrize("notice", ["look", "close"])
@pytest.mark.parametrize("names", [["store.json"], ["digest.key"], ["store.json", "digest.key"]])
def test_a_removed_manifest_or_key_is_written_again_so_that_the_next_start_finds_the_blocks(
    names, notice, open_disk, folder, clock, said
):
    tier = open_disk()
    key = tier.digest_key
    save(tier, chain(1, 4))
    for name in names:
        (folder / name).unlink()
    if notice == "look":
        look(tier, clock)
    save(tier, chain(2, 2))
    tier.close()
    assert said() == [f"tier disk: {' and '.join(names)} of {folder} had been removed: written again"]
    again = open_disk()
    assert again.digest_key == key
    assert [load(again, chain(1, 4)), load(again, chain(2, 2))] == [4, 2]
    assert said()[1:] == []


def test_a_reader_writes_nothing_again(open_disk, folder, clock, said):
    open_disk()
    reader = open_disk(access=StoreAccess.READ)
    (folder / "store.json").unlink()
    look(reader, clock)
    assert not (folder / "store.json").exists()
    assert said() == []


def test_blocks_held_while_the_folder_is_removed_are_still_right(open_disk, folder, clock):
    tier = open_disk()
    save(tier, chain(1, 4))
    hit = tier.find(chain(1, 4))
    shutil.rmtree(folder)
    look(tier, clock)
    blocks = empty(4, LAYOUT)
    transfer = tier.load(hit, blocks)
    assert ended(transfer) is TransferState.COMPLETED
    check_completed(transfer, chain(1, 4), blocks, LAYOUT)


def test_a_folder_that_cannot_be_made_anew_stops_the_saves_until_it_can(open_disk, folder, clock, said):
    tier = open_disk()
    save(tier, chain(1, 2))
    shutil.rmtree(folder)
    folder.write_text("in the way")
    assert failure_of(tier, chain(2, 1)) is TierFailure.GONE
    look(tier, clock)
    look(tier, clock)
    assert condition(tier) is TierCondition.LOST
    assert load(tier, chain(1, 2)) == 0
    gone, cannot = said()
    assert "its 2 blocks are lost" in gone
    assert "it cannot begin anew, and tries again every 1 s: [Errno 17] File exists" in cannot
    folder.unlink()
    look(tier, clock)
    assert condition(tier) is TierCondition.OK
    assert save(tier, chain(2, 1)) is TransferState.COMPLETED
    assert said() == [f"tier disk: it goes on in {folder}"]


def test_the_store_of_another_process_in_its_place_is_left_to_that_one(open_disk, folder, clock, said):
    tier = open_disk()
    save(tier, chain(1, 2))
    folder.rename(folder.with_name("moved"))
    other = open_disk(name="other")
    save(other, chain(2, 2))
    assert failure_of(tier, chain(3, 1)) is TierFailure.GONE
    assert "another process writes" in said()[-1]
    other.close()
    look(tier, clock)
    assert "another key" in said()[-1]
    assert condition(tier) is TierCondition.LOST
    assert load(open_disk(name="third"), chain(2, 2)) == 2


def test_a_removed_segment_takes_its_own_blocks_alone(open_disk, folder, clock, said):
    tier = open_disk()
    for seed in (1, 2, 3):
        save(tier, chain(seed, 4))
    sorted(folder.glob("*.kv"))[1].unlink()
    look(tier, clock)
    assert [load(tier, chain(seed, 4)) for seed in (1, 2, 3)] == [4, 0, 4]
    assert said() == ["tier disk: 1 segments with 4 blocks were removed from outside"]
    assert save(tier, chain(2, 4)) is TransferState.COMPLETED
    assert load(tier, chain(2, 4)) == 4


def test_a_removed_lock_is_taken_again_with_all_blocks(open_disk, folder, clock):
    tier = open_disk()
    save(tier, chain(1, 6))
    (folder / "writer.lock").unlink()
    look(tier, clock)
    with pytest.raises(StoreError, match="another process writes"):
        open_disk()
    assert load(tier, chain(1, 6)) == 6


def test_a_reader_misses_while_the_folder_is_gone_and_finds_it_again(open_disk, folder, clock, said):
    writer = open_disk()
    save(writer, chain(1, 2))
    reader = open_disk(access=StoreAccess.READ, name="reader")
    shutil.rmtree(folder)
    look(reader, clock)
    look(reader, clock)
    assert load(reader, chain(1, 2)) == 0
    assert condition(reader) is TierCondition.LOST
    save(writer, chain(2, 2))
    look(reader, clock)
    assert (load(reader, chain(2, 2)), condition(reader)) == (2, TierCondition.OK)
    assert len([message for message in said() if message.startswith("tier reader")]) == 3


def test_a_find_has_the_folder_looked_at_in_the_background(open_disk, folder, clock):
    tier = open_disk()
    save(tier, chain(1, 2))
    shutil.rmtree(folder)
    clock.now_s += 2
    give_up_s = time.monotonic() + 30
    while load(tier, chain(1, 2)):
        assert time.monotonic() < give_up_s, "no thread looked"


def test_another_file_system_under_the_name_gets_no_blocks(open_disk, folder, clock, said):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == folder.parent.stat().st_dev:
        pytest.skip("one file system only")
    tier = open_disk()
    save(tier, chain(1, 2))
    elsewhere = other / f"openinfer-test-{os.getpid()}"
    elsewhere.mkdir(mode=0o700)
    try:
        folder.rename(folder.with_name("moved"))
        folder.symlink_to(elsewhere)
        assert failure_of(tier, chain(2, 1)) is TierFailure.GONE
        assert "not on the file system that it was on" in said()[-1]
        assert not list(elsewhere.iterdir())
    finally:
        shutil.rmtree(elsewhere)


# --- whose folder it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", StoreAccess)
def test_a_folder_that_others_may_write_to_is_refused(access, open_disk, folder):
    open_disk().close()
    folder.chmod(0o702)
    with pytest.raises(StoreError, match=r"mode 702.*chmod go-w"):
        open_disk(access=access)
    folder.chmod(0o755)
    open_disk(access=access)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_a_group_may_write_to_is_refused_unless_it_is_the_users_own(open_disk, folder):
    open_disk().close()
    folder.chmod(0o2770)
    open_disk().close()
    os.chown(folder, os.geteuid(), 4711)
    folder.chmod(0o2770)
    with pytest.raises(StoreError, match="chmod go-w"):
        open_disk()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(open_disk, folder):
    open_disk().close()
    os.chown(folder, 4711, 4711)
    with pytest.raises(StoreError, match="belongs to user 4711"):
        open_disk()
