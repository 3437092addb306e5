"""`Life`: one start of a server, with its workers, its engine and its ranks, until all of them have ended."""

from typing import Any

from openinfer_bench.simulate.stack import Engine
from openinfer_core.testing.simulation.world import Process, World
from openinfer_server.workers.group import DEATHS_WINDOW_S, MAX_DEATHS

_NEWS_S = 5.0  # what the news of a death may take to arrive


class Life:
    """What is known of it from outside.

    Attributes:
        server: the process that was started, which is the first worker.
        processes: all of them, in the order in which they began.
        is_stopping: whether it was asked to end.
        excuse: the first fault that may end it, and so may be what its exit code tells.
        stalled_until_s: between its processes nothing arrives before.
        short_until_s: there are too few descriptors, or no memory for connections.
        flooded_until_s: the attacker has more connections than there is room for.
        wrong: what happened that nothing excuses.
    """

    def __init__(self, world: World, number: int, *, num_workers: int, num_ranks: int) -> None:
        self._world = world
        self.number = number
        self.num_workers = num_workers
        self.num_ranks = num_ranks
        self.server: Process | None = None
        self.processes: list[Process] = []
        self.engine: Engine | None = None
        self.engine_process: Process | None = None
        self.is_ready = False
        self.is_stopping = False
        self.excuse: str | None = None
        self.wrong: str | None = None
        self.num_killed_workers = 0
        self.stalled_until_s = 0.0
        self.short_until_s = 0.0
        self.flooded_until_s = 0.0
        self._worker_deaths_s: list[float] = []
        self.start_error: BaseException | None = None
        self._hurt: set[int] = set()

    # --- what happens to it -----------------------------------------------------------------------------

    def became_ready(self) -> None:
        self.is_ready = True
        for process in self.processes:
            if "loop" in process.notes:
                process.notes["loop"].longest_turn_s = 0.0  # a start may take its time
        self._world.note("life", self.number, "is ready", self.num_workers, self.num_ranks)

    def could_not_start(self, error: BaseException) -> None:
        self.start_error = error

    def excuse_end(self, why: str) -> None:
        """From now on the server may end by itself."""
        self.excuse = self.excuse or why

    def hurt(self, process: Process) -> None:
        """A process is made to end. Without a further worker the server goes on, unless it has lost too many."""
        self._hurt.add(process.pid)
        if process is self.server or process is self.engine_process or "app" not in process.notes:
            self.excuse_end(f"{process.name} was made to end")
            return
        self.num_killed_workers += 1
        self.count_death()

    def count_death(self) -> None:
        """Too many of them end the server."""
        self._worker_deaths_s.append(self._world.now_s)
        recent = [at_s for at_s in self._worker_deaths_s if self._world.now_s - at_s < DEATHS_WINDOW_S + _NEWS_S]
        if len(recent) >= MAX_DEATHS:
            self.excuse_end(f"{MAX_DEATHS} workers were made to end")

    def process_ended(self, process: Process) -> None:
        """Notes what it was not made to do."""
        self._world.note("end", process.name, process.exit_code)
        is_told = self.excuse is not None or process.pid in self._hurt
        if not is_told and not (self.is_stopping and process.exit_code == 0):
            self.wrong = self.wrong or f"{process.name} ended by itself, with {process.exit_code}"

    # --- what can be asked ------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        return all(process.has_ended for process in self.processes)

    @property
    def workers(self) -> list[Process]:
        """Those that live and serve, the first one first."""
        return [process for process in self.processes if "app" in process.notes and not process.has_ended]

    @property
    def apps(self) -> list[Any]:
        return [process.notes["app"] for process in self.workers]

    def further_workers(self) -> list[Process]:
        return [process for process in self.workers if process is not self.server]

    def may_break_off(self, worker: Process | None) -> bool:
        """Whether a request that this worker has taken may go without an answer."""
        is_worker_well = worker is not None and not worker.has_ended and worker.pid not in self._hurt
        return self.excuse is not None or not is_worker_well

    def is_settled(self) -> bool:
        """Whether workers that died were replaced, and all connections are closed."""
        connections = sum(app.service.budgets.connections.num_open for app in self.apps)
        return len(self.workers) == self.num_workers and connections == 0

    @property
    def num_open(self) -> int:
        """Requests of all workers."""
        return sum(app.service.link.num_open for app in self.apps)
