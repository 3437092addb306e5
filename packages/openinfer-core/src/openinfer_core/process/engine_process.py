"""The engine process: what runs in the child that `openinfer_core.process.remote.spawn_engine` starts.

    parent                                   child (python -P -m MODULE)
    Launch as one JSON line ──stdin──►       listens on a Unix socket (or loopback TCP)
    ◄──stdout── Address as one JSON line     builds its engine: loads weights, seconds
    Hello ─────socket──────────────►
    ◄────────── Welcome | StartRefusal       serves until Close, or until stdin ends: the parent died

The child's own standard output goes to standard error from then on, so that nothing printed can break the protocol.
It ignores SIGINT and SIGTERM, which a terminal or a service manager sends to parent and child alike: the parent
drains its requests first and then says Close. `OPENINFER_LOG_LEVEL` sets the level of its log (default INFO).
"""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from openinfer_core.errors import OpenInferError
from openinfer_core.process.descriptors import raise_descriptor_limit
from openinfer_core.process.host import EngineLoop, LoopRunner
from openinfer_core.process.links import LinkServer, shows_token
from openinfer_core.process.logs import set_up_logs
from openinfer_core.process.resident import return_freed_memory, settle_memory
from openinfer_core.process.wire import (
    Close,
    FrameBuffer,
    Hello,
    StartRefusal,
    Welcome,
    encode_frame,
    to_engine_decoder,
)

logger = logging.getLogger("openinfer.engine")

_LONGEST_UNIX_PATH_BYTES = 100  # `sockaddr_un.sun_path` has 104 bytes on macOS, 108 on Linux
_REFUSAL_DEADLINE_S = 10.0
_ORPHAN_DEADLINE_S = 9.0
"""What an engine without a parent or clients may take to end: its KV tiers have four seconds, and then those of its
ranks as long. A parent that lives kills it after ten."""


class LinkKind(StrEnum):
    """What a link is made of."""

    UNIX = "unix"
    """A Unix stream socket in a folder only its owner can enter."""
    TCP = "tcp"
    """A port of 127.0.0.1, unless another address is asked for; where there are no Unix sockets, or the temporary
    folder's path is too long for one."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line on the child's standard input."""

    token: str  # what a client must show
    spec: msgspec.Raw  # what to build; the module knows its type
    link: LinkKind
    host: str = "127.0.0.1"  # what a TCP link listens at: others' machines reach any other address


class Address(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line on the child's standard output."""

    unix_path: str | None = None
    tcp_port: int | None = None
    tcp_host: str = "127.0.0.1"


def default_link() -> LinkKind:
    return LinkKind.UNIX if hasattr(socket, "AF_UNIX") else LinkKind.TCP


@contextlib.contextmanager
def listening(kind: LinkKind, host: str = "127.0.0.1") -> Generator[tuple[socket.socket, Address]]:
    if kind is LinkKind.UNIX:
        folder = tempfile.mkdtemp(prefix="openinfer-")  # mode 0700
        path = str(Path(folder) / "engine")
        if len(path.encode()) <= _LONGEST_UNIX_PATH_BYTES:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                address = Address(unix_path=path)
                try:
                    listener.bind(path)
                    listener.listen()
                    yield listener, address
                finally:
                    remove_socket_file(address)
            return
        Path(folder).rmdir()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        yield listener, Address(tcp_port=listener.getsockname()[1], tcp_host=host)


def remove_socket_file(address: Address) -> None:
    """Removes a Unix socket's file and folder. Idempotent: whichever process lives longer does it."""
    if address.unix_path is not None:
        path = Path(address.unix_path)
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.parent.rmdir()


def run_engine_process(build: Callable[[msgspec.Raw], EngineLoop]) -> int:
    """Runs the engine that `build` makes; returns the exit code (0 after `Close`, 1 if it could not start or died).

    An `OpenInferError` of `build` is shown to the parent's user.
    """
    faulthandler.enable()  # a crash in a library says on standard error where each thread stood
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return serve_parent(build, StandardStreams())


class ParentStreams(Protocol):
    """What an engine's process and its parent say to each other before there is a socket."""

    def first_line(self) -> bytes:
        """What the parent says first; without a newline if it has ended."""
        ...

    def say(self, line: bytes) -> None:
        """The only thing that the parent is told; `BrokenPipeError` if it has ended."""
        ...

    def wait_for_end(self) -> None:
        """Returns when the parent has closed its end or has ended."""
        ...


class StandardStreams:
    """Those of this process; what is printed later goes to standard error."""

    def first_line(self) -> bytes:
        return sys.stdin.buffer.readline()

    def say(self, line: bytes) -> None:
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
        except BrokenPipeError:  # what is buffered would be written again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def wait_for_end(self) -> None:
        # os.read, not sys.stdin: a thread blocked inside a buffered reader breaks the interpreter's shutdown
        while os.read(0, 4096):
            pass


def serve_parent(build: Callable[[msgspec.Raw], EngineLoop], streams: ParentStreams) -> int:
    """What `run_engine_process` does, but for what belongs to the process as a whole."""
    line = streams.first_line()
    if not line.endswith(b"\n"):  # the parent has ended, by Ctrl-C perhaps, before it had said all
        return 1
    launch = msgspec.json.decode(line, type=Launch)
    return_freed_memory()
    raise_descriptor_limit()  # segments of disk tiers, pipes and sockets to ranks and clients
    with listening(launch.link, launch.host) as (listener, address):
        try:
            streams.say(msgspec.json.encode(address) + b"\n")
        except BrokenPipeError:
            return 1
        parent = _ParentWatch(streams, clean_up=lambda: remove_socket_file(address))
        try:
            set_up_logs(os.environ)
            loop = build(launch.spec)
            settle_memory()
        except OpenInferError as error:
            _refuse(listener, launch.token, str(error))
            return 1
        return _serve(loop, listener, launch.token, parent)


def _serve(loop: EngineLoop, listener: socket.socket, token: str, parent: "_ParentWatch") -> int:
    host = LoopRunner(loop)
    links = LinkServer(listener, token=token, host=host, welcome=Welcome(loop.info))
    parent.serve(host)  # before any Welcome: a client that has one may end our standard input and expects a clean close
    links.start()
    host.run(links.deliver, on_end=lambda: links.close(host.reason))
    parent.stop()
    return 0 if host.died is None else 1


def _refuse(listener: socket.socket, token: str, message: str) -> None:
    deadline_s = time.monotonic() + _REFUSAL_DEADLINE_S
    with contextlib.suppress(OSError):
        while (left_s := deadline_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(left_s)
                if _says_hello(connection, token):
                    connection.sendall(encode_frame(StartRefusal(message)))
                    return
    logger.error("%s", message)


def _says_hello(connection: socket.socket, token: str) -> bool:
    # Reads the Hello off the socket, too: closing it with bytes unread would take back what was sent (TCP resets).
    frames = FrameBuffer()
    try:
        while data := connection.recv(4096):
            for body in frames.feed(data):
                hello = to_engine_decoder.decode(body)
                return isinstance(hello, Hello) and shows_token(hello, token)
    except (OSError, OpenInferError, msgspec.MsgspecError):
        return False
    return False


class _ParentWatch:
    """Ends this process when its standard input does, because then the parent is gone.

    While the engine is being built there is no engine to ask: the process ends at once. Later the engine is asked to
    close, and ended if it hangs.
    """

    def __init__(self, streams: ParentStreams, *, clean_up: Callable[[], None]) -> None:
        self._streams = streams
        self._clean_up = clean_up
        self._host: LoopRunner | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="openinfer-parent", daemon=True).start()

    def serve(self, host: LoopRunner) -> None:
        self._host = host

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        self._streams.wait_for_end()
        if self._host is not None:
            self._host.post(Close())
            if self._stopped.wait(_ORPHAN_DEADLINE_S):
                return
        self._clean_up()
        logging.shutdown()
        os._exit(1)
