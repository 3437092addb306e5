"""Random use of every tier under random faults, and kills during writes.

Needs hypothesis, the extras valkey and s3, and the servers' wheels (`testing/servers.py`).

python -m openinfer_kv_offload.testing.soak --steps 10000 --kills 50 --json FILE
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from openinfer_core.provenance import provenance
from openinfer_kv_cache.testing.tier_cases import TierCase
from openinfer_kv_cache.testing.tier_machine import tier_machine
from openinfer_kv_offload.host.options import HostPolicy
from openinfer_kv_offload.remote.object_store import ObjectStore
from openinfer_kv_offload.remote.s3_store import S3Store
from openinfer_kv_offload.remote.valkey_store import ValkeyStore
from openinfer_kv_offload.stack.tier import WriteMode
from openinfer_kv_offload.testing.cases import DiskCase, HostCase, RemoteCase, StackCase
from openinfer_kv_offload.testing.kill_writer import KillReport, kill_writers
from openinfer_kv_offload.testing.servers import S3_BUCKET, S3_ENVIRONMENT, S3Server, ValkeyServer
from openinfer_kv_offload.transfer.queue import QueueOptions

_STEPS_PER_EXAMPLE = 50

# Trips often and heals at once, so that a machine sees both sides of the breaker.
_NERVOUS = QueueOptions(num_threads=2, breaker_failures=3, breaker_cooldown_s=0.0005)

CASES: Mapping[str, Callable[[Path], TierCase]] = {
    "host": lambda folder: HostCase(HostPolicy.LRU, _NERVOUS),
    "host-lfu": lambda folder: HostCase(HostPolicy.LFU, _NERVOUS),
    "disk": lambda folder: DiskCase(folder, _NERVOUS),
    "stack-through": lambda folder: StackCase(folder, WriteMode.THROUGH, faulty_disk=True, queue=_NERVOUS),
    "stack-back": lambda folder: StackCase(folder, WriteMode.BACK, faulty_disk=True, queue=_NERVOUS),
}  # makes an empty tier in an empty folder, by the name of its kind.


def remote_case(connect: Callable[[], ObjectStore]) -> TierCase:
    return RemoteCase(connect, connections=3, queue=_NERVOUS)


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes; that it is written at all says that no machine saw a wrong byte."""

    machines: dict[str, dict[str, int]]
    """By tier: `steps`, and what they came to."""
    kills: KillReport


def run_machine(make_case: Callable[[], TierCase], *, steps: int) -> dict[str, int]:
    """Uses one kind of tier at random until at least `steps` rules have run, the same ones each time.

    Returns:
        `steps`, and how often what happened.

    Raises:
        AssertionError: the tier broke its contract.
    """
    machine, seen = tier_machine(make_case)
    examples = max(steps // _STEPS_PER_EXAMPLE, 1)
    while seen["steps"] < steps:
        fixed = settings(
            max_examples=examples,
            stateful_step_count=_STEPS_PER_EXAMPLE,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        )
        seen.clear()
        run_state_machine_as_test(machine, settings=fixed)
        examples *= 2
    return dict(sorted(seen.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and reports; 1 if a kill led to a wrong byte or lost a completed block."""
    parser = argparse.ArgumentParser(prog="python -m openinfer_kv_offload.testing.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="rules to run for each kind of tier")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="openinfer-soak-") as scratch:
        machines = {
            name: run_machine(
                lambda make=make: make(Path(tempfile.mkdtemp(dir=scratch))),
                steps=arguments.steps,
            )
            for name, make in CASES.items()
        }
        machines |= _run_remote_machines(Path(scratch), steps=arguments.steps)
        kills = kill_writers(Path(scratch) / "killed", kills=arguments.kills)
    report = SoakReport(machines=machines, kills=kills)
    content = {**msgspec.to_builtins(provenance()), **msgspec.to_builtins(report)}
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    sys.stdout.write(encoded.decode())
    if arguments.json is not None:
        arguments.json.write_bytes(encoded)
    return 1 if kills.wrong_blocks or kills.lost_blocks else 0


def _run_remote_machines(scratch: Path, *, steps: int) -> dict[str, dict[str, int]]:
    os.environ.update(S3_ENVIRONMENT)
    folders = {name: scratch / name for name in ("valkey", "s3")}
    for folder in folders.values():
        folder.mkdir()
    with ValkeyServer(folders["valkey"]) as valkey, S3Server(folders["s3"]) as s3:
        return {
            "valkey": run_machine(lambda: remote_case(lambda: ValkeyStore(valkey.url)), steps=steps),
            "s3": run_machine(lambda: remote_case(lambda: S3Store(S3_BUCKET, endpoint=s3.endpoint)), steps=steps),
        }


if __name__ == "__main__":
    sys.exit(main())
