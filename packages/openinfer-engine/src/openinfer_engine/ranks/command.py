"""`openinfer rank`: gives the GPUs of this node to an engine whose head runs on another one.

openinfer rank --join HEAD:7000 --token-file FILE --ranks 8 [--model DIR] [--node NAME] [--node-index N]
"""

import argparse
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from openinfer_core import InvalidRequest, Refused
from openinfer_core.process.addresses import parse_address
from openinfer_core.process.logs import set_up_logs
from openinfer_core.process.mutual_proof import read_token
from openinfer_engine.ranks.handshake import Node, introduce
from openinfer_engine.ranks.process_host import CHILD_MODULE

OPENINFER_CONTRACT = 1

logger = logging.getLogger("openinfer.engine")

_RETRY_S = 0.5
_CONNECT_S = 10.0
_END_S = 5.0  # what a rank whose siblings have failed may take to end
_MAX_RANKS = 1024
_EXIT_FAILED = 1


def run(argv: Sequence[str]) -> int:
    """Joins, and waits for the engine's end; returns 0 if it closed, 1 if it or a rank of this node failed.

    Raises:
        InvalidRequest: an argument is wrong.
        Refused: the head cannot be reached, or does not take the ranks.
    """
    arguments = _parser().parse_args(argv)
    if sys.platform == "win32":
        raise Refused("ranks of several machines need a POSIX system")
    if not 1 <= arguments.ranks <= _MAX_RANKS or not 0 <= arguments.gpu < _MAX_RANKS:
        raise InvalidRequest(f"--ranks and --gpu must be between 0 and {_MAX_RANKS}", field="ranks")
    if arguments.model is not None and not arguments.model.is_dir():
        raise InvalidRequest(f"--model {arguments.model} is no folder", field="model")
    set_up_logs(os.environ)
    address = parse_address(arguments.join, field="join")
    token = read_token(arguments.token_file, field="token_file")
    children: list[subprocess.Popen[bytes]] = []
    end_s = time.monotonic() + arguments.wait_s
    try:
        for gpu in range(arguments.gpu, arguments.gpu + arguments.ranks):
            connection = _connect(address, end_s=end_s)
            with connection:
                node = Node(arguments.node, arguments.node_index, gpu, connection.getsockname()[0])
                introduce(connection, node, token=token)
                children.append(_start(connection, arguments.model))
            logger.info("GPU %d of node %s has joined %s:%d", gpu, arguments.node, *address)
        codes = [child.wait() for child in children]
    finally:
        for child in children:
            _end(child)
    return _EXIT_FAILED if any(codes) else 0


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer rank", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="where the head listens for ranks")
    parser.add_argument(
        "--token-file", required=True, type=Path, metavar="FILE", help="the secret that all nodes share"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model folder here, if its path is another one")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="ranks of this node, one GPU each (default: 1)"
    )
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="GPU of the first of them (default: 0)")
    parser.add_argument("--node", default=socket.gethostname(), metavar="NAME", help="by default the host name")
    parser.add_argument("--node-index", type=int, metavar="N", help="order of nodes: SLURM_NODEID, LWS_WORKER_INDEX")
    parser.add_argument("--wait-s", type=int, default=600, metavar="N", help="for the head to listen (default: 600)")
    return parser
