"""What becomes of a connection that has to make room before anything has been done for it."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from openinfer_server.http.acceptor import Acceptor, defer_silent
from openinfer_server.http.connections import ConnectionTable, Slot
from openinfer_server.testing import DEADLINE_S


def test_connection_that_makes_room_in_the_turn_that_accepted_it_is_closed_and_not_counted() -> None:
    asyncio.run(make_room_at_once())


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_protocol_whose_connection_makes_room_as_it_connects_is_told_of_its_end(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(make_room_as_it_connects())


class Table(ConnectionTable):
    """Says when a connection's descriptor is closed."""

    def __init__(self) -> None:
        super().__init__(4)
        self.left = asyncio.Event()

    def leave(self, slot: Slot) -> None:
        super().leave(slot)
        self.left.set()


class Watched(asyncio.Protocol):
    """Has its connection make room in the moment in which it is told that there is one."""

    def __init__(self, table: ConnectionTable) -> None:
        self.lost = asyncio.Event()
        self._table = table

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._table.evict()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def make_room_as_it_connects() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    table = Table()
    watched = Watched(table)
    acceptor = Acceptor(listener, table, lambda slot: watched, context=None, handshake_timeout_s=1.0)
    acceptor.start()
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"a")
        async with asyncio.timeout(DEADLINE_S):
            await watched.lost.wait()
            await table.left.wait()
        assert table.num_open == 0
    acceptor.close()


async def make_room_at_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    table = Table()
    acceptor = Acceptor(listener, table, lambda slot: asyncio.Protocol(), context=None, handshake_timeout_s=1.0)
    with socket.create_connection(listener.getsockname()) as client:
        client.settimeout(DEADLINE_S)
        accepted, address = listener.accept()
        acceptor._take(accepted, address)  # noqa: SLF001 - the moment between accepting and connecting
        assert table.num_open == 1
        assert table.evict()  # as for a newcomer that finds no descriptor, before the loop goes on
        await acceptor.wait_closed()
        async with asyncio.timeout(DEADLINE_S):
            await table.left.wait()
        assert table.num_open == 0
        assert client.recv(1) == b""
    acceptor.close()


def test_silent_connections_are_not_accepted_before_those_that_speak() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        if not defer_silent(listener, 600.0):
            pytest.skip("this system has no TCP_DEFER_ACCEPT, or no cookies")
        for _ in range(20):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        half_closed = stack.enter_context(socket.create_connection(listener.getsockname()))
        half_closed.shutdown(socket.SHUT_WR)
        late = stack.enter_context(socket.create_connection(listener.getsockname()))
        late.sendall(b"a")
        listener.settimeout(DEADLINE_S)
        for expected in (half_closed, late):
            accepted, address = listener.accept()
            stack.enter_context(accepted)
            assert address == expected.getsockname()


def test_sockets_that_cannot_leave_silent_connections_out_are_left_as_they_are(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert not defer_silent(listener, 5.0)
