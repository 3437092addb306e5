"""What becomes of a connection that has to make room before anything has been done for it."""

import asyncio
import socket

from openinfer_server.http.acceptor import Acceptor
from openinfer_server.http.connections import ConnectionTable


def test_connection_that_makes_room_in_the_turn_that_accepted_it_is_closed_and_not_counted() -> None:
    asyncio.run(make_room_at_once())


async def make_room_at_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    table = ConnectionTable(4)
    acceptor = Acceptor(listener, table, lambda slot: asyncio.Protocol(), context=None, handshake_timeout_s=1.0)
    with socket.create_connection(listener.getsockname()) as client:
        client.settimeout(5.0)
        accepted, address = listener.accept()
        acceptor._take(accepted, address)  # noqa: SLF001 - the moment between accepting and connecting
        assert table.num_open == 1
        assert table.evict()  # as for a newcomer that finds no descriptor, before the loop goes on
        await acceptor.wait_closed()
        await asyncio.sleep(0)
        assert table.num_open == 0
        assert client.recv(1) == b""
    acceptor.close()
