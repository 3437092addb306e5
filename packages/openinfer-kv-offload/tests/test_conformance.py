"""Every tier of ours against the published kit: the rules, and random use under random faults."""

import tempfile
from pathlib import Path

import pytest

from openinfer_kv_cache.testing.tier_contract import InjectedFault, check_tier
from openinfer_kv_offload import HostPolicy, RemoteTier, RemoteTierOptions, WriteMode
from openinfer_kv_offload.testing.cases import DiskCase, HostCase, StackCase
from openinfer_kv_offload.testing.soak import CASES, run_machine


class DictStore:
    """An `ObjectStore` in a dictionary, which outlives it."""

    address = "a dictionary"

    def __init__(self, objects):
        self.objects = objects

    def put(self, key, content):
        self.objects[key] = bytes(content)

    def get(self, key):
        return self.objects.get(key)

    def delete(self, keys):
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix):
        return [key for key in self.objects if key.startswith(prefix)]

    def close(self):
        pass


class KeepsWhatIsDeleted(DictStore):
    def delete(self, keys):
        pass


class StoreCase:
    is_persistent = True
    capacity_blocks = 8

    def __init__(self, make_store, capacity_blocks=8):
        self._make_store, self._objects, self._capacity_blocks = make_store, {}, capacity_blocks

    def open(self, layout, faults):
        options = RemoteTierOptions(budget_bytes=self._capacity_blocks * (layout.block_bytes + 128), connections=1)
        return RemoteTier(layout, self._make_store(self._objects), options, wrap_medium=faults.wrap)


@pytest.fixture
def folders(tmp_path):
    """New folders under one that pytest cleans up."""
    return lambda: Path(tempfile.mkdtemp(dir=tmp_path))


@pytest.mark.parametrize("policy", HostPolicy)
def test_host_tier_keeps_the_contract(policy):
    check_tier(lambda: HostCase(policy))


def test_disk_tier_keeps_the_contract(folders):
    check_tier(lambda: DiskCase(folders()))


def test_write_back_stack_keeps_the_contract(folders):
    check_tier(lambda: StackCase(folders(), WriteMode.BACK, faulty_disk=False))


@pytest.mark.parametrize("name", CASES)
def test_random_use_under_faults_never_gives_wrong_bytes(name, tmp_path):
    seen = run_machine(lambda: CASES[name](Path(tempfile.mkdtemp(dir=tmp_path))), steps=1500)
    assert seen["loaded blocks"] > 100
    assert seen["reopened"] > 10
    assert seen["save partial"] > 0
    assert {f"fault {kind}" for kind in InjectedFault} <= seen.keys()


def test_tier_over_a_store_keeps_the_contract():
    check_tier(lambda: StoreCase(DictStore))


def test_store_that_deletes_nothing_is_caught():
    with pytest.raises(AssertionError, match=r"stored 8 blocks when .* what it evicts must be deleted from its medium"):
        check_tier(lambda: StoreCase(KeepsWhatIsDeleted))


def test_case_too_large_for_the_kit_to_see_evictions_is_refused():
    with pytest.raises(AssertionError, match=r"5 times capacity_blocks \(8\) and gave nothing up"):
        check_tier(lambda: StoreCase(DictStore, capacity_blocks=64))
