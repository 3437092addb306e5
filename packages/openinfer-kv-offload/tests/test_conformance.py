"""Every tier of ours against the published kit: the rules, and random use under random faults."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from openinfer_kv_cache.testing.tier_contract import check_tier
from openinfer_kv_cache.testing.tier_machine import tier_machine
from openinfer_kv_offload import HostPolicy, QueueOptions, WriteMode
from openinfer_kv_offload.testing.cases import DiskCase, HostCase, StackCase

# Trips often and heals at once, so that a machine sees both sides of the breaker.
NERVOUS = QueueOptions(num_threads=2, breaker_failures=3, breaker_cooldown_s=0.0005)


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


MACHINES = {
    "host": lambda folders: HostCase(HostPolicy.LRU, NERVOUS),
    "host-lfu": lambda folders: HostCase(HostPolicy.LFU, NERVOUS),
    "disk": lambda folders: DiskCase(folders(), NERVOUS),
    "stack-through": lambda folders: StackCase(folders(), WriteMode.THROUGH, faulty_disk=True, queue=NERVOUS),
    "stack-back": lambda folders: StackCase(folders(), WriteMode.BACK, faulty_disk=True, queue=NERVOUS),
}


@pytest.mark.parametrize("name", MACHINES)
def test_random_use_under_faults_never_gives_wrong_bytes(name, folders):
    machine, seen = tier_machine(lambda: MACHINES[name](folders))
    fixed = settings(
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=fixed)
    assert seen["loaded blocks"] > 0
    assert seen["reopened"] > 0
    assert any(key.startswith("fault") for key in seen)
