"""A run: lives of a server one after the other, clients, faults, and the checks of all of it.

supervisor       Life: server, workers, engine, ranks ──(all have ended)──► RESTART_S ──► the next Life
clients' loop    waves of requests, each checked when it ends; between waves the stack must be found idle
"""

import asyncio
import gc
import hashlib
import logging
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from openinfer.models import find_model_dir
from openinfer_bench.simulate.checks import AnswerChecks, Circumstances, TextOf, Violation
from openinfer_bench.simulate.clients import HttpConnection
from openinfer_bench.simulate.faults import ATTACKS, Fault, FaultSchedule
from openinfer_bench.simulate.life import Life
from openinfer_bench.simulate.programs import PORT, Programs
from openinfer_bench.simulate.stack import END_OF_TURN, SlowDisk, StackOptionsOfRun, folder_of, key_file, key_of
from openinfer_bench.simulate.strikes import Strikes
from openinfer_bench.simulate.traffic import ATTACKER, TENANTS, TOOL, TOOL_CALL, Ask, Traffic
from openinfer_core.testing.fake_grammar import add_script
from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.world import Process, World
from openinfer_kv_cache.testing.tier_faults import FaultInjector
from openinfer_server import Tokenizer
from openinfer_server.options import ServerOptions

RESTART_S = 3.0
SERVER_ADDRESS = ("127.0.0.1", PORT)
_LOOK_S = 0.5  # between two looks of the supervisor
_START_S = 30.0  # that a server may take
_OUTLIVING_S = 60.0  # what processes may take to end after their server: a drain, and more
_IDLE_WAIT_S = 60.0  # what the last aborted requests and transfers get to end
_COLLECT_S = 300.0
_DISTURBED_S = 20.0  # after a fault that all feel: what a request may take then, `LONGEST_S` says
_HEALTH_S = 1.0  # what an answer of /health may take, whatever others do
_LONGEST_TURN_S = 0.025  # some requests at once, and two slices of others' work
_MOST_DESCRIPTORS = 64  # standard streams, the tokenizer's files, and the disk tier's 16 segments
_MOST_ENDS = 8  # of a first worker or an engine: listener, link and pipes; and two for each further process


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
    for name in (
        "openinfer",
        "asyncio",
        "uvicorn",
        "concurrent.futures",
    ):  # what goes wrong is injected; what is wrong is raised
        log = logging.getLogger(name)
        log.propagate = False
        log.handlers[:] = [logging.NullHandler()]
    sys.unraisablehook = lambda unraisable: None  # what is left of a process that was killed says so when it is freed
    gc.disable()  # it would run at moments that differ between processes; `_collect` runs it at virtual ones
    with ExitStack() as stack:
        run = Run(world, msgspec.convert(options, RunOptions), stack)
        gc.freeze()  # what is imported stays, and most of a collection would be looking at it
        return run.run()


class Run:
    """One run in a world."""

    def __init__(self, world: World, options: RunOptions, stack: ExitStack) -> None:
        self.world = world
        self._options = options
        size = StackOptionsOfRun()
        stack_options = StackOptionsOfRun(
            disk_folder=str(folder_of(stack)) if options.tiers else None,
            host_blocks=size.host_blocks if options.tiers else 0,
        )
        tokenizer = Tokenizer.load(find_model_dir("tiny"))
        add_script(TOOL, [*tokenizer.encode_short(TOOL_CALL), END_OF_TURN])
        self._checks = AnswerChecks(TextOf(tokenizer), max_model_tokens=size.max_model_tokens)
        self.tier_faults = FaultInjector()
        self.disk = SlowDisk()
        self._programs = Programs(
            world,
            stack_options,
            ServerOptions(model_name=["simulated"], large_request_bytes=0, api_keys_file=str(key_file(stack))),
            faults=self.tier_faults,
            disk=self.disk,
            note=self._checks.note,
        )
        self.client_loop = VirtualEventLoop(world)
        self.life: Life | None = None
        self._lives = 0
        self._ports = 40000
        self._outcomes: Counter[str] = Counter()
        self._latest_s = 0.0
        self._longest_turn_s = 0.0
        self._steps = Counter[str]()
        draw = random.Random(world.seed ^ 0x1F123BB5)  # noqa: S311 - no secrets here
        self.traffic = Traffic(draw, max_model_tokens=size.max_model_tokens)
        self.draw = random.Random(world.seed ^ 0x5851F42D)  # noqa: S311
        actions = Strikes(self).actions
        self._faults = FaultSchedule(self.draw, {kind: actions[kind] for kind in options.kinds})
        self._disturbed_until_s = 0.0
        self._open: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def run(self) -> dict[str, Any]:
        """Returns the report.

        Raises:
            Violation: an invariant does not hold. ConformanceError: a step read what it must not.
        """
        done = threading.Event()
        clients = threading.Thread(target=lambda: self._run_clients(done), name="clients")
        while not done.is_set():
            self._live(done, clients)
            if not done.is_set():
                self.world.sleep(RESTART_S)
        clients.join()
        if self._failure is not None:
            raise self._failure
        return {
            "seed": self.world.seed,
            "digest": self.world.digest,
            "virtual_hours": round(self.world.now_s / 3600, 3),
            "requests": sum(self._outcomes.values()),
            "outcomes": dict(sorted(self._outcomes.items())),
            "tokens": self._checks.num_tokens,
            "faults": {str(fault): count for fault, count in sorted(self._faults.counts.items())},
            "lives": self._lives,
            "processes": self.world.processes.num_started,
            "slowest_s": round(self._latest_s, 3),
            "slowest_victim_s": round(self._checks.longest_victim_s, 3),
            "longest_turn_ms": round(self._longest_turn_s * 1e3, 3),
            "engine": dict(sorted(self._steps.items())),
            "switches": self.world.num_switches,
        }

    # --- the server ---------------------------------------------------------------------------------------

    def _live(self, done: threading.Event, clients: threading.Thread) -> None:
        """One life of the server: until all of its processes have ended."""
        life = Life(
            self.world,
            self._lives,
            num_workers=self.draw.choice((1, 2, 3)),
            num_ranks=self.draw.choice((1, 1, 2)),
        )
        self._lives += 1
        self._programs.start(life)
        self.life = life
        began_s, server = self.world.now_s, life.server
        while server is not None and not server.has_ended:
            if life.is_ready and clients.ident is None:
                clients.start()
            if done.is_set() and not life.is_stopping:
                self.stop(life)
            self._check_life(life)
            if not life.is_ready and not life.excuse and not life.is_stopping and self.world.now_s > began_s + _START_S:
                raise Violation(f"the server has not started within {_START_S:g} s")
            self.world.sleep(_LOOK_S)
        ended_s = self.world.now_s
        while not life.has_ended:
            if self.world.now_s > ended_s + _OUTLIVING_S:
                left = [process.name for process in life.processes if not process.has_ended]
                raise Violation(f"the server has ended, and {left} live on")
            self.world.sleep(_LOOK_S)
        self._check_life(life)
        self._count(life)

    def _check_life(self, life: Life) -> None:
        if self._failure is not None:
            raise self._failure
        if life.engine is not None and life.engine.unexpected_death is not None:
            raise Violation("the engine died of itself") from life.engine.unexpected_death
        if life.wrong is not None:
            raise Violation(life.wrong) from life.start_error

    def stop(self, life: Life) -> None:
        """As a service manager does."""
        if life.server is not None and life.is_ready:
            life.is_stopping = True
            self.world.processes.send_signal(life.server, signal.SIGTERM)

    def _count(self, life: Life) -> None:
        if life.engine is None:
            return
        stats = life.engine.loop.stats()
        for name in ("steps", "prompt_tokens", "cached_tokens", "tier_tokens", "generated_tokens", "preemptions"):
            self._steps[name] += getattr(stats, name)
        for tier in stats.kv_tiers:
            for name in ("loaded", "saved", "hit", "missed", "evicted", "corrupt"):
                self._steps[f"{tier.tier}_{name}_blocks"] += getattr(tier, f"{name}_blocks")
            for reason, count in tier.failures.items():
                if count:
                    self._steps[f"{tier.tier}_{reason}"] += count

    # --- clients ------------------------------------------------------------------------------------------

    def _run_clients(self, done: threading.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.client_loop) as runner:
                runner.run(self._make_requests())
        except BaseException as error:  # noqa: BLE001 -- told by the main task
            self._failure = error
        done.set()

    async def _make_requests(self) -> None:
        end_s = self.world.now_s + self._options.hours * 3600
        next_collect_s = self.world.now_s + _COLLECT_S
        while self.world.now_s < end_s:
            wave_ends_s = self.world.now_s + self._options.wave_s
            self.begin_wave(self._options.wave_requests)
            await self._strike()
            await asyncio.sleep(max(0.0, wave_ends_s - self.world.now_s))
            await self._find_idle()
            if self.world.now_s >= next_collect_s:
                self._collect()
                next_collect_s = self.world.now_s + _COLLECT_S

    def _collect(self) -> None:
        self.world.is_interruptible = False  # what is freed here may be of a process that is gone
        gc.collect()
        self.world.is_interruptible = True

    async def _strike(self) -> None:
        """Faults while the wave is under way: between waves no request would meet them."""
        left = self._options.faults_per_hour * self._options.wave_s / 3600
        while self.draw.random() < left:
            left -= 1
            await asyncio.sleep(self.draw.expovariate(2.0))
            fault = self._faults.strike()
            self.world.note("fault", fault)
            if fault not in ATTACKS:
                self._disturbed_until_s = self.world.now_s + _DISTURBED_S

    def begin_wave(self, num_requests: int, *, within_s: float = 0.25) -> None:
        for _ in range(num_requests):
            delay_s = self.draw.expovariate(1 / within_s)
            self.start(self.ask(self.traffic.next(), delay_s))

    def start(self, client: Coroutine[Any, Any, None]) -> None:
        """Begins what a client does; what it raises ends the run."""
        task = asyncio.get_running_loop().create_task(client)
        self._open.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()

    async def ask(self, ask: Ask, delay_s: float) -> None:
        """A client's request, which is checked when it ends."""
        await asyncio.sleep(delay_s)
        life, connected = self.life, self.connect(ask.tenant)
        if life is None or connected is None:
            self._outcomes["refused"] += 1  # nothing listens: the server is being started again
            return
        connection, worker = connected
        headers = [("authorization", f"Bearer {key_of(ask.tenant)}")]
        answer = await connection.request("POST", ask.api, ask.encoded, headers=headers, manners=ask.manners)
        connection.close()
        circumstances = Circumstances(
            engine_died=life.may_break_off(worker),
            is_draining=life.is_stopping,
            # A GPU that died while nothing ran is found dead by the next step, a minute later maybe.
            is_disturbed=answer.sent_s < self._disturbed_until_s or not life.is_ready or life.excuse is not None,
            makes_room=answer.sent_s <= life.short_until_s
            or (ask.tenant == ATTACKER and answer.sent_s <= life.flooded_until_s),
            stalled_s=max(0.0, life.stalled_until_s - answer.sent_s),
        )
        outcome = self._checks.check(ask, answer, circumstances)
        self._outcomes[outcome] += 1
        self._latest_s = max(self._latest_s, answer.ended_s - answer.sent_s)
        content = hashlib.blake2b(bytes(answer.body), digest_size=6).hexdigest()
        self.world.note("answer", ask.number, outcome, answer.status, content)

    def connect(self, tenant: str) -> tuple[HttpConnection, Process] | None:
        """A new connection, and the worker that will accept it; None if nothing listens, as it may not."""
        life = self.life
        self._ports = 1024 + (self._ports + 1) % 60000
        connection = HttpConnection(lambda: self.world.now_s)
        connected = self.world.network.connect_client(
            self.client_loop,
            connection,
            SERVER_ADDRESS,
            client_address=(f"10.0.0.{(*TENANTS, ATTACKER).index(tenant)}", self._ports),
            delay_s=100e-6,
        )
        if connected is None:
            if life is not None and life.is_ready and not life.is_stopping and life.excuse is None:
                raise Violation("nothing listens")
            return None
        return connection, connected[1]

    async def ask_health(self) -> None:
        """A probe, which others must not hold up."""
        life, connected = self.life, self.connect(TENANTS[0])
        if life is None or connected is None:
            return
        connection, worker = connected
        answer = await connection.request("GET", "/health")
        connection.close()
        is_disturbed = answer.sent_s < self._disturbed_until_s or life.is_stopping or life.may_break_off(worker)
        took_s = answer.ended_s - answer.sent_s
        if not is_disturbed and (answer.status != 200 or took_s > _HEALTH_S):
            raise Violation(f"/health answered {answer.status} after {took_s:.2f} s")

    # --- between waves ------------------------------------------------------------------------------------

    async def _find_idle(self) -> None:
        """After a wave: everything that was asked is answered, and nothing of it is left behind."""
        if self._open:
            await asyncio.wait(self._open, timeout=_IDLE_WAIT_S)
        if self._failure is not None:
            raise self._failure
        if self._open:
            return  # a slow reader, or a storm; the next wave finds it
        life, until_s = self.life, self.world.now_s + _IDLE_WAIT_S
        while life is not None and self._lives_on(life) and self.world.now_s < until_s:
            engine = life.engine
            if engine is not None and not engine.loop.busy and not life.num_open and life.is_settled():
                engine.check_is_idle()
                self._check_nothing_is_open(life)
                self._check_turns(life)
                self._check_descriptors(life)
                return
            await asyncio.sleep(0.05)
        if life is not None and life.engine is not None and self._lives_on(life):
            raise Violation(
                f"nothing is asked for {_IDLE_WAIT_S:g} s, and {life.num_open} requests are open, settled: "
                f"{life.is_settled()}: {life.engine.loop.stats()}"
            )

    def _lives_on(self, life: Life) -> bool:
        return life is self.life and life.is_ready and not life.is_stopping and life.excuse is None

    def _check_nothing_is_open(self, life: Life) -> None:
        """Nothing of a request is left in the ledger, or in a budget of any worker."""
        host = None if life.engine_process is None else life.engine_process.notes.get("host")
        if host is not None and host.num_open:
            raise Violation(f"the ledger has {host.num_open} open requests, and none is asked")
        for worker in life.workers:
            budgets = worker.notes["app"].service.budgets
            used = {use.budget: use.used for use in budgets.uses() if use.used}
            # what all workers hold, one that has died among them
            shared = {"requests": budgets.requests.used_by_all, "body_bytes": budgets.body_bytes.used_by_all}
            used |= {name: amount for name, amount in shared.items() if amount}
            if used:
                raise Violation(f"{worker.name} has {used} of its budgets in use, and nothing is asked")

    def _check_turns(self, life: Life) -> None:
        """What holds the event loop up holds up every stream."""
        for worker in life.workers:
            turn_s = worker.notes["loop"].longest_turn_s
            self._longest_turn_s = max(self._longest_turn_s, turn_s)
            if turn_s > _LONGEST_TURN_S:
                raise Violation(f"a turn of the event loop took {turn_s * 1e3:.1f} ms")

    def _check_descriptors(self, life: Life) -> None:
        """Connections are gone, and what is open for each process is."""
        num_open = num_files()
        if num_open > _MOST_DESCRIPTORS:
            raise Violation(f"{num_open} descriptors are open, with no request and no connection")
        others = 2 * (life.num_workers - 1 + life.num_ranks - 1)
        for process in life.processes:
            if not process.has_ended and len(process.ends) > _MOST_ENDS + others:
                what = [end.address or end.peer_address for end in process.ends.values()]
                raise Violation(f"{process.name} has {len(process.ends)} descriptors open, with no connection: {what}")


def num_files() -> int:
    """Files of this process, without memory that simulated processes shared, which goes when it is collected."""
    num_open = 0
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):  # the folder's own is closed again
            num_open += "memfd:" not in str(entry.readlink())
    return num_open
