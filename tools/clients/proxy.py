"""A proxy that hands bytes on as they are, and remembers which requests went by and what they were answered with."""

import asyncio
import contextlib
import json
import threading
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

_READ_BYTES = 65536


@dataclass
class Exchange:
    """A request and the head of its answer.

    Attributes:
        status: of the answer; 0 if none came.
        body: the request's JSON; None without a body, or if it is none.
        answer: what was answered if that is no success: what there is to mend.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: str = ""


@dataclass
class _Requests:
    """httptools' callbacks of a connection's requests."""

    exchanges: list[Exchange]
    open: deque[Exchange]
    _path: bytes = b""
    _headers: dict[str, str] = field(default_factory=dict[str, str])
    _body: bytes = b""
    parser: httptools.HttpRequestParser | None = None

    def on_message_begin(self) -> None:
        self._path, self._headers, self._body = b"", {}, b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self.parser is not None
        try:
            body = json.loads(self._body) if self._body else None
        except ValueError:
            body = None
        exchange = Exchange(self.parser.get_method().decode(), self._path.decode(), self._headers, body)
        self.exchanges.append(exchange)
        self.open.append(exchange)


@dataclass
class _Answers:
    """httptools' callbacks of a connection's answers."""

    open: deque[Exchange]
    _current: Exchange | None = None
    parser: httptools.HttpResponseParser | None = None

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        status = self.parser.get_status_code()
        if status >= 200 and self.open:
            self._current = self.open.popleft()
            self._current.status = status

    def on_body(self, body: bytes) -> None:
        if self._current is not None and self._current.status >= 400:
            self._current.answer += body.decode("utf-8", "replace")


class CapturingProxy(AbstractContextManager["CapturingProxy"]):
    """Listens on a free port of loopback, in a thread, before a server.

    Attributes:
        url: where clients connect.
        exchanges: what has gone by, in the order in which requests were complete.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="capturing-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand on both ways until either side leaves; then both are closed, so that an abort stays one."""
        assert self._upstream.hostname is not None
        try:
            to_server = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        except OSError:
            writer.close()
            return
        waiting: deque[Exchange] = deque()
        requests, answers = _Requests(self.exchanges, waiting), _Answers(waiting)
        requests.parser = httptools.HttpRequestParser(requests)
        answers.parser = httptools.HttpResponseParser(answers)
        ways = [
            asyncio.ensure_future(_hand_on(reader, to_server[1], requests.parser)),
            asyncio.ensure_future(_hand_on(to_server[0], writer, answers.parser)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            writer.close()
            to_server[1].close()


async def _hand_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    parser: httptools.HttpRequestParser | httptools.HttpResponseParser,
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            with contextlib.suppress(httptools.HttpParserUpgrade, httptools.HttpParserError):
                parser.feed_data(data)
            writer.write(data)
            await writer.drain()
