"""Connections between a server's protocol and a client, each in an event loop of its own.

Bytes arrive in the order in which they were sent, after a delay, cut at places that the seed chooses. A side that does
not read holds up the other: its protocol is paused at the high-water mark, as over a socket.
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
_TICK_S = 1e-9  # between two arrivals: an event loop keeps no order of calls for the same moment


class VirtualTransport(asyncio.Transport):
    """One side of a connection."""

    def __init__(self, world: World, loop: VirtualEventLoop, *, extra: dict[str, Any], delay_s: float) -> None:
        super().__init__(extra)
        self._world = world
        self.loop = loop
        self._delay_s = delay_s
        self._protocol: Any = None
        self.peer: VirtualTransport | None = None
        self._unsent = bytearray()
        self._arrived: list[bytes] = []
        self._taken_bytes = 0  # sent, and not yet given to the peer's protocol
        self.last_arrival_s = 0.0
        self._is_closing = False
        self.is_over = False
        self._is_reading = True
        self._is_paused = False  # whether our protocol was told to stop writing
        self._ends_after_unsent = False

    # --- what a protocol calls ---------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self.is_over or not data:
            return
        self._unsent += data
        self._send()
        if len(self._unsent) > _HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del high, low

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self._unsent:
            self._end()

    def abort(self) -> None:
        self._is_closing = True
        self._unsent.clear()
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

    # --- bytes on their way ------------------------------------------------------------------------------

    def _send(self) -> None:
        peer = self.peer
        if peer is None or peer.is_over:
            self._unsent.clear()
            return
        draw = self._world.random
        while self._unsent and self._taken_bytes < _KERNEL_BYTES:
            most = min(len(self._unsent), _LARGEST_PIECE, _KERNEL_BYTES - self._taken_bytes)
            size = draw.randint(1, most) if draw.random() < 0.1 else most
            piece = bytes(self._unsent[:size])
            del self._unsent[:size]
            self._taken_bytes += size
            self._later(peer, partial(peer.arrive, piece))
        if self._ends_after_unsent and not self._unsent:
            self._ends_after_unsent = False
            self._later(peer, peer.peer_ended)

    def _later(self, peer: "VirtualTransport", call: Callable[[], None]) -> None:
        # Never before what was sent earlier on this connection.
        delay_s = self._delay_s * (0.5 + self._world.random.random())
        self.last_arrival_s = max(self.last_arrival_s + _TICK_S, self._world.now_s + delay_s)
        peer.loop.call_at_from_outside(self.last_arrival_s, call)

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
                self._later(self.peer, partial(self.peer.was_taken, len(piece)))

    def was_taken(self, size: int) -> None:
        self._taken_bytes -= size
        # Not for every small piece, or pieces would become smaller and smaller (silly window syndrome, RFC 813).
        if _KERNEL_BYTES - self._taken_bytes >= min(len(self._unsent), _KERNEL_BYTES // 2):
            self._send()
        if self._is_paused and len(self._unsent) <= _LOW_WATER:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing and not self._unsent and not self.is_over:
            self._end()

    def peer_ended(self) -> None:
        if self.is_over:
            return
        if not self._protocol.eof_received():
            self.close()

    def peer_is_gone(self) -> None:
        if not self.is_over:
            self._is_closing = True
            self._unsent.clear()
            self._over(None)

    def _end(self) -> None:
        if self.is_over:
            return
        peer = self.peer
        if peer is not None:
            self._later(peer, peer.peer_is_gone)
        self.loop.call_soon(self._over, None)

    def _over(self, error: Exception | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._arrived.clear()
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
) -> VirtualTransport:
    """Connects a client, called in its loop, to a protocol that is made in the server's; returns the client's side."""
    ours = VirtualTransport(
        world, client_loop, extra={"peername": server_address, "sockname": client_address}, delay_s=delay_s
    )
    theirs = VirtualTransport(
        world, server_loop, extra={"peername": client_address, "sockname": server_address}, delay_s=delay_s
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
