"""`Streams`: the engine's events, each to the request that it belongs to, by one task."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator

from openinfer_core import EngineClosed, EngineHandle, Failed, FailureKind, Finished, RequestId, TokenEvent
from openinfer_core.request import GenerateRequest

logger = logging.getLogger("openinfer.dynamo")


class Streams:
    """Of one engine; all methods run in the event loop of the task that runs `run`."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._ids = itertools.count(1)
        self._queues: dict[RequestId, asyncio.Queue[TokenEvent]] = {}
        self.ended_because = ""
        """Why the engine has ended; empty while it lives."""

    @property
    def num_open(self) -> int:
        return len(self._queues)

    def new_id(self) -> RequestId:
        return RequestId(next(self._ids))

    async def run(self) -> None:
        """Until the engine ends: every open request has its terminal event then."""
        reason = "the engine was closed"
        try:
            async for events in self._handle.events():
                for event in events:
                    self._hand_on(event)
        except EngineClosed as error:
            reason = str(error)
        finally:
            self.ended_because = reason
            for request_id in list(self._queues):
                self._hand_on(Failed(request_id, FailureKind.SHUTDOWN, reason))

    def begin(self, request: GenerateRequest) -> None:
        """Submits it; `events` gives what the engine says of it.

        Raises:
            EngineClosed: the engine has ended.
        """
        if self.ended_because:
            raise EngineClosed(self.ended_because)
        self._handle.submit(request)
        self._queues[request.request_id] = asyncio.Queue()

    async def events(self, request_id: RequestId) -> AsyncIterator[TokenEvent]:
        """What the engine says of a request that has begun, up to its terminal event."""
        queue = self._queues[request_id]
        while True:
            event = await queue.get()
            yield event
            if isinstance(event, Finished | Failed):
                return

    def abort(self, request_id: RequestId) -> None:
        """Ends a request with `Finished(ABORT)`, if it has not ended."""
        if request_id in self._queues and not self.ended_because:
            self._handle.abort(request_id)

    def leave(self, request_id: RequestId) -> None:
        """Its reader is gone: the engine need not go on, if it still does."""
        self.abort(request_id)
        self._queues.pop(request_id, None)

    def _hand_on(self, event: TokenEvent) -> None:
        queue = self._queues.get(event.request_id)
        if queue is not None:  # None: its reader has left
            queue.put_nowait(event)
