"""The engine process's side of its links: accepts clients, reads their commands, delivers events to each.

One thread waits on all sockets. Events are sent from the loop's own thread without blocking; what a slow client
does not take is buffered up to a bound and flushed by the thread, and beyond it that client is dropped and its
requests aborted. The engine never waits for a client.
"""

import contextlib
import hmac
import logging
import selectors
import socket
import threading
from typing import cast

import msgspec

from openinfer_core.errors import ContractViolation
from openinfer_core.events import Failed, Finished, TokenEvent
from openinfer_core.host import EngineHost
from openinfer_core.request import RequestId
from openinfer_core.wire import (
    Abort,
    AskStats,
    Close,
    Events,
    FrameBuffer,
    Hello,
    Stats,
    Submit,
    ToClient,
    ToEngine,
    Welcome,
    encode_frame,
    to_engine_decoder,
)

logger = logging.getLogger("openinfer.engine")

MAX_BUFFERED_BYTES = 64 * 2**20
"""What one client may leave unread."""
_READ_BYTES = 1 << 20


class Link:
    """One client."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.frames = FrameBuffer()
        self.welcome = False
        self.lost = False
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def send(self, message: ToClient) -> bool:
        """Sends what the socket takes and buffers the rest; returns whether something is left to flush."""
        frame = encode_frame(message)
        with self._lock:
            if self.lost:
                return False
            if self._unsent:
                self._unsent += frame
            else:
                self._unsent += frame[self._send(frame) :]
            if len(self._unsent) > MAX_BUFFERED_BYTES:
                self.lost = True
            return bool(self._unsent)

    def flush(self) -> bool:
        """Sends more of the buffer; returns whether something is left."""
        with self._lock:
            if self._unsent and not self.lost:
                del self._unsent[: self._send(self._unsent)]
            return bool(self._unsent)

    def finish(self, *, timeout_s: float) -> None:
        """Sends what is left, waiting at most so long, and closes the socket."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.settimeout(timeout_s)
            self.connection.sendall(self._unsent)
        self.connection.close()

    def _send(self, data: bytearray) -> int:
        try:
            return self.connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.lost = True
            return len(data)


class LinkServer:
    """Serves the clients of one engine on a listening socket."""

    def __init__(self, listener: socket.socket, *, token: str, host: EngineHost, welcome: Welcome) -> None:
        self._listener = listener
        self._token = token
        self._host = host
        self._welcome = welcome
        self._owners: dict[RequestId, Link] = {}
        self._links: set[Link] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="openinfer-links", daemon=True)

    def start(self) -> None:
        """Begins to accept clients."""
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread.start()

    def deliver(self, events: list[TokenEvent]) -> None:
        """Sends each client its events, one frame each. Called from the loop's thread."""
        batches: dict[Link, list[TokenEvent]] = {}
        for event in events:
            terminal = type(event) is Finished or type(event) is Failed
            owner = self._owners.pop(event.request_id, None) if terminal else self._owners.get(event.request_id)
            if owner is not None:
                batches.setdefault(owner, []).append(event)
        unsent = [link.send(Events(batch)) or link.lost for link, batch in batches.items()]
        if any(unsent):
            self._wake()

    def close(self) -> None:
        """Flushes what clients still take at once and closes every socket."""
        self._closing.set()
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            self._wake_writer.send(b"\0")

    def _serve(self) -> None:
        while not self._closing.is_set():
            for key, mask in self._selector.select():
                self._handle(cast("socket.socket", key.fileobj), cast("Link | None", key.data), mask)
            for link in [link for link in self._links if link.lost]:
                self._drop(link)
        self._finish()

    def _handle(self, readable: socket.socket, link: Link | None, mask: int) -> None:
        if link is not None:
            if mask & selectors.EVENT_READ:
                self._read(link)
            if mask & selectors.EVENT_WRITE:
                self._flush(link)
        elif readable is self._listener:
            self._accept()
        else:
            self._wake_reader.recv(4096)
            for waiting in list(self._links):
                self._flush(waiting)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the client left before it was accepted
        link = Link(connection)
        self._links.add(link)
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _flush(self, link: Link) -> None:
        if link.lost:
            return
        more = link.flush()
        self._selector.modify(link.connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0), link)

    def _read(self, link: Link) -> None:
        try:
            data = link.connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            link.lost = True
            return
        try:
            for body in link.frames.feed(data):
                self._obey(link, to_engine_decoder.decode(body))
        except (ContractViolation, msgspec.MsgspecError) as error:
            logger.error("a client broke the protocol and is dropped: %s", error)
            link.lost = True

    def _obey(self, link: Link, message: ToEngine) -> None:
        if not link.welcome:
            self._greet(link, message)
        elif isinstance(message, Submit):
            self._submit(link, message)
        elif isinstance(message, Abort):
            if self._owners.get(message.request_id) is link:
                self._host.post(message)
        elif isinstance(message, AskStats):
            self._send(link, Stats(self._host.stats()))
        elif isinstance(message, Close):
            self._host.post(message)
        else:
            raise ContractViolation("a second Hello")

    def _greet(self, link: Link, message: ToEngine) -> None:
        if not isinstance(message, Hello) or not hmac.compare_digest(message.token.encode(), self._token.encode()):
            raise ContractViolation("the first frame is not a Hello with the right token")
        link.welcome = True
        self._send(link, self._welcome)

    def _submit(self, link: Link, message: Submit) -> None:
        request_id = message.request.request_id
        if request_id in self._owners:
            raise ContractViolation(f"request id {request_id} is in use")
        self._owners[request_id] = link
        self._host.post(message)

    def _send(self, link: Link, message: ToClient) -> None:
        if link.send(message):
            self._flush(link)

    def _drop(self, link: Link) -> None:
        self._links.discard(link)
        self._selector.unregister(link.connection)
        link.connection.close()
        for request_id in [owned for owned, owner in list(self._owners.items()) if owner is link]:
            self._owners.pop(request_id, None)
            self._host.post(Abort(request_id))

    def _finish(self) -> None:
        for link in self._links:
            link.finish(timeout_s=1.0)
        self._selector.close()
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.close()
