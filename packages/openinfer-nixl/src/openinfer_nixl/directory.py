"""`Directory`: says to peers what this engine has, and leases it; `ArenaOffer` is what the tier `nixl` says."""

import contextlib
import logging
import socket
import threading
from collections.abc import Generator, Sequence
from typing import Protocol

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
    questions,
)

logger = logging.getLogger("openinfer.kv_offload")

MAX_PEERS = 256  # at a time; further ones wait in the listener's queue


class Offer(Protocol):
    """What a directory tells of; asked by several threads at once."""

    def answer(self, question: bytes, leases: set[int]) -> msgspec.Struct:
        """What a peer asks; `leases` are those of its connection, which a question may add to or end.

        Raises:
            msgspec.MsgspecError: it is no question.
        """
        ...

    def release(self, lease_ids: Sequence[int]) -> None:
        """Gives leases back; those that are void already are no error."""
        ...


class ArenaOffer:
    """The objects of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def answer(self, question: bytes, leases: set[int]) -> Answer:
        asked = questions.decode(question)
        if isinstance(asked, Has):
            return Found(self._arena.has(asked.key))
        if isinstance(asked, List):
            return Keys(self._arena.keys(asked.prefix))
        if isinstance(asked, GiveBack):
            if asked.lease_id in leases:  # a peer gives back its own alone
                leases.discard(asked.lease_id)
                self._arena.release([asked.lease_id])
            return GivenBack()
        lease = self._arena.lease(asked.key)
        if lease is None:
            return Absent()
        leases.add(lease.lease_id)
        return Leased(lease.lease_id, lease.address, lease.num_bytes)

    def release(self, lease_ids: Sequence[int]) -> None:
        self._arena.release(lease_ids)


class Directory:
    """Listens until it is closed; a thread for each peer.

    Args:
        listener: a socket that listens; closed with it.
        offer: what it tells of.
        token: what peers must have.
        protocol: that both speak.
        layout: what both have the same of: the digest of the blocks' layout; peers of another are refused.
        description: how the memory is read.
    """

    def __init__(
        self,
        listener: socket.socket,
        offer: Offer,
        *,
        token: bytes,
        layout: str,
        description: bytes,
        protocol: bytes = PROTOCOL,
    ) -> None:
        self._listener = listener
        self._offer = offer
        self._token = token
        self._protocol = protocol
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
                # Two answers may follow each other: the second is not to wait until the first is acknowledged.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                mutual_proof.admit(connection, token=self._token, protocol=self._protocol, judge=self._judge)
                frames = Frames(connection)
                frames.send(Described(self._description))
                while True:
                    frames.send(self._offer.answer(frames.receive(), leases))
        except (NotAdmitted, Refused) as error:
            logger.error("a peer is not admitted to this engine's KV blocks: %s", error)
        except (OSError, ContractViolation, msgspec.MsgspecError) as error:
            logger.info("a peer has left: %s", error)
        finally:
            self._offer.release(list(leases))
            self._room.release()

    def _judge(self, body: bytes) -> str | None:
        if body == self._layout.encode():
            return None
        return "the blocks of this engine have another layout: another model, KV dtype, block size or number of ranks"

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
