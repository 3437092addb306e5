"""A server's replicas come, leave, freeze and are lost, while requests run."""

import asyncio
import os
import signal
from typing import Any

import msgspec
from fake_replicas import TOKEN, FakeReplica, Reader, ask, ray_engine, run, until

from openinfer_core import Failed, FailureKind, Finished, Tokens
from openinfer_core.process.local import InProcessEngine
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions
from openinfer_ray.directory import Directory, read_listing
from openinfer_ray.following import Times
from openinfer_ray.ray_engine import join_replica
from openinfer_ray.replica_spec import ReplicaAddress, ReplicaState

QUICK = SimulatedOptions()
SLOW = SimulatedOptions(tpot_s=0.005)
OFTEN = Times(look_s=0.01, heartbeat_s=0.01, patience_s=30.0)


class Listing:
    """A directory that a test writes; it raises what `error` is."""

    def __init__(self, *addresses: ReplicaAddress) -> None:
        self.addresses = list(addresses)
        self.error: Exception | None = None
        self.asked = 0

    def __call__(self) -> list[ReplicaAddress]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return list(self.addresses)


def test_a_replica_that_comes_gets_requests() -> None:
    async def scenario(first: FakeReplica, second: FakeReplica) -> None:
        listing = Listing(first.address())
        engine = ray_engine(first, listing=listing, times=OFTEN)
        reader = Reader(engine)
        await until(lambda: listing.asked > 1)
        assert engine.replicas == ["a"]
        listing.addresses.append(second.address())
        await until(lambda: engine.replicas == ["a", "b"])
        for number in range(16):
            engine.submit(ask(number))
        assert all(isinstance(end, Finished) for end in await reader.wait_for(16, Finished, Failed))
        assert second.relay.num_links == 1
        await engine.close()

    with FakeReplica("a", QUICK) as first, FakeReplica("b", QUICK) as second:
        run(scenario(first, second))


def test_a_replica_that_leaves_answers_what_it_has_and_gets_no_more() -> None:
    async def scenario(first: FakeReplica, second: FakeReplica) -> None:
        listing = Listing(first.address(), second.address())
        engine = ray_engine(first, second, listing=listing, times=OFTEN)
        reader = Reader(engine)
        for number in range(8):
            engine.submit(ask(number, max_tokens=100))
        await reader.wait_for(8, Tokens)
        listing.addresses = [first.address(), second.address(ReplicaState.LEAVING)]
        await until(lambda: engine.replicas == ["a"])
        assert all(isinstance(end, Finished) for end in await reader.wait_for(8, Finished, Failed))
        assert await asyncio.to_thread(second.relay.wait_until_left, timeout_s=60)
        assert first.relay.num_links == 1
        await engine.close()

    with FakeReplica("a", SLOW) as first, FakeReplica("b", SLOW) as second:
        run(scenario(first, second))


def test_a_replica_that_dies_ends_its_streams_and_the_others_go_on() -> None:
    async def scenario(first: FakeReplica, second: FakeReplica, third: FakeReplica) -> None:
        listing = Listing(first.address(), second.address())
        engine = ray_engine(first, second, listing=listing, times=OFTEN)
        reader = Reader(engine)
        for number in range(16):
            engine.submit(ask(number, max_tokens=200))
        await until(lambda: {event.request_id for event in reader.seen if isinstance(event, Tokens)} == {*range(16)})
        assert second.engine.pid is not None
        os.kill(second.engine.pid, signal.SIGKILL)
        ends = await reader.wait_for(16, Finished, Failed)
        lost = [end for end in ends if isinstance(end, Failed)]
        assert 0 < len(lost) < 16
        assert {end.kind for end in lost} == {FailureKind.SHUTDOWN}
        listing.addresses.append(third.address())
        await until(lambda: engine.replicas == ["a", "c"])
        engine.submit(ask(99))
        assert isinstance((await reader.wait_for(17, Finished, Failed))[-1], Finished)
        await engine.close()

    with FakeReplica("a", SLOW) as first, FakeReplica("b", SLOW) as second, FakeReplica("c", SLOW) as third:
        run(scenario(first, second, third))


def test_a_frozen_replica_is_left_and_its_streams_end() -> None:
    async def scenario(first: FakeReplica) -> None:
        engine = ray_engine(first, times=Times(look_s=0.01, heartbeat_s=0.01, patience_s=0.3))
        reader = Reader(engine)
        engine.submit(ask(1, max_tokens=10**6))
        await reader.wait_for(1, Tokens)
        assert first.engine.pid is not None
        os.kill(first.engine.pid, signal.SIGSTOP)
        try:
            (end,) = await reader.wait_for(1, Failed)
            assert end.kind is FailureKind.SHUTDOWN
            assert engine.replicas == []
            engine.submit(ask(2))
            assert (await reader.wait_for(2, Failed))[-1].kind is FailureKind.UNAVAILABLE
        finally:
            os.kill(first.engine.pid, signal.SIGCONT)
        await engine.close()

    with FakeReplica("a", SLOW) as first:
        run(scenario(first))


def test_without_the_directory_streams_and_new_requests_go_on() -> None:
    async def scenario(first: FakeReplica) -> None:
        listing = Listing(first.address())
        engine = ray_engine(first, listing=listing, times=OFTEN)
        reader = Reader(engine)
        engine.submit(ask(1, max_tokens=50))
        await reader.wait_for(1, Tokens)
        for said in (ConnectionError("the control store is gone"), None):
            listing.error, listing.addresses, before = said, [], listing.asked
            await until(lambda before=before: listing.asked > before + 1)
        engine.submit(ask(2))
        assert all(isinstance(end, Finished) for end in await reader.wait_for(2, Finished, Failed))
        assert engine.replicas == ["a"]
        await engine.close()

    with FakeReplica("a", SLOW) as first:
        run(scenario(first))


def test_a_replica_of_another_composition_is_not_added() -> None:
    joins: list[str] = []

    def join(address: ReplicaAddress) -> Any:
        if address.name == "a":
            return join_replica(address, token=TOKEN)
        joins.append(address.name)
        return InProcessEngine(OtherLoop(QUICK))

    async def scenario(first: FakeReplica) -> None:
        other = ReplicaAddress(name="b", host="127.0.0.1", port=1)
        listing = Listing(first.address(), other)
        engine = ray_engine(first, listing=listing, join=join, times=OFTEN)
        reader = Reader(engine)
        await until(lambda: bool(joins))
        before = listing.asked
        await until(lambda: listing.asked > before + 3)
        assert engine.replicas == ["a"]
        assert joins == ["b"]
        await engine.close()
        await reader.task

    with FakeReplica("a", QUICK) as first:
        run(scenario(first))


class OtherLoop(SimulatedLoop):
    @property
    def info(self) -> Any:
        return msgspec.structs.replace(super().info, composition={"engine": "another"})


def test_closing_ends_the_application_once() -> None:
    ended: list[int] = []

    async def scenario(first: FakeReplica) -> None:
        engine = ray_engine(first, end=lambda: ended.append(1))
        await engine.close()
        await engine.close()
        assert ended == [1]

    with FakeReplica("a", QUICK) as first:
        run(scenario(first))


def test_the_directory_forgets_what_it_has_not_heard_of() -> None:
    now_s = 0.0
    directory = Directory(15.0, clock=lambda: now_s)
    for name in ("b", "a"):
        directory.announce(msgspec.json.encode(ReplicaAddress(name=name, host="10.0.0.1", port=7)))
    now_s = 10.0
    directory.announce(
        msgspec.json.encode(ReplicaAddress(name="b", host="10.0.0.1", port=7, state=ReplicaState.LEAVING))
    )
    assert [each.name for each in read_listing(directory.listing())] == ["a", "b"]
    now_s = 20.0
    (left,) = read_listing(directory.listing())
    assert (left.name, left.state) == ("b", ReplicaState.LEAVING)
    now_s = 30.0
    assert read_listing(directory.listing()) == []
