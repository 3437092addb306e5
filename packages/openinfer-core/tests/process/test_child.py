"""The exit code of an engine process says how it ended, and whatever connects first does not matter."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from openinfer_core import GenerateRequest
from openinfer_core.process.child import EngineChild
from openinfer_core.process.engine_process import LinkKind
from openinfer_core.process.wire import (
    Close,
    FrameBuffer,
    Hello,
    StartRefusal,
    Submit,
    ToClient,
    ToEngine,
    Welcome,
    encode_frame,
    to_client_decoder,
)

MakeRequest = Callable[..., GenerateRequest]
TOKEN = "the right token"


class FaultySpec(msgspec.Struct):
    behaviour: str


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "children"))


def start(behaviour: str, link: LinkKind = LinkKind.TCP) -> EngineChild:
    return EngineChild("faulty_engine", FaultySpec(behaviour), token=TOKEN, link=link)


def send(connection: socket.socket, *messages: ToEngine) -> None:
    connection.settimeout(30)
    connection.sendall(b"".join(encode_frame(message) for message in messages))


def receive(connection: socket.socket) -> ToClient | None:
    """The first message; None at the end of file."""
    frames = FrameBuffer()
    while data := connection.recv(1 << 16):
        for body in frames.feed(data):
            return to_client_decoder.decode(body)
    return None


@pytest.mark.parametrize("link", list(LinkKind))
def test_engine_process_that_is_told_to_close_ends_with_code_0(link: LinkKind) -> None:
    child = start("serve", link)
    with child.connect() as connection:
        send(connection, Hello(TOKEN))
        assert isinstance(receive(connection), Welcome)
        assert child.exit_code is None
        send(connection, Close())
        assert receive(connection) is None
    child.end(deadline_s=30)
    child.end(deadline_s=30)
    assert child.exit_code == 0


def test_engine_process_whose_standard_input_ends_closes_and_ends_with_code_0() -> None:
    child = start("serve")
    with child.connect() as connection:
        send(connection, Hello(TOKEN))
        assert isinstance(receive(connection), Welcome)
        child.end(deadline_s=30)  # closes the child's standard input first
        assert receive(connection) is None
    assert child.exit_code == 0


def test_engine_process_whose_engine_dies_ends_with_code_1(make_request: MakeRequest) -> None:
    child = start("die in a step")
    with child.connect() as connection:
        send(connection, Hello(TOKEN), Submit(make_request(1, max_tokens=50)))
        while receive(connection) is not None:
            pass
        child.end(deadline_s=30)
    assert child.exit_code == 1


def test_refusal_is_told_to_the_one_with_the_token_whoever_connects_before() -> None:
    child = start("refuse")
    with child.connect() as stranger, child.connect() as silent, child.connect() as connection:
        send(stranger, Hello("a wrong token"))
        silent.close()
        send(connection, Hello(TOKEN))
        assert receive(stranger) is None
        assert receive(connection) == StartRefusal("no engine of that kind")
    child.end(deadline_s=30)
    assert child.exit_code == 1


def test_engine_process_that_does_not_end_in_time_is_killed() -> None:
    child = start("serve")
    child.connect().close()
    os.kill(child.pid, signal.SIGSTOP)  # it cannot even notice that its standard input ends
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # all its threads
    child.end(deadline_s=0.05)
    assert child.exit_code == -signal.SIGKILL
