"""A replica's KV events reach servers that have the token, encrypted, and no others; what is missed is asked for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from test_stream import batch, digest, removed, stored

from openinfer_ray.kv_events.curve import connect_with
from openinfer_ray.kv_events.keys import curve_secrets, digest_key
from openinfer_ray.kv_events.relay import KvEventsRelay
from openinfer_ray.kv_events.subscription import KvEventSubscription
from openinfer_ray.kv_events.told_prefixes import ToldPrefixes

TOKEN = b"a secret of sixteen bytes or more"
SECRETS = curve_secrets(TOKEN)
END = b"\xff" * 8


class Engine:
    """The sockets of an engine's KV events, which a test writes to and answers from."""

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(f"ipc://{folder}/events")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{folder}/replay")
        self.sent: list[bytes] = []
        self.num_forgotten = 0

    def tell(self, *events: object, is_lost: bool = False) -> None:
        self.sent.append(batch(*events))
        if not is_lost:
            self._pub.send_multipart((b"", (len(self.sent) - 1).to_bytes(8, "big"), self.sent[-1]))

    def answer_replays(self) -> None:
        while self._router.poll(0):
            *addresses, _, first = self._router.recv_multipart()
            for number in range(max(int.from_bytes(first, "big"), self.num_forgotten), len(self.sent)):
                self._router.send_multipart((*addresses, b"", b"", number.to_bytes(8, "big"), self.sent[number]))
            self._router.send_multipart((*addresses, b"", b"", END, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def relay(tmp_path: Path, engine: Engine) -> Iterator[KvEventsRelay]:
    made = KvEventsRelay(tmp_path, host="127.0.0.1", secrets=SECRETS)
    yield made
    made.close()
    made.close()


@contextlib.asynccontextmanager
async def followed(relay: KvEventsRelay, engine: Engine) -> AsyncIterator[tuple[ToldPrefixes, Callable[..., Any]]]:
    """What a server knows of the replica, and what waits until something is so, or (None) for a turn."""
    held, subscription = ToldPrefixes(100), KvEventSubscription(SECRETS, patience_s=30.0)
    task = asyncio.create_task(subscription.follow("a", "127.0.0.1", relay.ports, held))

    async def until(is_so: Callable[[], bool] | None) -> None:
        while is_so is None or not is_so():
            assert not task.done()
            engine.answer_replays()
            await asyncio.sleep(0.01)
            if is_so is None:
                return

    try:
        yield held, until
    finally:
        task.cancel()
        await asyncio.wait((task,))
        subscription.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def test_a_server_knows_what_was_told_before_it_came_and_what_is_told_after(
    relay: KvEventsRelay, engine: Engine
) -> None:
    async def scenario() -> None:
        engine.tell(["AllBlocksCleared"])
        engine.tell(stored(1, 2))
        async with followed(relay, engine) as (held, until):
            await until(lambda: held.count([digest(1), digest(2)]) == 2)
            engine.tell(removed(2))
            # The subscription may not have arrived yet, and this message be lost: then a later one shows the gap.
            number = 10
            while held.count([digest(2)]):
                number += 1
                engine.tell(stored(number))
                await until(None)
            assert held.count([digest(1)]) == 1

    run(scenario())


def test_what_was_lost_on_the_way_is_asked_for(relay: KvEventsRelay, engine: Engine) -> None:
    async def scenario() -> None:
        engine.tell(stored(1))
        async with followed(relay, engine) as (held, until):
            await until(lambda: held.num_told == 1)
            for number in range(2, 6):
                engine.tell(stored(number), is_lost=True)
            number = 10
            while held.count([digest(number) for number in range(1, 6)]) < 5:
                number += 1
                engine.tell(stored(number))
                await until(None)

    run(scenario())


def test_a_server_that_comes_late_is_told_of_blocks_whose_messages_the_engine_has_forgotten(
    relay: KvEventsRelay, engine: Engine
) -> None:
    async def scenario() -> None:
        engine.tell(stored(1, 2, 3))
        engine.tell(stored(2, medium="CPU"))
        async with followed(relay, engine) as (held, until):
            await until(lambda: held.num_told == 3)
        engine.tell(removed(2, 3))
        async with followed(relay, engine) as (held, until):
            await until(lambda: held.num_told == 2)
        engine.num_forgotten = len(engine.sent)
        async with followed(relay, engine) as (held, until):
            await until(lambda: held.num_told == 2)
            assert held.count([digest(1), digest(2), digest(3)]) == 2
            held.removed([2], "GPU")
            assert held.count([digest(2)]) == 1

    run(scenario())


def test_two_servers_hear_the_same(relay: KvEventsRelay, engine: Engine) -> None:
    async def scenario() -> None:
        engine.tell(stored(1, 2, 3))
        async with followed(relay, engine) as (first, until), followed(relay, engine) as (second, _):
            await until(lambda: first.num_told == second.num_told == 3)

    run(scenario())


def answer(relay: KvEventsRelay, engine: Engine, secure: Callable[[Any], None], *, wait_ms: int) -> list[bytes] | None:
    """What a client of a replay hears within a time; None if nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        secure(asking)
        asking.connect(f"tcp://127.0.0.1:{relay.ports.replay}")
        asking.send_multipart((b"", bytes(8)))
        for _ in range(wait_ms // 10):
            engine.answer_replays()
            if asking.poll(10):
                return asking.recv_multipart()
        return None


def test_clients_without_the_token_are_told_nothing(relay: KvEventsRelay, engine: Engine) -> None:
    engine.tell(stored(1))
    assert answer(relay, engine, lambda asking: connect_with(asking, SECRETS), wait_ms=60_000) is not None
    # Hearing nothing takes a while to see; a slow machine can only make this pass.
    assert answer(relay, engine, lambda _: None, wait_ms=300) is None
    others = curve_secrets(b"another secret of sixteen bytes")
    assert answer(relay, engine, lambda asking: connect_with(asking, others), wait_ms=300) is None
    # It knows the replicas' key, and is no server.
    strange = SECRETS._replace(server=others.server)
    assert answer(relay, engine, lambda asking: connect_with(asking, strange), wait_ms=300) is None


def test_secrets_of_one_token_differ_from_each_other_and_from_it() -> None:
    secrets = {TOKEN, digest_key(TOKEN), *SECRETS}
    assert len(secrets) == 4
    assert all(len(each) == 32 for each in (digest_key(TOKEN), *SECRETS))
    assert curve_secrets(TOKEN) == SECRETS
