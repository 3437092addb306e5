"""Requests to the server of a model, on loopback: one connection each, bodies as they come."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httptools

from openinfer.several.turns import CannotWake

Headers = Sequence[tuple[bytes, bytes]]

_READ_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0


class Response:
    """What a server answers: its head, and its body piece by piece."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = self._is_complete = False

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200
        if not self._has_head:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head

    async def read_head(self) -> None:
        while not self._has_head:
            await self._feed()

    async def body(self) -> AsyncGenerator[bytes]:
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self._is_complete:
                return
            await self._feed()

    async def _feed(self) -> None:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise CannotWake("the server of this model has ended")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise CannotWake("the server of this model does not speak HTTP") from error


@asynccontextmanager
async def asked(
    address: tuple[str, int], method: str, target: str, headers: Headers, body: bytes
) -> AsyncGenerator[Response]:
    """A request's response, whose head has come; leaving ends the request, wherever it is.

    Raises:
        CannotWake: the server is gone.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError) as error:
        raise CannotWake("the server of this model is gone") from error
    try:
        head = [(b"host", f"{address[0]}:{address[1]}".encode()), (b"connection", b"close"), *headers]
        if body or method != "GET":
            head.append((b"content-length", str(len(body)).encode()))
        writer.write(f"{method} {target} HTTP/1.1\r\n".encode("ascii"))
        writer.write(b"".join(name + b": " + value + b"\r\n" for name, value in head) + b"\r\n" + body)
        response = Response(reader)
        try:
            await writer.drain()
            await response.read_head()
            yield response
        except OSError as error:
            raise CannotWake("the server of this model has ended") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def command(address: tuple[str, int], target: str, key: str) -> tuple[int, bytes]:
    """An operator's command without a body: status and body of the answer; `CannotWake` if the server is gone."""
    async with asked(address, "POST", target, [(b"x-api-key", key.encode())], b"") as response:
        return response.status, b"".join([piece async for piece in response.body()])
