"""The engine process's side of its links: accepts clients, reads their commands, delivers events to each.

One thread waits on all sockets. Events are sent from the loop's own thread without blocking; what a slow client
does not take is buffered up to a bound and flushed by the thread, and beyond it that client is dropped and its
requests aborted. The engine never waits for a client, and a client that breaks the protocol loses only its own link.

    accepted ──Hello with the token──► served ──end of file | broken protocol | unread bytes──► dropped
        └───────anything else, or too late──────────────────────────────────────────────────────┘
"""

import contextlib
import functools
import hmac
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import cast

import msgspec

from openinfer_core.errors import ContractViolation
from openinfer_core.events import TokenEvent
from openinfer_core.process.accepting import ACCEPT_PAUSE_S, EXHAUSTED
from openinfer_core.process.host import ControlCall, LoopRunner
from openinfer_core.process.kept_prompts import ALL_KEPT_IDS, KEPT_IDS, KeptPrompts, PromptBuffer, SharedIds
from openinfer_core.process.routes import Routes
from openinfer_core.process.wire import (
    Abort,
    AskStats,
    BriefHello,
    Close,
    Control,
    Controlled,
    Ended,
    Events,
    FrameBuffer,
    Hello,
    KnownPrompt,
    PromptPart,
    Stats,
    Submit,
    SubmitAlike,
    ToClient,
    ToEngine,
    Welcome,
    encode_frame,
    submitted,
    to_engine_decoder,
)
from openinfer_core.request import GenerateRequest, with_id
from openinfer_core.sampling import Grammar

logger = logging.getLogger("openinfer.engine")

MAX_BUFFERED_BYTES = 64 * 2**20  # what one client may leave unread
MAX_LINKS = 256
HELLO_DEADLINE_S = 10.0  # a connection that has not shown the token by then is dropped
MAX_HELLO_BYTES = 4096  # what a connection may send in vain before its Hello is complete
_READ_BYTES = 1 << 20
_FINISH_DEADLINE_S = 1.0


class Link:
    """One client, and what is on its way to it."""

    def __init__(self, connection: socket.socket, *, accepted_s: float, max_buffered_bytes: int) -> None:
        connection.setblocking(False)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.frames = FrameBuffer()
        self.accepted_s = accepted_s
        self.welcome = False
        self.lost = False
        self.grammar: Grammar | None = None  # of the last request that had one
        self.prompt = PromptBuffer()  # of the next request
        self.kept_ids = 0  # that it may keep of prompts
        self._max_buffered_bytes = max_buffered_bytes
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def send(self, message: ToClient) -> bool:
        """Sends what the socket takes and buffers the rest; returns whether something is left to flush."""
        frame = self._encode(message)
        with self._lock:
            if self.lost:
                return False
            # What is buffered goes first: a frame may not overtake another.
            rest = frame if self._unsent else frame[self._send(frame) :]
            self._unsent += rest
            if len(self._unsent) > self._max_buffered_bytes:
                logger.error("a client has left %d bytes unread and is dropped", len(self._unsent))
                self._lose()
            return bool(self._unsent)

    def flush(self) -> bool:
        with self._lock:
            if self._unsent:
                sent = self._send(self._unsent)
                del self._unsent[:sent]
            return bool(self._unsent)

    def close(self, *, deadline_s: float | None = None) -> None:
        """Closes the socket; until `deadline_s` (monotonic) it first sends what is left, with None nothing more."""
        with self._lock:  # never while the loop's thread sends: the descriptor's number may be another client's next
            if deadline_s is not None and self._unsent:
                with contextlib.suppress(OSError):
                    self.connection.settimeout(max(0.0, deadline_s - time.monotonic()))
                    self.connection.sendall(self._unsent)
            self._lose()
            self.connection.close()

    def _encode(self, message: ToClient) -> bytearray:
        try:
            return encode_frame(message)
        except ContractViolation as error:
            logger.error("a client is dropped: %s", error)
            self.lost = True
            return bytearray()

    def _send(self, data: bytearray) -> int:
        try:
            return self.connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._lose()
            return len(data)

    def _lose(self) -> None:
        self.lost = True
        self._unsent = bytearray()


class LinkServer:
    """Serves the clients of one engine on a listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str,
        host: LoopRunner,
        welcome: Welcome,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._token = token
        self._host = host
        self._welcome = welcome
        self._max_buffered_bytes = max_buffered_bytes
        self._clock = clock
        self._routes: Routes[Link] = Routes()
        self._links: dict[Link, None] = {}  # in the order in which they came
        # One for all reads: `recv` would ask the allocator for as many bytes in one piece each time, and what is
        # allocated in between keeps the pieces apart. With a read per request memory grew by 0.3 MB a minute.
        self._received = memoryview(bytearray(_READ_BYTES))
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._rests_until_s: float | None = None
        self._closing = threading.Event()
        self._reason: str | None = None
        self._ids = SharedIds(welcome.info.num_token_ids)
        self._left_ids = ALL_KEPT_IDS  # that links may still be allowed to keep
        self._thread = threading.Thread(target=self._serve, name="openinfer-links", daemon=True)

    def start(self) -> None:
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread.start()

    def deliver(self, events: list[TokenEvent]) -> None:
        """Sends each client its events, one frame each. Called from the loop's thread."""
        batches = self._routes.sort(events)
        unsent = [link.send(Events(batch)) or link.lost for link, batch in batches.items()]
        if any(unsent):
            self._wake()

    def close(self, reason: str | None = None) -> None:
        """Ends all links; clients are told the reason first, if there is one for them."""
        self._reason = reason
        self._closing.set()
        if self._thread.ident is None:
            self._finish()
            return
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full of wake-ups already, or the thread has ended
            self._wake_writer.send(b"\0")

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except Exception as error:
            logger.critical("the links failed; the engine ends", exc_info=error)
            self._host.post(Close())
        finally:
            self._finish()

    def _turn(self) -> None:
        strangers = [link for link in self._links if not link.welcome]
        timeout_s = HELLO_DEADLINE_S if strangers else None
        for key, mask in self._selector.select(timeout_s if self._rests_until_s is None else ACCEPT_PAUSE_S):
            self._handle(cast("socket.socket", key.fileobj), cast("Link | None", key.data), mask)
        if self._rests_until_s is not None and self._clock() >= self._rests_until_s:
            self._rests_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._drop_late(strangers)
        for link in [link for link in self._links if link.lost]:
            self._drop(link)

    def _handle(self, readable: socket.socket, link: Link | None, mask: int) -> None:
        if link is not None:
            if mask & selectors.EVENT_READ:
                self._read(link)
            if mask & selectors.EVENT_WRITE:
                self._flush(link)
        elif readable is self._listener:
            self._accept()
        else:
            with contextlib.suppress(BlockingIOError):
                self._wake_reader.recv(4096)
            for waiting in self._links:
                self._flush(waiting)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # the listener stays readable: without a rest this thread would spin
                logger.error("a client has to wait for %g s: %s", ACCEPT_PAUSE_S, error.strerror)
                self._selector.unregister(self._listener)
                self._rests_until_s = self._clock() + ACCEPT_PAUSE_S
            return  # or the client left before it was accepted
        if len(self._links) >= MAX_LINKS:
            logger.error("a client is turned away: %d links are open", len(self._links))
            connection.close()
            return
        link = Link(connection, accepted_s=self._clock(), max_buffered_bytes=self._max_buffered_bytes)
        self._links[link] = None
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _flush(self, link: Link) -> None:
        more = link.flush()
        if not link.lost:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            self._selector.modify(link.connection, events, link)

    def _read(self, link: Link) -> None:
        try:
            num_bytes = link.connection.recv_into(self._received)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            link.lost = True
            return
        try:
            for body in link.frames.feed(self._received[:num_bytes]):
                self._obey(link, to_engine_decoder.decode(body))
            if not link.welcome and len(link.frames) > MAX_HELLO_BYTES:
                raise ContractViolation("the first frame is too long for a Hello")
        except (ContractViolation, msgspec.MsgspecError) as error:
            logger.error("a client broke the protocol and is dropped: %s", error)
            link.lost = True

    def _obey(self, link: Link, message: ToEngine) -> None:
        if not link.welcome:
            self._greet(link, message)
        elif isinstance(message, Submit | SubmitAlike):
            self._submit(link, link.prompt.complete(submitted(message, last=link.grammar)))
        elif isinstance(message, PromptPart):
            link.prompt.take(message)
        elif isinstance(message, KnownPrompt):
            link.prompt.begin(message)
        elif isinstance(message, Abort):
            inner_id = self._routes.find(link, message.request_id)
            if inner_id is not None:
                self._host.post(Abort(inner_id))
        elif isinstance(message, AskStats):
            self._send(link, Stats(self._host.stats()))
        elif isinstance(message, Control):
            self._host.post(ControlCall(message.command, functools.partial(self._answer, link, message.number)))
        elif isinstance(message, Close):
            self._host.post(message)
        else:
            raise ContractViolation("a second Hello")

    def _answer(self, link: Link, number: int, refusal: str | None) -> None:
        # Called from the loop's thread, as `deliver` is.
        if link.send(Controlled(number, refusal)) or link.lost:
            self._wake()

    def _greet(self, link: Link, message: ToEngine) -> None:
        if not isinstance(message, Hello) or not shows_token(message, self._token):
            raise ContractViolation("the first frame is not a Hello with the right token")
        link.welcome = True
        link.kept_ids = 0 if isinstance(message, BriefHello) else min(KEPT_IDS, self._left_ids)
        self._left_ids -= link.kept_ids
        link.prompt = PromptBuffer(KeptPrompts(link.kept_ids), self._ids)
        self._send(link, msgspec.structs.replace(self._welcome, kept_ids=link.kept_ids))

    def _submit(self, link: Link, request: GenerateRequest) -> None:
        link.grammar = request.sampling.grammar or link.grammar
        inner_id = self._routes.add(link, request.request_id)
        if inner_id != request.request_id:
            request = with_id(request, inner_id)
        self._host.post(Submit(request))

    def _send(self, link: Link, message: ToClient) -> None:
        if link.send(message):
            self._flush(link)

    def _drop_late(self, strangers: list[Link]) -> None:
        now_s = self._clock()
        for link in strangers:
            if not link.welcome and now_s - link.accepted_s > HELLO_DEADLINE_S:
                logger.error("a client has not said Hello within %g s and is dropped", HELLO_DEADLINE_S)
                link.lost = True

    def _drop(self, link: Link) -> None:
        self._links.pop(link, None)
        self._left_ids += link.kept_ids
        self._selector.unregister(link.connection)
        link.close()
        for inner_id in self._routes.drop(link):
            self._host.post(Abort(inner_id))

    def _finish(self) -> None:
        deadline_s = time.monotonic() + _FINISH_DEADLINE_S
        for link in self._links:
            if self._reason is not None and link.welcome:
                link.send(Ended(self._reason))
            link.close(deadline_s=deadline_s)
        self._selector.close()
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.close()


def shows_token(hello: Hello, token: str) -> bool:
    # Takes the same time for every wrong token, so that none can be found byte by byte.
    return hmac.compare_digest(hello.token.encode(), token.encode())
