"""What clients of the router can do to each other: not read, send bodies without end, ask for servers that die."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from openinfer.several.child import ChildServer
from openinfer.several.front import Front
from openinfer.several.turns import CannotWake, Turns


class Model:
    """A server that answers without end, or once; it can die, and is started anew by a wake."""

    user_key = "user-key-0123456789"

    def __init__(self) -> None:
        self.wakes = 0
        self.has_ended = False
        self.may_start = True
        self.is_endless = False
        self.asked = 0
        self.has_lost_a_client = asyncio.Event()
        self.address = ("127.0.0.1", 0)
        self._listening: asyncio.Server | None = None

    async def wake(self) -> None:
        if self.has_ended and not self.may_start:
            raise CannotWake("it does not start")
        self.has_ended = False
        self.wakes += 1

    async def sleep(self) -> None:
        if self.has_ended:
            raise CannotWake("it has ended")

    async def listen(self) -> None:
        self._listening = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.address = self._listening.sockets[0].getsockname()[:2]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            body = b"x" * 65536 if self.is_endless else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"%x\r\n%b\r\n" % (len(body), body))
                await writer.drain()
                if not self.is_endless:
                    break
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except OSError:
            self.has_lost_a_client.set()
        finally:
            writer.close()

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()


@asynccontextmanager
async def routed(**options: Any) -> AsyncIterator[tuple[dict[str, Model], tuple[str, int]]]:
    """Two models of which one is awake, and where the router is asked."""
    models = {"a": Model(), "b": Model()}
    for model in models.values():
        await model.listen()
    turns = Turns(models, max_awake=1, max_waiting=4, turn_s=0.0)
    front = Front(cast("dict[str, ChildServer]", models), turns, wait_s=60.0, **options)
    try:
        yield models, await front.listen("127.0.0.1", 0)
    finally:
        await front.close()
        await turns.close()
        for model in models.values():
            model.close()


async def connect(address: tuple[str, int], body: bytes, *, length: int | None = None) -> Any:
    reader, writer = await asyncio.open_connection(*address, limit=1024)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def ask(address: tuple[str, int], model: str, **fields: object) -> int:
    """The status of the answer, which is read whole."""
    reader, writer = await connect(address, json.dumps({"model": model, **fields}).encode())
    try:
        status = int((await reader.readline()).split()[1])
        while await reader.read(1 << 16):
            pass
        return status
    finally:
        writer.close()


def on_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 120))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@on_loop
async def test_client_that_reads_nothing_does_not_keep_another_model_waiting() -> None:
    async with routed(write_timeout_s=0.2) as (models, address):
        models["a"].is_endless = True
        _, writer = await connect(address, b'{"model": "a"}')
        assert await ask(address, "b") == 200
        await models["a"].has_lost_a_client.wait()  # its request has ended at its model, too
        writer.close()


@on_loop
async def test_bodies_of_all_clients_are_bounded_together() -> None:
    async with routed(max_open_body_bytes=100_000) as (_, address):
        first, held = await connect(address, b" " * 60_000, length=1_000_000)
        second, other = await connect(address, b" " * 60_000, length=1_000_000)
        waiting = {asyncio.create_task(each.readline()): each for each in (first, second)}
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result().split()[1] for each in done] == [b"503"]
        held.close()
        other.close()
        for each in left:
            with contextlib.suppress(OSError):
                await each
        while await ask(address, "a", padding="x" * 80_000) != 200:  # until the router knows that both have left
            pass


@on_loop
async def test_server_that_has_died_is_started_again_by_the_next_request() -> None:
    async with routed() as (models, address):
        assert [await ask(address, name) for name in "ab"] == [200, 200]
        models["b"].has_ended = True
        assert await ask(address, "b") == 200
        assert models["b"].wakes == 2
        assert await ask(address, "a") == 200


@on_loop
async def test_server_that_cannot_be_started_again_is_503_for_its_own_model_alone() -> None:
    async with routed() as (models, address):
        assert await ask(address, "b") == 200
        models["b"].has_ended, models["b"].may_start = True, False
        assert [await ask(address, name) for name in "bab"] == [503, 200, 503]
        models["b"].may_start = True
        assert await ask(address, "b") == 200


@on_loop
async def test_connections_beyond_their_number_are_cut_off_and_leave_room_again() -> None:
    async with routed() as (_, address):
        idle = [await asyncio.open_connection(*address) for _ in range(1024)]
        with contextlib.suppress(OSError, IndexError):
            assert await ask(address, "a") == 0, "one more was answered"
        for _, writer in idle[:8]:
            writer.close()
        while True:
            with contextlib.suppress(OSError, IndexError):
                if await ask(address, "a") == 200:
                    break
            await asyncio.sleep(0)
        for _, writer in idle:
            writer.close()
