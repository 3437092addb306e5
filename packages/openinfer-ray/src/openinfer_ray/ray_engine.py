"""`RayEngine`: the replicas of an application as one `EngineHandle`, for a server that knows nothing of Ray."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

from openinfer_core import EngineHandle, EngineInfo, EngineStats, GenerateRequest, RequestId, TokenEvent
from openinfer_core.process.remote import JoinedEngine, join_connection
from openinfer_core.replicas import RoutedEngine
from openinfer_ray.following import Following, Times
from openinfer_ray.handshake import keep_alive, meet_replica
from openinfer_ray.replica_spec import ReplicaAddress

if TYPE_CHECKING:
    from openinfer_core.control import ControlCommand
    from openinfer_ray.kv_events.routing import KvRouting

logger = logging.getLogger("openinfer.engine")

_CONNECT_S = 5.0
_WELCOME_S = 10.0
_KEY_BYTES = 32


class RayEngine:
    """Implements `EngineHandle` and `ElasticQueue`; it belongs to the event loop in which `events` is read.

    Args:
        joined: the first replicas, by name; at least one.
        listing: see `Following`.
        join: see `Following`.
        end: called once, in a thread, when all links are closed: ends the application.
        times: see `Following`.
        routing: what chooses among replicas by their KV events, closed with the engine; by default what was sent to
            each counts.
    """

    def __init__(
        self,
        joined: Mapping[str, EngineHandle],
        *,
        listing: Callable[[], list[ReplicaAddress]],
        join: Callable[[ReplicaAddress], EngineHandle],
        end: Callable[[], None],
        times: Times | None = None,
        routing: "KvRouting | None" = None,
    ) -> None:
        router = None if routing is None else routing.router
        self._routing = routing
        self._routed = RoutedEngine(joined, key=secrets.token_bytes(_KEY_BYTES), router=router)
        self._following = Following(
            self._routed, listing=listing, join=join, joined=joined, times=times or Times(), hearing=routing
        )
        self._end = end
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def replicas(self) -> list[str]:
        """Those that get requests, by name."""
        return self._routed.replicas

    @property
    def info(self) -> EngineInfo:
        return self._routed.info

    @property
    def max_waiting(self) -> int:
        return self._routed.max_waiting

    def submit(self, request: GenerateRequest) -> None:
        self._routed.submit(request)

    def abort(self, request_id: RequestId) -> None:
        self._routed.abort(request_id)

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._following.run(), name="openinfer-replicas")
            self._task.add_done_callback(_say_failure)
        async for events in self._routed.events():
            yield events

    async def stats(self) -> EngineStats:
        return await self._routed.stats()

    async def control(self, command: "ControlCommand") -> None:
        await self._routed.control(command)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._routing is not None:
            self._routing.close()
        await self._routed.close()
        await asyncio.to_thread(self._end)


def join_replica(replica: ReplicaAddress, *, token: bytes) -> JoinedEngine:
    """A handle to a replica's engine.

    Raises:
        OSError: nothing listens there.
        Refused: what listens there does not have the token, or has other versions.
        EngineClosed: its engine is gone.
    """
    connection = socket.create_connection((replica.host, replica.port), timeout=_CONNECT_S)
    try:
        meet_replica(connection, token=token)
        keep_alive(connection)
        connection.settimeout(_WELCOME_S)
    except BaseException:
        connection.close()
        raise
    return join_connection(connection)


def _say_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("replicas are no longer followed", exc_info=error)
