"""The stack: scheduler, pool, tiers, loop, host, ledger and HTTP server as they are, on a fake GPU.

clients' loop ──bytes──► server's loop (protocol, ASGI app, link) ──► engine's thread (host, ledger, step loop,
scheduler, pool) ──► fake device        tiers' threads ──► memory and files
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from openinfer.models import find_model_dir
from openinfer_bench.simulate.clients import Connect
from openinfer_bench.simulate.cpu import CpuTimes, Interpreter, fitted_times
from openinfer_bench.simulate.device import GpuLost, SimulatedRunner, StepTimes, layout_of
from openinfer_bench.simulate.grammars import SimulatedCompiler
from openinfer_bench.simulate.traffic import ATTACKER, TENANTS
from openinfer_core.engine import EngineHandle, EngineInfo
from openinfer_core.events import FailureKind
from openinfer_core.process.local import InProcessEngine
from openinfer_core.queue_policies import FairShare
from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.network import connect
from openinfer_core.testing.simulation.world import World
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
from openinfer_server.app import App, load_app
from openinfer_server.http import request as http_request
from openinfer_server.http.protocol import bounded_protocol
from openinfer_server.options import ServerOptions
from openinfer_server.testing import RecordingEngine

SERVER_ADDRESS = ("127.0.0.1", 8000)
_NUM_TOKEN_IDS = 2048  # of the tiny model's tokenizer; the fake model says the first 64 alone


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


class NotingEngine(RecordingEngine):
    """An engine's handle that tells what it is asked."""

    def __init__(self, inner: EngineHandle, note: Callable[[GenerateRequest], None]) -> None:
        super().__init__(inner)
        self._note = note

    def submit(self, request: GenerateRequest) -> None:
        self._note(request)
        super().submit(request)


class Engine:
    """One life of the engine; the disk tier's folder outlives it."""

    def __init__(self, world: World, options: StackOptionsOfRun, faults: FaultInjector, disk: SlowDisk) -> None:
        layout = layout_of(options.block_size_tokens)
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
        cpu, interpreter = options.cpu, Interpreter(world)  # the engine has a process of its own
        self.runner = SimulatedRunner(
            world,
            self.config,
            options.steps,
            charge_plan=lambda rows: interpreter.charge(cpu.plan_s + rows * cpu.planned_row_s),
        )
        self.compiler = SimulatedCompiler(world, interpreter, cpu)
        self.scheduler = TokenBudgetScheduler(self.config, FairShare(QueuePolicyConfig()))
        port = None
        if self.tier is not None:
            port = PoolTierPort(self.tier, self.runner.pool.blocks, load_timeout_s=options.kv_load_timeout_s)
            self.scheduler.use_tiers(port)
        info = EngineInfo(
            model="simulated",
            family="qwen3",
            max_model_tokens=options.max_model_tokens,
            num_token_ids=_NUM_TOKEN_IDS,
            eos_token_ids=(),
            block_size_tokens=options.block_size_tokens,
            num_blocks=options.num_blocks,
            max_num_seqs=options.max_num_seqs,
            max_waiting=options.max_waiting,
        )
        self.loop = StepLoop(
            info=info, scheduler=self.scheduler, runner=self.runner, grammar_compiler=self.compiler, port=port
        )
        self.handle = InProcessEngine(self.loop)

    @property
    def unexpected_death(self) -> BaseException | None:
        """What ended the engine, unless it was made to end."""
        died = self.handle._host.died  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - the host tells clients less
        return None if isinstance(died, GpuLost) else died

    def check_is_idle(self) -> None:
        """Raises unless everything that requests had was given back."""
        stats = self.loop.stats()
        left = {name: getattr(stats, name) for name in ("running", "waiting", "blocks_used", "loading")}
        if any(left.values()):
            raise AssertionError(f"all requests have ended, and the engine still has {left}")
        self.scheduler.check_integrity()

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


class Server:
    """One life of the HTTP server, in the running event loop."""

    def __init__(
        self,
        world: World,
        engine: Engine,
        options: ServerOptions,
        loop: VirtualEventLoop,
        *,
        interpreter: Interpreter,
        cpu: CpuTimes,
        note: Callable[[GenerateRequest], None],
    ) -> None:
        self._world = world
        self._loop = loop
        self.app: App = load_app(NotingEngine(engine.handle, note), find_model_dir("tiny"), options)
        self._charge_for_encoding(cpu)
        self._protocol = _charged(bounded_protocol(options), interpreter, cpu)
        self._config = Config(
            self.app,
            http=self._protocol,
            ws="none",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=options.keep_alive_s,
        )
        self._config.load()
        self.state = ServerState()
        self.app.start()

    def make_protocol(self) -> asyncio.Protocol:
        return self._protocol(config=self._config, server_state=self.state, app_state={}, _loop=self._loop)

    def connector(self, client_loop: VirtualEventLoop, port: int) -> Connect:
        def connect_client(client: asyncio.Protocol) -> Any:
            return connect(
                self._world,
                client_loop=client_loop,
                client=client,
                server_loop=self._loop,
                make_server=self.make_protocol,
                delay_s=100e-6,
                client_address=("127.0.0.1", port),
                server_address=SERVER_ADDRESS,
            )

        return connect_client

    @property
    def has_ended(self) -> bool:
        """Whether its engine has died, which some clients may know before the server's own tasks do."""
        return self.app.service.link.dead or self.app.link_ended.is_set()

    async def drain(self) -> None:
        """Takes no more requests and lets those that run end, as after SIGTERM; then those that are left are told."""
        service = self.app.service
        service.draining = True
        try:
            async with asyncio.timeout(service.options.drain_deadline_s):
                await service.link.drained()
        except TimeoutError:
            service.link.fail_all(FailureKind.SHUTDOWN, "the server is shutting down")
        while any(map(_is_busy, self.state.connections)):  # noqa: ASYNC110 - as uvicorn does when it shuts down
            await asyncio.sleep(0.01)

    def break_connections(self) -> None:
        """What becomes of them when a process ends."""
        transports = [cast("Any", protocol).transport for protocol in self.state.connections]
        for transport in sorted(transports, key=lambda each: each.get_extra_info("peername")):
            transport.abort()

    async def stop(self) -> None:
        await self.app.stop()

    def _charge_for_encoding(self, cpu: CpuTimes) -> None:
        tokenizer: Any = self.app.service.tokenizer

        def charged(encode: Callable[..., Any]) -> Callable[..., Any]:
            def encode_slowly(text: str, *arguments: Any, **options: Any) -> Any:
                self._world.charge(len(text) * cpu.encoded_character_s)
                return encode(text, *arguments, **options)

            return encode_slowly

        # every text goes through the one or, as a rendered chat, the other, in whichever thread
        tokenizer._encode = charged(tokenizer._encode)  # noqa: SLF001
        tokenizer._encode_chat = charged(tokenizer._encode_chat)  # noqa: SLF001


def _is_busy(connection: Any) -> bool:
    return connection.cycle is not None and not connection.cycle.response_complete


def _charged(protocol: type[Any], interpreter: Interpreter, cpu: CpuTimes) -> type[Any]:
    def data_received(self: Any, data: bytes) -> None:
        interpreter.owe(len(data) * cpu.received_byte_s)
        protocol.data_received(self, data)

    return type(protocol.__name__, (protocol,), {"data_received": data_received})


def charge_for_decoding(interpreter: Interpreter, cpu: CpuTimes) -> None:
    """Every body that is decoded from now on takes its time, in the thread that decodes it."""
    module: Any = http_request
    decode_body = module.decode_body

    def decode_slowly(decoder: Any, body: bytes) -> Any:
        is_on_loop = asyncio._get_running_loop() is not None  # noqa: SLF001 - the public one raises
        charge = interpreter.owe if is_on_loop else interpreter.charge
        charge(cpu.request_s + len(body) * cpu.json_byte_s)
        return decode_body(decoder, body)

    module.decode_body = decode_slowly


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
