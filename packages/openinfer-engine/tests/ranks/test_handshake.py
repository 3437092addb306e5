"""Who is let in over a rank's socket, and which head a rank obeys."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from openinfer_core import Refused
from openinfer_core.process import mutual_proof
from openinfer_core.process.mutual_proof import NotAdmitted
from openinfer_engine.ranks.handshake import Node, admit, introduce, versions

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


def test_a_proof_for_another_protocol_is_worth_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    head, rank = ends
    body = msgspec.msgpack.encode((NODE, versions()))
    with ThreadPoolExecutor(1) as threads:
        introducing = threads.submit(mutual_proof.introduce, rank, body, token=TOKEN, protocol=b"another")
        with pytest.raises(NotAdmitted, match="does not have this engine's token"):
            admit(head, token=TOKEN)
        with pytest.raises(Refused, match="the token is not this engine's"):
            introducing.result()
