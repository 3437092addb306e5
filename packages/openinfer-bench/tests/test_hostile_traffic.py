"""Every attack of the bench at once, a few times each, while good requests run: foreseen answers, nothing left."""

import asyncio
import gc
from collections import Counter

import pytest

from openinfer_bench.hostile.attacks import ATTACKS, run_attack
from openinfer_bench.http_client import Address, ask
from openinfer_core.engine import EngineInfo
from openinfer_core.events import Failed, FailureKind
from openinfer_server import ServerOptions
from openinfer_server.http.protocol import bounded_protocol
from openinfer_server.testing import ParrotLoop, ThreadedServer, wait_until
from openinfer_tiny_model import model_dir

ATTEMPTS = {"disconnects": 60, "flood": 60, "slow-heads": 20, "idle": 20}
NAMES = [name for name in ATTACKS if name not in {"slow-readers", "tokenize", "tokenize-left", "texts"}]
"""Without those that take half a minute by themselves."""
GOOD = 20
NUM_TOKEN_IDS = 2048
BODY = {"prompt": "The stone", "max_tokens": 4, "stream": True}


class GrammarlessParrot(ParrotLoop):
    """Has no grammar compiler, and says so."""

    def submit(self, request):
        if request.sampling.grammar is not None:
            return [Failed(request.request_id, FailureKind.INVALID, "this parrot follows no grammar")]
        return super().submit(request)


def counted(protocol: type) -> tuple[type, set[asyncio.Protocol]]:
    """The protocol, and the set of its connections that are open."""
    connections: set[asyncio.Protocol] = set()

    class Counted(protocol):
        def connection_made(self, transport) -> None:
            connections.add(self)
            super().connection_made(transport)

        def connection_lost(self, exc) -> None:
            connections.discard(self)
            super().connection_lost(exc)

    return Counted, connections


@pytest.fixture
def attacked():
    options = ServerOptions(port=0, head_timeout_s=0.3, max_connections=64)
    info = EngineInfo(
        model="parrot",
        family="birds",
        max_model_tokens=2048,
        num_token_ids=NUM_TOKEN_IDS,
        eos_token_ids=(NUM_TOKEN_IDS - 1,),
        block_size_tokens=16,
        num_blocks=64,
        max_num_seqs=64,
        max_waiting=40,
    )
    protocol, connections = counted(bounded_protocol(options))
    with ThreadedServer(GrammarlessParrot(info), model_dir(), options, protocol=protocol) as server:
        server.connections = connections
        yield server


async def attack_and_ask(address: Address):
    async def good() -> int:
        statuses: list[int] = []
        while statuses.count(200) < GOOD:
            statuses.append((await ask(address, "/v1/completions", BODY)).status)
        return statuses.count(200)

    attacks = [
        run_attack(name, address, asyncio.sleep(60), count=ATTEMPTS.get(name, 3), concurrency=20) for name in NAMES
    ]
    answered, *found = await asyncio.gather(good(), *attacks)
    return answered, {name: counts.outcomes for name, counts in zip(NAMES, found, strict=True)}


def test_attacks_get_foreseen_answers_while_good_requests_are_answered(attacked):
    answered, outcomes = asyncio.run(attack_and_ask(Address(*attacked.address)))
    assert answered == GOOD
    for name in NAMES:
        # Together they want more than 64 connections: one that has not sent its head yet may be closed to make room.
        foreseen = ATTACKS[name].outcomes | {"closed"}
        if ATTACKS[name].before_tls:
            foreseen = {"400", "closed"}  # this server has no certificate: a handshake is no HTTP
        if ATTACKS[name].on_grammars:
            foreseen = foreseen - {"200"} | {"400"}  # it has no grammar compiler: no grammar is answered
        assert set(outcomes[name]) <= foreseen, (name, outcomes[name])
        assert sum(outcomes[name].values()) == ATTEMPTS.get(name, 3)
    wait_until(lambda: not attacked.connections, "an end of the connections")
    assert attacked.exit_code is None


PER_REQUEST = (
    "HttpRequest",
    "Response",
    "PlainStream",
    "DeltaChoice",
    "DirectWriter",
    "RequestResponseCycle",
    "Counted",
)
"""Kinds of things that are made for a request or a connection (`Counted`: the protocol of these tests)."""


def test_nothing_of_a_request_is_left_in_memory(attacked):
    """What one round leaves behind, ten would multiply."""

    def left() -> Counter[str]:
        gc.collect()
        return Counter(name for name in (type(thing).__name__ for thing in gc.get_objects()) if name in PER_REQUEST)

    before = left()
    answered, _ = asyncio.run(attack_and_ask(Address(*attacked.address)))
    assert answered == GOOD
    wait_until(lambda: left() <= before, "an end of what the requests were made of")
