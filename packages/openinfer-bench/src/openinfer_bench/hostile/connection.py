"""`Connection`: one connection of an attacker, and what came of it.

An outcome is a status, `closed` (the server ended the connection without one), `left` (the attacker did), or `hang`
(nothing came within `PATIENCE_S`).
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 30.0
_PIECE_BYTES = 64 * 2**10
_READ_BYTES = 2**16
_LAST_BYTES = 64
_BODY_BYTES = 2**20

Outcome = str


class Connection:
    """One connection of an attacker.

    Args:
        key: of the attacker's tenant; empty for a stranger.

    Attributes:
        posted_s: when a whole request had been sent, on the monotonic clock.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: str = "") -> None:
        self._reader = reader
        self._writer = writer
        self._key = key
        self.posted_s: float | None = None

    def head(self, path: str = "/v1/completions") -> bytes:
        """Of a request, without its end and the length of its body."""
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close"]
        lines += [f"authorization: Bearer {self._key}"] if self._key else []
        return "\r\n".join([*lines, ""]).encode()

    async def post(self, body: bytes, path: str = "/v1/completions") -> None:
        """A whole request."""
        if await self.send(self.head(path) + b"content-length: %d\r\n\r\n" % len(body) + body):
            self.posted_s = time.monotonic()

    async def send(self, data: bytes) -> bool:
        """Sends all of it; returns whether the server still listened."""
        try:
            for begin in range(0, len(data), _PIECE_BYTES):
                self._writer.write(data[begin : begin + _PIECE_BYTES])
                await self._writer.drain()
        except OSError:
            return False
        return True

    async def outcome(self) -> Outcome:
        """The status, or what came instead."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await self._reader.readline()
                while line.startswith(b"HTTP/1.1 1"):  # interim: its head ends with an empty line
                    while line.strip():
                        line = await self._reader.readline()
                    line = await self._reader.readline()
        except TimeoutError:
            return "hang"
        except OSError:
            return "closed"
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"

    async def end_sending(self) -> None:
        """Closes the attacker's side alone."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def read_to_end(self) -> bytes:
        """The last bytes of an answer."""
        last = b""
        with contextlib.suppress(OSError):
            while part := await self._reader.read(_READ_BYTES):
                last = (last + part)[-_LAST_BYTES:]
        return last

    async def read_body(self) -> bytes:
        """The body of an answer whose first line has been read; empty if it is too long or not whole."""
        try:
            rest = await self._reader.read(_BODY_BYTES)
            while part := await self._reader.read(_BODY_BYTES):
                rest += part
                if len(rest) > _BODY_BYTES:
                    return b""
        except OSError:
            return b""
        return rest.partition(b"\r\n\r\n")[2]

    async def close(self) -> None:
        """Ends it."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


Attacker = Callable[[Connection], Awaitable[Outcome]]


def posting(body: bytes | Callable[[], bytes], path: str = "/v1/completions") -> Attacker:
    """Posts a body, or each time another one, and reads the answer to its end."""

    async def attack(connection: Connection) -> Outcome:
        await connection.post(body if isinstance(body, bytes) else body(), path)
        outcome = await connection.outcome()
        if outcome == "200":
            await connection.read_to_end()
        return outcome

    return attack


def in_turns(*attackers: Attacker) -> Attacker:
    """One attempt after the other makes another attack."""
    turns = itertools.cycle(attackers)

    async def attack(connection: Connection) -> Outcome:
        return await next(turns)(connection)

    return attack


def leaving(body: bytes | Callable[[], bytes], path: str = "/v1/completions", *, after_s: float = 0.0) -> Attacker:
    """Posts a body, and is gone."""

    async def attack(connection: Connection) -> Outcome:
        await connection.post(body if isinstance(body, bytes) else body(), path)
        await asyncio.sleep(after_s)
        return "left"

    return attack
