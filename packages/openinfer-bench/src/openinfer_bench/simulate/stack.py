"""The engine of a simulated server: scheduler, pool, tiers and loop as they are, on a fake GPU or several.

links ──► host, ledger, step loop, scheduler, pool ──► fake device     tiers' threads ──► memory and files
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from openinfer_bench.simulate.cpu import CpuTimes, Interpreter, fitted_times
from openinfer_bench.simulate.device import GpuLost, SimulatedRunner, StepTimes, layout_of
from openinfer_bench.simulate.grammars import SimulatedCompiler
from openinfer_bench.simulate.ranks import start_ranks
from openinfer_bench.simulate.traffic import ATTACKER, TENANTS
from openinfer_core.engine import EngineInfo
from openinfer_core.events import TokenEvent
from openinfer_core.queue_policies import FairShare
from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.simulation.world import World
from openinfer_engine.errors import GroupBroken
from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.loop import StepLoop
from openinfer_engine.scheduler.token_budget import TokenBudgetScheduler
from openinfer_kv_cache import KvTier
from openinfer_kv_cache.testing.tier_faults import FaultInjector
from openinfer_kv_cache.tiers.traits import Medium
from openinfer_kv_offload.disk.tier import DiskTier, DiskTierOptions
from openinfer_kv_offload.format.record import record_bytes
from openinfer_kv_offload.host.options import HostTierOptions
from openinfer_kv_offload.host.tier import HostTier
from openinfer_kv_offload.stack.tier import StackOptions, TierStack, WriteMode
from openinfer_kv_offload.transfer.memory import WrapMedium
from openinfer_kv_offload.transfer.queue import QueueOptions

_NUM_TOKEN_IDS = 2048  # of the tiny model's tokenizer; the fake model says the first 64 alone, but for scripts
END_OF_TURN = 2033  # the tiny model's; what ends a call of a tool


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptionsOfRun:
    """How large everything is."""

    num_blocks: int = 72
    block_size_tokens: int = 16
    max_num_seqs: int = 16
    max_step_tokens: int = 512
    max_model_tokens: int = 1024
    max_waiting: int = 64
    host_blocks: int = 64
    disk_blocks: int = 960
    kv_load_timeout_s: float = 2.0
    disk_folder: str | None = None
    cpu: CpuTimes = field(default_factory=fitted_times)
    disk_bytes_per_s: float = 1e9
    disk_operation_s: float = 80e-6
    steps: StepTimes = field(default_factory=StepTimes)


class TimedMedium:
    """A medium that takes its time: `charge` is called with the bytes of each operation before it."""

    def __init__(self, medium: Medium, charge: Callable[[int], None]) -> None:
        self._medium = medium
        self._charge = charge

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        self._charge(sum(part.nbytes for part in parts))
        self._medium.write(offset_bytes, parts)

    def read(self, offset_bytes: int, into: memoryview) -> None:
        self._charge(into.nbytes)
        self._medium.read(offset_bytes, into)


@dataclass(slots=True)
class SlowDisk:
    """How much slower than it should be the disk is at this moment, for each of its operations."""

    extra_s: float = 0.0


class NotingLoop(StepLoop):
    """A loop that tells what it is asked.

    Attributes:
        on_submit: told each request.
        died: what ended it.
    """

    died: Exception | None = None
    on_submit: Callable[[GenerateRequest], None]

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        self.on_submit(request)
        return super().submit(request)

    def step(self) -> list[TokenEvent]:
        try:
            return super().step()
        except Exception as error:
            self.died = self.died or error
            raise


class Engine:
    """One life of the engine; the disk tier's folder outlives it. Made in its process.

    Args:
        num_ranks: GPUs; the others' processes are started here.
        note: told each request.
    """

    def __init__(
        self,
        world: World,
        options: StackOptionsOfRun,
        faults: FaultInjector,
        disk: SlowDisk,
        *,
        interpreter: Interpreter,
        num_ranks: int,
        note: Callable[[GenerateRequest], None],
    ) -> None:
        layout = layout_of(options.block_size_tokens)
        self._disk_folder = options.disk_folder
        self.tier = self._open_tiers(world, options, faults, disk)
        self.config = SchedulerConfig(
            num_blocks=options.num_blocks,
            block_size_tokens=options.block_size_tokens,
            max_num_seqs=options.max_num_seqs,
            max_step_tokens=options.max_step_tokens,
            max_model_tokens=options.max_model_tokens,
            max_waiting=options.max_waiting,
            layout_digest=layout.digest,
            digest_key=cast("Any", self.tier).digest_key if self.tier is not None else None,
        )
        cpu = options.cpu
        self.gpu = SimulatedRunner(
            world,
            self.config,
            options.steps,
            charge_plan=lambda rows: interpreter.charge(cpu.plan_s + rows * cpu.planned_row_s),
        )
        self.compiler = SimulatedCompiler(world, cpu)
        self.scheduler = TokenBudgetScheduler(self.config, FairShare(QueuePolicyConfig()))
        port = None
        if self.tier is not None:
            port = PoolTierPort(self.tier, self.gpu.pool.blocks, load_timeout_s=options.kv_load_timeout_s)
            self.scheduler.use_tiers(port)
        info = EngineInfo(
            model="simulated",
            family="qwen3",
            max_model_tokens=options.max_model_tokens,
            num_token_ids=_NUM_TOKEN_IDS,
            eos_token_ids=(END_OF_TURN,),
            block_size_tokens=options.block_size_tokens,
            num_blocks=options.num_blocks,
            max_num_seqs=options.max_num_seqs,
            max_waiting=options.max_waiting,
        )
        self.loop = NotingLoop(
            info=info,
            scheduler=self.scheduler,
            runner=start_ranks(world, self.gpu, num_ranks),
            grammar_compiler=self.compiler,
            port=port,
        )
        self.loop.on_submit = note

    @property
    def unexpected_death(self) -> Exception | None:
        """What ended the engine, unless it was made to end."""
        died = self.loop.died
        return None if isinstance(died, GpuLost | GroupBroken) else died

    def check_is_idle(self) -> None:
        """Raises unless everything that requests had was given back."""
        stats = self.loop.stats()
        left = {name: getattr(stats, name) for name in ("running", "waiting", "blocks_used", "loading")}
        if any(left.values()):
            raise AssertionError(f"all requests have ended, and the engine still has {left}")
        self.scheduler.check_integrity()

    def close_files(self) -> None:
        """What the kernel does when a process ends: the disk tier's files are real ones, of this process."""
        if self._disk_folder is None:
            return
        for name in sorted(map(int, os.listdir("/proc/self/fd/"))):
            try:
                is_ours = os.readlink(f"/proc/self/fd/{name}").startswith(self._disk_folder)
            except OSError:
                continue
            if is_ours:
                os.close(name)

    def _open_tiers(
        self, world: World, options: StackOptionsOfRun, faults: FaultInjector, disk: SlowDisk
    ) -> KvTier | None:
        layout, cpu = layout_of(options.block_size_tokens), options.cpu
        queue = QueueOptions(num_threads=2, breaker_cooldown_s=5.0)

        def in_memory(medium: Medium) -> Medium:
            return TimedMedium(medium, lambda size: world.charge(1e-6 + size / cpu.memory_bytes_per_s))

        def on_disk(medium: Medium) -> Medium:
            def charge(size: int) -> None:
                world.charge(options.disk_operation_s + size / options.disk_bytes_per_s + disk.extra_s)

            return faults.wrap(TimedMedium(medium, charge))

        def opened(tiers: list[KvTier]) -> KvTier | None:
            return TierStack(tiers, StackOptions(write=WriteMode.BEHIND)) if len(tiers) > 1 else next(iter(tiers), None)

        tiers: list[KvTier] = []
        if options.host_blocks:
            host_options = HostTierOptions(capacity_bytes=options.host_blocks * layout.block_bytes, queue=queue)
            tiers.append(HostTier(layout, host_options, wrap_medium=cast("WrapMedium", in_memory)))
        if options.disk_blocks and options.disk_folder is not None:
            disk_options = DiskTierOptions(
                folder=options.disk_folder,
                budget_bytes=options.disk_blocks * record_bytes(layout.block_bytes),
                segment_bytes=max(1, options.disk_blocks // 16) * record_bytes(layout.block_bytes),
                queue=queue,
            )
            tiers.append(DiskTier(layout, disk_options, wrap_medium=cast("WrapMedium", on_disk)))
        return opened(tiers)


def key_of(tenant: str) -> str:
    """The API key of a tenant."""
    return f"simulated-key-of-{tenant}"


def key_file(stack: ExitStack) -> Path:
    """A file with the keys of all tenants, which goes with the run."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openinfer-simulation-"))) / "keys.toml"
    path.touch(mode=0o600)
    path.write_text("".join(f'[[keys]]\ntenant = "{name}"\nkey = "{key_of(name)}"\n' for name in (*TENANTS, ATTACKER)))
    return path


def folder_of(stack: ExitStack) -> Path:
    """A folder for the disk tier, which goes with the run."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openinfer-simulation-"))) / "kv"
