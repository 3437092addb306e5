"""Blocks that only their device addresses: every tier moves them, and checks what it gives back."""

import pytest

from openinfer_kv_cache import DeviceTier, KvTierError, LastingTier, TierFailure, TransferState
from openinfer_kv_cache.testing.device_blocks import FakeBlockMover, FakeDeviceBlock, reference_block_sum
from openinfer_kv_cache.testing.tier_cases import chain, content, ended, kit_layout
from openinfer_kv_offload import DiskTier, HostTier, HostTierOptions, open_tiers
from openinfer_kv_offload.host.checksums import block_sum
from openinfer_kv_offload.settings import open_stack

LAYOUT = kit_layout()
FILLED = chain(1, 6)


def device_blocks(digests):
    return [FakeDeviceBlock(content(digest, LAYOUT)) for digest in digests]


def tier_of(kind, tmp_path):
    host, disk = "host=64KiB", f"disk={tmp_path / 'store'},1MiB"
    settings = {"host": [host], "disk": [disk], "stack": [host, disk]}[kind]
    return open_tiers(settings, LAYOUT)


@pytest.mark.parametrize("kind", ["host", "disk", "stack"])
def test_blocks_of_a_device_come_back_as_they_were_saved(kind, tmp_path):
    tier = tier_of(kind, tmp_path)
    assert isinstance(tier, DeviceTier)
    assert tier.takes_device_blocks
    assert ended(tier.save(FILLED, device_blocks(FILLED))) is TransferState.COMPLETED
    blocks = [FakeDeviceBlock(bytes(LAYOUT.block_bytes)) for _ in FILLED]
    assert ended(tier.load(tier.find(FILLED), blocks)) is TransferState.COMPLETED
    assert [bytes(block.memory) for block in blocks] == [content(digest, LAYOUT) for digest in FILLED]
    in_memory = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in FILLED]
    assert ended(tier.load(tier.find(FILLED), in_memory)) is TransferState.COMPLETED
    assert [bytes(block) for block in in_memory] == [content(digest, LAYOUT) for digest in FILLED]
    wrong = FakeDeviceBlock(bytes(LAYOUT.block_bytes - 1))
    with pytest.raises(KvTierError, match="this layout's have"):
        tier.save(FILLED[:1], [wrong])
    with pytest.raises(KvTierError, match="each kind by itself"):
        tier.save(FILLED[:2], [FakeDeviceBlock(bytes(LAYOUT.block_bytes)), in_memory[0]])
    tier.close()


def test_sum_of_a_block_is_the_contract_s():
    for num_bytes in (1, 7, 8, 17, 4096):
        block = content(FILLED[0], LAYOUT)[:num_bytes]
        assert block_sum(memoryview(block)) == reference_block_sum(block)


def test_memory_and_device_understand_each_other_s_stamps():
    tier = HostTier(LAYOUT, HostTierOptions(capacity_bytes=1 << 16))
    ended(tier.save(FILLED[:2], [memoryview(content(digest, LAYOUT)) for digest in FILLED[:2]]))
    blocks = [FakeDeviceBlock(bytes(LAYOUT.block_bytes)) for _ in range(2)]
    assert ended(tier.load(tier.find(FILLED[:2]), blocks)) is TransferState.COMPLETED
    assert [bytes(block.memory) for block in blocks] == [content(digest, LAYOUT) for digest in FILLED[:2]]
    tier.close()


def test_evicted_blocks_of_a_device_are_handed_to_the_disk(tmp_path):
    stack = open_stack(LAYOUT, f"host=8KiB;disk={tmp_path},1MiB;write=back")
    ended(stack.save(FILLED, device_blocks(FILLED)))
    assert stack.counters()[1].stored_blocks >= 4
    in_memory = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(4)]
    assert ended(stack.load(stack.find(FILLED[:4]), in_memory)) is TransferState.COMPLETED
    assert [bytes(block) for block in in_memory] == [content(digest, LAYOUT) for digest in FILLED[:4]]
    stack.close()


def test_blocks_of_a_device_are_handed_to_the_disk_behind_the_host(tmp_path):
    stack = open_stack(LAYOUT, f"host=64KiB;disk={tmp_path},1MiB")
    ended(stack.save(FILLED, device_blocks(FILLED)))
    stack.close()
    disk = open_tiers([f"disk={tmp_path},1MiB"], LAYOUT)
    in_memory = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in FILLED]
    assert ended(disk.load(disk.find(FILLED), in_memory)) is TransferState.COMPLETED
    assert [bytes(block) for block in in_memory] == [content(digest, LAYOUT) for digest in FILLED]
    disk.close()


def test_what_changed_in_the_arena_never_lands_on_a_device():
    tier = HostTier(LAYOUT, HostTierOptions(capacity_bytes=1 << 16))
    ended(tier.save(FILLED[:1], device_blocks(FILLED[:1])))
    (arena,) = tier.pinnable_memory()
    where = bytes(arena).index(content(FILLED[0], LAYOUT))
    arena[where + 7] ^= 1
    block = FakeDeviceBlock(bytes(LAYOUT.block_bytes))
    transfer = tier.load(tier.find(FILLED[:1]), [block])
    assert ended(transfer) is TransferState.PARTIAL
    assert transfer.failure is TierFailure.CORRUPT
    assert transfer.completed_blocks == 0
    assert not tier.find(FILLED[:1]).digests
    tier.close()


@pytest.mark.parametrize("bad", [None, 0, 5, 16, 19])
def test_blocks_from_disk_reach_a_device_several_at_a_time_up_to_one_that_is_not_whole(bad, tmp_path, monkeypatch):
    digests = chain(3, 20)
    tier = open_tiers([f"disk={tmp_path / 'store'},1MiB"], LAYOUT)
    ended(tier.save(digests, device_blocks(digests)))
    tier.close()
    if bad is not None:
        (segment,) = [each for each in (tmp_path / "store").rglob("*") if content(digests[bad], LAYOUT) in _read(each)]
        spoiled = bytearray(segment.read_bytes())
        spoiled[spoiled.index(content(digests[bad], LAYOUT)) + 7] ^= 1
        segment.write_bytes(spoiled)
    copied = []
    copy_in = FakeBlockMover.copy_in
    monkeypatch.setattr(
        FakeBlockMover,
        "copy_in",
        lambda self, blocks, *rest: copied.append(len(blocks)) or copy_in(self, blocks, *rest),
    )
    tier = open_tiers([f"disk={tmp_path / 'store'},1MiB"], LAYOUT)
    blocks = [FakeDeviceBlock(bytes(LAYOUT.block_bytes)) for _ in digests]
    transfer = tier.load(tier.find(digests), blocks)
    ended(transfer)
    num_whole = len(digests) if bad is None else bad
    assert transfer.completed_blocks == num_whole
    assert [bytes(block.memory) for block in blocks[:num_whole]] == [
        content(each, LAYOUT) for each in digests[:num_whole]
    ]
    assert all(not any(block.memory) for block in blocks[num_whole:])
    assert transfer.failure is (None if bad is None else TierFailure.CORRUPT)
    assert copied == {None: [16, 4], 0: [], 5: [5], 16: [16], 19: [16, 3]}[bad]
    tier.close()


def _read(path):
    return path.read_bytes() if path.is_file() else b""


def test_disk_keeps_the_key_that_its_blocks_are_named_with(tmp_path):
    folder = tmp_path / "store"
    tier = open_tiers([f"disk={folder},1MiB"], LAYOUT)
    assert isinstance(tier, LastingTier)
    key = tier.digest_key
    tier.close()
    assert (folder / "digest.key").stat().st_mode & 0o777 == 0o600
    for settings in (f"disk={folder},1MiB,access=read", f"disk={folder},1MiB"):
        again = open_tiers([settings], LAYOUT)
        assert isinstance(again, DiskTier)
        assert again.digest_key == key
        assert len(key) == 32
        again.close()


def test_stack_has_the_key_of_its_lasting_tiers_or_none_if_they_differ(tmp_path):
    stack = open_stack(LAYOUT, f"host=64KiB;disk={tmp_path / 'a'},1MiB;write=back;flush_on_close=true")
    assert stack.digest_key == (tmp_path / "a" / "digest.key").read_bytes()
    ended(stack.save(FILLED, device_blocks(FILLED)))
    assert [each.stored_blocks for each in stack.counters()] == [6, 0]
    stack.close()
    disk = open_tiers([f"disk={tmp_path / 'a'},1MiB"], LAYOUT)
    assert disk.counters()[0].stored_blocks == 6
    disk.close()
