"""`Peer`: another engine's objects, as this one asks for them. A peer that is gone has none."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator

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
    Question,
    TakeLease,
    answers,
)

logger = logging.getLogger("openinfer.kv_offload")

_REST_S = 1.0  # after which a peer that was gone is dialled again
_REST_SHARE = 4  # or so many times what the last try took: a machine that does not answer holds up few loads


class _Link:
    """One connection to a peer's directory, and what the agent calls the peer."""

    def __init__(self, connection: socket.socket, frames: Frames, name: str) -> None:
        self.connection = connection
        self.frames = frames
        self.name = name


class Peer:
    """Used from several threads at once: questions one after the other, transfers side by side.

    Args:
        address: where its directory listens.
        agent: of this process.
        token: what both have.
        layout: digest of the blocks' layout.
        timeout_s: of connecting, of an answer, and of a transfer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: tuple[str, int],
        agent: Agent,
        *,
        token: bytes,
        layout: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._agent = agent
        self._token = token
        self._layout = layout
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._dial_s = float("-inf")
        self._is_closed = False

    def has(self, key: str) -> bool:
        answer = self._ask(Has(key))
        return isinstance(answer, Found) and answer.is_there

    def keys(self, prefix: str) -> tuple[str, ...]:
        answer = self._ask(List(prefix))
        return answer.keys if isinstance(answer, Keys) else ()

    @contextlib.contextmanager
    def leased(self, key: str) -> Generator[tuple[str, Leased] | None]:
        """An object of the peer while it stays where it is, and the agent's name of the peer; None if it has none."""
        name = ""
        with self._lock:
            answer = self._ask_locked(TakeLease(key))
            if self._link is not None:
                name = self._link.name
        if not isinstance(answer, Leased):
            yield None
            return
        try:
            yield name, answer
        finally:
            self._ask(GiveBack(answer.lease_id))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _ask(self, question: Question) -> Answer | None:
        with self._lock:
            return self._ask_locked(question)

    def _ask_locked(self, question: Question) -> Answer | None:
        link = self._linked()
        if link is None:
            return None
        try:
            link.frames.send(question)
            return answers.decode(link.frames.receive())
        except (OSError, ContractViolation, msgspec.MsgspecError) as error:
            self._lose(error)
            return None

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
            mutual_proof.introduce(connection, said, token=self._token, protocol=PROTOCOL, deadline_s=self._timeout_s)
            connection.settimeout(self._timeout_s)
            frames = Frames(connection)
            described = answers.decode(frames.receive())
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
