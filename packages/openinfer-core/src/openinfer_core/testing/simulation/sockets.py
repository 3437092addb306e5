"""What descriptors of a world stand for: ends of connections and pipes, and what listens.

A descriptor belongs to the process that opened it, which may have so many (`EMFILE`), and whose end closes all. What
listens is found by its address; several may listen at one (`SO_REUSEPORT`), and the seed says who gets a connection.
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.network import Medium, Side, VirtualTransport
from openinfer_core.testing.simulation.world import Process, World

LINK_DELAY_S = 20e-6  # between processes of one machine
LINK_BYTES = 1 << 16
_SEND_BYTES = 1 << 16  # that a socket takes beyond what its peer has read
_FIRST_DESCRIPTOR = 1 << 24  # no real one is as large

Address = tuple[str, int] | str


class Link(NamedTuple):
    """A connection between two processes."""

    kind: str
    """`socket` or `pipe`."""
    ends: "tuple[SocketEnd, SocketEnd]"
    processes: tuple[Process, Process]

    def stall(self, until_s: float) -> None:
        """Nothing of it arrives before."""
        self.ends[0].medium.stalled_until_s = until_s

    def cut(self) -> None:
        """Both sides find the other gone, wherever in a message that is."""
        for end in self.ends:
            side = end.successor or end
            side.call_at(end.network.world.now_s, side.peer_is_gone)


class Network:
    """Who listens where, and every descriptor of the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[Address, list[SocketEnd]] = {}
        self.ends: dict[int, SocketEnd] = {}
        self.accept_error = 0  # of the system: what accepting raises
        self._links: list[Link] = []
        self._next_descriptor = _FIRST_DESCRIPTOR
        self._next_port = 50000

    def open(self, end: "SocketEnd", process: Process) -> None:
        """Gives it a descriptor of a process; `OSError` if that has too many."""
        if len(process.ends) >= process.descriptor_limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._next_descriptor += 1
        end.descriptor, end.process = self._next_descriptor, process
        self.ends[end.descriptor] = process.ends[end.descriptor] = end

    def pair(
        self, processes: tuple[Process, Process], *, delay_s: float = LINK_DELAY_S
    ) -> "tuple[SocketEnd, SocketEnd]":
        """Two ends that are connected."""
        medium = Medium(delay_s, kernel_bytes=LINK_BYTES)
        ours, theirs = SocketEnd(self, medium), SocketEnd(self, medium)
        ours.peer, theirs.peer = theirs, ours
        self.open(ours, processes[0])
        try:
            self.open(theirs, processes[1])
        except OSError:
            ours.close()
            raise
        self.join("pipe", (ours, theirs), processes)
        return ours, theirs

    def links(self) -> list[Link]:
        """Those between processes that live, in the order in which they were made."""
        self._links = [link for link in self._links if not any(process.has_ended for process in link.processes)]
        return self._links

    def join(self, kind: str, ends: "tuple[SocketEnd, SocketEnd]", processes: tuple[Process, Process]) -> None:
        if processes[0] is not processes[1] and self.world.outside not in processes:
            self._links.append(Link(kind, ends, processes))

    def connect_client(
        self,
        loop: VirtualEventLoop,
        client: Any,
        address: Address,
        *,
        client_address: Address,
        delay_s: float,
    ) -> tuple[VirtualTransport, Process] | None:
        """Connects a protocol to what listens at an address; returns its transport, and who will accept it, if any."""
        listener = self.listener_at(address)
        if listener is None or listener.process is None:
            return None
        extra = {"peername": address, "sockname": client_address}
        transport = VirtualTransport(self.world, loop, extra=extra, medium=Medium(delay_s))
        transport.set_protocol(client)
        self.connect(transport, listener, client_address)
        client.connection_made(transport)
        return transport, listener.process

    def bind(self, end: "SocketEnd", address: Address) -> Address:
        if isinstance(address, tuple) and address[1] == 0:
            self._next_port += 1
            address = (address[0], self._next_port)
        end.address = address
        return address

    def listen(self, end: "SocketEnd") -> None:
        listening = self.listeners.setdefault(end.address, [])
        if end not in listening:
            end.is_listening = True
            listening.append(end)

    def listener_at(self, address: Address) -> "SocketEnd | None":
        """One that listens there, drawn by the seed."""
        listening = self.listeners.get(address)
        return self.world.random.choice(listening) if listening else None

    def connect(self, ours: Side, listener: "SocketEnd", client_address: Address) -> "SocketEnd":
        """Puts a connection into a listener's queue; returns its other side, which is not accepted yet."""
        theirs = SocketEnd(self, ours.medium)
        theirs.peer, theirs.peer_address, theirs.address = ours, client_address, listener.address
        ours.peer = theirs
        ours.last_arrival_s = theirs.last_arrival_s = self.world.now_s + ours.medium.delay_s
        listener.call_at(ours.last_arrival_s, lambda: listener.queue_up(theirs))
        return theirs


class SocketEnd(Side):
    """A side that keeps what arrived until it is read: what a descriptor stands for."""

    def __init__(self, network: Network, medium: Medium) -> None:
        super().__init__(network.world, medium)
        self.network = network
        self.descriptor = -1
        self.process: Process | None = None
        self.address: Address = ""
        self.peer_address: Address = ""
        self.is_listening = False
        self.is_at_end = False  # the peer says no more
        self.is_blocking = True
        self.timeout_s: float | None = None
        self.backlog: deque[SocketEnd] = deque()
        self.watchers: list[Callable[[], None]] = []
        self._arrived = bytearray()

    # --- what can be done -------------------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        return bool(self._arrived or self.backlog or self.is_at_end or self.is_over)

    @property
    def is_writable(self) -> bool:
        return len(self.unsent) < _SEND_BYTES or self.is_over or self.has_no_peer

    @property
    def has_no_peer(self) -> bool:
        return self.peer is None or self.peer.is_over

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Blocks as its time-out says; `BlockingIOError` or `TimeoutError` if that is over."""
        if is_so():
            return
        if not self.is_blocking:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        world = self._world
        due_s = None if self.timeout_s is None else world.now_s + self.timeout_s
        task = world.current
        if task is None:
            raise RuntimeError("a socket is waited for outside of all tasks")
        with self.watched(lambda: world.wake(task)):
            while not is_so():
                if due_s is not None and world.now_s >= due_s:
                    raise TimeoutError("timed out")
                world.park(None if due_s is None else due_s - world.now_s)

    @contextmanager
    def watched(self, watcher: Callable[[], None]) -> Generator[None]:
        self.watchers.append(watcher)
        try:
            yield
        finally:
            self.watchers.remove(watcher)

    def read(self, size: int) -> bytes:
        self._require_open()
        self.wait(lambda: self.is_readable)
        data = bytes(self._arrived[:size])
        del self._arrived[:size]
        if data and self.peer is not None:
            self._tell(self.peer, "was_taken", len(data))
        return data

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._require_open()
        self.wait(lambda: self.is_writable)
        if self.has_no_peer:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        taken = bytes(data[: _SEND_BYTES - len(self.unsent)])
        self.unsent += taken
        self._send()
        return len(taken)

    def end_output(self) -> None:
        """The peer is told that no more comes."""
        self._ends_after_unsent = True
        self._send()

    def close(self) -> None:
        """The peer gets what was sent, and then finds the end. Idempotent."""
        if not self.is_over:
            self.is_over = True
            for waiting in self.backlog:
                waiting.close()
            if self.is_listening:
                self.network.listeners[self.address].remove(self)
            self._leave_peer()
        self.forget()

    def _leave_peer(self) -> None:
        # What was sent arrives first.
        if self.is_over and self.peer is not None and not self.unsent:
            self._tell(self.peer, "peer_is_gone")
            self.peer = None

    def vanish(self) -> None:
        """Its process is gone."""
        self.close()

    def forget(self) -> None:
        """Its descriptor is free."""
        self.network.ends.pop(self.descriptor, None)
        if self.process is not None:
            self.process.ends.pop(self.descriptor, None)

    def _require_open(self) -> None:
        if self.is_over:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    # --- Side -------------------------------------------------------------------------------------------

    def call_at(self, when_s: float, call: Callable[[], None]) -> None:
        self._world.call_at(when_s, call)

    def queue_up(self, connection: "SocketEnd") -> None:
        """A connection waits to be accepted, or finds that nothing listens any more."""
        if self.is_over:
            connection.close()
            return
        self.backlog.append(connection)
        self._changed()

    def arrive(self, piece: bytes) -> None:
        if not self.is_over:
            self._arrived += piece
            self._changed()

    def peer_ended(self) -> None:
        self.is_at_end = True
        self._changed()

    def peer_is_gone(self) -> None:
        self.is_at_end = True
        self.peer = None
        self.unsent.clear()
        self._changed()

    def _has_room(self) -> None:
        self._leave_peer()
        self._changed()

    def _changed(self) -> None:
        for watcher in [*self.watchers]:
            watcher()

    def into_transport(self, loop: VirtualEventLoop, extra: dict[str, Any]) -> VirtualTransport:
        """A transport in its place, which begins with what has arrived; the descriptor goes when that is over."""
        peer_address, address = self.peer_address, self.address
        transport = VirtualTransport(
            self._world, loop, extra={"peername": peer_address, "sockname": address, **extra}, medium=self.medium
        )
        self.succeed(transport)
        if self._arrived:
            transport.inherit("arrive", bytes(self._arrived))
        if self.is_at_end:
            transport.inherit("peer_is_gone")
        return transport
