"""A further worker: the process that `workers.WorkerGroup` starts.

It joins the engine, serves the port that the first worker listens on, and drains and ends when its standard input does:
the first worker drains, or has died. Some take large requests, and no others, which the rest hand over; they have a
lower priority, so that where processors are short, what they do is not at the cost of those who ask for little.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from openinfer_core.errors import OpenInferError
from openinfer_core.process.logs import set_up_logs
from openinfer_core.process.remote import join_engine
from openinfer_server.app import load_app
from openinfer_server.limits.worker_table import WorkerTable
from openinfer_server.observability.metrics_snapshot import MetricsSnapshot
from openinfer_server.server import (
    event_loop_factory,
    hand_over_of,
    listen,
    listen_for_large,
    serve_app,
    yield_interpreter,
)
from openinfer_server.workers.peers import PEERS_TIMEOUT_S
from openinfer_server.workers.wire import (
    MAX_LINE_BYTES,
    AskOthers,
    Counts,
    FromWorker,
    Others,
    Ready,
    WantLarge,
    WorkerLaunch,
    line_of,
    to_worker_decoder,
)

logger = logging.getLogger("openinfer.server")

LARGE_NICENESS = 5  # a third of the processor time of what it competes with; it has to answer for its counts, too


class FirstWorker:
    """Implements `Peers` for a further worker.

    Args:
        say: sends a line to the first worker.
        own: what this worker has counted.
    """

    lost: str | None = None  # the first worker's death ends this one at once

    def __init__(self, say: Callable[[FromWorker], None], own: Callable[[], MetricsSnapshot]) -> None:
        self._say = say
        self._own = own
        self._asked: deque[asyncio.Future[Sequence[MetricsSnapshot]]] = deque()

    async def snapshots(self) -> Sequence[MetricsSnapshot]:
        answer: asyncio.Future[Sequence[MetricsSnapshot]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._say(AskOthers(self._own()))
        async with asyncio.timeout(2 * PEERS_TIMEOUT_S):
            return await answer

    def take(self, line: bytes) -> None:
        message = to_worker_decoder.decode(line)
        if not isinstance(message, Others):
            self._say(Counts(self._own()))
        elif self._asked and not (answer := self._asked.popleft()).done():
            if message.snapshots is None:
                answer.set_exception(TimeoutError("another worker does not answer"))
            else:
                answer.set_result(message.snapshots)


async def serve_launch(launch: WorkerLaunch, lines: FileIO, out: BinaryIO) -> int:
    """Serves until `lines`, a pipe from the first worker, ends; says on `out` what that asks. Returns the exit code."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), lines)
    yield_interpreter()

    def say(message: FromWorker) -> None:
        with contextlib.suppress(BrokenPipeError):  # the first worker has died, as the end of `lines` says, too
            out.write(line_of(message))
            out.flush()

    if launch.takes_large:
        os.nice(LARGE_NICENESS)
    # Off the loop: an engine that is short of memory or descriptors takes the link when it can.
    gets_large = bool(launch.takes_large) or not launch.large
    handle = await asyncio.to_thread(join_engine, launch.engine, keeps_prompts=gets_large)
    try:
        with listen_for_large(launch.takes_large) if launch.takes_large else listen(launch.options) as listener:
            app = load_app(handle, Path(launch.model_dir), launch.options)
            app.service.share(WorkerTable(launch.table))
            app.service.peers = first = FirstWorker(say, app.service.snapshot)
            stop = asyncio.Event()
            listening = asyncio.create_task(_listen(reader, first, stop))
            hand_over = None
            if launch.large and not launch.takes_large:
                hand_over = hand_over_of(app, launch.large, lambda: say(WantLarge()))
            code = await serve_app(
                app, listener, launch.options, on_ready=lambda url: say(Ready()), stop=stop, hand_over=hand_over
            )
            listening.cancel()
            return code
    finally:
        await handle.close()


async def _listen(reader: asyncio.StreamReader, first: FirstWorker, stop: asyncio.Event) -> None:
    while line := await reader.readline():
        first.take(line)
    stop.set()


def main() -> int:
    set_up_logs(os.environ)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing printed can break the protocol
    lines = FileIO(sys.stdin.fileno(), closefd=False)  # nothing beyond the first line is read ahead
    try:
        launch = msgspec.json.decode(lines.readline(), type=WorkerLaunch)
        with asyncio.Runner(loop_factory=event_loop_factory(launch.options.event_loop)) as runner:
            return runner.run(serve_launch(launch, lines, out))
    except OpenInferError as error:
        logger.critical("the worker cannot serve: %s", error)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
