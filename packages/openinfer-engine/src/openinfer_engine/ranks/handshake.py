"""The first words over a rank's socket: `openinfer_core.process.mutual_proof`, and what a rank says of itself.

The head is the server, a rank the client; its body is `Introduction`. What follows is neither encrypted nor signed: the
network between ranks must be private.
"""

import socket

import msgspec

from openinfer_core import Refused
from openinfer_core.errors import ContractViolation
from openinfer_core.process import mutual_proof
from openinfer_core.process.mutual_proof import HANDSHAKE_DEADLINE_S, installed_versions, version_differences

_PROTOCOL = b"openinfer rank 2"
_COMPARED = ("openinfer-core", "openinfer-engine", "openinfer-kernels", "openinfer-kv-cache")
_MAX_GPU = 1023
_MAX_NODE_INDEX = 2**20
_MAX_NAME = 255


class Node(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of where it is."""

    name: str
    index: int | None  # the order of nodes, where the launcher knows one
    gpu: int
    address: str  # of its end of the socket


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of itself."""

    node: Node
    versions: dict[str, str]


_decoder = msgspec.msgpack.Decoder(Introduction)


def versions() -> dict[str, str]:
    """What head and ranks must have alike."""
    return installed_versions(_COMPARED)


def admit(connection: socket.socket, *, token: bytes, deadline_s: float = HANDSHAKE_DEADLINE_S) -> Node:
    """The head's part; the connection is then the rank's.

    Raises:
        NotAdmitted: it has no token, or is no rank.
        Refused: a rank with the token, and other versions.
    """
    name = ""

    def judge(body: bytes) -> str | None:
        nonlocal name
        said = _decoder.decode(body)
        _check_node(said.node)
        name = said.node.name
        return version_differences(said.versions, versions(), here="the head")

    try:
        body = mutual_proof.admit(connection, token=token, protocol=_PROTOCOL, judge=judge, deadline_s=deadline_s)
    except Refused as error:
        raise Refused(f"a rank of node {name} cannot take part: {error}") from error
    return _decoder.decode(body).node


def introduce(
    connection: socket.socket,
    node: Node,
    *,
    token: bytes,
    said: dict[str, str] | None = None,
    deadline_s: float = HANDSHAKE_DEADLINE_S,
) -> None:
    """The rank's part; by default it says the versions that are installed.

    Raises:
        Refused: the head does not take it, does not have the token itself, or is none.
    """
    body = msgspec.msgpack.encode(Introduction(node, versions() if said is None else said))
    try:
        mutual_proof.introduce(connection, body, token=token, protocol=_PROTOCOL, deadline_s=deadline_s)
    except Refused as error:
        raise Refused(f"the head does not take this rank: {error}") from error


def _check_node(node: Node) -> None:
    is_right = 0 <= node.gpu <= _MAX_GPU and 0 < len(node.name) <= _MAX_NAME and node.name.isprintable()
    if not is_right or not (node.index is None or 0 <= node.index <= _MAX_NODE_INDEX):
        raise ContractViolation(f"an offer that is out of range: {node!r}")
