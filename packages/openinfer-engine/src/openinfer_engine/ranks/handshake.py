"""The first words over a rank's socket: both ends show that they have the token, and what they are.

    head ─► Challenge(nonce)
    rank ─► Offer(node, GPU, versions, nonce, proof)      proof: HMAC-SHA256 of the token over nonces and what is said
    head ─► Admission(proof) | Refusal(why)

The token itself is never sent, each connection has nonces of its own, and proofs are compared in constant time. What
follows is neither encrypted nor signed: the network between ranks must be private.
"""

import hashlib
import hmac
import secrets
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from openinfer_core import InvalidRequest, Refused
from openinfer_core.errors import ContractViolation
from openinfer_core.process.wire import FrameBuffer, encode_frame

HANDSHAKE_DEADLINE_S = 10.0
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
_MOST_BYTES = 16 << 10  # of one message: any process that connects may send one
_NONCE_BYTES = 32
_COMPARED = ("openinfer-core", "openinfer-engine", "openinfer-kernels", "openinfer-kv-cache")
_MAX_GPU = 1023
_MAX_NODE_INDEX = 2**20
_MAX_NAME = 255


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """First message of the head."""

    nonce: bytes


class Node(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of where it is."""

    name: str
    index: int | None  # the order of nodes, where the launcher knows one
    gpu: int
    address: str  # of its end of the socket


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """First message of a rank."""

    node: Node
    versions: dict[str, str]
    nonce: bytes
    proof: bytes


class Admission(msgspec.Struct, frozen=True, array_like=True, tag="admission"):
    """The rank is taken; orders follow."""

    proof: bytes


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The rank is not taken; the head closes."""

    reason: str


_challenge_decoder = msgspec.msgpack.Decoder(Challenge)
_offer_decoder = msgspec.msgpack.Decoder(Offer)
_answer_decoder: msgspec.msgpack.Decoder[Admission | Refusal] = msgspec.msgpack.Decoder(Admission | Refusal)


class NotAdmitted(Exception):
    """A connection that becomes no rank; the message is for the log."""


def read_token(path: Path, *, field: str) -> bytes:
    """The secret in a file, without white space around it; raises `InvalidRequest`."""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise InvalidRequest(f"the token file {path}: {error.strerror}", field=field) from error
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise InvalidRequest(
            f"the token file {path} has {len(token)} bytes; it must have {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}, for "
            f"example those of: openssl rand -hex 32 > {path}",
            field=field,
        )
    return token


def versions() -> dict[str, str]:
    """What both ends must have alike before they can understand each other."""
    return {"python": "{}.{}".format(*sys.version_info[:2]), **{name: version(name) for name in _COMPARED}}


def admit(connection: socket.socket, *, token: bytes, deadline_s: float = HANDSHAKE_DEADLINE_S) -> Node:
    """The head's part; the connection is then the rank's.

    Raises:
        NotAdmitted: a stranger, or none that speaks.
        Refused: a rank with the token, and other versions.
    """
    link = _Handshake(connection, deadline_s=deadline_s)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        link.send(Challenge(nonce))
        offer = _offer_decoder.decode(link.receive())
        if not hmac.compare_digest(
            offer.proof, _proof(token, b"rank", (nonce, offer.nonce), offer.node, offer.versions)
        ):
            link.send(Refusal("the token is not this engine's"))
            raise NotAdmitted("it does not have this engine's token")
        _check_node(offer.node)
        if offer.versions != versions():
            reason = _said_of_versions(offer.versions)
            link.send(Refusal(reason))
            raise Refused(f"a rank of node {offer.node.name} cannot take part: {reason}")
        link.send(Admission(_proof(token, b"head", (offer.nonce, nonce), offer.node, offer.versions)))
    except (OSError, EOFError, ContractViolation, msgspec.MsgspecError) as error:
        raise NotAdmitted(f"{type(error).__name__}: {error}") from error
    connection.settimeout(None)
    return offer.node


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
    link = _Handshake(connection, deadline_s=deadline_s)
    nonce, said = secrets.token_bytes(_NONCE_BYTES), said or versions()
    try:
        challenge = _challenge_decoder.decode(link.receive())
        link.send(Offer(node, said, nonce, _proof(token, b"rank", (challenge.nonce, nonce), node, said)))
        answer = _answer_decoder.decode(link.receive())
    except (OSError, EOFError, ContractViolation, msgspec.MsgspecError) as error:
        raise Refused(f"the head does not answer as one: {type(error).__name__}: {error}") from error
    if isinstance(answer, Refusal):
        raise Refused(f"the head does not take this rank: {answer.reason}")
    if not hmac.compare_digest(answer.proof, _proof(token, b"head", (nonce, challenge.nonce), node, said)):
        raise Refused("what listens there does not have the token: it is not the head of this engine")
    connection.settimeout(None)


def _check_node(node: Node) -> None:
    is_right = 0 <= node.gpu <= _MAX_GPU and 0 < len(node.name) <= _MAX_NAME and node.name.isprintable()
    if not is_right or not (node.index is None or 0 <= node.index <= _MAX_NODE_INDEX):
        raise ContractViolation(f"an offer that is out of range: {node!r}")


def _said_of_versions(theirs: dict[str, str]) -> str:
    ours = versions()
    differences = [
        f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} on the head"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    return "; ".join(differences) + "; install the same wheels on all nodes"


def _proof(token: bytes, role: bytes, nonces: tuple[bytes, bytes], node: Node, said: dict[str, str]) -> bytes:
    parts = (role, *nonces, msgspec.msgpack.encode(node), msgspec.msgpack.encode(said, order="sorted"))
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(token, b"openinfer rank 1\0" + message, hashlib.sha256).digest()


class _Handshake:
    """One end of a connection whose other end is not known yet: few bytes, and until a deadline."""

    def __init__(self, connection: socket.socket, *, deadline_s: float) -> None:
        self._connection = connection
        self._end_s = time.monotonic() + deadline_s
        self._frames = FrameBuffer(max_frame_bytes=_MOST_BYTES)

    def send(self, message: msgspec.Struct) -> None:
        self._connection.settimeout(self._left_s)
        self._connection.sendall(encode_frame(message))

    def receive(self) -> bytes:
        while True:
            self._connection.settimeout(self._left_s)
            # Byte by byte: nothing of what follows the handshake may be taken along, as another reader continues.
            data = self._connection.recv(1)
            if not data:
                raise EOFError("the connection was closed")
            if bodies := self._frames.feed(data):
                return bodies[0]

    @property
    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake takes too long")
        return left_s
