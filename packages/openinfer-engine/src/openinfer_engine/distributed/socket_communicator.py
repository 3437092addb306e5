"""Ranks as processes, over NumPy arrays: each of them has a link to rank 0, which computes for all.

    rank 1 ──my array──►┐
    rank 2 ──my array──►├─ rank 0: waits for all, computes each rank's result ──► each its own
    rank 3 ──my array──►┘

It is how several ranks of a CPU engine run in processes of their own, and what tests the machinery that ranks on GPUs
need. A rank that dies or aborts closes its link; rank 0 then closes all others, so that none waits.
"""

import contextlib
import hmac
import secrets
import socket
import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from openinfer_core.errors import OpenInferError
from openinfer_core.process.child import connect_to
from openinfer_core.process.engine_process import Address, default_link, listening
from openinfer_core.process.wire import FrameBuffer, encode_frame
from openinfer_engine.distributed.host_collectives import HostCollective, Offer, check_alike
from openinfer_engine.distributed.host_communicator import HostCommunicator
from openinfer_engine.errors import GroupBroken
from openinfer_kernels import HostArray

_LOOK_S = 0.2  # between two looks, of the thread that lets the others in, at whether it still should
_HELLO_DEADLINE_S = 10.0
_READ_BYTES = 1 << 20


class _Ticket(msgspec.Struct, frozen=True):
    address: Address
    token: str
    host: str | None = None  # of rank 0, where ranks are on several machines


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    token: str
    rank: int


class _Array(msgspec.Struct, frozen=True, array_like=True):
    """An offer, or a result, whose operation is that of the offer."""

    operation: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, operation: str, array: HostArray) -> "_Array":
        return cls(operation, array.dtype.str, array.shape, array.tobytes())

    def array(self) -> HostArray:
        return np.frombuffer(bytearray(self.data), np.dtype(self.dtype)).reshape(self.shape)


_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_array_decoder = msgspec.msgpack.Decoder(_Array)


class SocketCommunicator(HostCommunicator):
    """One rank of a group of processes; `open` makes rank 0, `join` another one."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        links: "dict[int, _Link]",
        door: "_Door | None" = None,
        nodes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size, nodes=nodes)
        self._links = links
        self._changed = threading.Condition()
        self._broken: GroupBroken | None = None
        self._admitting: threading.Thread | None = None
        if door is not None:
            self._admitting = threading.Thread(target=self._admit, args=(door,), name="openinfer-door", daemon=True)
            self._admitting.start()

    @classmethod
    def open(
        cls, size: int, *, nodes: Sequence[int] | None = None, address: str | None = None
    ) -> "tuple[bytes, SocketCommunicator]":
        """Rank 0 of a group, which waits for the others at its first collective, and the ticket that they join by.

        The ticket is a secret: a process that has it can take part.

        Args:
            size: ranks of the group.
            nodes: the node of each rank; by default all are on one.
            address: of this machine, where ranks of others are to join.
        """
        door = _Door(address)
        return msgspec.json.encode(door.ticket), cls(0, size, links={}, door=door, nodes=nodes)

    @classmethod
    def join(cls, ticket: bytes, *, rank: int, size: int) -> "SocketCommunicator":
        """Another rank of the group that a ticket is for.

        Raises:
            GroupBroken: rank 0 is gone.
        """
        decoded = msgspec.json.decode(ticket, type=_Ticket)
        try:
            link = _Link(_connect(decoded))
            link.send(_Hello(decoded.token, rank))
        except (OSError, OpenInferError) as error:
            raise GroupBroken(f"rank {rank} cannot join: {error}") from error
        return cls(rank, size, links={0: link})

    def abort(self, error: BaseException) -> None:
        self._break(GroupBroken(f"rank {self._rank} failed: {type(error).__name__}: {error}"))

    def close(self) -> None:
        self._break(GroupBroken(f"rank {self._rank} has closed its end"))
        if self._admitting is not None:
            self._admitting.join()

    def _exchange(self, collective: HostCollective, array: HostArray) -> HostArray:
        offer = Offer(collective.name, np.asarray(array))
        try:
            self._check()
            return self._serve(collective, offer) if self._rank == 0 else self._ask(offer)
        except BaseException as error:
            self.abort(error)
            raise

    def _ask(self, offer: Offer) -> HostArray:
        try:
            self._links[0].send(_Array.of(offer.operation, offer.array))
            return self._links[0].receive().array()
        except (OSError, EOFError) as error:
            self._check()
            raise GroupBroken("the group is broken: rank 0 has left while others wait for a collective") from error

    def _serve(self, collective: HostCollective, mine: Offer) -> HostArray:
        """Rank 0's part: waits for every rank's array and sends each its result."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_whole or self._broken is not None)
        self._check()
        offers = [mine]
        for rank in range(1, self._size):
            try:
                received = self._links[rank].receive()
            except (OSError, EOFError) as error:
                self._check()
                raise GroupBroken(f"the group is broken: rank {rank} has left while others wait") from error
            offers.append(Offer(received.operation, received.array()))
        check_alike(offers)
        arrays = [offer.array for offer in offers]
        for rank in range(1, self._size):
            with contextlib.suppress(OSError):  # a rank that died meanwhile is found out at the next collective
                self._links[rank].send(_Array.of(collective.name, collective.combine(arrays, rank)))
        return collective.combine(arrays, 0)

    def _admit(self, door: "_Door") -> None:
        """Lets all others in, and closes the door: a process that is killed later leaves no socket."""
        with contextlib.closing(door):
            while not self._is_whole and self._broken is None:
                entered = door.wait(_LOOK_S)
                if entered is not None:
                    self._let_in(*entered)

    @property
    def _is_whole(self) -> bool:
        return len(self._links) == self._size - 1

    def _let_in(self, rank: int, link: "_Link") -> None:
        with self._changed:
            self._links[rank] = link
            is_late = self._broken is not None
            self._changed.notify_all()
        # The group broke while this rank came in: `_break` has closed the other links only.
        if is_late:
            link.close()

    def _check(self) -> None:
        if self._broken is not None:
            raise GroupBroken(str(self._broken)) from self._broken

    def _break(self, error: GroupBroken) -> None:
        with self._changed:
            self._broken = self._broken or error
            links = list(self._links.values())
            self._changed.notify_all()
        for link in links:
            link.close()


def _connect(ticket: _Ticket) -> socket.socket:
    if ticket.host is None:
        return connect_to(ticket.address)
    connection = socket.create_connection((ticket.host, ticket.address.tcp_port or 0), timeout=_HELLO_DEADLINE_S)
    connection.settimeout(None)
    return connection


class _Door:
    """Where rank 0 waits for the others."""

    def __init__(self, host: str | None) -> None:
        self._closing = contextlib.ExitStack()
        if host is None:
            self._listener, address = self._closing.enter_context(listening(default_link()))
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = self._closing.enter_context(socket.create_server((host, 0), family=family))
            address = Address(tcp_port=self._listener.getsockname()[1])
        self.ticket = _Ticket(address, secrets.token_hex(32), host)

    def wait(self, timeout_s: float) -> "tuple[int, _Link] | None":
        """A rank that has come within so many seconds; who does not show the token is sent away."""
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        link = _Link(connection)
        hello = link.hello()
        if hello is not None and hmac.compare_digest(hello.token.encode(), self.ticket.token.encode()):
            return hello.rank, link
        link.close()
        return None

    def close(self) -> None:
        self._closing.close()


class _Link:
    """A connection to another rank; either end waits for whole frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = FrameBuffer()
        self._arrived: deque[bytes] = deque()

    def send(self, message: msgspec.Struct) -> None:
        self._connection.sendall(encode_frame(message))

    def hello(self) -> _Hello | None:
        """The first message of another rank; None if it is none, or does not come."""
        self._connection.settimeout(_HELLO_DEADLINE_S)
        try:
            hello = _hello_decoder.decode(self._frame())
        except (OSError, EOFError, OpenInferError, msgspec.MsgspecError):
            return None
        self._connection.settimeout(None)
        return hello

    def receive(self) -> _Array:
        return _array_decoder.decode(self._frame())

    def _frame(self) -> bytes:
        while not self._arrived:
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._arrived += self._frames.feed(data)
        return self._arrived.popleft()

    def close(self) -> None:
        # Closing alone would not wake the threads that wait at either end.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
