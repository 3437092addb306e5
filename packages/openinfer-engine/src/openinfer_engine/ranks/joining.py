"""`join_head`: ranks of this node, as processes, for an engine whose head runs on another one."""

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from openinfer_core import Refused
from openinfer_engine.ranks.handshake import Node, introduce
from openinfer_engine.ranks.process_host import CHILD_MODULE

logger = logging.getLogger("openinfer.engine")

_RETRY_S = 0.5
_CONNECT_S = 10.0
_END_S = 5.0  # what a rank whose siblings have failed may take to end


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that is to join."""

    name: str  # of the node
    index: int | None = None  # order of nodes, where the launcher knows one
    gpu: int


def join_head(
    address: tuple[str, int], ranks: Sequence[Joining], *, token: bytes, model_dir: Path | None = None, wait_s: float
) -> list[int]:
    """Joins, and waits for the engine's end; returns the exit code of each rank, 0 if the engine closed it.

    On Linux the ranks are killed when the thread that calls this ends.

    Args:
        address: where the head listens.
        ranks: of this node.
        token: the secret that head and ranks show each other.
        model_dir: the model's folder here, if the engine's path is another one.
        wait_s: for the head to listen.

    Raises:
        Refused: the head cannot be reached, or does not take the ranks.
    """
    children: list[subprocess.Popen[bytes]] = []
    end_s = time.monotonic() + wait_s
    try:
        for rank in ranks:
            connection = _connect(address, end_s=end_s)
            with connection:
                node = Node(rank.name, rank.index, rank.gpu, connection.getsockname()[0])
                introduce(connection, node, token=token)
                children.append(_start(connection, model_dir))
            logger.info("GPU %d of node %s has joined %s:%d", rank.gpu, rank.name, *address)
        return [child.wait() for child in children]
    finally:
        for child in children:
            _end(child)


def _connect(address: tuple[str, int], *, end_s: float) -> socket.socket:
    """A connection to the head, which may start later than its ranks."""
    while True:
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as error:
            if time.monotonic() >= end_s:
                raise Refused(f"the head at {address[0]}:{address[1]} cannot be reached: {error}") from error
            time.sleep(_RETRY_S)
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _start(connection: socket.socket, model_dir: Path | None) -> "subprocess.Popen[bytes]":
    """A rank, which has the socket; ours is closed by the caller, so that its end is seen at the other side."""
    descriptor = connection.fileno()
    command = [sys.executable, "-P", "-m", CHILD_MODULE, "--link", str(descriptor)]
    command += [] if model_dir is None else ["--model", str(model_dir.resolve())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])  # noqa: S603 - our own module


def _end(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0 if child.poll() is not None else _END_S)
        return
    child.kill()
    child.wait()
