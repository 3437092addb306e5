"""A run: lives of the stack one after the other, clients, faults, and the checks of all of it.

server's loop    Life: engine + HTTP server ──(engine dies)──► connections break ──► RESTART_S ──► the next Life
clients' loop    waves of requests, each checked when it ends; between waves the stack must be found idle
"""

import asyncio
import gc
import hashlib
import logging
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from openinfer.models import find_model_dir
from openinfer_bench.simulate.checks import AnswerChecks, Circumstances, TextOf, Violation
from openinfer_bench.simulate.clients import HttpConnection
from openinfer_bench.simulate.cpu import Interpreter
from openinfer_bench.simulate.faults import ATTACKS, Fault, FaultSchedule, disk_faults
from openinfer_bench.simulate.stack import (
    Engine,
    Server,
    SlowDisk,
    StackOptionsOfRun,
    charge_for_decoding,
    folder_of,
    key_file,
    key_of,
)
from openinfer_bench.simulate.traffic import ATTACKER, Ask, Traffic
from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.world import World
from openinfer_kv_cache.testing.tier_faults import FaultInjector
from openinfer_server import Tokenizer
from openinfer_server.options import ServerOptions

RESTART_S = 3.0
_IDLE_WAIT_S = 60.0  # what the last aborted requests and transfers get to end
_COLLECT_S = 300.0
_DISTURBED_S = 20.0  # after a fault that all feel: what a request may take then, `LONGEST_S` says
_ATTACK_WITHIN_S = 0.05
_VICTIMS = 5  # of other tenants, who ask next to an attack
_LONGEST_TURN_S = 0.025  # some requests at once, and two slices of others' work
_STORM_REQUESTS = 100  # more than can run and wait
_MOST_DESCRIPTORS = 64  # standard streams, the tokenizer's files, and the disk tier's 16 segments


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run, as JSON has it."""

    hours: float = 1.0
    wave_s: float = 60.0
    """Virtual seconds from one wave of requests to the next."""
    wave_requests: int = 20
    faults_per_hour: float = 110.0
    tiers: bool = True
    kinds: tuple[Fault, ...] = tuple(Fault)
    """Of faults."""


def main(world: World, **options: Any) -> dict[str, Any]:
    """Runs a simulation and returns its report."""
    log = logging.getLogger("openinfer")  # what goes wrong is injected; what is wrong is raised
    log.propagate = False
    log.addHandler(logging.NullHandler())
    gc.disable()  # it would run at moments that differ between processes; `_collect` runs it at virtual ones
    with ExitStack() as stack:
        run = Run(world, msgspec.convert(options, RunOptions), stack)
        return run.run()


class Run:
    """One run in a world."""

    def __init__(self, world: World, options: RunOptions, stack: ExitStack) -> None:
        self._world = world
        self._options = options
        size = StackOptionsOfRun()
        self._stack_options = StackOptionsOfRun(
            disk_folder=str(folder_of(stack)) if options.tiers else None,
            host_blocks=size.host_blocks if options.tiers else 0,
        )
        self._server_options = ServerOptions(model_name=["simulated"], api_keys_file=str(key_file(stack)))
        self._tier_faults = FaultInjector()
        self._disk = SlowDisk()
        cpu = self._stack_options.cpu
        self._interpreter = Interpreter(world)  # of the server's process
        charge_for_decoding(self._interpreter, cpu)

        def take_turn(num_callbacks: int) -> None:
            self._interpreter.owe(num_callbacks * cpu.callback_s)
            self._interpreter.pay()

        self._server_loop = VirtualEventLoop(world, charge=take_turn)
        self._client_loop = VirtualEventLoop(world)
        self._engine: Engine | None = None
        self._server: Server | None = None
        self._lives = 0
        self._stopping = asyncio.Event()
        self._ports = 40000
        self._outcomes: Counter[str] = Counter()
        self._latest_s = 0.0
        self._steps = Counter[str]()
        draw = random.Random(world.seed ^ 0x1F123BB5)  # noqa: S311 - no secrets here
        self._checks = AnswerChecks(TextOf(_token_bytes()), max_model_tokens=size.max_model_tokens)
        self._traffic = Traffic(draw, max_model_tokens=size.max_model_tokens)
        self._draw = random.Random(world.seed ^ 0x5851F42D)  # noqa: S311
        actions = {
            Fault.ENGINE_DEATH: self._kill_engine,
            Fault.RESTART: self._restart,
            Fault.SLOW_GPU: self._slow_gpu,
            Fault.SLOW_DISK: self._slow_disk,
            Fault.DISK_ERROR: self._fail_disk,
            Fault.CLOCK_STEP: self._step_clock,
            Fault.STORM: lambda: self._begin_wave(_STORM_REQUESTS, within_s=0.1),
            Fault.GARBAGE: self._send_garbage,
            Fault.GUARD_DEATH: self._kill_guard,
            Fault.GRAMMAR_FLOOD: lambda: self._attack(self._traffic.grammar_flood()),
            Fault.MASK_FLOOD: lambda: self._attack(self._traffic.mask_flood()),
            Fault.BODY_FLOOD: lambda: self._attack(self._traffic.body_flood()),
        }
        self._faults = FaultSchedule(self._draw, {kind: actions[kind] for kind in options.kinds})
        self._disturbed_until_s = 0.0
        self._open: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def run(self) -> dict[str, Any]:
        """Returns the report.

        Raises:
            Violation: an invariant does not hold. ConformanceError: a step read what it must not.
        """
        with asyncio.Runner(loop_factory=lambda: self._server_loop) as runner:
            runner.run(self._serve())
        return {
            "seed": self._world.seed,
            "digest": self._world.digest,
            "virtual_hours": round(self._world.now_s / 3600, 3),
            "requests": sum(self._outcomes.values()),
            "outcomes": dict(sorted(self._outcomes.items())),
            "tokens": self._checks.num_tokens,
            "faults": {str(fault): count for fault, count in sorted(self._faults.counts.items())},
            "slowest_s": round(self._latest_s, 3),
            "slowest_victim_s": round(self._checks.longest_victim_s, 3),
            "longest_turn_ms": round(self._server_loop.longest_turn_s * 1e3, 3),
            "engine": dict(sorted(self._steps.items())),
            "switches": self._world.num_switches,
        }

    # --- the stack ----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        done = asyncio.Event()
        clients = threading.Thread(target=lambda: self._run_clients(done), name="clients")
        while not done.is_set():
            await self._live(done, clients)
            if not done.is_set():
                await asyncio.sleep(RESTART_S)
        clients.join()
        if self._failure is not None:
            raise self._failure

    async def _live(self, done: asyncio.Event, clients: threading.Thread) -> None:
        """One life of engine and server: until the engine dies, or all is done."""
        engine = Engine(self._world, self._stack_options, self._tier_faults, self._disk)
        server = Server(
            self._world,
            engine,
            self._server_options,
            self._server_loop,
            interpreter=self._interpreter,
            cpu=self._stack_options.cpu,
            note=self._checks.note,
        )
        self._engine, self._server = engine, server
        self._world.note("life", self._lives)
        if not clients.is_alive():
            clients.start()
        self._stopping.clear()
        ends = [asyncio.create_task(event.wait()) for event in (done, server.app.link_ended, self._stopping)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self._stopping.is_set() and not server.has_ended:
            await server.drain()
        self._lives += 1
        self._server = None
        self._count(engine)
        server.break_connections()
        await server.stop()
        await engine.handle.close()
        self._engine = None
        if engine.unexpected_death is not None:
            raise Violation("the engine died of itself") from engine.unexpected_death

    def _count(self, engine: Engine) -> None:
        stats = engine.loop.stats()
        for name in ("steps", "prompt_tokens", "cached_tokens", "tier_tokens", "generated_tokens", "preemptions"):
            self._steps[name] += getattr(stats, name)
        for tier in stats.kv_tiers:
            for name in ("loaded", "saved", "hit", "missed", "evicted", "corrupt"):
                self._steps[f"{tier.tier}_{name}_blocks"] += getattr(tier, f"{name}_blocks")
            for reason, count in tier.failures.items():
                if count:
                    self._steps[f"{tier.tier}_{reason}"] += count

    # --- clients ------------------------------------------------------------------------------------------

    def _run_clients(self, done: asyncio.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._client_loop) as runner:
                runner.run(self._make_requests())
        except BaseException as error:  # noqa: BLE001 -- told by the main task
            self._failure = error
        self._server_loop.call_soon_threadsafe(done.set)

    async def _make_requests(self) -> None:
        end_s = self._world.now_s + self._options.hours * 3600
        next_collect_s = self._world.now_s + _COLLECT_S
        while self._world.now_s < end_s:
            wave_ends_s = self._world.now_s + self._options.wave_s
            self._begin_wave(self._options.wave_requests)
            await self._strike()
            await asyncio.sleep(max(0.0, wave_ends_s - self._world.now_s))
            await self._find_idle()
            if self._world.now_s >= next_collect_s:
                gc.collect()
                next_collect_s = self._world.now_s + _COLLECT_S

    async def _strike(self) -> None:
        """Faults while the wave is under way: between waves no request would meet them."""
        left = self._options.faults_per_hour * self._options.wave_s / 3600
        while self._draw.random() < left:
            left -= 1
            await asyncio.sleep(self._draw.expovariate(2.0))
            fault = self._faults.strike()
            self._world.note("fault", fault)
            if fault not in ATTACKS:
                self._disturbed_until_s = self._world.now_s + _DISTURBED_S

    def _begin_wave(self, num_requests: int, *, within_s: float = 0.25) -> None:
        for _ in range(num_requests):
            delay_s = self._draw.expovariate(1 / within_s)
            self._start(self._ask(self._traffic.next(), delay_s))

    def _start(self, client: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(client)
        self._open.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()

    async def _ask(self, ask: Ask, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        server, engine = self._server, self._engine
        if server is None or engine is None or server.has_ended:
            self._outcomes["refused"] += 1  # nothing listens: the process is being started again
            return
        connection = self._connect(server)
        headers = [("authorization", f"Bearer {key_of(ask.tenant)}")]
        answer = await connection.request("POST", ask.api, ask.encoded, headers=headers, manners=ask.manners)
        connection.close()
        # The requests of a dying engine are told first, then its server.
        circumstances = Circumstances(
            engine_died=engine.runner.failure is not None,
            is_draining=server.app.service.draining,
            is_disturbed=answer.sent_s < self._disturbed_until_s,
        )
        outcome = self._checks.check(ask, answer, circumstances)
        self._outcomes[outcome] += 1
        self._latest_s = max(self._latest_s, answer.ended_s - answer.sent_s)
        content = hashlib.blake2b(bytes(answer.body), digest_size=6).hexdigest()
        self._world.note("answer", ask.number, outcome, answer.status, content)

    def _connect(self, server: Server) -> HttpConnection:
        self._ports = 1024 + (self._ports + 1) % 60000
        return HttpConnection.open(server.connector(self._client_loop, self._ports), lambda: self._world.now_s)

    async def _find_idle(self) -> None:
        """After a wave: everything that was asked is answered, and nothing of it is left behind."""
        if self._open:
            await asyncio.wait(self._open, timeout=_IDLE_WAIT_S)
        if self._failure is not None:
            raise self._failure
        if self._open:
            return  # a slow reader, or a storm; the next wave finds it
        engine, server = self._engine, self._server
        until_s = self._world.now_s + _IDLE_WAIT_S
        while engine is not None and engine is self._engine and self._world.now_s < until_s:
            if not engine.loop.busy and server is not None and not server.app.service.link.num_open:
                engine.check_is_idle()
                self._check_turns()
                self._check_descriptors()
                return
            await asyncio.sleep(0.05)
        if engine is not None and engine is self._engine:
            raise Violation(f"nothing is asked for {_IDLE_WAIT_S:g} s, and the engine is busy: {engine.loop.stats()}")

    def _check_turns(self) -> None:
        """What holds the event loop up holds up every stream."""
        if self._server_loop.longest_turn_s > _LONGEST_TURN_S:
            raise Violation(f"a turn of the event loop took {self._server_loop.longest_turn_s * 1e3:.1f} ms")

    def _check_descriptors(self) -> None:
        """Files of the disk tier are the only ones that come and go."""
        num_open = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
        if num_open > _MOST_DESCRIPTORS:
            raise Violation(f"{num_open} descriptors are open, with no request and no connection")

    # --- faults -------------------------------------------------------------------------------------------

    def _kill_engine(self) -> None:
        if self._engine is not None:
            self._engine.runner.die()

    def _restart(self) -> None:
        self._server_loop.call_at_from_outside(self._world.now_s, self._stopping.set)

    def _slow_gpu(self) -> None:
        engine = self._engine
        if engine is not None:
            engine.runner.slowness = 20.0
            self._client_loop.call_later(2.0, setattr, engine.runner, "slowness", 1.0)

    def _slow_disk(self) -> None:
        self._disk.extra_s = self._draw.choice((0.01, 0.3, 3.0))
        self._client_loop.call_later(10.0, setattr, self._disk, "extra_s", 0.0)

    def _fail_disk(self) -> None:
        self._tier_faults.on_next_reads(*disk_faults(self._draw))
        self._tier_faults.on_next_writes(*disk_faults(self._draw))

    def _step_clock(self) -> None:
        self._world.wall_offset_s += self._draw.choice((-3600.0, -1.0, 1.0, 86400.0))

    def _kill_guard(self) -> None:
        engine = self._engine
        if engine is not None:
            engine.compiler.is_guarded = False
            self._client_loop.call_later(2.0, setattr, engine.compiler, "is_guarded", True)

    def _attack(self, asks: list[Ask]) -> None:
        for ask in asks:
            self._start(self._ask(ask, self._draw.expovariate(1 / _ATTACK_WITHIN_S)))
        self._begin_wave(_VICTIMS)

    def _send_garbage(self) -> None:
        self._start(self._be_garbage())

    async def _be_garbage(self) -> None:
        server = self._server
        if server is None:
            return
        connection = self._connect(server)
        body = self._draw.choice((b"{", b"\xff\xfe", b'{"token_ids": [1e400]}', b"[" * 5000, b'{"prompt": null}'))
        path = self._draw.choice(("/inference/v1/generate", "/v1/completions", "/v1/nothing", "/v1/chat/completions"))
        headers = [("authorization", f"Bearer {key_of(ATTACKER)}")]
        answer = await connection.request("POST", path, body, headers=headers)
        connection.close()
        if self._server is server and not server.has_ended and answer.status not in (400, 404, 429, 503):
            raise Violation(f"{body[:40]!r} to {path} was answered with {answer.status}")


def _token_bytes() -> list[bytes]:
    table = Tokenizer.load(find_model_dir("tiny")).table
    if table is None:
        raise Violation("the tiny model's tokenizer has no table of bytes")
    return table.raw
