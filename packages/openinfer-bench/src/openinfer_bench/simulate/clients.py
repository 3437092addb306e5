"""Clients of the simulated server: HTTP/1.1 over a virtual connection, by h11, in an event loop of their own."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """What a client does that a good one would not."""

    leaves_after_events: int | None = None
    """It closes the connection after so many events of the stream."""
    reads_slowly_s: float = 0.0
    """For so long it reads nothing, after the first event."""
    sends_body_for_s: float = 0.0
    """So long lies between the two halves of its body."""
    shuts_its_side: bool = False
    """It says after the body that it will send no more, and waits for its answer."""


@dataclass(slots=True)
class Answer:
    """What came back, and when, in virtual seconds."""

    sent_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)
    event_times_s: list[float] = field(default_factory=list[float])
    ended_s: float = 0.0
    is_whole: bool = False
    """Whether the response came to its end as HTTP has it."""
    has_left: bool = False
    """Whether the client left on purpose."""


class HttpConnection(asyncio.Protocol):
    """One connection; requests go over it one after the other."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._http = h11.Connection(our_role=h11.CLIENT)
        self._transport: Any = None
        self._answer: Answer | None = None
        self._manners = Manners()
        self._done: asyncio.Future[None] | None = None
        self.is_open = True

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Sequence[tuple[str, str]] = (),
        manners: Manners | None = None,
    ) -> Answer:
        """Sends a request and returns what came back until the response or the connection ended."""
        self._manners = manners or Manners()
        answer = self._answer = Answer(self._now())
        self._done = asyncio.get_running_loop().create_future()
        head = [("host", "127.0.0.1:8000"), *headers]
        if body:
            head += [("content-type", "application/json"), ("content-length", str(len(body)))]
        self._write(self._http.send(h11.Request(method=method, target=path, headers=head)))
        await self._send_body(body)
        self._write(self._http.send(h11.EndOfMessage()))
        if self._manners.shuts_its_side and self.is_open:
            self._transport.write_eof()
        await self._done
        answer.ended_s = self._now()
        if answer.is_whole and self.is_open and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.close()
        return answer

    async def _send_body(self, body: bytes) -> None:
        if not body:
            return
        middle = len(body) // 2 if self._manners.sends_body_for_s else len(body)
        self._write(self._http.send(h11.Data(data=body[:middle])))
        if middle < len(body):
            await asyncio.sleep(self._manners.sends_body_for_s)
            self._write(self._http.send(h11.Data(data=body[middle:])))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    def write_raw(self, data: bytes) -> None:
        """What need be no request."""
        self._write(data)

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def eof_received(self) -> bool:
        self._receive(b"")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.is_open = False
        self._end()

    def _receive(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or not self.is_open:
            return
        try:
            self._http.receive_data(data)
            while self._take(self._http.next_event(), answer):
                pass
        except h11.RemoteProtocolError:
            self._end()

    def _take(self, event: Any, answer: Answer) -> bool:
        if isinstance(event, h11.Response):
            answer.status = event.status_code
            answer.headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            is_first = not answer.body
            answer.body += event.data
            answer.event_times_s.append(self._now())
            if is_first and self._manners.reads_slowly_s:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_later(self._manners.reads_slowly_s, self._transport.resume_reading)
            leaves_after = self._manners.leaves_after_events
            if leaves_after is not None and len(answer.event_times_s) >= leaves_after:
                answer.has_left = True
                self.close()
                self._end()
                return False
        elif isinstance(event, h11.EndOfMessage):
            answer.is_whole = True
            self._end()
            return False
        return event is not h11.NEED_DATA and event is not h11.PAUSED and not isinstance(event, h11.ConnectionClosed)

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _write(self, data: bytes | None) -> None:
        if data and self.is_open:
            self._transport.write(data)
