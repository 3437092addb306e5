"""`WorkerGroup`: the first worker's view of the others, which it starts, watches and ends.

start ──all Ready──► serving ──drain──► draining ──all ended, or too late: killed──► ended
                        └──one ends by itself──► lost: /health says so, the first drains and ends with 1
"""

import asyncio
import contextlib
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
from openinfer_server.observability.metrics_snapshot import MetricsSnapshot
from openinfer_server.options import ServerOptions
from openinfer_server.workers.peers import PEERS_TIMEOUT_S
from openinfer_server.workers.wire import (
    MAX_LINE_BYTES,
    AskCounts,
    Counts,
    Others,
    Ready,
    ToWorker,
    WorkerLaunch,
    from_worker_decoder,
    line_of,
)

logger = logging.getLogger("openinfer.server")

_END_GRACE_S = 5.0  # what a worker gets beyond the drain's deadline


class _Worker:
    """One further worker."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked: deque[asyncio.Future[MetricsSnapshot]] = deque()

    def say(self, message: WorkerLaunch | ToWorker) -> None:
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(line_of(message))

    async def counts(self) -> MetricsSnapshot:
        answer: asyncio.Future[MetricsSnapshot] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self.say(AskCounts())
        return await answer

    def told(self, counts: Counts) -> None:
        if self._asked and not (answer := self._asked.popleft()).done():
            answer.set_result(counts.snapshot)


class WorkerGroup:
    """Implements `Peers` for the first worker. Made by `start`."""

    def __init__(self, own: Callable[[], MetricsSnapshot]) -> None:
        self.lost: str | None = None
        self.ended = asyncio.Event()  # set when a worker has ended by itself
        self._own = own
        self._workers: list[_Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    async def start(self, handle: EngineHandle, model_dir: Path, options: ServerOptions, port: int) -> None:
        """Starts `options.workers - 1` processes and waits until they take connections.

        Raises:
            ServerError: the engine cannot be joined, or a worker ended before it was ready.
        """
        access = handle.access if isinstance(handle, RemoteEngine) else None
        if access is None:
            raise ServerError("several workers need an engine in a process of its own; this one cannot be joined")
        launch = WorkerLaunch(
            engine=access, model_dir=str(model_dir), options=msgspec.structs.replace(options, port=port)
        )
        for _ in range(options.workers - 1):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "openinfer_server.workers.worker"),
                stdin=PIPE,
                stdout=PIPE,
                limit=MAX_LINE_BYTES,
            )
            worker = _Worker(process)
            self._workers.append(worker)
            worker.say(launch)
            self._spawn(self._listen(worker))
        lost = asyncio.create_task(self.ended.wait())
        ready = asyncio.gather(*(worker.ready for worker in self._workers))
        await asyncio.wait((lost, ready), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if self.lost is not None:
            ready.cancel()
            raise ServerError(f"{self.lost} before it was ready; its log says why")

    async def snapshots(self) -> Sequence[MetricsSnapshot]:
        async with asyncio.timeout(PEERS_TIMEOUT_S):
            return await asyncio.gather(*(worker.counts() for worker in self._workers))

    def drain(self) -> None:
        """Tells all to take no more requests and to end."""
        self._draining = True
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
        await asyncio.gather(*ends, *self._tasks)

    async def _listen(self, worker: _Worker) -> None:
        stdout = worker.process.stdout
        try:
            while stdout is not None and (line := await stdout.readline()):
                message = from_worker_decoder.decode(line)
                if isinstance(message, Ready):
                    worker.ready.set_result(None)
                elif isinstance(message, Counts):
                    worker.told(message)
                else:
                    self._spawn(self._answer(worker))
        except (msgspec.MsgspecError, ValueError):
            logger.exception("worker %d broke the protocol", worker.process.pid)
            worker.process.kill()
        code = await worker.process.wait()
        if not self._draining:
            self.lost = f"worker {worker.process.pid} ended with code {code}"
            logger.critical("%s; the server ends", self.lost)
            self.ended.set()

    async def _answer(self, asker: _Worker) -> None:
        try:
            async with asyncio.timeout(PEERS_TIMEOUT_S):
                others = [worker.counts() for worker in self._workers if worker is not asker]
                asker.say(Others([self._own(), *await asyncio.gather(*others)]))
        except TimeoutError:
            asker.say(Others(None))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def can_share_ports() -> bool:
    """Whether several processes can listen on one port, and the system spreads connections over them."""
    return sys.platform.startswith("linux") and hasattr(socket, "SO_REUSEPORT")
