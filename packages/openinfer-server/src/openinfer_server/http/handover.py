"""Large requests are answered by another process of the server, which the connection itself is handed to.

    front: a large request's head is complete ──► connects, sends the descriptor and all bytes that it has read
                     │                                   │ Unix socket in a private folder
    other process:   │                          receives both, goes on as if it had accepted the connection
                     │                                   │ first byte of a response, or the connection's end: BEGUN
    front:           ├── is told, and closes its own copy of the descriptor
                     ├── BACK: what is asked for is kept in this process: it answers, with all that was read
                     └── the other process dies before: once more by the one that takes its place, then 503

So neither the body nor what is made of it ever holds the event loop, the interpreter or, at equal priority, the
processors of those whose requests are small. A handed-over connection ends with its response, since the next request
may be one for this process. What the other process reads is kept in memory that both have (`workers/kept_bytes.py`)
until it begins to answer: a request that ended one process is never answered here, where it might end this one.

Over TLS there is nothing to hand over: the keys of a connection are in this process, and its library gives neither
them nor the state of a record that is half read to another.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from openinfer_server.http.acceptor import Acceptor, MakeProtocol
from openinfer_server.http.connections import ConnectionTable
from openinfer_server.workers.kept_bytes import KEPT_BYTES, Connected, KeptBytes, num_read

logger = logging.getLogger("openinfer.server")

MAX_WAITED_FOR = 16  # handed-over requests whose first byte is waited for: each takes a descriptor more
MAX_KEPT = 8  # of these, requests whose bytes are kept: each takes one more, and `KEPT_BYTES` at most
_BEGUN = b"\1"
_BACK = b"\2"
_ALONE, _WITH_KEPT = b"\0", b"\3"  # the byte that a connection's descriptor comes with, and that of what is kept
MAX_FRAMING_BYTES = 2**17  # of a head and of what follows its request
_RECEIVE_S = 5.0  # in which the front sends what it has read
_MAX_READ_BYTES = 4 * 2**20 + KEPT_BYTES  # what that can be: a read of the event loop's, the head, what was kept
_CHUNK_BYTES = 2**16
_REPLACED_S = 60.0  # in which another process takes the place of one that died
_LOOK_EVERY_S = 0.05
_MOST_SAME = 40
_CREDENTIALS = struct.Struct("3i")  # Linux's ucred: process, user, group


class Handed(Enum):
    """What came of a connection that was handed over."""

    LET_GO = "the other process answers, or is believed to"
    GIVEN_BACK = "this process is to answer"
    LOST = "the other process has died"


class Handing:
    """One connection on its way to the other process, which has its descriptor already.

    Args:
        connection: of which the front has a descriptor of its own.
        read: what was read of it since its request began.
        kept: what the other process reads of it; None where that is not kept.
        is_waited_for: whether the front waits for what the other process does with it.

    Attributes:
        link: to the other process.
        pid: of that process; 0 before there is a link.
        num_same: how often that process was found again, which has lost the link.
    """

    def __init__(
        self, connection: Connected, read: Sequence[bytes], kept: KeptBytes | None, *, is_waited_for: bool
    ) -> None:
        self.connection = connection
        self.read = read
        self.kept = kept
        self.is_waited_for = is_waited_for
        self.link: socket.socket | None = None
        self.pid = self.num_same = 0
        self._num_read_before = None if kept is None else num_read(connection)

    def all_read(self) -> bytes | None:
        """All bytes of the connection since its request began; None if some are not known."""
        if self.kept is None or self._num_read_before is None:
            return None
        kept = self.kept.all()
        is_whole = num_read(self.connection) == self._num_read_before + len(kept)
        return b"".join((*self.read, kept)) if is_whole else None

    def close(self) -> None:
        """Idempotent."""
        for each in (self.link, self.kept):
            if each is not None:
                each.close()


class HandOver:
    """Where a front hands large requests over to.

    Args:
        address: path of the socket on which the other process listens, when it is there.
        paths: of routes that any process may answer, percent-encoded.
        returning: of routes some of whose requests the other process gives back.
        least_bytes: of a large body.
        want: called where the other process is not there; it may be on its way already.

    Attributes:
        num_handed_over: requests so far.
        num_repeated: those whose process died, and which were handed to the next.
        num_given_back: those that the other process gave back.
    """

    def __init__(
        self,
        address: str,
        paths: Iterable[str],
        *,
        returning: Iterable[str] = (),
        least_bytes: int,
        want: Callable[[], None],
    ) -> None:
        self.num_handed_over = self.num_repeated = self.num_given_back = 0
        self._address = address
        self._paths = frozenset(path.encode() for path in paths)
        self._returning = frozenset(path.encode() for path in returning)
        self._least_bytes = least_bytes
        self._want = want
        self._num_waited_for = self._num_kept = 0

    def takes(self, method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request is large, and one that another process may answer. One of no told length may be large."""
        path = url.partition(b"?")[0]
        may_return = path in self._returning
        if method != b"POST" or not (may_return or path in self._paths):
            return False
        fields = dict(headers)
        length = fields.get(b"content-length", b"")
        if may_return and not (length.isdigit() and self._can_keep(int(length))):
            return False
        if length.isdigit():
            return int(length) >= self._least_bytes
        return b"transfer-encoding" in fields

    def _can_keep(self, num_bytes: int) -> bool:
        has_room = self._num_kept < MAX_KEPT and self._num_waited_for < MAX_WAITED_FOR
        return has_room and num_bytes + MAX_FRAMING_BYTES <= KEPT_BYTES

    def begin(self, connection: Connected, read: Sequence[bytes]) -> Handing | None:
        """Hands a connection over, which is to be finished and released; None if the other process is not there.

        Where many are waited for, the other process is believed to answer this one.
        """
        try:
            kept = KeptBytes.create() if self._can_keep(0) else None
        except OSError:  # no descriptor, or no memory
            return None
        handing = Handing(connection, read, kept, is_waited_for=self._num_waited_for < MAX_WAITED_FOR)
        if not self._reach(handing):
            handing.close()
            self._want()
            return None
        self.num_handed_over += 1
        self._num_waited_for += handing.is_waited_for
        self._num_kept += kept is not None
        return handing

    def release(self, handing: Handing) -> None:
        """Frees what one that was begun holds; once."""
        self._num_waited_for -= handing.is_waited_for
        self._num_kept -= handing.kept is not None
        handing.close()

    def _reach(self, handing: Handing) -> bool:
        """Whether the other process is there, and another than had it before; if so, it has the descriptors."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.setblocking(False)
        kept = [] if handing.kept is None else [handing.kept.descriptor]
        try:
            link.connect(self._address)
            pid = _peer(link)
            if pid != handing.pid:  # else it is dying, and its link was closed before its listening socket is
                socket.send_fds(link, [_WITH_KEPT if kept else _ALONE], [handing.connection.fileno(), *kept])
                handing.link, handing.pid = link, pid
                return True
            handing.num_same += 1
        except OSError:  # not there yet, or not any more; or it has more to accept than it can
            pass
        link.close()
        return False

    async def finish(self, handing: Handing) -> tuple[Handed, bytes]:
        """Sends what was read; what came of it, and if it was given back, all bytes since its request began.

        A request whose process dies before it begins to answer is handed to the next one, once.
        """
        told = await _told(handing.link, handing.read, is_waited_for=handing.is_waited_for)
        if told is Handed.LOST and (read := handing.all_read()) is not None and await self._reach_next(handing):
            self.num_repeated += 1
            told = await _told(handing.link, [read], is_waited_for=True)
        if told is not Handed.GIVEN_BACK:
            return told, b""
        self.num_given_back += 1
        back = handing.all_read()
        return (Handed.LOST, b"") if back is None else (told, back)

    async def _reach_next(self, handing: Handing) -> bool:
        """Waits for the process that takes the place of one that died; whether it came."""
        for _ in range(round(_REPLACED_S / _LOOK_EVERY_S)):
            if self._reach(handing):
                return True
            if handing.num_same > _MOST_SAME:  # it lives, and could not take it
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return False


def _peer(link: socket.socket) -> int:
    """The process that listens at the other end."""
    return _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]


async def _told(link: socket.socket | None, parts: Sequence[bytes], *, is_waited_for: bool) -> Handed:
    """Sends what was read of a connection, and waits for what the other process does with it."""
    if link is None:
        return Handed.LOST
    loop = asyncio.get_running_loop()
    with link:
        try:
            for part in parts:
                await loop.sock_sendall(link, part)
            link.shutdown(socket.SHUT_WR)
            told = await loop.sock_recv(link, 1) if is_waited_for else _BEGUN
        except OSError:
            told = b""
    return {_BEGUN: Handed.LET_GO, _BACK: Handed.GIVEN_BACK}.get(told, Handed.LOST)


class Arrival:
    """A connection that was handed over to this process.

    Args:
        link: to the front that did.
        read: what it had read.
        kept: where what is read from now on is kept, until the front is told; None where it is not.

    Attributes:
        abandon: ends this process's part of the connection without a word to its client; set by its protocol.
    """

    def __init__(self, link: socket.socket, read: bytes, kept: KeptBytes | None = None) -> None:
        self.read = read
        self.abandon: Callable[[], None] = _nothing
        self._link = link
        self._kept = kept

    def reads(self, data: bytes) -> None:
        """Called with all that is read of the connection, before anything is done with it."""
        if self._kept is not None:
            self._kept.add(data)

    def begins(self) -> None:
        """Its response begins, or it ends without one: the front need not answer for this process. Idempotent."""
        self._tell(_BEGUN)

    def goes_back(self) -> bool:
        """Gives the connection back to the front, which answers; False if its response has begun."""
        if self._kept is None:
            return False
        self.abandon()
        self._tell(_BACK)
        return True

    def _tell(self, what: bytes) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        with contextlib.suppress(OSError), self._link:
            self._link.send(what)


def _nothing() -> None:
    pass


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
                connection, read, kept = await _received(link)
        except (OSError, TimeoutError, asyncio.CancelledError):
            link.close()
            return
        try:
            address = connection.getpeername()
        except OSError:  # its client has left
            connection.close()
            Arrival(link, b"", kept).begins()
            return
        self._enter(connection, address, self._make_arrived(Arrival(link, read, kept)))


def _no_protocol(_: object) -> asyncio.Protocol:
    raise AssertionError("connections arrive with what is known of them")


async def _received(link: socket.socket) -> tuple[socket.socket, bytes, KeptBytes | None]:
    """A connection, what was read of it, and where the rest is kept; raises `OSError` if it does not come whole."""
    await _readable(link)
    data, descriptors, _, _ = socket.recv_fds(link, len(_ALONE), 2)
    if len(descriptors) != {_ALONE: 1, _WITH_KEPT: 2}.get(data):  # fewer where this process may open no more
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionResetError("no connection came")
    connection = socket.socket(fileno=descriptors[0])
    kept = KeptBytes(descriptors[1]) if len(descriptors) > 1 else None
    try:
        read = bytearray()
        while part := await asyncio.get_running_loop().sock_recv(link, _CHUNK_BYTES):
            read += part
            if len(read) > _MAX_READ_BYTES:
                raise ConnectionAbortedError("more was sent than a front reads at a time")
    except BaseException:
        connection.close()
        if kept is not None:
            kept.close()
        raise
    return connection, bytes(read), kept


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(link, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(link)
