"""Requests of an attacker, and how each may be answered.

An outcome is a status, `closed` (the server ended the connection without one), `left` (the attacker did), or `hang`
(nothing came within `PATIENCE_S`).
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

PATIENCE_S = 30.0
_PIECE_BYTES = 64 * 2**10
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

Outcome = str


class Connection:
    """One connection of an attacker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

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
        except TimeoutError:
            return "hang"
        except OSError:
            return "closed"
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"

    async def close(self) -> None:
        """Ends it."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


Attacker = Callable[[Connection], Awaitable[Outcome]]


def post(body: bytes) -> bytes:
    """A whole request."""
    return _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def _posting(body: bytes) -> Attacker:
    async def attack(connection: Connection) -> Outcome:
        await connection.send(post(body))
        return await connection.outcome()

    return attack


async def _slow_head(connection: Connection) -> Outcome:
    """Sends a byte of a head now and then, and never its end."""
    answered = asyncio.ensure_future(connection.outcome())
    await connection.send(_HEAD)
    while not answered.done():
        if not await connection.send(b"x"):
            break
        await asyncio.wait((answered,), timeout=0.5)
    return await answered


async def _long_head(connection: Connection) -> Outcome:
    await connection.send(_HEAD + b"x-long: " + b"x" * 10_000_000)
    return await connection.outcome()


async def _leave(connection: Connection) -> Outcome:
    """Asks for a long answer and is gone."""
    await connection.send(post(b'{"prompt": "stone", "max_tokens": 1000, "stream": true}'))
    return "left"


def _nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of attack.

    Attributes:
        attacker: makes one attempt over a connection of its own.
        outcomes: what may come of it.
        about: one line.
    """

    attacker: Attacker
    outcomes: frozenset[Outcome]
    about: str


def _attack(attacker: Attacker, outcomes: str, about: str) -> Attack:
    return Attack(attacker, frozenset(outcomes.split()), about)


_SCHEMA = b'{"prompt": "a", "structured_outputs": {"json": %b}}'
_REGEX = b'{"prompt": "a", "structured_outputs": {"regex": "(((((a+)+)+)+)+)+$(x{1,9999}){1,9999}"}}'
_GOOD = json.dumps({"prompt": "stone " * 20, "max_tokens": 8}).encode()

ATTACKS: Mapping[str, Attack] = {
    "slow-heads": _attack(_slow_head, "408 closed 503", "heads that never end, a byte at a time"),
    "long-heads": _attack(_long_head, "431 closed", "heads of 10 MB"),
    "long-prompts": _attack(_posting(json.dumps({"prompt": [1] * 1_000_000}).encode()), "400 503", "1e6 token ids"),
    "many-choices": _attack(_posting(b'{"prompt": "a", "n": 1000000000}'), "400", "n = 1e9"),
    "deep-schemas": _attack(_posting(_SCHEMA % _nested(50_000)), "400", "a schema 50,000 deep"),
    "regexes": _attack(_posting(_REGEX), "400", "a regular expression that explodes"),
    "empty-lists": _attack(_posting(b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}"), "400 503", "2e6 empty lists"),
    "disconnects": _attack(_leave, "left closed", "clients that ask and leave"),
    "flood": _attack(_posting(_GOOD), "200 429 503 closed", "good requests, too many at once"),
}


async def run_attack(name: str, host: str, port: int, *, count: int, concurrency: int, seconds: float) -> Counter[str]:
    """Makes so many attempts, so many at once, for so long at most; returns how often each outcome came."""
    attacker = ATTACKS[name].attacker
    outcomes: Counter[str] = Counter()
    left = iter(range(count))
    end_s = time.monotonic() + seconds

    async def work() -> None:
        for _ in left:
            if time.monotonic() > end_s:
                return
            outcomes[await _attempt(attacker, host, port)] += 1

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return outcomes


async def _attempt(attacker: Attacker, host: str, port: int) -> Outcome:
    try:
        connection = Connection(*await asyncio.open_connection(host, port))
    except OSError:
        return "closed"
    try:
        return await attacker(connection)
    finally:
        await connection.close()
