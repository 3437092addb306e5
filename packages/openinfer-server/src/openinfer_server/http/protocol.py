"""uvicorn's httptools protocol, with what it lacks: bounded heads, a deadline for them, and direct writes.

    first byte ──► head ──(complete)──► request runs ──► keep-alive ──► first byte ...
                     ├── longer than max_head_bytes: 431      URL alone longer than max_url_bytes: 414
                     ├── not complete within head_timeout_s: 408
                     └── HTTP/1.1 without exactly one `host`, HTTP/1.0 with several: 400

A client that ends its side of the connection behind a whole request may still be reading: it gets its whole answer. Or
it has left, which looks the same until something is written to it: `_look_for_client` does that. Over TLS, where
asyncio knows no half of a connection, the client has left.

It tells the table of connections whether it has a request: one without makes room when they are short.

A large request goes to another process with its connection (`handover.py`), where there is one: nothing is parsed
beyond its head, unless that process gives it back.

The minor version of uvicorn is pinned, because this class relies on when `data_received`, `on_message_begin`, `on_url`,
`on_header`, `on_headers_complete`, `send_400_response`, `eof_received`, `connection_lost`, `pause_writing` and
`resume_writing` are called; tests/http/test_http_protocol.py is the contract.
"""

import asyncio
import math
import socket
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from openinfer_server.http.api_errors import ApiError, busy
from openinfer_server.http.connections import Slot
from openinfer_server.http.handover import Arrival, Handed, Handing, HandOver
from openinfer_server.http.writers import ARRIVAL, DIRECT_WRITE, DirectWriter
from openinfer_server.options import ServerOptions

_LINGER_S = 1.0
# For how long, and how much, a client may go on sending a request that was refused: it is thrown away, one read (up to
# 256 KB) in each pause, since reading as fast as it comes would take the loop from others. 8 MB are through in 0.7 s.
_LINGER_BYTES = 16 * 2**20
_LINGER_PAUSE_S = 0.02
# Between two looks at whether a client that ended its side is still there, the first and the longest.
_FIRST_PROBE_S = 0.05
_LONGEST_PROBE_S = 4.0
_INTERIM_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _HeadRefused(Exception):
    pass


class _HeadHandedOver(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Subclasses say with which options: uvicorn constructs protocols itself."""

    options = ServerOptions()
    hand_over: HandOver | None = None
    slot: Slot | None = None  # of its connection; given by the acceptor
    arrival: Arrival | None = None  # if another process accepted it; given by the acceptor

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._writer: DirectWriter | None = None
        self._refusal: ApiError | None = None
        self._in_head = False
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._discarded_bytes = 0
        self._head_deadline: asyncio.TimerHandle | None = None
        self._first_byte_deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._body_deadline: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._reading_on: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._is_between = True  # no request has begun that has not been read whole
        self._read: list[bytes] | None = None  # since its request began; None unless that began with bytes of its own
        self._handing: Handing | None = None
        self._handing_task: asyncio.Task[None] | None = None
        self._is_given_back = False  # the request at hand is to be answered here

    def attach(self, writer: DirectWriter) -> None:
        if self.transport.is_closing():  # lost before the writer was known: nothing else would tell it
            writer.lost()
            return
        self._writer = writer
        if not self.flow.write_paused:
            writer.resume()

    def detach(self) -> None:
        self._writer = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        _send_at_once(transport)
        # uvicorn starts its keep-alive timer after the first response only: a connection that never asks has this one
        self._first_byte_deadline = self.loop.call_later(self.options.keep_alive_s, transport.close)
        if self.arrival is not None:
            self.arrival.abandon = self._abandon
            self._take(self.arrival.read)  # before anything that comes from now on

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        if self.arrival is not None:
            self.arrival.begins()
        if self._handing_task is not None:
            self._handing_task.cancel()
        for timer in (self._unread_deadline, self._body_deadline, self._lingering, self._reading_on, self._probe):
            if timer is not None:
                timer.cancel()
        self._end_writer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset uvicorn leaves it, and it would keep all this a minute

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether to keep the other half of the connection, for the answer to a request that came whole."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self.scheme == "https" or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        if self._probe is None:
            self._look_for_client(_FIRST_PROBE_S)
        return True

    def _look_for_client(self, next_look_s: float) -> None:
        """Drops the connection if what was written found no one; writes something that no client shows to anyone."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        cycle = self.cycle
        if self._writer is not None:
            self._writer.probe()
        elif not self.pipeline and not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM_RESPONSE)
        self._probe = self.loop.call_later(next_look_s, self._look_for_client, min(2 * next_look_s, _LONGEST_PROBE_S))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writer is not None:
            self._writer.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()  # it was for a client that does not read
            self._unread_deadline = None
        if self._writer is not None:
            self._writer.resume()

    def data_received(self, data: bytes) -> None:
        if self.arrival is not None:
            self.arrival.reads(data)
        self._take(data)

    def _take(self, data: bytes) -> None:
        if self._refusal is not None:
            # read on and thrown away, so that the client gets to the refusal; bounded, or it could send for ever
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _LINGER_BYTES:
                self.transport.abort()
                return
            self.transport.pause_reading()
            self._reading_on = self.loop.call_later(_LINGER_PAUSE_S, self._read_on)
            return
        if self._first_byte_deadline is not None:
            self._first_byte_deadline.cancel()
            self._first_byte_deadline = None
        if self.hand_over is not None:
            self._remember(data)
        self._feed(data)
        if self._in_head:
            self._unparsed_bytes += len(data)
            self._measure_unfinished_head()

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _remember(self, data: bytes) -> None:
        """Keeps what is read until the end of a head, if its request begins with it."""
        if self._is_between:
            self._read = [data]
        elif self._read is not None:
            self._read.append(data)

    def _feed(self, data: bytes) -> None:
        """As uvicorn's `data_received`, but what stops the parser where a request is handed over is no error."""
        self._unset_keepalive_if_required()
        try:
            cast("Any", self.parser).feed_data(data)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        except httptools.HttpParserError:
            if self._handing is not None and self.hand_over is not None:
                self._begin_handing(self.hand_over, self._handing)
                return
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._is_between = False
        self._head_bytes = 0
        self._unparsed_bytes = 0
        extensions: dict[str, Any] = {DIRECT_WRITE: self}
        if self.arrival is not None:
            extensions[ARRIVAL] = self.arrival
        cast("dict[str, Any]", self.scope)["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.options.max_url_bytes:
            self._refuse(ApiError(414, f"the URL exceeds {self.options.max_url_bytes} bytes", code="url_too_long"))
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timers()
        self._check_host()
        if self.slot is not None:
            self.slot.asks()
        if self.hand_over is not None and not self._is_given_back:
            self._hand_over(self.hand_over)
        if cast("Any", self.parser).get_http_version() == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1: an old client would take it for the answer
        super().on_headers_complete()

    def _hand_over(self, hand_over: HandOver) -> None:
        """Hands a large request over with its connection, if it is the only one that the connection has."""
        read, self._read = self._read, None  # what follows in the same bytes does not begin with them
        cycle = cast("RequestResponseCycle | None", self.cycle)
        is_alone = read is not None and (cycle is None or cycle.response_complete) and self.scheme == "http"
        method = cast("Any", self.parser).get_method()
        if read is None or not is_alone or not hand_over.takes(method, self.url, self.headers):
            return
        owner = hand_over.owner(self.headers, self.client[0] if self.client else "")
        if suspected_s := hand_over.suspected_s(owner):
            message = "a request of yours ended two processes of the server; for a while it takes small ones alone"
            self._refuse(busy(message, retry_after_s=math.ceil(suspected_s)))
        self._handing = hand_over.begin(self.transport.get_extra_info("socket"), read, owner)
        if self._handing is not None:
            raise _HeadHandedOver

    def _begin_handing(self, hand_over: HandOver, handing: Handing) -> None:
        self._stop_timers()
        self.transport.pause_reading()
        self._handing_task = self.loop.create_task(self._let_go(hand_over, handing), name="openinfer-handover")
        self._handing_task.add_done_callback(lambda _: hand_over.release(handing))

    async def _let_go(self, hand_over: HandOver, handing: Handing) -> None:
        handed, read = await hand_over.finish(handing)
        if handed is Handed.LET_GO:
            self.transport.abort()
        elif handed is Handed.GIVEN_BACK:
            self._take_back(read)
        else:
            self._refusal = busy("the process for large requests has ended, or has no room; try again")
            self.transport.resume_reading()
            self.send_400_response("")

    def _take_back(self, read: bytes) -> None:
        """Begins again with a request that was handed over, of which all was read until now."""
        self._handing = self._handing_task = None
        self._is_given_back = self._is_between = True
        self.parser = _parser_of(self)
        self._take(read)
        self.transport.resume_reading()

    def _abandon(self) -> None:
        """Ends this process's part of a connection that another has, too; no answer was begun."""
        self.transport.pause_reading()
        self.cycle.disconnected = True  # it is not to answer for what did not
        self.transport.abort()

    def _check_host(self) -> None:
        """RFC 9112, 3.2: a proxy before this server may have gone by another `host` than this server sees."""
        version = cast("Any", self.parser).get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            self._refuse(ApiError(400, f"the request has {num_hosts} host headers, not one", code="invalid_http"))

    def on_message_complete(self) -> None:
        if self._body_deadline is not None:
            self._body_deadline.cancel()
            self._body_deadline = None
        self._is_between = True
        self._is_given_back = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A response is whole; its client must read what is left of it, and end its body if it was answered before."""
        answered = self.cycle
        super().on_response_complete()
        if not self.pipeline and self.slot is not None:
            (self.slot.is_spent if answered.more_body else self.slot.waits)()
        if answered.more_body and self._body_deadline is None:
            self._body_deadline = self.loop.call_later(self.options.body_timeout_s, self.transport.abort)
        if self.transport.get_write_buffer_size() and self._unread_deadline is None:
            self._unread_deadline = self.loop.call_later(self.options.write_timeout_s, self._drop_if_unread)

    def send_400_response(self, msg: str) -> None:
        """Answers a request that cannot be parsed, or was refused while parsing, and closes."""
        if self.arrival is not None:
            self.arrival.begins()
        error = self._refusal or ApiError(400, msg, code="invalid_http")
        self._refusal = error
        self._stop_timers()
        self._end_writer()
        self.transport.write(_plain_response(error))  # past ASGI: what is refused here is no request yet
        if self.slot is not None:
            self.slot.is_spent()
        self._close_when_read()

    def _close_when_read(self) -> None:
        # Closing with bytes unread sends a reset, which would take back what was written: the client closes, or a while
        # passes.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingering = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _count(self, length: int) -> None:
        self._head_bytes += length  # counted here and not from `data_received`, which may have several requests
        if self._head_bytes > self.options.max_head_bytes:
            self._refuse(_head_too_large(self.options.max_head_bytes))

    def _refuse(self, error: ApiError) -> None:
        """Stops the parser: uvicorn answers its error with `send_400_response`."""
        self._refusal = error
        raise _HeadRefused

    def _measure_unfinished_head(self) -> None:
        # the parser tells of whole headers only: half of a huge one is seen here
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._unparsed_bytes > self.options.max_head_bytes:
            self._refusal = _head_too_large(self.options.max_head_bytes)
            self.send_400_response("")
        elif self._head_deadline is None:
            self._head_deadline = self.loop.call_later(self.options.head_timeout_s, self._head_timed_out)

    def _head_timed_out(self) -> None:
        self._head_deadline = None
        if self._in_head and not self.transport.is_closing():
            message = f"the request's headers did not arrive within {self.options.head_timeout_s:g} s"
            self._refusal = ApiError(408, message, code="timeout")
            self.send_400_response("")

    def _drop_if_unread(self) -> None:
        # closing, or the next response of a pipeline, would wait for the client for ever
        self._unread_deadline = None
        idle = self.cycle.response_complete
        if self.flow.write_paused or (idle and self.transport.get_write_buffer_size()):
            self.transport.abort()

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.lost()
            self._writer = None

    def _stop_timers(self) -> None:
        for timer in (self._head_deadline, self._first_byte_deadline):
            if timer is not None:
                timer.cancel()
        self._head_deadline = self._first_byte_deadline = None


def _parser_of(protocol: BoundedProtocol) -> httptools.HttpRequestParser:
    """As uvicorn makes it."""
    parser = httptools.HttpRequestParser(protocol)
    cast("Any", parser).set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def bounded_protocol(options: ServerOptions, hand_over: HandOver | None = None) -> type[BoundedProtocol]:
    return type("BoundedProtocol", (BoundedProtocol,), {"options": options, "hand_over": hand_over})


def _send_at_once(transport: asyncio.Transport) -> None:
    """Turns Nagle's algorithm off, with which a token can wait 40 ms; asyncio does so for its own listeners only."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _head_too_large(limit: int) -> ApiError:
    return ApiError(431, f"the request's headers exceed {limit} bytes", code="headers_too_large")


def _plain_response(error: ApiError) -> bytes:
    body = error.to_json()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    )
    further = b"".join(b"%b: %b\r\n" % header for header in error.headers)
    return head.encode() + further + b"\r\n" + body
