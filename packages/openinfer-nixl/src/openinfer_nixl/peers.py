"""`PeerConnection`: another engine, as this one asks it for what it has, and `Peer`: its objects.

A peer that is gone has none.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Generic, NamedTuple, TypeVar

import msgspec

from openinfer_core import Refused
from openinfer_core.errors import ContractViolation
from openinfer_core.process import mutual_proof
from openinfer_nixl.agent import Agent
from openinfer_nixl.messages import (
    PROTOCOL,
    Answer,
    Described,
    Found,
    Frames,
    GiveBack,
    Has,
    Keys,
    Leased,
    List,
    TakeLease,
)

Answers = TypeVar("Answers")
logger = logging.getLogger("openinfer.kv_offload")

_REST_S = 1.0  # after which a peer that was gone is dialled again
_REST_SHARE = 4  # or so many times what the last try took: a machine that does not answer holds up few loads


class _Link:
    """One connection to a peer's directory, and what the agent calls the peer."""

    def __init__(self, connection: socket.socket, frames: Frames, name: str) -> None:
        self.connection = connection
        self.frames = frames
        self.name = name
        self.num_unread = 0  # answers that are not waited for


class Told(NamedTuple, Generic[Answers]):
    """What a peer has answered."""

    peer: str  # as the agent calls it
    answer: Answers


class PeerConnection(Generic[Answers]):
    """Questions to a peer's directory, one after the other, from several threads.

    Args:
        address: where its directory listens.
        agent: of this process.
        answers: reads what the peer says.
        token: what both have.
        layout: what both have the same of: the digest of the blocks' layout.
        timeout_s: of connecting, and of an answer.
        protocol: that both speak.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: tuple[str, int],
        agent: Agent,
        answers: "msgspec.msgpack.Decoder[Answers]",
        *,
        token: bytes,
        layout: str,
        timeout_s: float,
        protocol: bytes = PROTOCOL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._agent = agent
        self._answers = answers
        self._protocol = protocol
        self._token = token
        self._layout = layout
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._dial_s = float("-inf")
        self._is_closed = False

    def ask(self, question: msgspec.Struct) -> Told[Answers] | None:
        """What the peer answers; None if it is gone, or says what cannot be."""
        with self._lock:
            link = self._linked()
            if link is None:
                return None
            try:
                link.frames.send(question)
                while link.num_unread:
                    link.frames.receive()
                    link.num_unread -= 1
                return Told(link.name, self._answers.decode(link.frames.receive()))
            except (OSError, ContractViolation, msgspec.MsgspecError) as error:
                self._lose(error)
                return None

    def tell(self, question: msgspec.Struct) -> None:
        """As `ask`, and does not wait for the answer: the next `ask` reads it, and drops it."""
        with self._lock:
            link = self._link
            if link is None:
                return
            try:
                link.frames.send(question)
                link.num_unread += 1
            except OSError as error:
                self._lose(error)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _linked(self) -> _Link | None:
        began_s = self._clock()
        if self._link is None and not self._is_closed and began_s >= self._dial_s:
            try:
                self._link = self._dial()
            except (OSError, Refused, ContractViolation, msgspec.MsgspecError) as error:
                self._lose(error, took_s=self._clock() - began_s)
        return self._link

    def _dial(self) -> _Link:
        connection = socket.create_connection(self._address, self._timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = self._layout.encode()
            proof = {"token": self._token, "protocol": self._protocol}
            mutual_proof.introduce(connection, said, **proof, deadline_s=self._timeout_s)
            connection.settimeout(self._timeout_s)
            frames = Frames(connection)
            described = self._answers.decode(frames.receive())
            if not isinstance(described, Described):
                raise ContractViolation("a peer does not say how its memory is read")
            name = self._agent.meet(described.description)
        except BaseException:
            connection.close()
            raise
        logger.info("KV blocks of %s:%d can be read", *self._address)
        return _Link(connection, frames, name)

    def _lose(self, error: Exception, *, took_s: float = 0.0) -> None:
        if self._dial_s == float("-inf") or self._link is not None:  # told once, not at each look
            logger.warning("KV blocks of %s:%d cannot be read: %s", *self._address, error)
        self._drop()
        self._dial_s = self._clock() + max(_REST_S, _REST_SHARE * took_s)

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.connection.close()
            self._agent.part(link.name)


class Peer:
    """Another engine's objects. Used from several threads at once, as its connection is."""

    def __init__(self, connection: "PeerConnection[Answer]") -> None:
        self._connection = connection
        self.close = connection.close

    def has(self, key: str) -> bool:
        told = self._connection.ask(Has(key))
        return told is not None and isinstance(told.answer, Found) and told.answer.is_there

    def keys(self, prefix: str) -> tuple[str, ...]:
        told = self._connection.ask(List(prefix))
        return told.answer.keys if told is not None and isinstance(told.answer, Keys) else ()

    @contextlib.contextmanager
    def leased(self, key: str) -> Generator[tuple[str, Leased] | None]:
        """An object of the peer while it stays where it is, and the agent's name of the peer; None if it has none."""
        told = self._connection.ask(TakeLease(key))
        if told is None or not isinstance(told.answer, Leased):
            yield None
            return
        try:
            yield told.peer, told.answer
        finally:
            self._connection.ask(GiveBack(told.answer.lease_id))
