"""Who is let in over a connection, and which server a client believes."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from openinfer_core.errors import InvalidRequest, Refused
from openinfer_core.process.mutual_proof import (
    Admission,
    Challenge,
    NotAdmitted,
    Offer,
    admit,
    introduce,
    read_token,
    version_differences,
)
from openinfer_core.process.wire import encode_frame

TOKEN = b"a secret of sixteen bytes or more"
OTHER = b"a secret of sixteen bytes or less"
PROTOCOL = b"a test 1"
BODY = b"what the client says of itself"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    server, client = socket.socketpair()
    with server, client:
        yield server, client


def let_in(server: socket.socket, **changed: float) -> bytes:
    return admit(server, token=TOKEN, protocol=PROTOCOL, judge=lambda body: None, **changed)


def test_both_ends_with_the_token_meet_and_what_follows_is_left(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, client, BODY, token=TOKEN, protocol=PROTOCOL)
        assert let_in(server) == BODY
        server.sendall(b"orders")
        introducing.result()
    assert client.recv(100) == b"orders"
    assert server.gettimeout() is None
    assert client.gettimeout() is None


@pytest.mark.parametrize(("token", "protocol"), [(OTHER, PROTOCOL), (TOKEN, b"a test 2")])
def test_another_token_or_protocol_is_refused_and_both_ends_say_so(
    ends: tuple[socket.socket, socket.socket], token: bytes, protocol: bytes
) -> None:
    server, client = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, client, BODY, token=token, protocol=protocol)
        with pytest.raises(NotAdmitted, match="does not have this engine's token"):
            let_in(server)
        with pytest.raises(Refused, match="the token is not this engine's"):
            introducing.result()


def test_what_the_judge_says_reaches_both(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, client, BODY, token=TOKEN, protocol=PROTOCOL)
        with pytest.raises(Refused, match="not today"):
            admit(server, token=TOKEN, protocol=PROTOCOL, judge=lambda body: "not today" if body == BODY else None)
        with pytest.raises(Refused, match="not today"):
            introducing.result()


def test_the_token_is_never_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = ends
    server.sendall(encode_frame(Challenge(b"n" * 32)))
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, client, BODY, token=TOKEN, protocol=PROTOCOL)
        said = server.recv(4096)
        server.close()
        with pytest.raises(Refused, match="does not answer as an engine"):
            introducing.result()
    assert TOKEN not in said


def test_a_server_without_the_token_is_not_believed(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, client, BODY, token=TOKEN, protocol=PROTOCOL)
        server.sendall(encode_frame(Challenge(b"n" * 32)))
        server.recv(4096)
        server.sendall(encode_frame(Admission(b"p" * 32)))
        with pytest.raises(Refused, match="what listens there does not have the token"):
            introducing.result()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        (20_000).to_bytes(4, "little") + b"x" * 100,
        bytes(encode_frame(Challenge(b"n"))),
        bytes(encode_frame(Offer(BODY, b"", b""))),
        b"",
    ],
)
def test_what_does_not_speak_the_protocol_is_not_let_in(ends: tuple[socket.socket, socket.socket], said: bytes) -> None:
    server, stranger = ends
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(NotAdmitted):
        let_in(server)


def test_a_connection_that_says_nothing_is_left(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(NotAdmitted, match="TimeoutError"):
        let_in(ends[0], deadline_s=0.05)


def test_a_proof_of_another_connection_is_worth_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, client, BODY, token=TOKEN, protocol=PROTOCOL)
        let_in(server)
        introducing.result()
    recorded = _offer_of(TOKEN)
    again, replayed = socket.socketpair()
    with again, replayed:
        replayed.sendall(recorded)
        with pytest.raises(NotAdmitted, match="does not have this engine's token"):
            let_in(again)


def _offer_of(token: bytes) -> bytes:
    """What a client has said on some connection."""
    server, client = socket.socketpair()
    with server, client, ThreadPoolExecutor(1) as threads:
        server.sendall(encode_frame(Challenge(b"n" * 32)))
        introducing = threads.submit(introduce, client, BODY, token=token, protocol=PROTOCOL)
        said = server.recv(4096)
        server.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Refused):
            introducing.result()
    return said


def test_versions_are_compared_by_name() -> None:
    assert version_differences({"a": "1"}, {"a": "1"}, here="the head") is None
    said = version_differences({"a": "1", "b": "2"}, {"a": "3"}, here="the head")
    assert said is not None
    assert said.startswith("a is 1 there and 3 on the head; b is 2 there and absent on the head; install the same")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_a_token_of_another_length_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="must have 16 to 4096"):
        read_token(path, field="rank_host")


def test_white_space_around_a_token_is_not_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b" " + TOKEN + b"\n")
    assert read_token(path, field="rank_host") == TOKEN
    with pytest.raises(InvalidRequest, match="No such file"):
        read_token(tmp_path / "absent", field="rank_host")


def test_messages_are_of_fixed_types() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(bytes(encode_frame(Challenge(b"n"))[4:]), type=Offer)
