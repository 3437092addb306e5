"""What a process that died had read of a connection: all of it, or nothing that counts."""

import contextlib
import os
import socket

import pytest

from openinfer_server.http.handover import Handing
from openinfer_server.workers.group import can_share_ports
from openinfer_server.workers.kept_bytes import KEPT_BYTES, KeptBytes, num_read

pytestmark = pytest.mark.skipif(not can_share_ports(), reason="only Linux hands connections over")


@pytest.fixture
def ends():
    """Both ends of a connection over loopback: the client's, and the server's."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client, stack.enter_context(listener.accept()[0])


@pytest.fixture
def kept():
    kept = KeptBytes.create()
    yield kept
    kept.close()


def handing_of(server, kept, read=b"POST / "):
    handing = Handing(server, [read], owner="", is_kept=kept is not None, is_waited_for=True)
    handing.kept = kept
    return handing


def send(ends, data):
    """Sends to a server that has read all, and returns when its kernel has it."""
    client, server = ends
    client.sendall(data)
    assert server.recv(len(data), socket.MSG_PEEK | socket.MSG_WAITALL) == data


def test_bytes_are_counted_when_they_are_read_and_not_when_they_come(ends):
    _, server = ends
    before = num_read(server)
    send(ends, b"x" * 1000)
    assert num_read(server) == before
    assert server.recv(300) == b"x" * 300
    assert num_read(server) == before + 300


class Meanwhile:
    """A connection of which bytes come between two looks of the kernel at it, so many times."""

    def __init__(self, ends, times):
        self._ends = ends
        self._times = times

    def fileno(self):
        return self._ends[1].fileno()

    def getsockopt(self, *arguments):
        told = self._ends[1].getsockopt(*arguments)
        if self._times:
            self._times -= 1
            client, server = self._ends
            unread = len(server.recv(2**16, socket.MSG_PEEK))  # there is always some
            client.sendall(b"x")
            server.recv(unread + 1, socket.MSG_PEEK | socket.MSG_WAITALL)
        return told


def test_bytes_that_come_meanwhile_are_not_counted_as_read(ends):
    _, server = ends
    send(ends, b"abc")
    server.recv(1)
    before = num_read(server)
    assert num_read(Meanwhile(ends, times=3)) == before


def test_a_client_that_never_stops_is_not_waited_for(ends):
    send(ends, b"abc")
    assert num_read(Meanwhile(ends, times=10**9)) is None


def test_a_client_that_ends_its_side_sends_no_byte_by_that(ends):
    client, server = ends
    before = num_read(server)
    client.sendall(b"abc")
    client.shutdown(socket.SHUT_WR)
    data = b""
    while part := server.recv(10):
        data += part
    assert data == b"abc"
    assert num_read(server) == before + 3


def test_what_was_read_and_kept_is_all_there_is(ends, kept):
    _, server = ends
    handing = handing_of(server, kept)
    send(ends, b"abcdef")
    for _ in range(2):
        kept.add(server.recv(2))
        assert handing.all_read() is not None
    assert handing.all_read() == b"POST / abcd"


def test_what_was_read_and_not_kept_makes_a_hole(ends, kept):
    _, server = ends
    handing = handing_of(server, kept)
    send(ends, b"abcdef")
    kept.add(server.recv(2))
    server.recv(2)  # and here its process died
    assert handing.all_read() is None
    kept.add(server.recv(2))
    assert handing.all_read() is None


def test_more_than_is_kept_is_not_repeated(ends, kept):
    _, server = ends
    handing = handing_of(server, kept)
    kept.add(b"x" * KEPT_BYTES)
    kept.add(b"x")
    assert kept.all() == b""
    kept.add(b"y")
    assert kept.all() == b""
    send(ends, b"ab")
    server.recv(2)
    assert handing.all_read() is None


def test_another_process_goes_on_where_the_first_ended(kept):
    kept.add(b"abc")
    other = KeptBytes(kept.descriptor)
    other.add(b"de")
    assert kept.all() == b"abcde"
    other.add(b"x" * (KEPT_BYTES - 4))
    assert kept.all() == b""


def test_what_cannot_be_kept_is_not_repeated_and_breaks_nothing(ends, kept):
    _, server = ends
    unwritable = KeptBytes(os.open(f"/proc/self/fd/{kept.descriptor}", os.O_RDONLY))  # as where there is no memory
    handing = handing_of(server, unwritable)
    send(ends, b"ab")
    unwritable.add(server.recv(2))
    assert handing.all_read() is None
    unwritable.close()


def test_it_is_closed_once(kept):
    kept.close()
    kept.close()
    assert kept.descriptor == -1
