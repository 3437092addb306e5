"""Every attack of the bench at once, a few times each, while good requests run: foreseen answers, nothing left."""

import asyncio
import gc
from collections import Counter

import pytest

from openinfer_bench.hostile.attacks import ATTACKS, run_attack
from openinfer_bench.hostile.good import Seen, ask
from openinfer_bench.hostile.model import NUM_TOKEN_IDS, write_model
from openinfer_core.engine import EngineInfo
from openinfer_core.events import Failed, FailureKind
from openinfer_server import ServerOptions
from openinfer_server.http.protocol import bounded_protocol
from openinfer_server.testing import ParrotLoop, ThreadedServer, wait_until

ATTEMPTS = {"disconnects": 60, "flood": 60, "slow-heads": 20}
GOOD = 20


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
def attacked(tmp_path):
    write_model(tmp_path)
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
    with ThreadedServer(GrammarlessParrot(info), tmp_path, options, protocol=protocol) as server:
        server.connections = connections
        yield server


async def attack_and_ask(host: str, port: int):
    seen = Seen()

    async def good() -> None:
        for _ in range(GOOD):
            await ask(host, port, seen, prompt="The stone", max_tokens=4)

    attacks = [
        run_attack(name, host, port, count=ATTEMPTS.get(name, 3), concurrency=20, seconds=60) for name in ATTACKS
    ]
    _, *outcomes = await asyncio.gather(good(), *attacks)
    return seen, dict(zip(ATTACKS, outcomes, strict=True))


def test_attacks_get_foreseen_answers_while_good_requests_are_answered(attacked):
    seen, outcomes = asyncio.run(attack_and_ask(*attacked.address))
    assert len(seen.ttft_s) == GOOD
    for name, attack in ATTACKS.items():
        assert set(outcomes[name]) <= attack.outcomes, (name, outcomes[name])
        assert outcomes[name].total() == ATTEMPTS.get(name, 3)
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
    seen, _ = asyncio.run(attack_and_ask(*attacked.address))
    assert len(seen.ttft_s) == GOOD
    wait_until(lambda: left() <= before, "an end of what the requests were made of")
