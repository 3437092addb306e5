"""Where a stream's events go: straight into the transport, or through ASGI's `send`.

    feed (per token)      events.append(event); the first one puts the writer on the link's dirty list
    flush (per wake-up)   one write of everything that came, however many tokens it was

Both writers hold back what a slow reader does not take and drop it beyond a bound: `dropped` tells the request, which
aborts its generation. A client that never reads costs `max_buffered_bytes` and nothing more.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol, cast

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientDisconnected(Exception):
    """The client left before its request was whole or answered; there is no one to tell."""


DIRECT_WRITE = "openinfer.direct_write"  # key of `DirectConnection` in `scope["extensions"]`
ARRIVAL = "openinfer.arrival"  # of a `handover.Arrival`, where another process accepted the connection

EVENT_STREAM = b"text/event-stream; charset=utf-8"
JSON_LINES = b"application/x-ndjson"
"""Of lines of JSON; space may come ahead of one, to see whether a client has left."""
# Chunks that readers leave out, by what a body is: a comment, and space ahead of the next line's JSON.
_PROBES = {EVENT_STREAM: b"3\r\n:\n\n\r\n", JSON_LINES: b"1\r\n \r\n"}


class StreamWriter:
    """One response body of server-sent events, or of what else an API writes piece by piece.

    Attributes:
        content_type: of the body; events, unless it is set before `start`.
        events: those of this wake-up, in order; `flush` empties it.
        is_dirty: whether the writer is on the link's dirty list; `mark_dirty` sets it, `flush` clears it.
        max_buffered_bytes: what the client may leave unread; appending a large event at once raises it by its size.
        dropped: resolved when the response was given up.
        was_slow: whether that was because the client left too much unread, or for too long.
    """

    __slots__ = ("content_type", "dropped", "events", "is_dirty", "max_buffered_bytes", "was_slow")

    def __init__(self, *, max_buffered_bytes: int) -> None:
        self.content_type = EVENT_STREAM
        self.max_buffered_bytes = max_buffered_bytes
        self.events: list[bytes] = []
        self.is_dirty = False
        self.was_slow = False
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def head(self) -> Message:
        """The response's head."""
        headers = [(b"content-type", self.content_type), (b"cache-control", b"no-cache")]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def mark_dirty(self, dirty: list["StreamWriter"]) -> None:
        """Has `events` sent at the end of this wake-up: puts the writer on the link's dirty list, once."""
        if not self.is_dirty:
            self.is_dirty = True
            dirty.append(self)

    def flush(self) -> None:
        """Sends `events`, or holds them while the client cannot take them."""
        raise NotImplementedError

    async def start(self) -> None:
        """Sends the response's head and what has been held until then."""
        raise NotImplementedError

    async def end(self, timeout_s: float) -> None:
        """Sends what is left and completes the response, or drops the connection if that takes too long."""
        raise NotImplementedError

    def drop(self) -> None:
        """Gives the response up."""
        if not self.dropped.done():
            self.dropped.set_result(None)

    def drop_slow(self) -> None:
        """Gives the response up because of its reader."""
        if not self.dropped.done():
            self.was_slow = True
            self.drop()


class DirectConnection(Protocol):
    """What the HTTP protocol offers to direct writes."""

    transport: asyncio.Transport

    def attach(self, writer: "DirectWriter") -> None:
        """From here on the writer is told when it may write (`resume`), must wait (`pause`), or is alone (`lost`)."""
        ...

    def detach(self) -> None:
        """The writer's response is complete."""
        ...


class DirectWriter(StreamWriter):
    """Writes chunks of the chunked encoding into the transport, without waking any task.

    held ──resume──► writing ⇄ (pause, resume) ⇄ held        any ──lost, drop──► nothing is kept or written
    """

    __slots__ = ("_blocked", "_connection", "_held", "_lost", "_send", "_transport", "_writable")

    def __init__(self, connection: DirectConnection, send: Send, *, max_buffered_bytes: int) -> None:
        super().__init__(max_buffered_bytes=max_buffered_bytes)
        self._connection = connection
        self._transport = connection.transport
        self._send = send
        self._blocked = True  # until the head is out, an event must not overtake it
        self._lost = False
        self._held = bytearray()
        self._writable: asyncio.Future[None] | None = None

    def flush(self) -> None:
        self.is_dirty = False
        parts = self.events
        if not parts:
            return
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if not body:
            return  # an empty chunk would end the response
        chunk = b"%x\r\n%b\r\n" % (len(body), body)
        if self._blocked:
            self._hold(chunk)
        else:
            self._transport.write(chunk)

    async def start(self) -> None:
        await self._send(self.head)  # ASGI chooses the chunked encoding; then the transport is ours
        self._connection.attach(self)

    async def end(self, timeout_s: float) -> None:
        self.flush()
        if self._blocked and not self._lost:
            self._writable = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._writable, self.dropped), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._writable.done():
                self.drop_slow()
        self._connection.detach()  # from here on the protocol waits for the reader, within `write_timeout_s`
        if not self.dropped.done():
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def drop(self) -> None:
        super().drop()
        self.lost()
        self._transport.abort()  # `close` would wait for the reader that was given up

    def probe(self) -> None:
        """Writes what readers of a stream of events or of JSON lines leave out: it fails if the client has left."""
        probe = _PROBES.get(self.content_type)
        if probe is not None and not self._blocked:
            self._transport.write(probe)

    def pause(self) -> None:
        self._blocked = True

    def lost(self) -> None:
        self._blocked = self._lost = True
        self._held.clear()
        self._set_writable()

    def resume(self) -> None:
        if self._lost:
            return
        self._blocked = False
        if self._held:
            held, self._held = self._held, bytearray()
            self._transport.write(held)  # may pause again
        if not self._blocked:
            self._set_writable()

    def _set_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _hold(self, chunk: bytes) -> None:
        if self._lost:
            return
        self._held += chunk
        if len(self._held) + self._transport.get_write_buffer_size() > self.max_buffered_bytes:
            self.drop_slow()


class SendWriter(StreamWriter):
    """For servers without `DIRECT_WRITE`: one task per stream that sleeps in a future and calls `send`."""

    __slots__ = ("_ended", "_held", "_pump", "_send", "_wake")

    def __init__(self, send: Send, *, max_buffered_bytes: int) -> None:
        super().__init__(max_buffered_bytes=max_buffered_bytes)
        self._send = send
        self._held = bytearray()
        self._ended = False
        self._wake: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None

    def flush(self) -> None:
        self.is_dirty = False
        if self.dropped.done():
            self.events.clear()  # the request's coroutine, which aborts its choices, has not woken yet
            return
        self._held += b"".join(self.events)
        self.events.clear()
        if len(self._held) > self.max_buffered_bytes:
            self.drop_slow()
        self._wake_pump()

    async def start(self) -> None:
        await self._send(self.head)
        self._pump = asyncio.create_task(self._run())

    async def end(self, timeout_s: float) -> None:
        self.flush()
        self._ended = True
        self._wake_pump()
        pump = cast("asyncio.Task[None]", self._pump)
        await asyncio.wait((pump, self.dropped), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not pump.done():
            self.drop_slow()

    def drop(self) -> None:
        super().drop()
        self._held.clear()
        if self._pump is not None:
            self._pump.cancel()  # the server closes the connection then, because the response is not complete

    def _wake_pump(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _run(self) -> None:
        with contextlib.suppress(ClientDisconnected):  # the request learns from `disconnected` that its client has left
            while self._held or not self._ended:
                if not self._held:
                    self._wake = asyncio.get_running_loop().create_future()
                    await self._wake
                    continue
                body, self._held = bytes(self._held), bytearray()  # `flush` adds to it while `send` waits
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def stream_writer(scope: Scope, send: Send, *, max_buffered_bytes: int) -> StreamWriter:
    """The direct writer where the server offers the transport, else the one through `send`."""
    connection = scope.get("extensions", {}).get(DIRECT_WRITE)
    if connection is None:
        return SendWriter(send, max_buffered_bytes=max_buffered_bytes)
    return DirectWriter(connection, send, max_buffered_bytes=max_buffered_bytes)
