"""What each fault does to a run."""

import asyncio
import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from openinfer_bench.simulate.checks import Violation
from openinfer_bench.simulate.faults import Fault, disk_faults
from openinfer_bench.simulate.stack import Engine, key_of
from openinfer_bench.simulate.traffic import ATTACKER, Ask
from openinfer_core.testing.simulation.world import Process
from openinfer_engine.worker.process_group import CHILD_MODULE as RANK

if TYPE_CHECKING:
    from openinfer_bench.simulate.life import Life
    from openinfer_bench.simulate.scenario import Run

_ATTACK_WITHIN_S = 0.05
_VICTIMS = 5  # of other tenants, who ask next to an attack
_STORM_REQUESTS = 100  # more than can run and wait
_IDLE_CONNECTIONS = 300  # more than a process may have open
_IDLE_S = 3.0
_SHORTAGE_S = 0.6
_DEATHS = 3


class Strikes:
    """Faults of a run. Those that end a process are told to its `Life` first."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        traffic = run.traffic
        self.actions: dict[Fault, Callable[[], None]] = {
            Fault.GPU_DEATH: self._kill_gpu,
            Fault.ENGINE_DEATH: lambda: self._kill(self._engine_process),
            Fault.WORKER_DEATH: self._kill_worker,
            Fault.WORKER_DEATHS: self._kill_workers,
            Fault.SERVER_DEATH: lambda: self._kill(None if self._life is None else self._life.server),
            Fault.RANK_DEATH: lambda: self._kill(self._any(RANK)),
            Fault.LINK_STALL: self._stall_links,
            Fault.LINK_CUT: self._cut_link,
            Fault.FORK_FAILS: self._fail_fork,
            Fault.NO_DESCRIPTORS: self._take_descriptors,
            Fault.NO_MEMORY: self._take_memory,
            Fault.RESTART: self._restart,
            Fault.SLOW_GPU: self._slow_gpu,
            Fault.SLOW_DISK: self._slow_disk,
            Fault.DISK_ERROR: self._fail_disk,
            Fault.CLOCK_STEP: self._step_clock,
            Fault.STORM: lambda: run.begin_wave(_STORM_REQUESTS, within_s=0.1),
            Fault.GARBAGE: lambda: self._attack([], self._be_garbage()),
            Fault.GUARD_DEATH: self._kill_guard,
            Fault.GRAMMAR_FLOOD: lambda: self._attack(traffic.grammar_flood()),
            Fault.MASK_FLOOD: lambda: self._attack(traffic.mask_flood()),
            Fault.BODY_FLOOD: lambda: self._attack(traffic.body_flood()),
            Fault.IDLE_FLOOD: lambda: self._attack([], self._be_idle()),
            Fault.SLOW_READERS: lambda: self._attack(traffic.slow_readers()),
        }

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def _life(self) -> "Life | None":
        life = self._run.life
        return life if life is not None and life.is_ready and not life.is_stopping else None

    @property
    def _engine(self) -> Engine | None:
        return None if self._life is None else self._life.engine

    @property
    def _engine_process(self) -> Process | None:
        return None if self._life is None else self._life.engine_process

    def _any(self, name: str) -> Process | None:
        life = self._life
        there = [] if life is None else [each for each in life.processes if each.name == name and not each.has_ended]
        return self._run.draw.choice(there) if there else None

    def _later(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        self._run.client_loop.call_later(delay_s, call, *arguments)

    # --- processes and links --------------------------------------------------------------------------------

    def _kill_gpu(self) -> None:
        if self._life is not None and self._engine is not None:
            self._life.excuse_end("the GPU died")
            self._engine.gpu.die()

    def _kill(self, process: Process | None) -> None:
        if self._life is not None and process is not None and not process.has_ended:
            self._life.hurt(process)
            self._run.world.processes.kill(process)

    def _kill_worker(self) -> None:
        workers = [] if self._life is None else self._life.further_workers()
        if workers:
            self._kill(self._run.draw.choice(workers))

    def _kill_workers(self) -> None:
        life = self._life
        if life is None or life.num_workers == 1:
            return
        for index in range(_DEATHS):
            self._later(index * 5.0, self._kill_worker_of, life)
        self._later(100.0, self._check_it_has_ended, life)

    def _kill_worker_of(self, life: "Life") -> None:
        if life is self._life:
            self._kill_worker()

    def _check_it_has_ended(self, life: "Life") -> None:
        if life.num_killed_workers >= _DEATHS and life.server is not None and not life.server.has_ended:
            life.wrong = life.wrong or f"{_DEATHS} workers died within a minute, and the server lives on"

    def _fail_fork(self) -> None:
        life = self._life
        if life is not None and life.further_workers():
            self._run.world.processes.num_to_fail = 1
            self._kill_worker()

    def _links(self) -> list[Any]:
        return [link for link in self._run.world.network.links() if link.kind == "socket" or self._is_of_rank(link)]

    def _is_of_rank(self, link: Any) -> bool:
        return any(process.name == RANK for process in link.processes)

    def _stall_links(self) -> None:
        until_s = self._run.world.now_s + self._run.draw.choice((0.2, 1.0, 5.0))
        if self._run.life is not None:  # also one that drains, whose links stall like others
            # one that is shorter than what is left of another ends nothing
            self._run.life.stalled_until_s = max(self._run.life.stalled_until_s, until_s)
        for link in self._links():
            link.stall(until_s)

    def _cut_link(self) -> None:
        links, life = self._links(), self._life
        if not links or life is None:
            return
        link = self._run.draw.choice(links)
        for process in link.processes:
            if process is not life.engine_process or self._is_of_rank(link):
                life.hurt(process)
        link.cut()

    def _begin_shortage(self) -> None:
        if self._run.life is not None:
            self._run.life.short_until_s = self._run.world.now_s + _SHORTAGE_S

    def _take_descriptors(self) -> None:
        self._begin_shortage()
        most = self._run.world.processes.descriptor_limit  # a worker's own may be that of another shortage
        for worker in () if self._life is None else self._life.workers:
            worker.descriptor_limit = len(worker.ends)
            self._later(_SHORTAGE_S, setattr, worker, "descriptor_limit", most)

    def _take_memory(self) -> None:
        self._begin_shortage()
        network = self._run.world.network
        network.accept_error = errno.ENOMEM
        self._later(_SHORTAGE_S, setattr, network, "accept_error", 0)

    def _restart(self) -> None:
        if self._life is not None:
            self._run.stop(self._life)

    # --- devices --------------------------------------------------------------------------------------------

    def _slow_gpu(self) -> None:
        engine = self._engine
        if engine is not None:
            engine.gpu.slowness = 20.0
            self._later(2.0, setattr, engine.gpu, "slowness", 1.0)

    def _slow_disk(self) -> None:
        disk = self._run.disk
        disk.extra_s = self._run.draw.choice((0.01, 0.3, 3.0))
        self._later(10.0, setattr, disk, "extra_s", 0.0)

    def _fail_disk(self) -> None:
        self._run.tier_faults.on_next_reads(*disk_faults(self._run.draw))
        self._run.tier_faults.on_next_writes(*disk_faults(self._run.draw))

    def _step_clock(self) -> None:
        self._run.world.wall_offset_s += self._run.draw.choice((-3600.0, -1.0, 1.0, 86400.0))

    def _kill_guard(self) -> None:
        engine = self._engine
        if engine is not None:
            engine.compiler.is_guarded = False
            self._later(2.0, setattr, engine.compiler, "is_guarded", True)
        self._attack([])

    # --- attacks --------------------------------------------------------------------------------------------

    def _attack(self, asks: list[Ask], *others: Any) -> None:
        run = self._run
        for other in others:
            run.start(other)
        for ask in asks:
            run.start(run.ask(ask, run.draw.expovariate(1 / _ATTACK_WITHIN_S)))
        run.begin_wave(_VICTIMS)
        run.start(run.ask_health())

    async def _be_idle(self) -> None:
        """Connections of one address that say nothing, or half a head."""
        if self._run.life is not None:
            self._run.life.flooded_until_s = self._run.world.now_s + _IDLE_S
        connected = [self._run.connect(ATTACKER) for _ in range(_IDLE_CONNECTIONS)]
        for each in connected[::2]:
            if each is not None:
                each[0].write_raw(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
        await asyncio.sleep(_IDLE_S)
        for each in connected:
            if each is not None:
                each[0].close()

    async def _be_garbage(self) -> None:
        run, life = self._run, self._run.life
        connected = run.connect(ATTACKER)
        if connected is None or life is None:
            return
        connection, worker = connected
        body = run.draw.choice((b"{", b"\xff\xfe", b'{"token_ids": [1e400]}', b"[" * 5000, b'{"prompt": null}'))
        path = run.draw.choice(("/inference/v1/generate", "/v1/completions", "/v1/nothing", "/v1/messages"))
        headers = [("authorization", f"Bearer {key_of(ATTACKER)}")]
        answer = await connection.request("POST", path, body, headers=headers)
        connection.close()
        may_fail = life.may_break_off(worker) or life.is_stopping
        # where descriptors are short, or this attacker's silent connections take them
        makes_room = answer.status == 0 and answer.sent_s <= max(life.short_until_s, life.flooded_until_s)
        if not may_fail and not makes_room and answer.status not in (400, 404, 429, 503):
            raise Violation(f"{body[:40]!r} to {path} was answered with {answer.status}")
