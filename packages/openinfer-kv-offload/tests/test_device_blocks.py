"""Blocks that only their device addresses: every tier moves them, and checks what it gives back."""

import pytest

from openinfer_kv_cache import DeviceTier, KvTierError, LastingTier, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, content, ended, kit_layout
from openinfer_kv_offload import DiskTier, HostTier, HostTierOptions, open_tiers
from openinfer_kv_offload.settings import open_stack

LAYOUT = kit_layout()
FILLED = chain(1, 6)


class FakeDeviceBlock:
    """Memory behind a pair of copies, as a GPU's is."""

    def __init__(self, content=None):
        self.nbytes = LAYOUT.block_bytes
        self.memory = bytearray(content or bytes(self.nbytes))

    def copy_to(self, host):
        host[:] = self.memory

    def copy_from(self, host):
        self.memory[:] = host


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
    assert ended(tier.save(FILLED, device_blocks(FILLED))) is TransferState.LANDED
    blocks = [FakeDeviceBlock() for _ in FILLED]
    assert ended(tier.load(tier.find(FILLED), blocks)) is TransferState.LANDED
    assert [bytes(block.memory) for block in blocks] == [content(digest, LAYOUT) for digest in FILLED]
    in_memory = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in FILLED]
    assert ended(tier.load(tier.find(FILLED), in_memory)) is TransferState.LANDED
    assert [bytes(block) for block in in_memory] == [content(digest, LAYOUT) for digest in FILLED]
    wrong = FakeDeviceBlock()
    wrong.nbytes -= 1
    with pytest.raises(KvTierError, match="this layout's have"):
        tier.save(FILLED[:1], [wrong])
    tier.close()


def test_what_changed_in_the_arena_never_reaches_a_device():
    tier = HostTier(LAYOUT, HostTierOptions(capacity_bytes=1 << 16))
    ended(tier.save(FILLED[:1], device_blocks(FILLED[:1])))
    (arena,) = tier.pinnable_memory()
    where = bytes(arena).index(content(FILLED[0], LAYOUT))
    arena[where + 7] ^= 1
    block = FakeDeviceBlock()
    transfer = tier.load(tier.find(FILLED[:1]), [block])
    assert ended(transfer) is TransferState.SHORT
    assert transfer.failure is TierFailure.CORRUPT
    assert bytes(block.memory) == bytes(LAYOUT.block_bytes)
    tier.close()


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
