"""Every tier of ours against the published kit: the rules, and random use under random faults."""

import tempfile
from pathlib import Path

import pytest

from openinfer_kv_cache.testing.tier_contract import InjectedFault, check_tier
from openinfer_kv_offload import HostPolicy, WriteMode
from openinfer_kv_offload.testing.cases import DiskCase, HostCase, StackCase
from openinfer_kv_offload.testing.soak import CASES, run_machine


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
