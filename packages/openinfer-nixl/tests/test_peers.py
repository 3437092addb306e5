"""A peer whose machine does not answer."""

import socket
from typing import Any

import pytest
from fake_agents import Wire

from openinfer_nixl.messages import answers
from openinfer_nixl.peers import Peer, PeerConnection

TIMEOUT_S = 5.0


class Network:
    """A clock, and connections that wait for it and then fail."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.dials: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def connect(self, address: Any, timeout_s: float) -> socket.socket:
        self.dials.append(self.now_s)
        self.now_s += timeout_s
        raise TimeoutError(f"{address} does not answer")


def test_a_machine_that_does_not_answer_is_waited_for_a_fifth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    monkeypatch.setattr(socket, "create_connection", network.connect)
    agent = Wire().agent(0, 0)
    there = ("10.0.0.9", 7600)
    connection = PeerConnection(there, agent, answers, token=b"", layout="", timeout_s=TIMEOUT_S, clock=network.clock)
    peer = Peer(connection)
    while network.now_s < 100:
        assert not peer.has("key")
        network.now_s += 0.5
    assert network.dials == [0.0, 25.0, 50.0, 75.0]
