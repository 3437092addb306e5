"""Connections: between protocols, each in an event loop of its own, and between sockets (`sockets.py`).

Bytes arrive in the order in which they were sent, after a delay, cut at places that the seed chooses. A side that does
not read holds up the other: a protocol is paused at the high-water mark, a socket takes no more.

    Side ◄──arrive, ended, gone──► Side        VirtualTransport: calls a protocol        SocketEnd: keeps what arrived
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.world import World

# Smaller than a real system's, so that streams of a few tokens meet what long ones would.
_HIGH_WATER, _LOW_WATER = 8192, 2048
_KERNEL_BYTES = 4096  # what a reader that does not read takes all the same
_LARGEST_PIECE = 65536
_CUT_RATE = 0.1  # of pieces, those that end somewhere
_TICK_S = 1e-9  # between two arrivals: an event loop keeps no order of calls for the same moment


class Medium:
    """What both sides of a connection have in common.

    Attributes:
        delay_s: of most bytes.
        stalled_until_s: nothing arrives before.
        kernel_bytes: what a side that does not read takes.
    """

    def __init__(self, delay_s: float, *, kernel_bytes: int = _KERNEL_BYTES) -> None:
        self.delay_s = delay_s
        self.kernel_bytes = kernel_bytes
        self.stalled_until_s = 0.0


class Side:
    """One side of a connection: what is on its way to the other, and what the other sends."""

    def __init__(self, world: World, medium: Medium) -> None:
        self._world = world
        self.medium = medium
        self.peer: Side | None = None
        self.last_arrival_s = 0.0
        self.is_over = False
        self.unsent: bytearray = bytearray()
        self.taken_bytes = 0  # sent, and not yet read by the peer
        self._ends_after_unsent = False
        self.successor: Side | None = None
        self._inherited_s = 0.0

    # --- for the other side -----------------------------------------------------------------------------

    def arrive(self, piece: bytes) -> None:
        raise NotImplementedError

    def peer_ended(self) -> None:
        raise NotImplementedError

    def peer_is_gone(self) -> None:
        raise NotImplementedError

    def was_taken(self, size: int) -> None:
        """The peer has read so many bytes."""
        self.taken_bytes -= size
        # Not for every small piece, or pieces would become smaller and smaller (silly window syndrome, RFC 813).
        room = self.medium.kernel_bytes - self.taken_bytes
        if room >= min(len(self.unsent), self.medium.kernel_bytes // 2):
            self._send()
        self._has_room()

    def _has_room(self) -> None:
        raise NotImplementedError

    def call_at(self, when_s: float, call: Callable[[], None]) -> None:
        raise NotImplementedError

    # --- bytes on their way ------------------------------------------------------------------------------

    def _send(self) -> None:
        peer = self.peer
        if peer is None or peer.is_over:
            self.unsent.clear()
            return
        draw = self._world.random
        while self.unsent and self.taken_bytes < self.medium.kernel_bytes:
            most = min(len(self.unsent), _LARGEST_PIECE, self.medium.kernel_bytes - self.taken_bytes)
            size = draw.randint(1, most) if draw.random() < _CUT_RATE else most
            piece = bytes(self.unsent[:size])
            del self.unsent[:size]
            self.taken_bytes += size
            self._tell(peer, "arrive", piece)
        if self._ends_after_unsent and not self.unsent:
            self._ends_after_unsent = False
            self._tell(peer, "peer_ended")

    def _tell(self, peer: "Side", what: str, *arguments: Any) -> None:
        """Calls a method of the other side when the news of it arrives: never before what was sent earlier."""
        medium = self.medium
        arrives_s = self._world.now_s + medium.delay_s * (0.5 + self._world.random.random())
        self.last_arrival_s = max(self.last_arrival_s + _TICK_S, arrives_s, medium.stalled_until_s)
        call = partial(_call_present, peer, what, *arguments)
        peer.call_at(self.last_arrival_s, call)

    def succeed(self, successor: "Side") -> None:
        """Another side takes this one's place, with all that is on its way."""
        successor.peer, successor.last_arrival_s = self.peer, self.last_arrival_s
        successor.unsent += self.unsent
        successor.taken_bytes = self.taken_bytes
        if self.peer is not None:
            self.peer.peer = successor
        self.successor = successor
        self.is_over = True

    def inherit(self, what: str, *arguments: Any) -> None:
        """What arrived at the side whose place this one has taken, in the same order."""
        self._inherited_s = max(self._inherited_s + _TICK_S, self._world.now_s)
        self.call_at(self._inherited_s, partial(getattr(self, what), *arguments))


def _call_present(side: Side, what: str, *arguments: Any) -> None:
    if side.successor is None:
        getattr(side, what)(*arguments)
    else:
        side.successor.inherit(what, *arguments)


class VirtualTransport(asyncio.Transport, Side):
    """A side that belongs to a protocol in an event loop."""

    def __init__(self, world: World, loop: VirtualEventLoop, *, extra: dict[str, Any], medium: Medium) -> None:
        asyncio.Transport.__init__(self, extra)
        Side.__init__(self, world, medium)
        self.loop = loop
        self._protocol: Any = None
        self._arrived: list[bytes] = []
        self._is_closing = False
        self._is_reading = True
        self._is_paused = False  # whether our protocol was told to stop writing
        self._is_alone = False  # whether the peer is gone
        self.on_over: Callable[[], None] | None = None

    # --- what a protocol calls ---------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_alone and data:
            self.loop.call_soon(self._over, None)  # as a connection that is reset
        if self._is_closing or self.is_over or not data:
            return
        self.unsent += data
        self._send()
        if len(self.unsent) > _HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del high, low

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self.unsent:
            self._end()

    def abort(self) -> None:
        self._is_closing = True
        self.unsent.clear()
        self._end()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._ends_after_unsent = True
        self._send()

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self.loop.call_soon(self._give)

    def is_reading(self) -> bool:
        return self._is_reading

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # --- Side --------------------------------------------------------------------------------------------

    def call_at(self, when_s: float, call: Callable[[], None]) -> None:
        self.loop.call_at_from_outside(when_s, call)

    def arrive(self, piece: bytes) -> None:
        if self.is_over:
            return
        self._arrived.append(piece)
        self._give()

    def _give(self) -> None:
        while self._arrived and self._is_reading and not self.is_over:
            piece = self._arrived.pop(0)
            self._protocol.data_received(piece)
            if self.peer is not None:
                self._tell(self.peer, "was_taken", len(piece))
        if self._is_alone and not self._arrived:
            self._over(None)

    def _has_room(self) -> None:
        if self._is_paused and len(self.unsent) <= _LOW_WATER:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing and not self.unsent and not self.is_over:
            self._end()

    def peer_ended(self) -> None:
        if self.is_over:
            return
        if not self._protocol.eof_received():
            self.close()

    def peer_is_gone(self) -> None:
        """What has arrived can still be read: a socket that is closed sends what it has before its end."""
        if not self.is_over:
            self._is_closing = self._is_alone = True
            self.unsent.clear()
            self._give()

    def vanish(self) -> None:
        """Its process is gone: the other side is told, the protocol is not."""
        if not self.is_over:
            self.is_over = self._is_closing = True
            if self.peer is not None:
                self._tell(self.peer, "peer_is_gone")

    def _end(self) -> None:
        if self.is_over:
            return
        if self.peer is not None:
            self._tell(self.peer, "peer_is_gone")
        self.loop.call_soon(self._over, None)

    def _over(self, error: Exception | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._arrived.clear()
            if self.on_over is not None:
                self.on_over()
            self._protocol.connection_lost(error)


def connect(
    world: World,
    *,
    client_loop: VirtualEventLoop,
    client: asyncio.Protocol,
    server_loop: VirtualEventLoop,
    make_server: Callable[[], asyncio.BaseProtocol],
    delay_s: float,
    client_address: tuple[str, int],
    server_address: tuple[str, int],
    kernel_bytes: int = _KERNEL_BYTES,
) -> VirtualTransport:
    """Connects a client, called in its loop, to a protocol that is made in the server's; returns the client's side.

    Of what was sent, `kernel_bytes` may be under way at most, as in buffers of sockets.
    """
    medium = Medium(delay_s, kernel_bytes=kernel_bytes)
    ours = VirtualTransport(
        world, client_loop, extra={"peername": server_address, "sockname": client_address}, medium=medium
    )
    theirs = VirtualTransport(
        world, server_loop, extra={"peername": client_address, "sockname": server_address}, medium=medium
    )
    ours.peer, theirs.peer = theirs, ours
    ours.set_protocol(client)

    def accept() -> None:
        protocol = make_server()
        theirs.set_protocol(protocol)
        protocol.connection_made(theirs)

    ours.last_arrival_s = world.now_s + delay_s  # no byte arrives before the connection does
    server_loop.call_at_from_outside(world.now_s + delay_s, accept)
    client.connection_made(ours)
    return ours
