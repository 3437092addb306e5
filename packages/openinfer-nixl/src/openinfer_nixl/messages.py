"""What peers say to each other, after both have shown that they have the token: frames of `core.process.wire`.

client ─► Has | List | TakeLease | GiveBack     one at a time
server ─► Described, first of all; then Found | Keys | Leased | Absent | GivenBack
"""

import socket
from typing import Annotated, TypeAlias

import msgspec

from openinfer_core.process.wire import FrameBuffer, encode_frame

PROTOCOL = b"openinfer nixl 1"
MAX_KEY_CHARACTERS = 256
_MAX_FRAME_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16

_Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY_CHARACTERS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Has(msgspec.Struct, frozen=True, array_like=True, tag="has"):
    """Whether there is an object of a key."""

    key: _Key


class List(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """Which keys begin so."""

    prefix: _Key


class TakeLease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """An object is to stay where it is."""

    key: _Key


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag="give_back"):
    """It may go."""

    lease_id: Number


class Described(msgspec.Struct, frozen=True, array_like=True, tag="described"):
    """How the server's memory is read."""

    description: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """Answers `Has`."""

    is_there: bool


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """Answers `List`."""

    keys: tuple[_Key, ...]


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """Where the object is, in the address space of the server."""

    lease_id: Number
    address: Number
    num_bytes: Number


class Absent(msgspec.Struct, frozen=True, array_like=True, tag="absent"):
    """There is no such object."""


class GivenBack(msgspec.Struct, frozen=True, array_like=True, tag="given_back"):
    """The lease has ended."""


Question: TypeAlias = Has | List | TakeLease | GiveBack
Answer: TypeAlias = Described | Found | Keys | Leased | Absent | GivenBack

questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Frames:
    """The frames of one connection that is blocking, or has a timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = FrameBuffer(max_frame_bytes=_MAX_FRAME_BYTES)
        self._ready: list[bytes] = []

    def send(self, message: msgspec.Struct) -> None:
        self._connection.sendall(encode_frame(message))

    def receive(self) -> bytes:
        """The body of the next one; raises `ConnectionError` at the end."""
        while not self._ready:
            data = self._connection.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionError("the peer has closed the connection")
            self._ready = self._buffer.feed(data)
        return self._ready.pop(0)
