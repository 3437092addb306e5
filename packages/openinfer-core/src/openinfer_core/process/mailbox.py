"""`Mailbox`: a handle's open requests, and events on their way to the one task that consumes it."""

import asyncio
from collections.abc import AsyncIterator

from openinfer_core.errors import ContractViolation, EngineClosed, InvalidRequest
from openinfer_core.events import Failed, FailureKind, Finished, TokenEvent
from openinfer_core.request import RequestId


class Mailbox:
    """Collects events and wakes its reader once, however many arrive. Used from one event loop's thread."""

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []
        self._open: set[RequestId] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._failure: str | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    def open(self, request_id: RequestId) -> None:
        """Notes a request that will be submitted.

        Raises:
            EngineClosed: no more events can come.
            InvalidRequest: the id is in use.
        """
        self.require_open()
        if request_id in self._open:
            raise InvalidRequest(f"request id {request_id} is in use", field="request_id")
        self._open.add(request_id)

    def require_open(self) -> None:
        if self._ended:
            raise EngineClosed(self._failure or "the engine was closed")

    def put(self, events: list[TokenEvent]) -> None:
        for event in events:
            if type(event) is Finished or type(event) is Failed:
                self._open.discard(event.request_id)
        self._events += events
        self._wake()

    def end(self, failure: str | None = None) -> None:
        """No more events come: requests still open fail; with `failure`, the reader then gets `EngineClosed`."""
        if self._ended:
            return
        self._ended, self._failure = True, failure
        message = failure or "the engine has shut down"
        self.put([Failed(request_id, FailureKind.SHUTDOWN, message) for request_id in sorted(self._open)])

    async def read(self) -> AsyncIterator[list[TokenEvent]]:
        """Yields all events that are there, each time there are any, until the end.

        Raises:
            EngineClosed: the engine died.
            ContractViolation: another task waits for events; each would get only some.
        """
        while True:
            if self._events:
                events, self._events = self._events, []
                yield events
            elif self._ended:
                break
            else:
                await self._wait()
        if self._failure is not None:
            raise EngineClosed(self._failure)

    async def _wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            raise ContractViolation("two tasks iterate over events(); one engine handle has one consumer")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
