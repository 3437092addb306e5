"""A phase of `openinfer bench serve` in a world: its client, its requests, the stack before it."""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openinfer_bench.serve.client import Connection
from openinfer_bench.serve.figures import row_of
from openinfer_bench.serve.load import interleaved, shares_of
from openinfer_bench.serve.messages import Outcome, Target
from openinfer_bench.serve.worker import work
from openinfer_bench.serve.workloads import Phase, Sizes, phases
from openinfer_bench.simulate.replay.arrivals import phase_of_file
from openinfer_bench.simulate.replay.fitted import FittedServer, read_fitted
from openinfer_bench.simulate.replay.stack import ADDRESS, MODEL, ReplayedEngine, ReplayedServer
from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.world import World

CLIENT_PROCESSES = 6
_START_S = 1.0
_COLLECT_S = 5.0


def main(
    world: World,
    *,
    fit: str,
    workload: str = "",
    sizes: dict[str, Any] | None = None,
    arrivals: str = "",
    most_requests: int | None = None,
) -> dict[str, Any]:
    """Runs a workload, or a file's arrivals, and returns its rows and what the run was like."""
    log = logging.getLogger("openinfer")
    log.propagate = False
    log.addHandler(logging.NullHandler())
    gc.disable()  # it would run at moments that differ between processes; `_collect` runs it at virtual ones
    if arrivals:
        planned = [phase_of_file(Path(arrivals), most_requests=most_requests)]
    else:
        planned = [*phases(workload, Sizes(**(sizes or {})))]
    return _Replay(world, read_fitted(Path(fit)), planned).run()


class _Replay:
    def __init__(self, world: World, fitted: FittedServer, planned: list[Phase]) -> None:
        self._world = world
        self._fitted = fitted
        self._phases = planned
        self._pay: Callable[[], None] = lambda: None
        self._server_loop = VirtualEventLoop(world, charge=lambda _: self._pay())
        self._client_loop = VirtualEventLoop(world)
        self._rows: list[dict[str, Any]] = []
        self._failure: BaseException | None = None

    def run(self) -> dict[str, Any]:
        with asyncio.Runner(loop_factory=lambda: self._server_loop) as runner:
            stats, busy_s = runner.run(self._serve())
        if self._failure is not None:
            raise self._failure
        return {
            "rows": self._rows,
            "digest": self._world.digest,
            "virtual_s": round(self._world.now_s, 3),
            "gpu_busy_s": round(busy_s, 3),
            "engine": {
                name: getattr(stats, name) for name in ("steps", "prompt_tokens", "cached_tokens", "preemptions")
            },
        }

    async def _serve(self) -> tuple[Any, float]:
        engine = ReplayedEngine(self._world, self._fitted)
        self._server = ReplayedServer(self._world, engine, self._fitted)
        self._pay = self._server.pay
        done = asyncio.Event()
        clients = threading.Thread(target=lambda: self._run_clients(done), name="clients")
        clients.start()
        while not done.is_set():
            await _wait(done, _COLLECT_S)
            gc.collect()
        clients.join()
        stats, busy_s = engine.loop.stats(), engine.runner.busy_s
        await self._server.stop()
        await engine.handle.close()
        return stats, busy_s

    def _run_clients(self, done: asyncio.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._client_loop) as runner:
                runner.run(self._send())
        except BaseException as error:  # noqa: BLE001 -- told by the main task
            self._failure = error
        self._server_loop.call_soon_threadsafe(done.set)

    async def _send(self) -> None:
        target = Target(host=ADDRESS[0], port=ADDRESS[1], path="", model=MODEL)
        for phase in self._phases:
            begin_at_s = self._world.now_s + self._world.wall_offset_s + _START_S
            shares = shares_of(target, phase, processes=CLIENT_PROCESSES, begin_at_s=begin_at_s)
            found = await asyncio.gather(*(work(share, connect=self._connect) for share in shares))
            outcomes: list[Outcome] = interleaved(found, phase.jobs)
            for outcome in outcomes:
                self._world.note("outcome", outcome.tokens, outcome.error, *outcome.times_s[[0, -1]].tolist())
            self._rows.append(row_of(phase.name, outcomes[phase.thrown_away :]) | phase.sizes)

    async def _connect(self, make: Callable[[], Connection], target: Target) -> Connection:
        del target
        connection = make()
        self._server.connect(connection, self._client_loop, self._server_loop)
        return connection


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
