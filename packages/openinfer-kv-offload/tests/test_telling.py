"""What tiers tell of: all that can be found in them, and nothing else, in order, whatever happens."""

import random

import pytest

from openinfer_kv_cache import TellingTier, TierMedium
from openinfer_kv_cache.testing.tier_cases import chain, kit_layout, load, save
from openinfer_kv_offload import (
    DiskTier,
    DiskTierOptions,
    HostTier,
    HostTierOptions,
    RemoteTier,
    RemoteTierOptions,
    StackOptions,
    StoreAccess,
    TierStack,
    WriteMode,
)

LAYOUT = kit_layout()
CPU, STORAGE = TierMedium.CPU, TierMedium.STORAGE


class Router:
    """Knows what it was told, and checks that it can follow."""

    def __init__(self):
        self.known = {CPU: set(), STORAGE: set()}
        self.removals = 0

    def stored(self, digests, medium):
        assert not self.known[medium].intersection(digests)
        self.known[medium].update(digests)

    def removed(self, digests, medium):
        assert self.known[medium].issuperset(digests)
        self.known[medium].difference_update(digests)
        self.removals += len(digests)


class Objects(dict):
    address = "a dictionary"

    def put(self, key, content):
        self[key] = bytes(content)

    def delete(self, keys):
        for key in keys:
            self.pop(key, None)

    def list(self, prefix):
        return [key for key in self if key.startswith(prefix)]

    def close(self):
        pass


def host(tmp_path, **_):
    return HostTier(LAYOUT, HostTierOptions(capacity_bytes=8 * 3904)), CPU


def disk(tmp_path, access=StoreAccess.WRITE):
    size = LAYOUT.block_bytes + 4096
    options = DiskTierOptions(folder=str(tmp_path), budget_bytes=8 * size, segment_bytes=2 * size, access=access)
    return DiskTier(LAYOUT, options), STORAGE


def remote(tmp_path, objects=None, **_):
    options = RemoteTierOptions(budget_bytes=8 * (LAYOUT.block_bytes + 128), refresh_s=3600.0)
    return RemoteTier(LAYOUT, Objects() if objects is None else objects, options), STORAGE


@pytest.mark.parametrize("make", [host, disk, remote])
def test_a_router_knows_what_can_be_found(make, tmp_path):
    tier, medium = make(tmp_path)
    assert isinstance(tier, TellingTier)
    tier.listen(router := Router())
    draw, chains = random.Random(0), [chain(number, 3) for number in range(6)]
    for _ in range(40):
        digests = draw.choice(chains)
        if draw.random() < 0.7:
            save(tier, digests)
        else:
            load(tier, digests)
        for each in chains:
            for digest in each:
                hit = tier.find([digest])
                assert (digest in router.known[medium]) == bool(hit.digests)
                hit.close()
    assert router.removals
    assert tier.counters()[0].stored_blocks == len(router.known[medium])
    tier.close()


def test_what_was_there_before_is_told_at_once(tmp_path):
    before, _ = disk(tmp_path)
    save(before, chain(1, 3))
    before.close()
    tier, _ = disk(tmp_path)
    tier.listen(router := Router())
    assert router.known[STORAGE] == set(chain(1, 3))
    tier.close()


def test_what_others_save_and_delete_is_told_when_it_is_seen(tmp_path):
    objects = Objects()
    (one, _), (two, _) = remote(tmp_path, objects), remote(tmp_path, objects)
    two.listen(router := Router())
    save(one, chain(1, 3))
    two.refresh()
    assert router.known[STORAGE] == set(chain(1, 3))
    objects.clear()
    two.refresh()
    assert router.known[STORAGE] == set()
    one.close()
    two.close()


def test_a_stack_tells_of_each_of_its_tiers(tmp_path):
    stack = TierStack([host(tmp_path)[0], disk(tmp_path)[0]], StackOptions(write=WriteMode.THROUGH))
    stack.listen(router := Router())
    save(stack, chain(1, 2))
    assert router.known == {CPU: set(chain(1, 2)), STORAGE: set(chain(1, 2))}
    stack.close()
