"""Ends of tiers in virtual time, where a disk or a plug-in is slow; see test_closing.py."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mutants  # pyright: ignore[reportMissingImports] - next to this file

from openinfer_bench.simulate.stack import SlowDisk, TimedMedium
from openinfer_core.testing.simulation.world import World
from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_kv_cache import KvTier, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, empty, filled, kit_layout, load, save
from openinfer_kv_cache.tiers.traits import Medium
from openinfer_kv_offload.disk.tier import DiskTier, DiskTierOptions
from openinfer_kv_offload.host.options import HostTierOptions
from openinfer_kv_offload.host.tier import HostTier
from openinfer_kv_offload.stack.tier import StackOptions, TierStack, WriteMode
from openinfer_kv_offload.transfer.memory import WrapMedium
from openinfer_kv_offload.transfer.queue import QueueOptions

_LAYOUT = kit_layout()
_QUEUE = QueueOptions(num_threads=2)
_SLOW_S = 30.0  # an operation of the disk
_HOUR_S = 3600.0


class Hanging:
    """A tier of a plug-in whose end takes an hour, and which is told no time."""

    def __init__(self, tier: KvTier, world: World) -> None:
        self._tier = tier
        self._world = world

    def __getattr__(self, name: str) -> Any:
        if name == "close_within":
            raise AttributeError(name)
        return getattr(self._tier, name)

    def close(self) -> None:
        self._world.sleep(_HOUR_S)


def stack_on_a_slow_disk(world: World, *, mutant: str | None = None) -> dict[str, Any]:
    """A write-behind stack with much to hand down, and a load under way, has four seconds for its end."""
    if mutant is not None:
        mutants.MUTANTS[mutant](world)
    folder, disk = tempfile.mkdtemp(), SlowDisk()
    early, late = chain(1, 2), chain(2, 64)
    tiers = _open(world, folder, disk)
    first = TierStack(tiers, StackOptions(write=WriteMode.BEHIND))
    save(first, early)
    first.flush()
    disk.extra_s = _SLOW_S
    into = empty(len(early), _LAYOUT)
    loading = tiers[1].load(tiers[1].find(early), into)
    saving = first.save(late, filled(late, _LAYOUT))
    while saving.poll() is TransferState.PENDING:
        world.sleep(0.01)
    began_s = world.now_s
    have_ended = first.close_within(4.0)
    took_s = world.now_s - began_s
    state, before = loading.poll(), [bytes(block) for block in into]
    world.sleep(300.0)  # what was left behind ends
    disk.extra_s = 0.0
    again = _open(world, folder, disk)[1]
    answer = {
        "took_s": took_s,
        "have_ended": have_ended,
        "load": state,
        "touched": [bytes(block) for block in into] != before,
        "saved_before": load(again, early),
        "stored_below": len(again.find(late).digests) == tiers[1].counters()[0].saved_blocks - len(early),
    }
    again.close()
    return answer


def port_with_a_hanging_plug_in(world: World, *, mutant: str | None = None) -> dict[str, Any]:
    if mutant is not None:
        mutants.MUTANTS[mutant](world)
    pool = filled(chain(1, 8), _LAYOUT)
    tier = Hanging(_open(world, tempfile.mkdtemp(), SlowDisk())[0], world)
    calls: list[str] = []
    port = PoolTierPort(
        cast("KvTier", tier), pool, load_timeout_s=1.0, before_close=lambda: calls.append("memory is unlocked")
    )
    port.save(chain(1, 8), range(8))
    began_s = world.now_s
    port.close()
    return {"took_s": world.now_s - began_s, "calls": calls, "faults": port.faults}


def _open(world: World, folder: str, disk: SlowDisk) -> Sequence[Any]:
    def on_disk(medium: Medium) -> Medium:
        return TimedMedium(medium, lambda size: world.charge(1e-4 + disk.extra_s))

    disk_options = DiskTierOptions(folder=str(Path(folder) / "kv"), budget_bytes=2**20, queue=_QUEUE)
    return [
        HostTier(_LAYOUT, HostTierOptions(capacity_bytes=2**20, queue=_QUEUE)),
        DiskTier(_LAYOUT, disk_options, wrap_medium=cast("WrapMedium", on_disk)),
    ]
