"""Large requests are answered by another process of the server, which the connection itself is handed to.

    front: a large request's head is complete: nothing is read any more
                     │   the other process was never there: up to MAX_WAITED_FOR requests wait for its first start,
                     │   FIRST_START_S at most; what comes beyond, or after that, is answered in this process
                     ├──► connects, sends the descriptor and all bytes that it has read, MAX_SENDING at a time
                     │                                   │ Unix socket in a private folder
    other process:   │                          receives both, goes on as if it had accepted the connection
                     │                                   │ first byte of a response, or the connection's end: BEGUN
    front:           ├── is told, and closes its own copy of the descriptor; if many wait so, without being told
                     ├── BACK: what is asked for is kept in this process: it answers, with all that was read
                     └── the other process dies before: once more by the one that takes its place, then 503

A request that ended two processes ends no third, and neither do others of its owner for a while (`suspects.py`). So
that the right one is found, those that were lost are repeated one after the other, each alone for `ALONE_S`; what comes
meanwhile, or while there is no process after a death, waits with them: what may have ended one is not answered here.

There may be several such processes (`--large-request-workers`). Those that a conversation's turns come to must be one,
which has its tokens (`text/known_prefixes.py`): a place is a digest of the owner and of the body's first bytes, which
are looked at where they lie in the kernel. Conversations that begin alike for as long share one, and bodies that come
slowly or tell no length are placed by their owner alone.

So neither the body nor what is made of it ever holds the event loop, the interpreter or, at equal priority, the
processors of those whose requests are small. A handed-over connection ends with its response, since the next request
may be one for this process. What the other process reads is kept in memory that both have (`workers/kept_bytes.py`)
until it begins to answer: a request that ended one process is never answered here, where it might end this one.

Over TLS there is nothing to hand over: the keys of a connection are in this process, and its library gives neither
them nor the state of a record that is half read to another.
"""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from openinfer_core.process.accepting import EXHAUSTED
from openinfer_server.http.acceptor import Acceptor, MakeProtocol
from openinfer_server.http.connections import ConnectionTable
from openinfer_server.limits.descriptors import MAX_KEPT, MAX_SENDING, MAX_WAITED_FOR
from openinfer_server.limits.shared_budget import owner_of
from openinfer_server.limits.suspects import Suspects
from openinfer_server.workers.kept_bytes import KEPT_BYTES, Connected, KeptBytes, num_read

logger = logging.getLogger("openinfer.server")

_BEGUN = b"\1"
_BACK = b"\2"
# The byte that a connection's descriptor comes with, and that of what is kept, and of a connection whose front does not
# wait to be told.
_ALONE, _WITH_KEPT, _UNWAITED = b"\0", b"\3", b"\4"
_DESCRIPTORS = {_ALONE: 1, _WITH_KEPT: 2, _UNWAITED: 1}
MAX_FRAMING_BYTES = 2**17  # of a head and of what follows its request
ALONE_S = 2.0  # for which a request that is repeated has the other process for itself: what ends that does so soon
_MAX_TRIES = 2  # processes that one request may end
_RECEIVE_S = 5.0  # in which the front sends what it has read
_MAX_READ_BYTES = 4 * 2**20 + KEPT_BYTES  # what that can be: a read of the event loop's, the head, what was kept
_CHUNK_BYTES = 2**16
FIRST_START_S = 20.0  # for which large requests wait for the other process to be there for the first time
_SHORT = EXHAUSTED | {errno.ETOOMANYREFS}  # of descriptors, also of those on their way through sockets
_REPLACED_S = 60.0  # in which another process takes the place of one that died
_LOOK_EVERY_S = 0.05
_MOST_SAME = 40
PLACED_BY_BYTES = 2**15  # of a body; more would not fit into what the kernel takes of a connection that is not read
_PLACED_WITHIN_S = 0.25  # in which they come, or its owner alone decides
_PEEK_AGAIN_S = 0.002
Headers = Sequence[tuple[bytes, bytes]]  # names in lower case
_CREDENTIALS = struct.Struct("3i")  # Linux's ucred: process, user, group


class Handed(Enum):
    """What came of a connection that was handed over."""

    LET_GO = "the other process answers, or is believed to"
    GIVEN_BACK = "this process is to answer"
    LOST = "the other process has died"


class _Found(Enum):
    """What came of a connection's first try to reach the other process."""

    THERE = "it has the connection"
    ABSENT = "it is not there, and not waited for any longer"
    DEAD = "it has died, or cannot take any more: as if it had died with this one"


class Handing:
    """One connection on its way to the other process, of which nothing is read here any more.

    Args:
        connection: of which the front has a descriptor of its own.
        owner: whose request it is: the tenant, or the client's address without one.
        read: what was read of it since its request began.
        is_kept: whether what the other process reads of it is kept.
        is_waited_for: whether the front waits for what the other process does with it.

    Attributes:
        kept: what the other process reads of it, once it has the connection.
        link: to the other process.
        pid: of that process; 0 before there is a link.
        num_tries: processes that it was given to.
        num_same: how often that process was found again, which has lost the link, or took no more, or descriptors were
            short.
        place: where it is handed over to.
    """

    place: "_Place"

    def __init__(
        self,
        connection: Connected,
        read: Sequence[bytes],
        *,
        owner: str,
        is_kept: bool,
        is_waited_for: bool,
    ) -> None:
        self.connection = connection
        self.owner = owner
        self.read = read
        self.is_kept = is_kept
        self.is_waited_for = is_waited_for
        self.kept: KeptBytes | None = None
        self.link: socket.socket | None = None
        self.pid = self.num_same = self.num_tries = 0
        self._num_read_before = num_read(connection) if is_kept else None

    def keep(self) -> KeptBytes | None:
        """Where what is read from now on is kept, if it is; raises `OSError` without descriptors or memory."""
        if self.is_kept and self.kept is None:
            self.kept = KeptBytes.create()
        return self.kept

    def all_read(self) -> bytes | None:
        """All bytes of the connection since its request began; None if some are not known."""
        if not self.is_kept or self._num_read_before is None:
            return None
        kept = b"" if self.kept is None else self.kept.all()
        is_whole = num_read(self.connection) == self._num_read_before + len(kept)
        return b"".join((*self.read, kept)) if is_whole else None

    def close(self) -> None:
        """Idempotent."""
        for each in (self.link, self.kept):
            if each is not None:
                each.close()


class _Place:
    """One of the other processes, or what takes its place.

    Args:
        address: path of the socket on which it listens, when it is there.

    Attributes:
        num_lost: requests that wait to be repeated, or are being.
        was_there: whether it ever was.
        gone_s: when it, which was there, was first not found; None if it is.
        one_at_a_time: held by the request that is repeated.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_lost = 0
        self.was_there = False
        self.gone_s: float | None = None
        self.one_at_a_time = asyncio.Lock()

    def is_awaited(self) -> bool:
        """Whether the process has died, and the next one is on its way."""
        return self.gone_s is not None and _now_s() - self.gone_s < _REPLACED_S


class HandOver:
    """Where a front hands large requests over to.

    Args:
        addresses: paths of the sockets on which the other processes listen, when they are there; all fronts'.
        paths: of routes that any process may answer, percent-encoded.
        returning: of routes some of whose requests the other process gives back.
        least_bytes: of a large body.
        want: called once, when the first large request comes.
        tenant_of: whose request it is by its headers; empty where that is not known.
        first_start_s: for which large requests wait for the other processes to be there for the first time.

    Attributes:
        num_handed_over: requests so far.
        num_repeated: those whose process died, and which were handed to the next.
        num_given_back: those that the other process gave back.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        paths: Iterable[str],
        *,
        returning: Iterable[str] = (),
        least_bytes: int,
        want: Callable[[], None],
        tenant_of: Callable[[Headers], str],
        first_start_s: float = FIRST_START_S,
    ) -> None:
        self.num_handed_over = self.num_repeated = self.num_given_back = 0
        self._places = [_Place(address) for address in addresses]
        self._paths = frozenset(path.encode() for path in paths)
        self._returning = frozenset(path.encode() for path in returning)
        self._least_bytes = least_bytes
        self._want = want
        self._tenant_of = tenant_of
        self._num_waited_for = self._num_kept = 0
        self._suspects = Suspects()
        self._first_start_s = first_start_s
        self._wanted_s: float | None = None  # when the other processes were asked for
        self._sending = asyncio.Semaphore(MAX_SENDING)

    def suspected_s(self, owner: str) -> float:
        """For how much longer large requests of an owner are refused, one of whose ended two processes."""
        return self._suspects.left_s(owner, now_s=_now_s())

    def owner(self, headers: Headers, address: str) -> str:
        """Whose share a request of a client at this address is of, as `HttpRequest.owner` has it."""
        return self._tenant_of(headers) or owner_of(address)

    def takes(self, method: bytes, url: bytes, headers: Headers) -> bool:
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

    def begin(self, connection: Connected, read: Sequence[bytes], owner: str) -> Handing | None:
        """A large request, which is to be finished and released; None if it is to be answered here.

        No descriptor is opened yet: many requests may come in one turn of the event loop. Where many are waited for,
        the other process is believed to answer this one, if it has ever been there.
        """
        is_waited_for = self._num_waited_for < MAX_WAITED_FOR
        if self._wanted_s is None:
            self._wanted_s = _now_s()
            self._want()
        if not is_waited_for and not any(place.was_there for place in self._places):
            return None
        handing = Handing(connection, read, owner=owner, is_kept=self._can_keep(0), is_waited_for=is_waited_for)
        self._num_waited_for += handing.is_waited_for
        self._num_kept += handing.is_kept
        return handing

    def _is_coming(self, place: _Place) -> bool:
        """Whether the other process may yet be there for the first time."""
        is_new = not place.was_there and self._wanted_s is not None
        return is_new and _now_s() - (self._wanted_s or 0.0) < self._first_start_s

    async def _placed(self, handing: Handing) -> _Place:
        """Where the turns of its conversation are handed over to, whichever front they come to."""
        if len(self._places) == 1:
            return self._places[0]
        digest = hashlib.blake2b(handing.owner.encode("utf-8", "surrogatepass") + b"\0", digest_size=8)
        digest.update(await _beginning(handing, min(PLACED_BY_BYTES, self._least_bytes)))
        return self._places[int.from_bytes(digest.digest(), "little") % len(self._places)]

    def release(self, handing: Handing) -> None:
        """Frees what one that was begun holds; once."""
        self._num_waited_for -= handing.is_waited_for
        self._num_kept -= handing.is_kept
        handing.close()

    def _reach(self, handing: Handing, *, is_waited_for: bool = True) -> bool:
        """Whether the other process is there, and another than had it before; if so, it has the descriptors."""
        place = handing.place
        try:
            kept = handing.keep()
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            handing.num_same += 1
            return False
        link.setblocking(False)
        kinds = {True: _WITH_KEPT, False: _ALONE if is_waited_for else _UNWAITED}
        try:
            link.connect(place.address)
            pid = _peer(link)
            if pid != handing.pid:  # else it is dying, and its link was closed before its listening socket is
                further = [] if kept is None else [kept.descriptor]
                socket.send_fds(link, [kinds[kept is not None]], [handing.connection.fileno(), *further])
                handing.link, handing.pid = link, pid
                handing.num_tries += 1
                place.was_there, place.gone_s = True, None
                return True
            handing.num_same += 1
        except BlockingIOError:  # it has more to accept than it can
            handing.num_same += 1
        except OSError as error:
            if error.errno in _SHORT:
                handing.num_same += 1
            elif place.was_there and place.gone_s is None:  # not there any more
                place.gone_s = _now_s()
        link.close()
        return False

    async def _find(self, handing: Handing) -> _Found:
        """Gives a connection to the other process for the first time."""
        place = handing.place
        while not place.num_lost:
            if self._reach(handing, is_waited_for=handing.is_waited_for):
                self.num_handed_over += 1
                return _Found.THERE
            if place.is_awaited() or handing.num_same > _MOST_SAME:
                break
            if not handing.num_same and not self._is_coming(place):
                return _Found.ABSENT
            await asyncio.sleep(_LOOK_EVERY_S)
        return _Found.DEAD

    async def finish(self, handing: Handing) -> tuple[Handed, bytes]:
        """Hands it over with what was read; what came of it, and if it was given back, all bytes since it began.

        A request whose process dies before it begins to answer is handed to the next one, once. One that found no
        process where none was for long is given back, too.
        """
        place = handing.place = await self._placed(handing)
        async with self._sending:
            found = await self._find(handing)
            if found is _Found.ABSENT:
                return Handed.GIVEN_BACK, b"".join(handing.read)
            is_sent = found is _Found.THERE and await _is_sent(handing.link, handing.read)
            if is_sent and not handing.is_waited_for:
                handing.close()
                return Handed.LET_GO, b""
        told = await _told(handing.link) if is_sent else Handed.LOST
        if told is Handed.LOST:
            place.num_lost += 1
            try:
                told = await self._repeat(handing)
            finally:
                place.num_lost -= 1
        if told is not Handed.GIVEN_BACK:
            return told, b""
        self.num_given_back += 1
        back = handing.all_read()
        return (Handed.LOST, b"") if back is None else (told, back)

    async def _repeat(self, handing: Handing) -> Handed:
        """Gives a lost request to the next process when it is its turn; its owner is suspected if that dies, too."""
        told = Handed.LOST
        while told is Handed.LOST and handing.num_tries < _MAX_TRIES:
            async with handing.place.one_at_a_time:
                if self.suspected_s(handing.owner) or (read := handing.all_read()) is None:
                    return told
                self.num_repeated += handing.num_tries > 0
                if not await self._reach_next(handing):
                    return told
                telling = asyncio.create_task(_sent_and_told(handing.link, [read]))
                try:
                    await asyncio.wait((telling,), timeout=ALONE_S)
                except asyncio.CancelledError:
                    telling.cancel()
                    raise
            told = await telling
        if told is Handed.LOST:
            self._suspects.add(handing.owner, now_s=_now_s())
            logger.error("a request has ended %d processes; large ones of its owner are refused", handing.num_tries)
        return told

    async def _reach_next(self, handing: Handing) -> bool:
        """Waits for the process that takes the place of one that died; whether it came."""
        while not self._reach(handing):
            if handing.num_same > _MOST_SAME:  # it lives, and could not take it
                return False
            if handing.place.gone_s is not None and not handing.place.is_awaited():
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True


async def _beginning(handing: Handing, num_bytes: int) -> bytes:
    """So many of a body's first bytes; none where they do not come soon, or may be told in parts of any size."""
    head, _, body = b"".join(handing.read).partition(b"\r\n\r\n")
    if b"\ntransfer-encoding:" in head.lower():
        return b""
    end_s = _now_s() + _PLACED_WITHIN_S
    while len(beginning := body[:num_bytes] + _peeked(handing.connection, num_bytes - len(body))) < num_bytes:
        if _now_s() > end_s:
            return b""
        await asyncio.sleep(_PEEK_AGAIN_S)
    return beginning


def _peeked(connection: Connected, most: int) -> bytes:
    """What has come of a connection, which stays there to be read."""
    if most <= 0 or connection.fileno() < 0:
        return b""
    twin = socket.socket(fileno=connection.fileno())  # event loops hide what reads
    try:
        return twin.recv(most, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:  # nothing has come, or its client has left
        return b""
    finally:
        twin.detach()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _peer(link: socket.socket) -> int:
    """The process that listens at the other end."""
    return _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]


async def _is_sent(link: socket.socket | None, parts: Sequence[bytes]) -> bool:
    """Sends what was read of a connection; whether the other process was there to take it."""
    if link is None:
        return False
    try:
        for part in parts:
            await asyncio.get_running_loop().sock_sendall(link, part)
        link.shutdown(socket.SHUT_WR)
    except OSError:
        return False
    return True


async def _told(link: socket.socket | None) -> Handed:
    """Waits for what the other process does with a connection."""
    if link is None:
        return Handed.LOST
    with link:
        try:
            told = await asyncio.get_running_loop().sock_recv(link, 1)
        except OSError:
            told = b""
    return {_BEGUN: Handed.LET_GO, _BACK: Handed.GIVEN_BACK}.get(told, Handed.LOST)


async def _sent_and_told(link: socket.socket | None, parts: Sequence[bytes]) -> Handed:
    return await _told(link) if await _is_sent(link, parts) else Handed.LOST


class Arrival:
    """A connection that was handed over to this process.

    Args:
        link: to the front that did; None where that does not wait to be told.
        read: what it had read.
        kept: where what is read from now on is kept, until the front is told; None where it is not.

    Attributes:
        abandon: ends this process's part of the connection without a word to its client; set by its protocol.
    """

    def __init__(self, link: socket.socket | None, read: bytes, kept: KeptBytes | None = None) -> None:
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
        if self._link is not None:
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
                connection, read, kept, is_waited_for = await _received(link)
        except (OSError, TimeoutError, asyncio.CancelledError):
            link.close()
            return
        if not is_waited_for:
            link.close()
        arrival = Arrival(link if is_waited_for else None, read, kept)
        try:
            address = connection.getpeername()
        except OSError:  # its client has left
            connection.close()
            arrival.begins()
            return
        self._enter(connection, address, self._make_arrived(arrival))


def _no_protocol(_: object) -> asyncio.Protocol:
    raise AssertionError("connections arrive with what is known of them")


async def _received(link: socket.socket) -> tuple[socket.socket, bytes, KeptBytes | None, bool]:
    """A connection, what was read of it, where the rest is kept, and whether its front waits to be told.

    Raises:
        OSError: it did not come whole.
    """
    await _readable(link)
    data, descriptors, _, _ = socket.recv_fds(link, len(_ALONE), 2)
    if len(descriptors) != _DESCRIPTORS.get(data):  # fewer where this process may open no more
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
    return connection, bytes(read), kept, data != _UNWAITED


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(link, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(link)
