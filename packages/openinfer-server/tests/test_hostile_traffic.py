"""Every attack of the bench at once, a few times each, while good requests run: foreseen answers, nothing left."""

import asyncio
import gc
from collections import Counter

import msgspec
import pytest

from openinfer_core.events import Failed, FailureKind
from openinfer_server import ServerOptions
from openinfer_server.hostile_bench.attacks import ATTACKS, run_attack
from openinfer_server.hostile_bench.good import Seen, ask
from openinfer_server.testing import ParrotLoop, wait_until

ATTEMPTS = {"disconnects": 60, "flood": 60, "slow-heads": 20}
GOOD = 20


class GrammarlessParrot(ParrotLoop):
    """Has no grammar compiler, and says so."""

    def submit(self, request):
        if request.sampling.grammar is not None:
            return [Failed(request.request_id, FailureKind.INVALID, "this parrot follows no grammar")]
        return super().submit(request)


@pytest.fixture
def attacked(start, info):
    options = ServerOptions(port=0, head_timeout_s=0.3, max_connections=64)
    return start(GrammarlessParrot(msgspec.structs.replace(info, max_waiting=40)), options)


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


def test_nothing_is_left_in_memory(attacked):
    """What one round leaves behind, ten would multiply."""

    def objects() -> Counter[str]:
        asyncio.run(attack_and_ask(*attacked.address))
        wait_until(lambda: not attacked.connections, "an end of the connections")
        attacked.engine.submitted.clear()
        attacked.engine.aborted.clear()
        return counted()

    def counted() -> Counter[str]:
        gc.collect()
        kinds = (type(thing) for thing in gc.get_objects())
        ours = ("<class 'openinfer_server.", "<class 'uvicorn.")
        return Counter(name for name in map(repr, kinds) if name.startswith(ours))

    first = objects()
    assert first
    objects()
    wait_until(lambda: counted() <= first, "an end of what two rounds made")
