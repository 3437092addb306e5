"""A replica's port: who reaches the engine through it, and how links end."""

import asyncio
import errno
import os
import socket
import threading
from operator import attrgetter

import msgspec
import pytest
from fake_replicas import TOKEN, FakeReplica, Reader, ask, ray_engine, run

from openinfer_core import Failed, FailureKind, Finished, Refused
from openinfer_core.process import mutual_proof
from openinfer_core.simulated import SimulatedOptions
from openinfer_core.testing.engine import ENGINE_CHECKS, EngineCheck
from openinfer_ray.ray_engine import join_replica

ENDLESS = SimulatedOptions(tpot_s=0.001)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=attrgetter("__name__"))
def test_replicas_over_tcp_keep_the_contract_of_one_engine(check: EngineCheck) -> None:
    with FakeReplica("a", SimulatedOptions()) as first, FakeReplica("b", SimulatedOptions()) as second:
        check(lambda: ray_engine(first, second))


def test_another_token_is_refused_and_reaches_no_engine() -> None:
    with FakeReplica("a", SimulatedOptions()) as replica:
        with pytest.raises(Refused, match="the token is not this engine's"):
            join_replica(replica.address(), token=b"another secret of many bytes")
        assert replica.relay.num_links == 0
        asyncio.run(replica.join().close())  # the right one is served after that


class ShortOfDescriptors(socket.socket):
    """A listener whose first `accept` finds none left."""

    num_asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_replica_without_a_descriptor_takes_its_server_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as made:
        listener = ShortOfDescriptors(made.family, made.type, made.proto, fileno=made.detach())
    with FakeReplica("a", SimulatedOptions(), listener=listener) as replica:
        asyncio.run(replica.join().close())
        assert listener.num_asked > 1


def test_other_versions_are_refused_by_name() -> None:
    with FakeReplica("a", SimulatedOptions()) as replica, socket.create_connection(replica.relay.address) as server:
        versions = {"python": "3.0", "openinfer-core": "0.0.1", "openinfer-ray": "0.0.1"}
        body = msgspec.msgpack.encode(versions)
        with pytest.raises(Refused, match=r"openinfer-core is 0\.0\.1 there and .* on the replica"):
            mutual_proof.introduce(server, body, token=TOKEN, protocol=b"openinfer replica 1")


def test_what_listens_there_must_have_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, FakeReplica("a", SimulatedOptions()) as replica:
        host, port = listener.getsockname()
        stranger = threading.Thread(target=_hang_up, args=(listener,))
        stranger.start()
        address = replica.address()
        with pytest.raises(Refused, match="does not answer as an engine"):
            join_replica(type(address)(name="x", host=host, port=port), token=TOKEN)
        stranger.join()


def _hang_up(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.close()


def test_a_server_that_leaves_is_noticed_and_its_requests_are_aborted() -> None:
    async def scenario(replica: FakeReplica) -> None:
        handle = replica.join()
        reader = Reader(handle)
        handle.submit(ask(1, max_tokens=10**6))
        await handle.stats()
        assert not await asyncio.to_thread(replica.relay.wait_until_left, timeout_s=0.01)
        await handle.close()
        assert await asyncio.to_thread(replica.relay.wait_until_left, timeout_s=60)
        other = replica.join()
        while (await other.stats()).running:  # asking takes a round trip
            pass
        await other.close()
        await reader.task

    with FakeReplica("a", ENDLESS) as replica:
        run(scenario(replica))


def test_closing_the_relay_ends_streams_with_an_error() -> None:
    async def scenario(replica: FakeReplica) -> None:
        engine = ray_engine(replica)
        reader = Reader(engine)
        engine.submit(ask(1, max_tokens=10**6))
        await engine.stats()
        replica.relay.close()
        (end,) = await reader.wait_for(1, Finished, Failed)
        assert isinstance(end, Failed)
        assert end.kind in (FailureKind.SHUTDOWN, FailureKind.UNAVAILABLE)
        await engine.close()

    with FakeReplica("a", ENDLESS) as replica:
        run(scenario(replica))
