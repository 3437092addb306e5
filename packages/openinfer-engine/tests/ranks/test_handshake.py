"""Who is let in over a rank's socket, and which head a rank obeys."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from openinfer_core import InvalidRequest, Refused
from openinfer_core.process.wire import encode_frame
from openinfer_engine.ranks import handshake
from openinfer_engine.ranks.handshake import Challenge, Node, NotAdmitted, Offer, admit, introduce, read_token, versions

TOKEN = b"a secret of sixteen bytes or more"
OTHER = b"a secret of sixteen bytes or less"
NODE = Node("b", 1, 3, "10.0.0.2")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    head, rank = socket.socketpair()
    with head, rank:
        yield head, rank


def test_both_ends_with_the_token_meet_and_what_follows_is_left(ends: tuple[socket.socket, socket.socket]) -> None:
    head, rank = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, rank, NODE, token=TOKEN)
        assert admit(head, token=TOKEN) == NODE
        head.sendall(b"orders")
        introducing.result()
    assert rank.recv(100) == b"orders"
    assert head.gettimeout() is None
    assert rank.gettimeout() is None


def test_a_wrong_token_is_refused_and_both_ends_say_so(ends: tuple[socket.socket, socket.socket]) -> None:
    head, rank = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, rank, NODE, token=OTHER)
        with pytest.raises(NotAdmitted, match="does not have this engine's token"):
            admit(head, token=TOKEN)
        with pytest.raises(Refused, match="the token is not this engine's"):
            introducing.result()


def test_the_token_is_never_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    head, rank = ends
    head.sendall(encode_frame(Challenge(b"n" * 32)))
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, rank, NODE, token=TOKEN)
        said = head.recv(4096)
        head.close()
        with pytest.raises(Refused, match="does not answer as one"):
            introducing.result()
    assert TOKEN not in said


def test_other_versions_are_refused_by_name(ends: tuple[socket.socket, socket.socket]) -> None:
    head, rank = ends
    theirs = versions() | {"openinfer-engine": "0.0.9"}
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, rank, NODE, token=TOKEN, said=theirs)
        with pytest.raises(Refused, match=r"a rank of node b cannot take part: openinfer-engine is 0\.0\.9 there and"):
            admit(head, token=TOKEN)
        with pytest.raises(
            Refused, match=r"openinfer-engine is 0\.0\.9 there and .* on the head; install the same wheels"
        ):
            introducing.result()


def test_a_head_without_the_token_is_not_obeyed(ends: tuple[socket.socket, socket.socket]) -> None:
    head, rank = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, rank, NODE, token=TOKEN)
        head.sendall(encode_frame(Challenge(b"n" * 32)))
        head.recv(4096)
        head.sendall(encode_frame(handshake.Admission(b"p" * 32)))
        with pytest.raises(Refused, match="what listens there does not have the token"):
            introducing.result()


@pytest.mark.parametrize(
    "node", [Node("", None, 0, ""), Node("b", None, -1, ""), Node("b", -1, 0, ""), Node("b\n", 0, 0, "")]
)
def test_an_offer_out_of_range_is_not_let_in(ends: tuple[socket.socket, socket.socket], node: Node) -> None:
    head, rank = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, rank, node, token=TOKEN)
        with pytest.raises(NotAdmitted, match="out of range"):
            admit(head, token=TOKEN)
        head.close()
        with pytest.raises(Refused):
            introducing.result()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        (20_000).to_bytes(4, "little") + b"x" * 100,
        bytes(encode_frame(Challenge(b"n"))),
        bytes(encode_frame(Offer(NODE, {}, b"", b""))),
        b"",
    ],
)
def test_what_is_no_rank_is_not_let_in(ends: tuple[socket.socket, socket.socket], said: bytes) -> None:
    head, stranger = ends
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(NotAdmitted):
        admit(head, token=TOKEN)


def test_a_connection_that_says_nothing_is_left(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(NotAdmitted, match="TimeoutError"):
        admit(ends[0], token=TOKEN, deadline_s=0.05)


def test_a_proof_of_another_connection_is_worth_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    head, rank = ends
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(introduce, rank, NODE, token=TOKEN)
        admit(head, token=TOKEN)
        introducing.result()
    recorded = _offer_of(TOKEN)
    again, replayed = socket.socketpair()
    with again, replayed:
        replayed.sendall(recorded)
        with pytest.raises(NotAdmitted, match="does not have this engine's token"):
            admit(again, token=TOKEN)


def _offer_of(token: bytes) -> bytes:
    """What a rank has said on some connection."""
    head, rank = socket.socketpair()
    with head, rank, ThreadPoolExecutor(1) as threads:
        head.sendall(encode_frame(Challenge(b"n" * 32)))
        introducing = threads.submit(introduce, rank, NODE, token=token)
        said = head.recv(4096)
        head.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Refused):
            introducing.result()
    return said


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
