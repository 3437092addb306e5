"""`WorkerGroup`: the first worker's view of the others, which it starts, watches and ends.

start ──all Ready──► serving ──drain──► draining ──all ended, or too late: killed──► ended
                      │   ▲
    one ends by itself▼   │another takes its place
                      fewer ──MAX_DEATHS within DEATHS_WINDOW_S──► lost: /health says so, the first drains, ends with 1

What a worker that died had counted stays in the sums, as far as it was asked: counters do not fall.

One more, or several, take the large requests of all (`http/handover.py`). They are started as soon as the server is
ready if the model's context is long, else by the first of these requests (`want_large`); it waits for their first
start, and where they cannot be started at all, large requests are answered like others.
They are there so that what a large request does is not at the cost of others: so their deaths do not end the server,
and after many of them one is not there for `LARGE_PAUSE_S`, in which its requests wait, or are told to come again.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec

from openinfer_core.engine import EngineHandle
from openinfer_core.process.remote import RemoteEngine
from openinfer_server.errors import ServerError
from openinfer_server.limits.worker_table import WorkerTable
from openinfer_server.observability.metrics_snapshot import MetricsSnapshot, summed
from openinfer_server.options import ServerOptions
from openinfer_server.workers.peers import PEERS_TIMEOUT_S
from openinfer_server.workers.wire import (
    MAX_LINE_BYTES,
    AskCounts,
    Counts,
    Others,
    Ready,
    ToWorker,
    WantLarge,
    WorkerLaunch,
    from_worker_decoder,
    line_of,
)

logger = logging.getLogger("openinfer.server")

MAX_DEATHS = 3  # so many are no accident: what ends one worker would end the next
DEATHS_WINDOW_S = 60.0
LARGE_PAUSE_S = 30.0  # less than requests wait for another process
_START_AGAIN_S = 1.0
_ATTEMPTS_PER_WARNING = 60
_END_GRACE_S = 5.0  # what a worker gets beyond the drain's deadline


class _Worker:
    """One further worker."""

    def __init__(self, process: Process, number: int) -> None:
        self.process = process
        self.number = number  # of its row in the table
        self.was_ready = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counted: MetricsSnapshot | None = None  # when it was last asked
        self._asked: deque[asyncio.Future[MetricsSnapshot | None]] = deque()

    def say(self, message: WorkerLaunch | ToWorker) -> None:
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(line_of(message))

    async def counts(self) -> MetricsSnapshot | None:
        """What it has counted; None if it ended instead of answering."""
        answer: asyncio.Future[MetricsSnapshot | None] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self.say(AskCounts())
        return await answer

    def told(self, counts: Counts) -> None:
        self.counted = counts.snapshot
        if self._asked and not (answer := self._asked.popleft()).done():
            answer.set_result(counts.snapshot)

    def has_ended(self) -> None:
        """Answers who waits for its counts."""
        for answer in self._asked:
            if not answer.done():
                answer.set_result(None)
        self._asked.clear()


class WorkerGroup:
    """Implements `Peers` for the first worker. Made by `start`."""

    def __init__(self, own: Callable[[], MetricsSnapshot]) -> None:
        self.lost: str | None = None
        self.ended = asyncio.Event()  # set when `lost` is
        self._own = own
        self._workers: list[_Worker] = []
        self._launch: WorkerLaunch | None = None
        self._table: WorkerTable | None = None
        self._is_serving = False  # all have been ready once
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._large_deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._dead_counted: list[MetricsSnapshot] = []  # none, or the sum
        self._max_model_tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._drains = asyncio.Event()
        self._large_numbers = range(0)  # of the workers that take large requests, once they are wanted

    def prepare(
        self, handle: EngineHandle, model_dir: Path, options: ServerOptions, table: WorkerTable, *, large: Sequence[str]
    ) -> None:
        """Notes what workers are told.

        Args:
            handle: of the engine, which others can join.
            model_dir: of its model.
            options: of the first worker, with the port that it listens on.
            table: its own, with a row for each worker and each of `large`.
            large: paths of the sockets on which large requests are to be taken, each by a worker of its own.

        Raises:
            ServerError: the engine cannot be joined.
        """
        access = handle.access if isinstance(handle, RemoteEngine) else None
        if access is None:
            raise ServerError("several workers need an engine in a process of its own; this one cannot be joined")
        self._table = table
        self._launch = WorkerLaunch(
            engine=access,
            model_dir=str(model_dir),
            table=table.access_of(0),
            options=options,
            large=tuple(large),
        )
        self._max_model_tokens = handle.info.max_model_tokens

    async def start(self) -> None:
        """Starts `options.workers - 1` processes and waits until they take connections; after `prepare`.

        Raises:
            ServerError: a worker ended before it was ready.
        """
        launch, table = self._launch, self._table
        if launch is None or table is None:
            raise RuntimeError("workers are started after they were prepared")
        for number in range(1, launch.options.workers):
            await self._start_worker(launch, table, number)
        lost = asyncio.create_task(self.ended.wait())
        ready = asyncio.gather(*(worker.ready for worker in self._workers))
        await asyncio.wait((lost, ready), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if self.lost is not None:
            ready.cancel()
            raise ServerError(f"{self.lost} before it was ready; its log says why")
        self._is_serving = True

    def want_large(self) -> None:
        """Starts the workers that take large requests, unless that was tried before."""
        launch, table = self._launch, self._table
        if launch is None or table is None or self._large_numbers or self._draining:
            return
        first = launch.options.workers
        self._large_numbers = range(first, first + len(launch.large))
        processes = "a process" if len(launch.large) == 1 else f"{len(launch.large)} processes"
        logger.info("%s for large requests %s started", processes, "is" if len(launch.large) == 1 else "are")
        self._spawn(self._start_large(launch, table))

    async def _start_large(self, launch: WorkerLaunch, table: WorkerTable) -> None:
        try:
            for number in self._large_numbers:
                await self._start_worker(launch, table, number)
        except OSError as error:
            logger.error("large requests are answered next to others: no process can be started for them: %s", error)

    async def snapshots(self) -> Sequence[MetricsSnapshot]:
        return await self._counts_without(None)

    def drain(self) -> None:
        """Tells all to take no more requests and to end."""
        self._draining = True
        self._drains.set()
        for worker in self._workers:
            if worker.process.stdin is not None:
                worker.process.stdin.close()

    async def end(self, timeout_s: float) -> None:
        """Waits until all have ended; kills those that take longer. Idempotent."""
        self.drain()
        ends = [asyncio.create_task(worker.process.wait()) for worker in self._workers]
        if ends:
            await asyncio.wait(ends, timeout=timeout_s + _END_GRACE_S)
        for worker in self._workers:
            if worker.process.returncode is None:
                logger.error("worker %d does not end and is killed", worker.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
        while tasks := {*self._tasks}:
            # Those that have ended take themselves out in a later turn; from Python 3.12 on no turn is between, where
            # all of them have ended.
            self._tasks -= tasks
            await asyncio.gather(*tasks)

    async def _start_worker(self, launch: WorkerLaunch, table: WorkerTable, number: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "openinfer_server.workers.worker"),
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_LINE_BYTES,
            pass_fds=(table.descriptor,),
        )
        worker = _Worker(process, number)
        self._workers.append(worker)
        takes_large = launch.large[self._large_numbers.index(number)] if number in self._large_numbers else ""
        worker.say(msgspec.structs.replace(launch, table=table.access_of(number), takes_large=takes_large))
        if self._draining and process.stdin is not None:
            process.stdin.close()  # it was started while the end was asked for
        self._spawn(self._listen(worker))

    async def _listen(self, worker: _Worker) -> None:
        stdout = worker.process.stdout
        try:
            while stdout is not None and (line := await stdout.readline()):
                message = from_worker_decoder.decode(line)
                if isinstance(message, Ready):
                    worker.was_ready = True
                    worker.ready.set_result(None)
                elif isinstance(message, Counts):
                    worker.told(message)
                elif isinstance(message, WantLarge):
                    self.want_large()
                else:
                    worker.counted = message.own
                    self._spawn(self._answer(worker))
        except (msgspec.MsgspecError, ValueError):
            logger.exception("worker %d broke the protocol", worker.process.pid)
            worker.process.kill()
        code = await worker.process.wait()
        worker.has_ended()
        if not self._draining:
            await self._replace(worker, f"worker {worker.process.pid} ended with code {code}")

    async def _replace(self, worker: _Worker, what: str) -> None:
        """Starts another in place of one that ended by itself, unless too many did."""
        self._workers.remove(worker)
        if self._table is not None:
            self._table.clear(worker.number)  # it gives back no more what it had taken
        if worker.counted is not None:
            metrics = summed([*self._dead_counted, worker.counted], max_model_tokens=self._max_model_tokens)
            self._dead_counted = [MetricsSnapshot.of(metrics, open_requests=0)]
        takes_large = worker.number in self._large_numbers
        if takes_large and not worker.was_ready:
            logger.error("%s before it was ready: large requests are answered next to others", what)
            return
        launch, table = self._launch, self._table
        are_many = self._are_many_deaths(self._large_deaths if takes_large else self._deaths)
        if launch is None or table is None or not (takes_large or self._is_serving) or (are_many and not takes_large):
            self._give_up(what)
            return
        if are_many:
            logger.error("%s, the third within a minute; another takes its place in %g s", what, LARGE_PAUSE_S)
            await self._wait_unless_draining(LARGE_PAUSE_S)
        else:
            logger.error("%s; another takes its place", what)
        if not self._draining:
            await self._start_when_possible(launch, table, worker.number)

    async def _start_when_possible(self, launch: WorkerLaunch, table: WorkerTable, number: int) -> None:
        """Tries once a second: the system has no memory, processes or descriptors, and the others serve meanwhile."""
        for attempt in itertools.count():
            try:
                await self._start_worker(launch, table, number)
            except OSError as error:
                if attempt % _ATTEMPTS_PER_WARNING == 0:
                    logger.error("no worker can be started, which is tried again each second: %s", error)
            else:
                return
            await self._wait_unless_draining(_START_AGAIN_S)
            if self._draining:
                return

    async def _wait_unless_draining(self, most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._drains.wait()

    def _are_many_deaths(self, deaths: deque[float]) -> bool:
        """Counts one more."""
        now = asyncio.get_running_loop().time()
        deaths.append(now)
        return len(deaths) == MAX_DEATHS and now - deaths[0] < DEATHS_WINDOW_S

    def _give_up(self, why: str) -> None:
        self.lost = why
        logger.critical("%s; the server ends", why)
        self.ended.set()

    async def _answer(self, asker: _Worker) -> None:
        try:
            asker.say(Others([self._own(), *await self._counts_without(asker)]))
        except TimeoutError:
            asker.say(Others(None))

    async def _counts_without(self, left_out: _Worker | None) -> list[MetricsSnapshot]:
        async with asyncio.timeout(PEERS_TIMEOUT_S):
            # One that starts has counted nothing, and does not answer yet.
            ready = [worker for worker in self._workers if worker.was_ready]
            asked = [worker.counts() for worker in ready if worker is not left_out]
            counted = await asyncio.gather(*asked)
        return [*filter(None, counted), *self._dead_counted]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def can_share_ports() -> bool:
    """Whether several processes can listen on one port, and the system spreads connections over them."""
    return sys.platform.startswith("linux") and hasattr(socket, "SO_REUSEPORT")
