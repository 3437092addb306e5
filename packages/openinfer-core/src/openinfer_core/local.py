"""`InProcessEngine`: an engine in a thread of this process."""

import asyncio
import threading
from collections.abc import AsyncIterator

from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.errors import EngineClosed
from openinfer_core.events import TokenEvent
from openinfer_core.host import EngineHost, EngineLoop
from openinfer_core.mailbox import Mailbox
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.wire import Abort, Close, Submit

DIED = "the engine loop failed; its traceback is in the log"


class InProcessEngine:
    """Runs an `EngineLoop` in a thread; implements `EngineHandle`."""

    def __init__(self, loop: EngineLoop) -> None:
        self._info = loop.info
        self._host = EngineHost(loop)
        self._mailbox = Mailbox()
        self._lock = threading.Lock()
        self._early: list[TokenEvent] = []
        self._reader_loop: asyncio.AbstractEventLoop | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="openinfer-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        return self._info

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request.

        Raises:
            EngineClosed: the engine has ended.
            InvalidRequest: the request's id is in use.
        """
        if self._ended and self._reader_loop is None:
            raise EngineClosed(DIED)
        self._mailbox.open(request.request_id)
        self._host.post(Submit(request))

    def abort(self, request_id: RequestId) -> None:
        """Ends a request with `Finished(ABORT)`."""
        self._host.post(Abort(request_id))

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        """Yields all events that are there, each time there are any."""
        self._attach(asyncio.get_running_loop())
        async for events in self._mailbox.read():
            yield events

    async def stats(self) -> EngineStats:
        """A fresh snapshot.

        Raises:
            EngineClosed: the engine has ended.
        """
        if self._ended:
            raise EngineClosed("the engine has ended")
        return self._host.stats()

    async def close(self) -> None:
        """Ends the loop and waits for its thread."""
        self._host.post(Close())
        await asyncio.to_thread(self._thread.join)

    def _attach(self, reader_loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._reader_loop = reader_loop
            self._mailbox.put(self._early)
            self._early = []
            if self._ended:
                self._end_mailbox()

    def _run(self) -> None:
        self._host.run(self._from_thread)
        with self._lock:
            self._ended = True
            if self._reader_loop is not None:
                self._call_reader(self._reader_loop)

    def _call_reader(self, reader_loop: asyncio.AbstractEventLoop) -> None:
        if not reader_loop.is_closed():
            reader_loop.call_soon_threadsafe(self._end_mailbox)

    def _end_mailbox(self) -> None:
        self._mailbox.end(None if self._host.died is None else DIED)

    def _from_thread(self, events: list[TokenEvent]) -> None:
        with self._lock:
            if self._reader_loop is None:
                self._early += events
            elif not self._reader_loop.is_closed():
                self._reader_loop.call_soon_threadsafe(self._mailbox.put, events)
