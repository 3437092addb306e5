"""`Front`: the HTTP server that clients ask, on loopback. Each request goes to the server of the model that it names.

One request a connection, whose head, body and time are bounded, and all bodies together. A client that leaves, also by
half a close, ends its request at the model's server, and so does one that does not read what it asked for: another
model may wait for this one to end. Without keys of its own it answers loopback's names alone, and takes JSON alone, so
that no web page of a browser on this machine gets anything from it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import cast
from urllib.parse import unquote

import httptools
import msgspec

from openinfer.several.child import ChildServer
from openinfer.several.turns import CannotWake, TooMany, Turns
from openinfer.several.upstream import Response, asked
from openinfer_server import ApiError

logger = logging.getLogger("openinfer.several")

MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 32 << 20
MAX_OPEN_BODY_BYTES = 512 << 20
"""Of all requests that are not answered yet."""
MAX_CONNECTIONS = 1024
READ_TIMEOUT_S = 30.0  # for head and body
WRITE_TIMEOUT_S = 30.0  # in which a client takes a part of what it is sent
_READ_BYTES = 1 << 16
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_OF_ONE_MODEL = "/v1/models/"
_RETRY = ((b"retry-after", b"5"),)
# Of one connection, or what this server says itself.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host", b"upgrade", b"te", b"trailer"}
    | {b"expect", b"authorization", b"x-api-key", b"proxy-authorization", b"proxy-connection"}
)


class _Asked(msgspec.Struct, frozen=True):
    """The part of a body that says where it goes."""

    model: str


_asked_decoder = msgspec.json.Decoder(_Asked)


class _DoesNotRead(Exception):
    """A client leaves unread what it asked for."""


class _OpenBodies:
    """Counts bytes of bodies."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes

    def take(self, num_bytes: int) -> None:
        if num_bytes > self._left_bytes:
            raise ApiError(503, "the bodies of all requests are too large together", code="overloaded", headers=_RETRY)
        self._left_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._left_bytes += num_bytes


class HttpRequestHead:
    """A request as it comes; what httptools calls."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.taken_bytes = 0  # of the bound of all bodies
        self.is_complete = False
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True

    @property
    def method(self) -> str:
        return self.parser.get_method().decode("ascii")

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("latin-1")

    def header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")


class Front:
    """Serves until it is closed.

    Args:
        servers: by the names of their models.
        turns: of the same models.
        wait_s: that a request waits for its model at most.
        write_timeout_s: in which a client takes a part of its response.
        max_open_body_bytes: of the requests that are not answered yet.
    """

    def __init__(
        self,
        servers: Mapping[str, ChildServer],
        turns: Turns,
        *,
        wait_s: float,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        max_open_body_bytes: int = MAX_OPEN_BODY_BYTES,
    ) -> None:
        self._write_timeout_s = write_timeout_s
        self._open_bodies = _OpenBodies(max_open_body_bytes)
        self._servers = servers
        self._turns = turns
        self._wait_s = wait_s
        self._connections: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Begins to serve; returns where."""
        self._listening = await asyncio.start_server(self._connected, host, port)
        return cast("tuple[str, int]", self._listening.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """Ends what is under way. Idempotent."""
        if self._listening is not None:
            self._listening.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except _DoesNotRead:
            logger.info("a client is cut off that does not read its response")
            writer.transport.abort()
        except (OSError, TimeoutError, httptools.HttpParserError):
            logger.debug("a client left, or spoke no HTTP", exc_info=True)
        finally:
            try:
                await self._close(writer)
            finally:
                self._connections.discard(task)

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        """Waits for what the client has not taken yet, but not for ever."""
        writer.close()
        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await writer.wait_closed()
            except TimeoutError:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = Answer(writer, timeout_s=self._write_timeout_s)
        request = HttpRequestHead()
        try:
            await _read(reader, request, self._open_bodies)
            _check_origin(request)
            answering = asyncio.create_task(self._answer(request, answer))
            leaving = asyncio.create_task(reader.read(1))
            try:
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            finally:
                await _cancelled(leaving)
                await _cancelled(answering)
        except ApiError as error:
            await answer.refuse(error)
        except _DoesNotRead:
            raise
        except Exception:
            logger.exception("a request failed")
            await answer.refuse(ApiError(500, "the router failed on this request; its log says why"))
        finally:
            self._open_bodies.give_back(request.taken_bytes)

    async def _answer(self, request: HttpRequestHead, answer: "Answer") -> None:
        if request.method == "GET" and request.path in ("/health", "/ready"):
            states = {name: self._turns.phase(name).name.lower() for name in self._servers}
            await answer.send(200, msgspec.json.encode({"status": "ok", "models": states}))
        elif request.method == "GET" and request.path == "/v1/models":
            cards = [_card(name) for name in self._servers]
            await answer.send(200, msgspec.json.encode({"object": "list", "data": cards}))
        elif request.method == "GET" and request.path.startswith(_OF_ONE_MODEL):
            name = unquote(request.path.removeprefix(_OF_ONE_MODEL))
            self._check_served(name)
            await answer.send(200, msgspec.json.encode(_card(name)))
        elif request.method == "POST":
            await self._hand_on(request, answer)
        else:
            message = f"{request.method} {request.path[:200]} is not a route of several models"
            raise ApiError(404, message, code="unknown_url")

    def _check_served(self, name: str) -> None:
        if name not in self._servers:
            message = f"the model {name[:200]!r} is not served; there are {', '.join(self._servers)}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _hand_on(self, request: HttpRequestHead, answer: "Answer") -> None:
        name = _model_of(request)
        self._check_served(name)
        server = self._servers[name]
        if server.has_ended:
            self._turns.lost(name)
        try:
            async with contextlib.AsyncExitStack() as turn:
                async with asyncio.timeout(self._wait_s):
                    await turn.enter_async_context(self._turns.turn(name))
                await self._forward(request, server, answer)
        except TooMany as error:
            raise ApiError(429, str(error), code="queue_full", headers=_RETRY) from error
        except CannotWake as error:
            raise ApiError(503, str(error), code="unavailable", headers=_RETRY) from error
        except TimeoutError as error:
            message = f"the model {name} was not woken within {self._wait_s:g} s"
            raise ApiError(503, message, code="unavailable", headers=_RETRY) from error

    async def _forward(self, request: HttpRequestHead, server: ChildServer, answer: "Answer") -> None:
        headers = [each for each in request.headers if each[0] not in _HOP_BY_HOP]
        headers.append((b"x-api-key", server.user_key.encode()))
        target = request.target.decode("latin-1")
        async with asked(server.address, request.method, target, headers, bytes(request.body)) as response:
            await answer.pass_on(response)


def _card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "openinfer"}


class Answer:
    """What a client is answered, once."""

    def __init__(self, writer: asyncio.StreamWriter, *, timeout_s: float) -> None:
        self._writer = writer
        self._timeout_s = timeout_s
        self._has_begun = False

    async def send(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        self._begin(status, [(b"content-type", b"application/json"), length, *headers])
        self._writer.write(body)
        await self._drain()

    async def refuse(self, error: ApiError) -> None:
        """As an error, unless a response has begun: then the connection ends in its middle, which says it, too."""
        if not self._has_begun:
            with contextlib.suppress(OSError):
                await self.send(error.status, error.to_json(), error.headers)

    async def pass_on(self, response: Response) -> None:
        headers = [each for each in response.headers if each[0] not in _HOP_BY_HOP]
        self._begin(response.status, [*headers, (b"transfer-encoding", b"chunked")])
        async for piece in response.body():
            self._writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            await self._drain()
        self._writer.write(b"0\r\n\r\n")
        await self._drain()

    async def _drain(self) -> None:
        """Raises `_DoesNotRead`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except TimeoutError as error:
            raise _DoesNotRead from error

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self._writer.write(b"HTTP/1.1 %d \r\n" % status + head + b"connection: close\r\n\r\n")


async def _read(reader: asyncio.StreamReader, request: HttpRequestHead, open_bodies: _OpenBodies) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while not request.is_complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the client left before its request was whole")
                num_bytes += len(data)
                open_bodies.take(len(data))
                request.taken_bytes += len(data)
                request.parser.feed_data(data)
                _check_size(request, num_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the request was not whole after {READ_TIMEOUT_S:g} s") from error
    except (httptools.HttpParserError, UnicodeDecodeError) as error:
        raise ApiError(400, "this is no HTTP request that is understood") from error


def _check_size(request: HttpRequestHead, num_bytes: int) -> None:
    head_bytes = num_bytes - len(request.body)
    if len(request.body) > MAX_BODY_BYTES:
        raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    # What frames the chunks of a body counts as its head: at most as much again.
    if head_bytes > MAX_HEAD_BYTES + len(request.body):
        raise ApiError(431, f"the head has more than {MAX_HEAD_BYTES} bytes")


def _check_origin(request: HttpRequestHead) -> None:
    """A page in a browser can send what needs no leave; and a name that leads here is loopback's own."""
    host = request.header(b"host")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in _LOOPBACK:
        raise ApiError(403, "this router answers to the names of loopback alone")
    if request.header(b"origin"):
        raise ApiError(403, "web pages are not answered: ask the server of one model")
    if request.method == "POST" and request.header(b"content-type").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "the body must be application/json")


def _model_of(request: HttpRequestHead) -> str:
    try:
        return _asked_decoder.decode(bytes(request.body)).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body must say which model it is for: {error}", param="model") from error


async def _cancelled(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
