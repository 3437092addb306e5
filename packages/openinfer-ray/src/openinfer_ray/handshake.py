"""The first words between server and replica, and the sockets that they use."""

import socket
import sys

import msgspec

from openinfer_core.process import mutual_proof
from openinfer_core.process.mutual_proof import installed_versions, version_differences

_PROTOCOL = b"openinfer replica 1"
_COMPARED = ("openinfer-core", "openinfer-ray")
_IDLE_S = 5  # without a byte, after which the other machine is asked whether it is there
_INTERVAL_S = 2
_QUESTIONS = 3
_UNANSWERED_MS = 15_000  # how long bytes may stay unacknowledged

_decoder: msgspec.msgpack.Decoder[dict[str, str]] = msgspec.msgpack.Decoder(dict[str, str])


def admit_server(connection: socket.socket, *, token: bytes) -> None:
    """The replica's part.

    Raises:
        NotAdmitted: what connects does not have the token, or is no server of ours.
        Refused: it has other versions.
    """
    mutual_proof.admit(connection, token=token, protocol=_PROTOCOL, judge=_judge)


def meet_replica(connection: socket.socket, *, token: bytes) -> None:
    """The server's part; raises `Refused` if what listens there is no replica of this token and these versions."""
    said = msgspec.msgpack.encode(installed_versions(_COMPARED))
    mutual_proof.introduce(connection, said, token=token, protocol=_PROTOCOL)


def keep_alive(connection: socket.socket) -> None:
    """Sends small frames at once, and ends a connection whose other machine is gone within a quarter of a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _QUESTIONS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def _judge(body: bytes) -> str | None:
    return version_differences(_decoder.decode(body), installed_versions(_COMPARED), here="the replica")
