"""Both ends of a connection show that they have one secret, which is never sent, before anything else is said.

    server ─► Challenge(nonce)
    client ─► Offer(body, nonce, proof)
    server ─► Admission(proof) | Refusal(why)

A proof is HMAC-SHA256 (RFC 2104) of the secret over the protocol's name, the role, both nonces and the body. Each
connection has nonces of its own, and proofs are compared in constant time. What follows is neither encrypted nor
signed: the network must be private.
"""

import hashlib
import hmac
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec

from openinfer_core.errors import ContractViolation, InvalidRequest, Refused
from openinfer_core.process.wire import FrameBuffer, encode_frame

HANDSHAKE_DEADLINE_S = 10.0
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
_MOST_BYTES = 16 << 10  # of one message: any process that connects may send one
_NONCE_BYTES = 32


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """First message of the server."""

    nonce: bytes


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """First message of the client; the body is the protocol's."""

    body: bytes
    nonce: bytes
    proof: bytes


class Admission(msgspec.Struct, frozen=True, array_like=True, tag="admission"):
    """The client is taken; the protocol follows."""

    proof: bytes


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The client is not taken; the server closes."""

    reason: str


_challenge_decoder = msgspec.msgpack.Decoder(Challenge)
_offer_decoder = msgspec.msgpack.Decoder(Offer)
_answer_decoder: msgspec.msgpack.Decoder[Admission | Refusal] = msgspec.msgpack.Decoder(Admission | Refusal)


class NotAdmitted(Exception):
    """A connection without the secret, or that does not speak the protocol; the message is for the log."""


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


def admit(
    connection: socket.socket,
    *,
    token: bytes,
    protocol: bytes,
    judge: Callable[[bytes], str | None],
    deadline_s: float = HANDSHAKE_DEADLINE_S,
) -> bytes:
    """The server's part; the connection is then the client's, and blocking.

    Args:
        connection: a new one.
        token: the secret.
        protocol: its name and number: a proof of one is worth nothing in another.
        judge: why a client with the secret is refused all the same, from its body; None if it is not.
        deadline_s: for the whole.

    Returns:
        The client's body.

    Raises:
        NotAdmitted: the client does not have the secret, or does not speak the protocol.
        Refused: what `judge` said; the client has been told.
    """
    link = _Handshake(connection, deadline_s=deadline_s)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        link.send(Challenge(nonce))
        offer = _offer_decoder.decode(link.receive())
        proof = _proof(token, protocol, b"client", (nonce, offer.nonce), offer.body)
        if not hmac.compare_digest(offer.proof, proof):
            link.send(Refusal("the token is not this engine's"))
            raise NotAdmitted("it does not have this engine's token")
        if (reason := judge(offer.body)) is not None:
            link.send(Refusal(reason))
            raise Refused(reason)
        link.send(Admission(_proof(token, protocol, b"server", (offer.nonce, nonce), offer.body)))
    except (OSError, EOFError, ContractViolation, msgspec.MsgspecError) as error:
        raise NotAdmitted(f"{type(error).__name__}: {error}") from error
    connection.settimeout(None)
    return offer.body


def introduce(
    connection: socket.socket,
    body: bytes,
    *,
    token: bytes,
    protocol: bytes,
    deadline_s: float = HANDSHAKE_DEADLINE_S,
) -> None:
    """The client's part; the connection is blocking then.

    Raises:
        Refused: the server refuses it, does not have the secret itself, or does not speak the protocol.
    """
    link = _Handshake(connection, deadline_s=deadline_s)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        challenge = _challenge_decoder.decode(link.receive())
        link.send(Offer(body, nonce, _proof(token, protocol, b"client", (challenge.nonce, nonce), body)))
        answer = _answer_decoder.decode(link.receive())
    except (OSError, EOFError, ContractViolation, msgspec.MsgspecError) as error:
        raise Refused(f"what listens there does not answer as an engine: {type(error).__name__}: {error}") from error
    if isinstance(answer, Refusal):
        raise Refused(answer.reason)
    if not hmac.compare_digest(answer.proof, _proof(token, protocol, b"server", (nonce, challenge.nonce), body)):
        raise Refused("what listens there does not have the token: it is not of this engine")
    connection.settimeout(None)


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """What both ends must have alike before they can understand each other: these, and Python."""
    return {"python": "{}.{}".format(*sys.version_info[:2]), **{name: version(name) for name in distributions}}


def version_differences(theirs: Mapping[str, str], ours: Mapping[str, str], *, here: str) -> str | None:
    """What to tell a client of other versions; None if there is no difference."""
    differences = [
        f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} on {here}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    return "; ".join(differences) + "; install the same wheels on all nodes" if differences else None


def _proof(token: bytes, protocol: bytes, role: bytes, nonces: tuple[bytes, bytes], body: bytes) -> bytes:
    parts = (protocol, role, *nonces, body)
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(token, b"openinfer proof 2\0" + message, hashlib.sha256).digest()


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
