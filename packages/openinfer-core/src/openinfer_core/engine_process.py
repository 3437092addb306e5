"""The engine process: what runs in the child that `openinfer_core.remote.spawn_engine` starts.

    parent                                   child (python -P -m MODULE)
    Launch as one JSON line ──stdin──►       listens on a Unix socket (or loopback TCP)
    ◄──stdout── Address as one JSON line     builds its engine: loads weights, seconds
    Hello ─────socket──────────────►
    ◄────────── Welcome | Refusal            serves until Close, or until stdin ends: the parent died

The child's own standard output goes to standard error from then on, so that nothing printed can break the protocol.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from openinfer_core.errors import OpenInferError
from openinfer_core.host import EngineHost, EngineLoop
from openinfer_core.links import LinkServer
from openinfer_core.wire import Close, Refusal, Welcome, encode_frame

logger = logging.getLogger("openinfer.engine")

_LONGEST_UNIX_PATH = 100
"""`sockaddr_un.sun_path` has 104 bytes on macOS, 108 on Linux."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line on the child's standard input."""

    token: str
    """What a client must show."""
    spec: msgspec.Raw
    """What to build; the module knows its type."""


class Address(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line on the child's standard output."""

    unix_path: str | None = None
    tcp_port: int | None = None
    """On 127.0.0.1."""


def run_engine_process(build: Callable[[msgspec.Raw], EngineLoop]) -> int:
    """Runs an engine in this process; returns the exit code (0 after `Close`, 1 if the engine could not start or died).

    Args:
        build: makes the engine from the launch's spec; an `OpenInferError` it raises is shown to the parent's user.
    """
    logging.basicConfig(level=os.environ.get("OPENINFER_LOG_LEVEL", "INFO"), format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    listener, address, folder = _listen()
    try:
        _say(address)
        return _serve(build, launch, listener)
    finally:
        if address.unix_path is not None:
            Path(address.unix_path).unlink(missing_ok=True)
            Path(folder).rmdir()


def _listen() -> tuple[socket.socket, Address, str]:
    if hasattr(socket, "AF_UNIX"):
        folder = tempfile.mkdtemp(prefix="openinfer-")  # mode 0700
        path = str(Path(folder) / "engine")
        if len(path.encode()) <= _LONGEST_UNIX_PATH:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path)
            listener.listen()
            return listener, Address(unix_path=path), folder
        Path(folder).rmdir()
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, Address(tcp_port=listener.getsockname()[1]), ""


def _say(address: Address) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(address) + b"\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _serve(build: Callable[[msgspec.Raw], EngineLoop], launch: Launch, listener: socket.socket) -> int:
    try:
        loop = build(launch.spec)
    except OpenInferError as error:
        _refuse(listener, str(error))
        return 1
    host = EngineHost(loop)
    links = LinkServer(listener, token=launch.token, host=host, welcome=Welcome(loop.info))
    links.start()
    threading.Thread(target=_watch_parent, args=(host,), name="openinfer-parent", daemon=True).start()
    host.run(links.deliver)
    links.close()
    return 0 if host.died is None else 1


def _watch_parent(host: EngineHost) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    host.post(Close())


def _refuse(listener: socket.socket, message: str) -> None:
    """Tells the one who started this process why it ends. The address is private, so the token need not be checked."""
    listener.settimeout(10.0)
    try:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(encode_frame(Refusal(message)))
    except OSError:
        logger.error("%s", message)
