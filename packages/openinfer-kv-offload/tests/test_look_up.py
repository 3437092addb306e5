"""Asking a medium for what other processes have saved: how often, and of what."""

import pytest

from openinfer_kv_cache import SharedTier
from openinfer_kv_cache.testing.tier_cases import chain, kit_layout, save
from openinfer_kv_offload import (
    DiskTier,
    DiskTierOptions,
    HostTier,
    HostTierOptions,
    RemoteTier,
    RemoteTierOptions,
    StackOptions,
    StoreAccess,
    TierConfigError,
    TierStack,
    WriteMode,
    open_tiers,
    settings,
)
from openinfer_kv_offload.remote.tier import count_beginning

LAYOUT = kit_layout()


@pytest.mark.parametrize("length", range(9))
def test_a_beginning_is_counted_with_few_questions(length):
    for there in range(length + 1):
        asked = []

        def has(digest, there=there, asked=asked):
            asked.append(digest)
            return digest < there

        assert count_beginning(range(length), has) == there
        assert len(asked) <= length.bit_length() + 1
        if there == length > 0:
            assert asked == [length - 1]  # what another engine has just saved is there whole


class Listed:
    """A store that cannot say whether it has a key; counts its lists."""

    address = "a dictionary"

    def __init__(self, objects):
        self.objects, self.lists = objects, 0

    def put(self, key, content):
        self.objects[key] = bytes(content)

    def get(self, key):
        return self.objects.get(key)

    def delete(self, keys):
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix):
        self.lists += 1
        return [key for key in self.objects if key.startswith(prefix)]

    def close(self):
        pass


def test_a_store_that_cannot_be_asked_for_a_key_is_listed():
    objects = {}
    stores = [Listed(objects), Listed(objects)]
    options = RemoteTierOptions(budget_bytes=64 * (LAYOUT.block_bytes + 128), refresh_s=3600.0)
    one, two = (RemoteTier(LAYOUT, store, options) for store in stores)
    save(one, chain(1, 3))
    lists = stores[1].lists
    two.look_up(chain(1, 3))
    assert two.find(chain(1, 3)).digests == tuple(chain(1, 3))
    two.look_up(chain(1, 3))  # it knows them
    assert stores[1].lists == lists + 1
    one.close()
    two.close()


def test_a_reader_of_a_folder_finds_what_it_looks_up(tmp_path):
    options = {"folder": str(tmp_path), "budget_bytes": 1 << 20, "refresh_s": 3600.0}
    writer = DiskTier(LAYOUT, DiskTierOptions(**options))
    reader = DiskTier(LAYOUT, DiskTierOptions(**options, access=StoreAccess.READ))
    save(writer, chain(1, 3))
    assert reader.find(chain(1, 3)).digests == ()
    reader.look_up(chain(1, 3))
    assert reader.find(chain(1, 3)).digests == tuple(chain(1, 3))
    reader.close()
    writer.close()


def host(blocks=8):
    return HostTier(LAYOUT, HostTierOptions(capacity_bytes=blocks * 3904))


def disk(folder, **options):
    return DiskTier(LAYOUT, DiskTierOptions(folder=str(folder), budget_bytes=1 << 20, **options))


def test_a_host_tier_is_no_place_that_others_read():
    tier = host()
    assert not isinstance(tier, SharedTier)
    tier.close()


def test_a_save_counts_when_the_shared_tier_has_it(tmp_path):
    shared = disk(tmp_path)
    stack = TierStack([host(), shared], StackOptions(shared_in="disk"))
    transfer = stack.save(chain(1, 3), [memoryview(bytes(LAYOUT.block_bytes))] * 3)
    transfer.wait()
    assert (transfer.completed_blocks, shared.counters()[0].stored_blocks) == (3, 3)
    stack.close()


def test_what_the_host_tier_alone_has_does_not_count(tmp_path):
    disk(tmp_path).close()
    stack = TierStack([host(), disk(tmp_path, access=StoreAccess.READ)], StackOptions(shared_in="disk"))
    transfer = stack.save(chain(1, 3), [memoryview(bytes(LAYOUT.block_bytes))] * 3)
    transfer.wait()
    assert transfer.completed_blocks == 0
    assert stack.counters()[0].stored_blocks == 3
    stack.close()


def test_a_stack_that_lands_somewhere_writes_through_and_says_what_is_wrong(tmp_path):
    opened = open_tiers([f"stack=host=1MiB;disk={tmp_path},1MiB;shared_in=disk"], LAYOUT)
    transfer = opened.save(chain(1, 2), [memoryview(bytes(LAYOUT.block_bytes))] * 2)
    transfer.wait()
    assert [each.stored_blocks for each in opened.counters()] == [2, 2]
    opened.close()
    for mode in (WriteMode.BEHIND, WriteMode.BACK):
        with pytest.raises(TierConfigError, match="needs write=through"):
            StackOptions(write=mode, shared_in="disk")
    for name, message in (("host", "no other process can read"), ("s3", "names none of")):
        with pytest.raises(TierConfigError, match=message):
            settings.open_stack(LAYOUT, f"host=1MiB;disk={tmp_path},1MiB;shared_in={name}")
