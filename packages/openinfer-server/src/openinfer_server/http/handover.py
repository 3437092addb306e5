"""Large requests are answered by another process of the server, which the connection itself is handed to.

    front: a large request's head is complete ──► connects, sends the descriptor and all bytes that it has read
                     │                                   │ Unix socket in a private folder
    other process:   │                          receives both, goes on as if it had accepted the connection
                     │                                   │ first byte of a response, or the connection's end: BEGUN
    front:           └── is told, and closes its own copy of the descriptor; where the other process dies before: 503

So neither the body nor what is made of it ever holds the event loop, the interpreter or, at equal priority, the
processors of those whose requests are small. A handed-over connection ends with its response, since the next request
may be one for this process. Over TLS there is nothing to hand over: the keys of a connection are in this process.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence

from openinfer_server.http.acceptor import Acceptor, MakeProtocol
from openinfer_server.http.connections import ConnectionTable

logger = logging.getLogger("openinfer.server")

MAX_WAITED_FOR = 16  # handed-over requests whose first byte is waited for: each takes a descriptor more
_BEGUN = b"\1"
_DESCRIPTOR = b"\0"  # the byte that a descriptor comes with
_RECEIVE_S = 5.0  # in which the front sends what it has read
_MAX_READ_BYTES = 4 * 2**20  # what that can be: a read of the event loop's, and the head
_CHUNK_BYTES = 2**16


class Handing:
    """One connection on its way to the other process, which has its descriptor already.

    Args:
        link: to the other process.
        read: what was read of the connection since its request began.
    """

    def __init__(self, link: socket.socket, read: Sequence[bytes]) -> None:
        self._link = link
        self._read = read

    async def finish(self, *, is_waited_for: bool) -> bool:
        """See `HandOver.finish`."""
        loop = asyncio.get_running_loop()
        with self._link:
            try:
                for part in self._read:
                    await loop.sock_sendall(self._link, part)
                self._link.shutdown(socket.SHUT_WR)
                return not is_waited_for or await loop.sock_recv(self._link, 1) == _BEGUN
            except OSError:
                return False


class HandOver:
    """Where a front hands large requests over to.

    Args:
        address: path of the socket on which the other process listens, when it is there.
        paths: of routes that any process may answer, percent-encoded.
        least_bytes: of a large body.
        want: called where the other process is not there; it may be on its way already.

    Attributes:
        num_handed_over: requests so far.
    """

    def __init__(self, address: str, paths: Iterable[str], *, least_bytes: int, want: Callable[[], None]) -> None:
        self.num_handed_over = 0
        self._address = address
        self._paths = frozenset(path.encode() for path in paths)
        self._least_bytes = least_bytes
        self._want = want
        self._num_waited_for = 0

    def takes(self, method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request is large, and one that another process may answer. One of no told length may be large."""
        if method != b"POST" or url.partition(b"?")[0] not in self._paths:
            return False
        fields = dict(headers)
        length = fields.get(b"content-length", b"")
        if length.isdigit():
            return int(length) >= self._least_bytes
        return b"transfer-encoding" in fields

    def begin(self, descriptor: int, read: Sequence[bytes]) -> Handing | None:
        """Hands a connection over; None if the other process is not there: then it is answered here."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.setblocking(False)
        try:
            link.connect(self._address)
            socket.send_fds(link, [_DESCRIPTOR], [descriptor])
        except OSError:  # not there yet, or not any more; or it has more to accept than it can
            link.close()
            self._want()
            return None
        self.num_handed_over += 1
        return Handing(link, read)

    async def finish(self, handing: Handing) -> bool:
        """Sends what was read; whether the other process begins to answer, or else has died before it did.

        Where many are waited for it is believed to.
        """
        if self._num_waited_for >= MAX_WAITED_FOR:
            return await handing.finish(is_waited_for=False)
        self._num_waited_for += 1
        try:
            return await handing.finish(is_waited_for=True)
        finally:
            self._num_waited_for -= 1


class Arrival:
    """A connection that was handed over to this process.

    Args:
        link: to the front that did.
        read: what it had read.
    """

    def __init__(self, link: socket.socket, read: bytes) -> None:
        self.read = read
        self._link = link

    def begins(self) -> None:
        """Its response begins, or it ends without one: the front need not answer for this process. Idempotent."""
        with contextlib.suppress(OSError), self._link:
            self._link.send(_BEGUN)


MakeArrived = Callable[[Arrival], MakeProtocol]


class ArrivalAcceptor(Acceptor):
    """Takes connections that other processes of the server hand over.

    Args:
        listener: listens on a Unix socket, does not block; closed by `close`.
        make_protocol: of a connection that arrived.
    """

    def __init__(self, listener: socket.socket, table: ConnectionTable, make_protocol: MakeArrived) -> None:
        super().__init__(listener, table, _no_protocol, context=None, handshake_timeout_s=_RECEIVE_S)
        self._make_arrived = make_protocol
        self._receiving: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        super().close()
        for task in self._receiving:
            task.cancel()

    def _take(self, accepted: socket.socket, address: tuple[str, int] | str) -> None:
        accepted.setblocking(False)
        task = self._loop.create_task(self._receive(accepted), name="openinfer-arrival")
        self._receiving.add(task)
        task.add_done_callback(self._receiving.discard)

    async def _receive(self, link: socket.socket) -> None:
        """What breaks here is told by the end of the link."""
        try:
            async with asyncio.timeout(_RECEIVE_S):
                connection, read = await _received(link)
        except (OSError, TimeoutError, asyncio.CancelledError):
            link.close()
            return
        try:
            address = connection.getpeername()
        except OSError:  # its client has left
            connection.close()
            Arrival(link, b"").begins()
            return
        self._enter(connection, address, self._make_arrived(Arrival(link, read)))


def _no_protocol(_: object) -> asyncio.Protocol:
    raise AssertionError("connections arrive with what is known of them")


async def _received(link: socket.socket) -> tuple[socket.socket, bytes]:
    """A connection, and all that was read of it; raises `OSError` if it does not come whole."""
    await _readable(link)
    data, descriptors, _, _ = socket.recv_fds(link, len(_DESCRIPTOR), 1)
    received = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if data != _DESCRIPTOR or len(received) != 1:
        raise ConnectionResetError("no connection came")
    (connection,) = received
    try:
        read = bytearray()
        while part := await asyncio.get_running_loop().sock_recv(link, _CHUNK_BYTES):
            read += part
            if len(read) > _MAX_READ_BYTES:
                raise ConnectionAbortedError("more was sent than a front reads at a time")
    except BaseException:
        connection.close()
        raise
    return connection, bytes(read)


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(link, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(link)
