"""`SocketLink`: the head's end of the link to a rank that has joined over TCP, written by a thread of its own."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

from openinfer_engine.ranks.handshake import Node
from openinfer_engine.worker.messages import bodies, write_all


class SocketLink:
    """The socket of one rank; it is blocking, and the handshake is over."""

    shares_environment = False
    process_id = None

    def __init__(self, connection: socket.socket, node: Node) -> None:
        self._connection = connection
        self.node = node
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_ended = False
        self._is_read = False
        self._has_closed = threading.Event()
        # A network that drops packets blocks this thread, and not the one that makes steps.
        self._writer = threading.Thread(target=self._write, name="openinfer-rank-writer", daemon=True)
        self._writer.start()

    @property
    def name(self) -> str:
        return f"GPU {self.node.gpu} of node {self.node.name}"

    @property
    def own_address(self) -> str:
        """The address of the head by which this rank reaches it."""
        return self._connection.getsockname()[0]

    def send(self, frame: bytes) -> None:
        if self._is_ended:
            raise BrokenPipeError("the link was ended")
        self._frames.put(frame)

    def frames(self) -> Iterator[bytes]:
        self._is_read = True
        try:
            yield from bodies(self._connection.fileno())
        finally:
            self._has_closed.set()

    def how_it_ended(self) -> str:
        return f"the link to node {self.node.name} ({self.node.address}) was closed"

    def kill(self) -> None:
        # Also wakes a thread that waits in `frames` or in the writer; closing alone would not.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._end_writer()

    def end(self, *, deadline_s: float) -> None:
        self._end_writer()
        if not self._is_read or not self._has_closed.wait(deadline_s):
            self.kill()
            if self._is_read:
                self._has_closed.wait()
        self._writer.join()
        self._connection.close()

    def _end_writer(self) -> None:
        self._is_ended = True
        self._frames.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the rank is gone: `frames` ends
            while (frame := self._frames.get()) is not None:
                write_all(self._connection.fileno(), frame)
            self._connection.shutdown(socket.SHUT_WR)
