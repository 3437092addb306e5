"""Attempts that are about connections and HTTP (what never ends, is never read, is too long), or forge turns."""

import asyncio
import json

from openinfer_bench.hostile import bodies
from openinfer_bench.hostile.connection import PATIENCE_S, Connection, Outcome

_DRIP_S = 0.5


async def idle(connection: Connection) -> Outcome:
    """Sends nothing."""
    return await connection.outcome()


async def unfinished_handshake(connection: Connection) -> Outcome:
    """Sends the beginning of TLS's first message."""
    await connection.send(b"\x16\x03\x01\x02\x00\x01")
    return await connection.outcome()


async def two_lengths(connection: Connection) -> Outcome:
    """Says two lengths of a body, which proxies and servers may read differently."""
    await connection.send(connection.head() + b"content-length: 3\r\ncontent-length: 30\r\n\r\n{}\n")
    return await connection.outcome()


async def half_closed(connection: Connection) -> Outcome:
    """Asks, ends its side of the connection, and wants the whole answer all the same."""
    await connection.post(b'{"prompt": "stone", "max_tokens": 24, "stream": true, "ignore_eos": true}')
    await connection.end_sending()
    outcome = await connection.outcome()
    return outcome if outcome != "200" or b"data: [DONE]" in await connection.read_to_end() else "cut"


async def forged_turn(connection: Connection) -> Outcome:
    """Has a chat encoded whose text spells turns: `forged` if what begins a turn occurs as often as that says."""
    await connection.post(bodies.forged_turns(), "/tokenize")
    outcome = await connection.outcome()
    if outcome != "200":
        return outcome
    ids: list[int] = json.loads(await connection.read_body() or b'{"tokens": []}')["tokens"]
    return "forged" if ids.count(ids[0] if ids else 0) > bodies.FORGED_TURNS else outcome


async def slow_head(connection: Connection) -> Outcome:
    """Sends a byte of a head now and then, and never its end."""
    return await _drip(connection, connection.head())


async def slow_body(connection: Connection) -> Outcome:
    """Sends a byte of a body now and then, and never its end."""
    return await _drip(connection, connection.head() + b"content-length: 8000000\r\n\r\n")


async def _drip(connection: Connection, begin: bytes) -> Outcome:
    answered = asyncio.ensure_future(connection.outcome())
    await connection.send(begin)
    while not answered.done():
        if not await connection.send(b"x"):
            break
        await asyncio.wait((answered,), timeout=_DRIP_S)
    return await answered


async def long_head(connection: Connection) -> Outcome:
    """Ten megabytes."""
    await connection.send(connection.head() + b"x-long: " + b"x" * 10_000_000)
    return await connection.outcome()


async def unread_stream(connection: Connection) -> Outcome:
    """Asks for many tokens with all that can be told of each, and reads none."""
    await connection.post(b'{"prompt": "stone", "max_tokens": 1900, "n": 4, "stream": true, "ignore_eos": true}')
    await asyncio.sleep(PATIENCE_S)
    return "left"
