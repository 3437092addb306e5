"""Replicas without Ray: simulated engines in processes of their own, each with a relay on loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from openinfer_core import EngineHandle, GenerateRequest, RequestId, SamplingParams, TokenEvent
from openinfer_core.process.engine_process import LinkKind
from openinfer_core.process.remote import EngineAccess, open_link
from openinfer_core.simulated import SimulatedOptions, spawn_simulated
from openinfer_ray.ray_engine import RayEngine, join_replica
from openinfer_ray.relay import Relay
from openinfer_ray.replica_spec import ReplicaAddress, ReplicaState

TOKEN = b"a secret of sixteen bytes or more"


class FakeReplica(AbstractContextManager["FakeReplica"]):
    """What `Replica` is, but for Ray: an engine's process and its relay."""

    def __init__(self, name: str, options: SimulatedOptions, *, listener: socket.socket | None = None) -> None:
        self.engine = spawn_simulated(options, link=LinkKind.UNIX)
        access = self.engine.access
        assert isinstance(access, EngineAccess)
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self.relay = Relay(listener, token=TOKEN, open_link=lambda: open_link(access))
        self.relay.start()
        self._name = name

    def address(self, state: ReplicaState = ReplicaState.SERVING) -> ReplicaAddress:
        """What the directory lists of it."""
        host, port = self.relay.address
        return ReplicaAddress(name=self._name, host=host, port=port, state=state)

    def join(self) -> EngineHandle:
        """A server's handle to it."""
        return join_replica(self.address(), token=TOKEN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.relay.close()
        asyncio.run(self.engine.close())


class Reader:
    """Reads a handle's events in a task of its own."""

    def __init__(self, handle: EngineHandle) -> None:
        self.seen: list[TokenEvent] = []
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(handle.events()))

    async def _read(self, events: AsyncIterator[list[TokenEvent]]) -> None:
        async for batch in events:
            self.seen += batch
            self._changed.set()

    async def wait_for(self, count: int, *kinds: type) -> list[Any]:
        """The events of these kinds, when there are so many."""
        while len(found := [event for event in self.seen if isinstance(event, kinds)]) < count:
            self._changed.clear()
            await self._changed.wait()
        return found


def ask(number: int, *, max_tokens: int = 4) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=(number, 2, 3), sampling=sampling)


def ray_engine(*replicas: FakeReplica, **options: Any) -> RayEngine:
    """The engine of a server that has joined these, by default with a directory that lists nothing else."""
    defaults: dict[str, Any] = {
        "listing": list,
        "join": lambda address: join_replica(address, token=TOKEN),
        "end": lambda: None,
    }
    joined = {replica.address().name: replica.join() for replica in replicas}
    return RayEngine(joined, **defaults | options)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


async def until(is_so: Callable[[], bool]) -> None:
    """Polls what no event tells of."""
    while not is_so():  # noqa: ASYNC110 - what is waited for is another task's
        await asyncio.sleep(0.01)
