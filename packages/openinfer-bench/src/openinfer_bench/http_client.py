"""`ask`: one HTTP request over a connection of its own, followed event by event."""

import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

DEADLINE_S = 120.0
_READ_BYTES = 2**20  # of a line; an event may hold a whole completion
LOST, HANG = 0, -1  # in the place of a status: the connection ended without an end of the answer; no end came in time


class Address(NamedTuple):
    """Of a server; with TLS, whose certificate is not checked: these clients started the server themselves."""

    host: str
    port: int
    is_tls: bool = False

    @classmethod
    def of(cls, url: str) -> "Address":
        """The server of a URL that has a port."""
        parts = urlsplit(url)
        return cls(parts.hostname or "", parts.port or 0, parts.scheme == "https")

    @property
    def url(self) -> str:
        """Without a path."""
        return f"{'https' if self.is_tls else 'http'}://{self.host}:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection; lines of up to 1 MiB can be read from it. Raises `OSError`."""
        context = unverified() if self.is_tls else None
        return await asyncio.open_connection(self.host, self.port, limit=_READ_BYTES, ssl=context)


@cache
def unverified() -> ssl.SSLContext:
    """Of a client that takes any certificate; one for all, since making one takes as long as a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass(slots=True)
class Answer:
    """What came of one request.

    Attributes:
        status: of HTTP, or `LOST`, or `HANG`.
        begin_s: on the monotonic clock, as all times.
        event_s: when each event of a stream came.
        text: of completions, all deltas in order; else the body.
        left: the client did, as it was asked to.
    """

    begin_s: float
    status: int = LOST
    end_s: float = 0.0
    event_s: list[float] = field(default_factory=list[float])
    text: str = ""
    left: bool = False

    @property
    def is_whole(self) -> bool:
        return self.status > 0 and not self.left


async def ask(
    address: Address,
    path: str,
    body: bytes | dict[str, Any],
    *,
    key: str = "",
    leave_after: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> Answer:
    """Posts a body, a dictionary as JSON; never raises for what the server or the network do.

    The client leaves after `leave_after` events.
    """
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = Answer(begin_s=time.monotonic())
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await address.connect()
            try:
                writer.write(_request(path, encoded, key))
                status = await _follow(reader, answer, leave_after)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            answer.status = status
    except TimeoutError:
        answer.status = HANG
    except (OSError, ValueError, asyncio.IncompleteReadError):
        answer.status = LOST
    answer.end_s = time.monotonic()
    return answer


def _request(path: str, body: bytes, key: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close"]
    lines += [f"authorization: Bearer {key}"] if key else []
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


async def _follow(reader: asyncio.StreamReader, answer: Answer, leave_after: int | None) -> int:
    """Reads the whole answer; returns its status, `LOST` if the end is missing."""
    line = await reader.readline()
    if not line.startswith(b"HTTP/1.1 "):
        return LOST
    status = int(line.split()[1])
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"text/event-stream" not in head:
        answer.text = (await _body(reader, head)).decode(errors="replace")
        return status
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return status
        if line.startswith(b"data: {"):
            answer.event_s.append(time.monotonic())
            answer.text += _delta(json.loads(line[6:]))
            if len(answer.event_s) == leave_after:
                answer.left = True
                return status
    return LOST


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Raises `IncompleteReadError` if it is cut."""
    _, found, rest = head.partition(b"content-length:")
    return await reader.readexactly(int(rest.split(b"\r\n")[0])) if found else await reader.read()


def _delta(event: dict[str, Any]) -> str:
    choices: list[dict[str, Any]] = event.get("choices", [])
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
