"""`Following`: keeps a `RoutedEngine` in step with the replicas that a directory lists.

listed as serving ─► join (in a thread) ─► RoutedEngine.join ─► asked for its numbers, as a heartbeat; heard
listed as leaving ─► RoutedEngine.drain: gets no more requests, and is left when it has answered
no heartbeat      ─► its link is closed: its requests go elsewhere, or end with an error
not listed        ─► nothing: the link says whether it lives
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from openinfer_core import EngineClosed, EngineHandle, EngineInfo, EngineStats, InvalidRequest, OpenInferError, Refused
from openinfer_core.control import COMMAND_TIMEOUT_S
from openinfer_core.replicas import RoutedEngine
from openinfer_ray.replica_spec import ReplicaAddress, ReplicaState

logger = logging.getLogger("openinfer.engine")


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How often what is looked at, in seconds."""

    look_s: float = 0.5
    """Between two looks into the directory."""
    heartbeat_s: float = 2.0
    """Between an answer of a replica and the next question."""
    patience_s: float = 10.0
    """What a replica may take to answer before it counts as gone."""


class Hearing(Protocol):
    """What hears of replicas besides."""

    def told(self, stats: EngineStats) -> None:
        """A replica's numbers."""
        ...

    async def follow(self, replica: ReplicaAddress) -> None:
        """Begins when a replica gets requests, and is cancelled when it is left."""
        ...


class Following:
    """Belongs to the event loop in which `run` is awaited.

    Args:
        engine: of the replicas in `joined`.
        listing: the replicas that are there; may block, and raise what it likes.
        join: a handle to one; may block. Raises `OpenInferError` or `OSError`.
        joined: those that the engine has already, by their names.
        times: how often what is looked at.
        hearing: is told of replicas while they are joined.
    """

    def __init__(
        self,
        engine: RoutedEngine,
        *,
        listing: Callable[[], list[ReplicaAddress]],
        join: Callable[[ReplicaAddress], EngineHandle],
        joined: Mapping[str, EngineHandle],
        times: Times,
        hearing: Hearing | None = None,
    ) -> None:
        self._engine = engine
        self._listing = listing
        self._join = join
        self._times = times
        self._hearing = hearing
        self._heard: dict[str, asyncio.Task[None]] = {}
        self._joined = dict(joined)
        self._composition = {} if not joined else _composition_of(next(iter(joined.values())).info)
        self._busy: set[str] = set()  # replicas that are being joined or drained
        self._refused: set[str] = set()  # replicas that can never be added
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_lost = False  # whether the directory did not answer when it was last asked

    async def run(self) -> None:
        """Until it is cancelled."""
        for name, handle in self._joined.items():
            self._begin(self._watch(name, handle), f"openinfer-heartbeat-{name}")
        try:
            while True:
                for replica in await self._look():
                    self._heed(replica)
                await asyncio.sleep(self._times.look_s)
        finally:
            for task in (left := [*self._tasks]):
                task.cancel()
            if left:
                await asyncio.wait(left)

    async def _look(self) -> list[ReplicaAddress]:
        try:
            replicas = await asyncio.to_thread(self._listing)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds; streams go on without it
            if not self._is_lost:
                logger.error("the directory of replicas does not answer; those that are connected go on: %s", error)
            self._is_lost = True
            return []
        self._is_lost = False
        return replicas

    def _heed(self, replica: ReplicaAddress) -> None:
        name = replica.name
        if name in self._busy or name in self._refused:
            return
        if replica.state is ReplicaState.LEAVING:
            if name in self._joined:
                self._begin(self._drain(name), f"openinfer-drain-{name}", busy=name)
        elif name not in self._joined:
            self._begin(self._add(replica), f"openinfer-join-{name}", busy=name)
        elif self._hearing is not None and name not in self._heard:
            self._heard[name] = self._begin(self._hearing.follow(replica), f"openinfer-hear-{name}")

    def _begin(self, work: Coroutine[Any, Any, None], title: str, *, busy: str | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=title)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if busy is not None:
            self._busy.add(busy)
            task.add_done_callback(lambda _: self._busy.discard(busy))
        return task

    async def _add(self, replica: ReplicaAddress) -> None:
        try:
            handle = await asyncio.to_thread(self._join, replica)
        except (OpenInferError, OSError) as error:
            logger.warning("replica %s at %s:%d cannot be had yet: %s", replica.name, replica.host, replica.port, error)
            return
        try:
            if _composition_of(handle.info) != self._composition:
                raise Refused(f"replica {replica.name} is composed otherwise than the first one")
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._engine.join(replica.name, handle)
        except InvalidRequest:  # an old link to it has not ended yet
            await handle.close()
        except (EngineClosed, TimeoutError) as error:
            logger.warning("replica %s cannot join yet: %s", replica.name, error or "it does not answer")
            await handle.close()
        except Refused as error:
            self._refused.add(replica.name)
            logger.error("%s", error)
            await handle.close()
        else:
            logger.info("replica %s is there", replica.name)
            self._joined[replica.name] = handle
            self._begin(self._watch(replica.name, handle), f"openinfer-heartbeat-{replica.name}")

    async def _drain(self, name: str) -> None:
        logger.info("replica %s is leaving", name)
        await self._engine.drain(name)
        self._leave(name)

    async def _watch(self, name: str, handle: EngineHandle) -> None:
        with contextlib.suppress(EngineClosed):
            while True:
                await asyncio.sleep(self._times.heartbeat_s)
                try:
                    async with asyncio.timeout(self._times.patience_s):
                        stats = await handle.stats()
                    if self._hearing is not None:
                        self._hearing.told(stats)
                except TimeoutError:
                    logger.error("replica %s has not answered for %g s: left", name, self._times.patience_s)
                    await handle.close()
                    break
        self._leave(name)

    def _leave(self, name: str) -> None:
        self._joined.pop(name, None)
        if (heard := self._heard.pop(name, None)) is not None:
            heard.cancel()


def _composition_of(info: EngineInfo) -> dict[str, str]:
    """What replicas must have alike: not the places at which each tells of its KV."""
    return {name: part for name, part in info.composition.items() if name != "kv_events"}
