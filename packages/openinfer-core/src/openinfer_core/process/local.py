"""`InProcessEngine`: an engine in a thread of this process.

    engine thread                        the reader's event loop
    LoopRunner ─► _deliver ─► _arrived ──(one wake-up)──► _collect ─► Mailbox ─► events()

What the thread delivers lies in `_arrived`, under a lock, until the reader's event loop collects it. So nothing is
lost when there is no reader yet, or when its event loop has been closed and another one reads on.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from openinfer_core.control import ControlCommand, checked_command
from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.events import TokenEvent
from openinfer_core.process.host import ControlCall, EngineLoop, LoopRunner
from openinfer_core.process.mailbox import Mailbox
from openinfer_core.process.wire import Abort, Close, Submit, raise_refusal
from openinfer_core.request import GenerateRequest, RequestId

DIED = "the engine loop failed; its traceback is in the log"


class InProcessEngine:
    """Runs an `EngineLoop` in a thread; implements `EngineHandle`."""

    def __init__(self, loop: EngineLoop) -> None:
        self._info = loop.info
        self._host = LoopRunner(loop)
        self._mailbox = Mailbox()
        self._lock = threading.Lock()
        self._arrived: list[TokenEvent] = []
        self._has_ended = False
        self._reader_loop: asyncio.AbstractEventLoop | None = None
        self._wake_up_due = False
        self._thread = threading.Thread(target=self._run, name="openinfer-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest) -> None:
        self._collect()
        self._mailbox.open(request.request_id)
        self._host.post(Submit(request))

    def abort(self, request_id: RequestId) -> None:
        if request_id in self._mailbox:
            self._host.post(Abort(request_id))

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        with self._lock:
            self._reader_loop = asyncio.get_running_loop()
            self._wake_up_due = False  # one that was due in a closed event loop never came
        self._collect()
        async for events in self._mailbox.read():
            yield events

    async def stats(self) -> EngineStats:
        self._collect()
        self._mailbox.require_open()
        return self._host.stats()

    async def control(self, command: ControlCommand) -> None:
        command = checked_command(command)
        self._collect()
        self._mailbox.require_open()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str | None] = loop.create_future()

        def settle(refusal: str | None) -> None:
            if not done.done():  # the caller may have been cancelled
                done.set_result(refusal)

        def answer(refusal: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's event loop has been closed
                loop.call_soon_threadsafe(settle, refusal)

        self._host.post(ControlCall(command, answer))
        raise_refusal(await done)

    async def close(self) -> None:
        self._host.post(Close())
        await asyncio.to_thread(self._thread.join)
        self._collect()

    def _collect(self) -> None:
        with self._lock:
            self._wake_up_due = False
            events, self._arrived = self._arrived, []
            has_ended = self._has_ended
        if events:
            self._mailbox.put(events)
        if has_ended:
            self._mailbox.end(None if self._host.died is None else self._host.reason or DIED)

    def _run(self) -> None:
        self._host.run(self._deliver, on_end=self._tell_end)

    def _tell_end(self) -> None:
        with self._lock:
            self._has_ended = True
            self._wake_reader()

    def _deliver(self, events: list[TokenEvent]) -> None:
        with self._lock:
            self._arrived += events
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader_loop is None or self._wake_up_due:
            return
        try:
            self._reader_loop.call_soon_threadsafe(self._collect)
            self._wake_up_due = True
        except RuntimeError:  # it is closed; the next reader finds everything in `_arrived`
            self._reader_loop = None
