"""`Acceptor`: takes the connections of one listening socket, never more than there are descriptors for.

asyncio's own accepts as many in one go as its queue is long, before it reads from any, and logs each one that finds no
descriptor. Here a turn of the event loop accepts a few; a newcomer beyond the table's capacity has a waiting one end
first; and when descriptors are short all the same, accepting pauses and one line says so.

    readable ──► accept ──► table.enter ──► (TLS handshake, within its deadline) ──► protocol ──► closed: table.leave
        └── EMFILE, ENFILE, ENOBUFS, ENOMEM ──► a waiting one ends, nothing is accepted for PAUSE_S
"""

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from openinfer_core.process.accepting import EXHAUSTED
from openinfer_server.http.connections import ConnectionTable, Slot
from openinfer_server.limits.descriptors import CLOSING
from openinfer_server.limits.shared_budget import owner_of

logger = logging.getLogger("openinfer.server")

# Few, so that what a newcomer asks is read before so many came after it that it makes room for them.
_ACCEPTS_PER_TURN = 4
_PAUSE_S = 0.1
_LOG_PERIOD_S = 60.0

# 0: a full queue refuses newcomers; else connections beyond it are told apart by a cookie (tcp(7)).
_COOKIES = Path("/proc/sys/net/ipv4/tcp_syncookies")

MakeProtocol = Callable[[Slot], asyncio.Protocol]


def defer_silent(listener: socket.socket, timeout_s: float) -> bool:
    """Leaves connections that have said nothing to the kernel, for `timeout_s` and up to twice as long, where it can.

    A client of HTTP or TLS speaks first. One that does not costs the event loop nothing until then, neither a turn nor
    a descriptor; it counts in the listener's backlog. A connection that is half closed, or has left, is not silent.

    Returns:
        Whether it can: this system has the option, for such sockets, and refuses no newcomer where a backlog is full.
    """
    with contextlib.suppress(OSError):  # no such file, and no such option of these sockets
        if hasattr(socket, "TCP_DEFER_ACCEPT") and _COOKIES.read_text("ascii").strip() != "0":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(timeout_s))
            return True
    return False


class AcceptedSocket(socket.socket):
    """The socket of a connection, which says when its descriptor is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        self._tell()

    def detach(self) -> int:
        """As uvloop ends a connection, whose descriptor it closes then."""
        fd = super().detach()
        self._tell()
        return fd

    def _tell(self) -> None:
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


class Acceptor:
    """Accepts until it is closed; has what uvicorn asks of an asyncio server.

    Args:
        listener: listens, does not block; closed by `close`.
        make_protocol: of a new connection.
        context: of TLS, or None.
        handshake_timeout_s: for TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        make_protocol: MakeProtocol,
        *,
        context: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._listener = listener
        self._table = table
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._unsaid = 0  # times that descriptors were short since that was logged
        self._say_from_s = 0.0
        self._is_closed = False

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(socket.SOMAXCONN)
        self._loop.add_reader(self._listener, self._on_readable)

    def close(self) -> None:
        """Takes no more; those that are there go on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._context is not None:
            for task in self._connecting:
                task.cancel()

    async def wait_closed(self) -> None:
        """As an asyncio server has it."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _on_readable(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._table.num_open >= self._table.capacity + CLOSING:
                return  # the next turn asks again, when what was evicted is closed
            try:
                accepted, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._rest(error)
                    return
                continue  # the client has left, or a firewall forbids it
            self._take(accepted, address)

    def _take(self, accepted: socket.socket, address: tuple[str, int] | str) -> None:
        self._enter(accepted, address, self._make_protocol)

    def _enter(self, accepted: socket.socket, address: tuple[str, int] | str, make_protocol: MakeProtocol) -> None:
        kind = (accepted.family, accepted.type, accepted.proto)
        connection = AcceptedSocket(*kind, fileno=accepted.detach())
        connection.setblocking(False)
        slot = self._table.enter(owner_of(address[0] if isinstance(address, tuple) else address))
        connection.on_close = lambda: self._table.leave(slot)
        if self._table.num_live > self._table.capacity:
            self._table.evict()
        task = self._loop.create_task(self._connect(connection, slot, make_protocol), name="openinfer-connection")
        if self._context is not None:
            # A handshake may take long. Without one a connection has its transport two turns later, and is not
            # cancelled in between: uvloop would close it without a word to its protocol, whose request may have begun.
            slot.abort = task.cancel
        self._connecting.add(task)
        task.add_done_callback(lambda task: self._has_connected(task, connection))

    def _has_connected(self, task: "asyncio.Task[None]", connection: AcceptedSocket) -> None:
        self._connecting.discard(task)
        if task.cancelled():  # before its first step: `_connect` has not seen it
            connection.close()

    async def _connect(self, connection: AcceptedSocket, slot: Slot, make_protocol: MakeProtocol) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: make_protocol(slot),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else self._handshake_timeout_s,
            )
        except (OSError, asyncio.CancelledError):  # it broke off, or was evicted or too late with its handshake
            connection.close()
            return
        slot.abort = transport.abort
        if slot.is_told_to_end or self._is_closed:
            transport.abort()

    def _rest(self, error: OSError) -> None:
        """Descriptors are short although the table has room: other files of this process or of the system have them."""
        self._table.evict()
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_PAUSE_S, self._go_on)
        self._unsaid += 1
        now_s = self._loop.time()
        if now_s >= self._say_from_s:
            logger.error(
                "no descriptor for a new connection (%s): %d connections are open; it happened %d times, and accepting "
                "pauses for %g s each time",
                error.strerror,
                self._table.num_open,
                self._unsaid,
                _PAUSE_S,
            )
            self._unsaid, self._say_from_s = 0, now_s + _LOG_PERIOD_S

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_readable)
