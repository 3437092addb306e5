"""`Relay`: a replica's port, which passes the frames of servers that have shown the token on to its engine.

    server ═ TCP ═► Relay: admit_server, then bytes as they come ═ Unix socket ═► engine's process

The engine listens where its own user alone can enter; the relay shows it its token, which no server is told.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Generator

from openinfer_core import EngineClosed, Refused
from openinfer_core.process.accepting import ACCEPT_PAUSE_S, EXHAUSTED
from openinfer_core.process.mutual_proof import NotAdmitted
from openinfer_ray.handshake import admit_server, keep_alive

logger = logging.getLogger("openinfer.engine")

MAX_CONNECTIONS = 64  # at a time; further ones wait in the listener's queue
_CHUNK_BYTES = 1 << 16


class Relay:
    """Listens from `start` to `close`; a thread for each direction of each connection.

    Args:
        listener: a socket that listens; closed by the relay.
        token: what servers must have.
        open_link: a connection to the engine, whose first frame is its `Welcome`; raises `EngineClosed`.
    """

    def __init__(self, listener: socket.socket, *, token: bytes, open_link: Callable[[], socket.socket]) -> None:
        self._listener = listener
        self._token = token
        self._open_link = open_link
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._num_links = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="openinfer-relay", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def num_links(self) -> int:
        """Servers that are connected to the engine."""
        with self._changed:
            return self._num_links

    def start(self) -> None:
        self._thread.start()

    def wait_until_left(self, *, timeout_s: float) -> bool:
        """Whether no server is connected to the engine any more, after at most so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_links, timeout_s)

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in self._connections:
                _shut(connection)
        # Wakes the thread that accepts, which closing alone would not.
        _shut(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._room.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._room.release()
                if error.errno not in EXHAUSTED or self._closes_in_a_pause():
                    return  # closed
                continue
            threading.Thread(target=self._serve, args=(connection,), name="openinfer-relayed", daemon=True).start()

    def _closes_in_a_pause(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, ACCEPT_PAUSE_S)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, self._known(connection):
                keep_alive(connection)
                admit_server(connection, token=self._token)
                with self._open_link() as engine, self._known(engine), self._linked():
                    _relay(connection, engine)
        except NotAdmitted as error:
            logger.error("a connection to the replica is not admitted: %s", error)
        except (Refused, EngineClosed) as error:
            logger.error("a server is not connected to the replica: %s", error)
        except OSError as error:
            logger.error("a connection to the replica broke: %s", error)
        finally:
            self._room.release()

    @contextlib.contextmanager
    def _known(self, connection: socket.socket) -> Generator[None]:
        """While `close` ends the connection."""
        with self._changed:
            if self._is_closed:
                raise EngineClosed("the replica is ending")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._connections.discard(connection)

    @contextlib.contextmanager
    def _linked(self) -> Generator[None]:
        with self._changed:
            self._num_links += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_links -= 1
                self._changed.notify_all()


def _relay(server: socket.socket, engine: socket.socket) -> None:
    """Passes bytes both ways until one side ends."""
    back = threading.Thread(target=_pass_on, args=(engine, server), name="openinfer-relayed-back", daemon=True)
    back.start()
    _pass_on(server, engine)
    back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        while num_bytes := source.recv_into(buffer):
            target.sendall(buffer[:num_bytes])
    except OSError as error:  # one of them is gone, or `close` was called
        logger.debug("a connection of the replica ended: %s", error)
    finally:
        # What was sent still arrives; the thread of the other direction wakes.
        _shut(target)
        _shut(source)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
