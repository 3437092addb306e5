"""`Directory`: says to peers which objects an arena has, and leases them."""

import contextlib
import logging
import socket
import threading
from collections.abc import Generator

import msgspec

from openinfer_core import Refused
from openinfer_core.errors import ContractViolation
from openinfer_core.process import mutual_proof
from openinfer_core.process.accepting import ACCEPT_PAUSE_S, EXHAUSTED
from openinfer_core.process.mutual_proof import NotAdmitted
from openinfer_nixl.arena import Arena
from openinfer_nixl.messages import (
    PROTOCOL,
    Absent,
    Answer,
    Described,
    Found,
    Frames,
    GiveBack,
    GivenBack,
    Has,
    Keys,
    Leased,
    List,
    Question,
    questions,
)

logger = logging.getLogger("openinfer.kv_offload")

MAX_PEERS = 256  # at a time; further ones wait in the listener's queue


class Directory:
    """Listens until it is closed; a thread for each peer.

    Args:
        listener: a socket that listens; closed with it.
        arena: what it tells of.
        token: what peers must have.
        layout: digest of the blocks' layout; peers of another are refused.
        description: how the arena's memory is read.
    """

    def __init__(self, listener: socket.socket, arena: Arena, *, token: bytes, layout: str, description: bytes) -> None:
        self._listener = listener
        self._arena = arena
        self._token = token
        self._layout = layout
        self._description = description
        self._room = threading.BoundedSemaphore(MAX_PEERS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="openinfer-nixl-directory", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def close(self) -> None:
        """Ends all connections, and with them their leases. Idempotent."""
        self._closed.set()
        with self._lock:
            for connection in self._connections:
                _shut(connection)
        _shut(self._listener)  # wakes the thread that accepts, which closing alone would not
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._room.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._room.release()
                if error.errno not in EXHAUSTED:
                    return  # closed
                self._closed.wait(ACCEPT_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="openinfer-nixl-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        leases: set[int] = set()
        try:
            with connection, self._known(connection):
                mutual_proof.admit(connection, token=self._token, protocol=PROTOCOL, judge=self._judge)
                frames = Frames(connection)
                frames.send(Described(self._description))
                while True:
                    frames.send(self._answer(questions.decode(frames.receive()), leases))
        except (NotAdmitted, Refused) as error:
            logger.error("a peer is not admitted to this engine's KV blocks: %s", error)
        except (OSError, ContractViolation, msgspec.MsgspecError) as error:
            logger.info("a peer has left: %s", error)
        finally:
            self._arena.release(list(leases))
            self._room.release()

    def _judge(self, body: bytes) -> str | None:
        if body == self._layout.encode():
            return None
        return "the blocks of this engine have another layout: another model, KV dtype, block size or number of ranks"

    def _answer(self, question: Question, leases: set[int]) -> Answer:
        if isinstance(question, Has):
            return Found(self._arena.has(question.key))
        if isinstance(question, List):
            return Keys(self._arena.keys(question.prefix))
        if isinstance(question, GiveBack):
            if question.lease_id in leases:  # a peer gives back its own alone
                leases.discard(question.lease_id)
                self._arena.release([question.lease_id])
            return GivenBack()
        lease = self._arena.lease(question.key)
        if lease is None:
            return Absent()
        leases.add(lease.lease_id)
        return Leased(lease.lease_id, lease.address, lease.num_bytes)

    @contextlib.contextmanager
    def _known(self, connection: socket.socket) -> Generator[None]:
        with self._lock:
            self._connections.add(connection)
        try:
            if self._closed.is_set():
                raise ConnectionError("the directory is closed")
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
