"""`RoutedEngine`: engines of one model, here or on other machines, as one `EngineHandle`.

    submit ─► router ─► a replica ─► its events ─► the one reader
                 ▲                        │
                 └── once more, elsewhere ┴── the replica died before the request had shown a token

A request keeps its id and its seed when it is sent again. One that has shown tokens ends with the replica,
`Failed(SHUTDOWN)`: what another replica would say may differ from what the client has read.

A replica that comes later is told what the others were: adapters, a pause, a sleep. One whose weights are not those of
the others gets no requests until an update that it obeys.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec

from openinfer_core.control import ControlCommand, LoadAdapter, LoadStep, UnloadAdapter, UpdateWeights
from openinfer_core.engine import EngineHandle, EngineInfo, EngineStats
from openinfer_core.errors import ContractViolation, EngineClosed, InvalidRequest, Refused
from openinfer_core.events import Failed, FailureKind, Finished, Scheduled, TokenEvent, Tokens
from openinfer_core.process.mailbox import Mailbox
from openinfer_core.replicas.prefix_router import PrefixRouter
from openinfer_core.replicas.standing_commands import StandingCommands
from openinfer_core.replicas.totals import info_of_all, stats_of_all
from openinfer_core.request import GenerateRequest, RequestId

logger = logging.getLogger("openinfer.engine")

# what all replicas must have alike: a request is checked, and its answer read, by these
_ALIKE = (
    "family",
    "max_model_tokens",
    "num_token_ids",
    "eos_token_ids",
    "block_size_tokens",
    "capabilities",
    "kv_layout_digest",
)
_NO_REPLICA = "no replica can take the request at the moment"


class RoutedEngine:
    """Implements `EngineHandle` and `ElasticQueue`; it belongs to one event loop, and closes its replicas.

    Args:
        replicas: the first ones, by name; `join` brings others.
        key: of the router's digests.
        router: chooses among them; by default a `PrefixRouter`.

    Raises:
        Refused: two replicas are not of one model.
    """

    def __init__(self, replicas: Mapping[str, EngineHandle], *, key: bytes, router: PrefixRouter | None = None) -> None:
        if not replicas:
            raise ValueError("at least one replica is needed")
        first = next(iter(replicas.values())).info
        info = info_of_all([engine.info for engine in replicas.values()])
        self._info = msgspec.structs.replace(info, composition=info.composition | {"replicas": str(len(replicas))})
        self._router = router or PrefixRouter(block_size_tokens=first.block_size_tokens, key=key)
        self._replicas: dict[str, EngineHandle] = {}
        self._flights: dict[RequestId, _Flight] = {}
        self._mailbox = Mailbox()
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._standing = StandingCommands()
        self._aside: set[str] = set()  # replicas of other weights, which get no requests
        self._is_read = False
        self._is_closing = False
        self._ended_flight = asyncio.Event()
        for name, engine in replicas.items():
            self.add(name, engine)

    # --- replicas ---------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[str]:
        """Those that get requests."""
        return self._router.names

    async def join(self, name: str, engine: EngineHandle) -> None:
        """Brings a replica, tells it what the others were told, and then sends it requests.

        Raises:
            Refused: it is not of this model, or refuses what the others obeyed.
            InvalidRequest: another one has its name.
            EngineClosed: it is gone.
        """
        self._require_new(name, engine)
        told: list[ControlCommand] | None = None
        has_same_weights = True
        while told != (commands := self._standing.commands):  # others may be told meanwhile
            await _repeat(commands, engine)
            has_same_weights = await self._has_weights_of_others(engine)
            told = commands
        self.add(name, engine)
        if not has_same_weights:
            self._set_aside(name, "its weights are not those of the others, which were updated")

    def add(self, name: str, engine: EngineHandle) -> None:
        """Brings a replica that is as the others are, and gets requests from now on.

        Raises:
            Refused: it is not of this model.
            InvalidRequest: another one has its name.
        """
        self._require_new(name, engine)
        self._replicas[name] = engine
        self._router.add(name, num_blocks=engine.info.num_blocks)
        if self._is_read:
            self._listen_to(name)

    async def drain(self, name: str) -> None:
        """Sends a replica no more requests, waits for the end of those that it has, and closes it."""
        self._router.remove(name)
        self._aside.discard(name)
        while any(flight.replica == name for flight in self._flights.values()):
            self._ended_flight.clear()
            await self._ended_flight.wait()
        engine = self._replicas.get(name)
        if engine is not None:
            await engine.close()

    # --- the handle -------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def max_waiting(self) -> int:
        return sum(self._replicas[name].info.max_waiting for name in self._router.names if name in self._replicas)

    def submit(self, request: GenerateRequest) -> None:
        self._mailbox.open(request.request_id)
        flight = self._flights[request.request_id] = _Flight(request)
        self._send(flight)

    def abort(self, request_id: RequestId) -> None:
        flight = self._flights.get(request_id)
        engine = None if flight is None else self._replicas.get(flight.replica)
        if engine is not None:
            engine.abort(request_id)

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        if not self._is_read:
            self._is_read = True
            for name in self._replicas:
                self._listen_to(name)
        async for events in self._mailbox.read():
            yield events

    async def stats(self) -> EngineStats:
        """The sum over all replicas that live; see the fields for what else."""
        self._mailbox.require_open()
        answers = await asyncio.gather(*(engine.stats() for engine in self._replicas.values()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineClosed):
                raise answer
        told = [answer for answer in answers if isinstance(answer, EngineStats)]
        if not told:
            raise EngineClosed("no replica is left")
        return stats_of_all(told)

    async def control(self, command: ControlCommand) -> None:
        """Commands all replicas, and returns when each has answered; one that is gone meanwhile needs to hear nothing.

        Where one refuses an adapter, none has it, and all keep what they have under its name. Where one refuses an
        update of weights that others have obeyed, it gets no requests until one that it obeys.
        """
        self._mailbox.require_open()
        holding = await self._hold(command) if isinstance(command, LoadAdapter) and command.in_place else set[str]()
        told, failed = set[str](), dict[str, BaseException]()
        while names := self._replicas.keys() - told:  # others may join meanwhile
            if isinstance(command, LoadAdapter):
                named = msgspec.structs.replace(command, step=LoadStep.NAME)
                failed |= await self._tell(named, sorted(names & holding))
            failed |= await self._tell(command, sorted(names - holding))
            told.update(names)
        done = self._replicas.keys() - failed.keys()
        refused = {name: error for name, error in failed.items() if not isinstance(error, EngineClosed)}
        if refused and isinstance(command, LoadAdapter) and not command.in_place:
            await self._tell(UnloadAdapter(command.name), sorted(done))
        if done and isinstance(command, UpdateWeights):
            self._are_updated(done, refused)
        if refused or (failed and not done):
            raise (*refused.values(), *failed.values())[0]
        self._standing.note(command)

    async def _hold(self, command: LoadAdapter) -> set[str]:
        """Replicas that hold an adapter, which has no name yet: all, of those that are there; raises if one refuses."""
        names = sorted(self._replicas)
        failed = await self._tell(msgspec.structs.replace(command, step=LoadStep.HOLD), names)
        holding = set(names) - failed.keys()
        for error in failed.values():
            if not isinstance(error, EngineClosed):
                await self._tell(msgspec.structs.replace(command, step=LoadStep.DROP), sorted(holding))
                raise error
        return holding

    def _are_updated(self, done: AbstractSet[str], refused: Iterable[str]) -> None:
        for name in refused:
            self._set_aside(name, "it refused an update of weights that others have obeyed")
        for name in sorted(self._aside & done):
            logger.info("replica %s has the weights of the others, and gets requests", name)
            self._router.add(name, num_blocks=self._replicas[name].info.num_blocks)
        self._aside -= done

    def _set_aside(self, name: str, reason: str) -> None:
        """Sends a replica no more requests; those that it has it answers."""
        logger.error("replica %s gets no requests until an update of weights that it obeys: %s", name, reason)
        self._router.remove(name)
        self._aside.add(name)

    async def _has_weights_of_others(self, engine: EngineHandle) -> bool:
        version = (await engine.stats()).weights_version
        for name in self._router.names:
            with contextlib.suppress(EngineClosed):
                return (await self._replicas[name].stats()).weights_version == version
        return True

    async def _tell(self, command: ControlCommand, names: Sequence[str]) -> dict[str, BaseException]:
        """Why replicas have not obeyed, by their names, once all have answered."""
        commands = (self._replicas[name].control(command) for name in names)
        answers = await asyncio.gather(*commands, return_exceptions=True)
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def close(self) -> None:
        self._is_closing = True
        for engine in [*self._replicas.values()]:
            await engine.close()
        for task in [*self._listening.values()]:
            await asyncio.wait((task,))
        self._flights.clear()
        self._mailbox.end()

    # --- requests ---------------------------------------------------------------------------------------

    def _send(self, flight: "_Flight") -> None:
        """Sends a request to the first replica that takes it; without any it fails, and the client may try later."""
        request = flight.request
        with contextlib.suppress(LookupError):
            while True:
                flight.replica = self._router.choose(request)
                try:
                    self._replicas[flight.replica].submit(request)
                except EngineClosed:
                    self._router.remove(flight.replica)
                else:
                    return
        self._end(request.request_id)
        self._mailbox.put([Failed(request.request_id, FailureKind.UNAVAILABLE, _NO_REPLICA)])

    def _require_new(self, name: str, engine: EngineHandle) -> None:
        if name in self._replicas:
            raise InvalidRequest(f"there is a replica {name} already")
        _require_alike(self._info, engine.info, name)

    def _listen_to(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._listen(name), name=f"openinfer-replica-{name}")
        task.add_done_callback(functools.partial(self._has_ended, name))
        self._listening[name] = task

    async def _listen(self, name: str) -> None:
        try:
            async for events in self._replicas[name].events():
                self._hear(name, events)
        except (EngineClosed, ContractViolation) as error:
            logger.error("replica %s is gone: %s", name, error)

    def _has_ended(self, name: str, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("replica %s failed", name, exc_info=task.exception())
        self._router.remove(name)
        self._aside.discard(name)
        self._replicas.pop(name, None)
        self._listening.pop(name, None)
        left = [flight for flight in self._flights.values() if flight.replica == name]
        for flight in [] if self._is_closing else left:
            self._lose(flight)

    def _hear(self, name: str, events: Iterable[TokenEvent]) -> None:
        passed: list[TokenEvent] = []
        for event in events:
            flight = self._flights.get(event.request_id)
            if flight is None or flight.replica != name:
                continue
            if isinstance(event, Failed) and event.kind is FailureKind.SHUTDOWN and not self._is_closing:
                self._router.remove(name)
                self._lose(flight)
                continue
            if isinstance(event, Scheduled) and flight.was_scheduled:
                continue
            flight.was_scheduled = flight.was_scheduled or isinstance(event, Scheduled)
            flight.has_shown = flight.has_shown or isinstance(event, Tokens)
            if isinstance(event, Finished | Failed):
                self._end(event.request_id)
            passed.append(event)
        if passed:
            self._mailbox.put(passed)

    def _lose(self, flight: "_Flight") -> None:
        """The replica of a request is gone."""
        if not flight.has_shown and not flight.was_sent_again:
            flight.was_sent_again = True
            self._send(flight)
            return
        request_id = flight.request.request_id
        self._end(request_id)
        self._mailbox.put([Failed(request_id, FailureKind.SHUTDOWN, "the replica that served the request has ended")])

    def _end(self, request_id: RequestId) -> None:
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            self._router.ended(flight.replica)
        self._ended_flight.set()


@dataclass(slots=True)
class _Flight:
    """A request that has not ended."""

    request: GenerateRequest
    replica: str = ""
    was_scheduled: bool = False
    has_shown: bool = False
    was_sent_again: bool = False


async def _repeat(commands: Iterable[ControlCommand], engine: EngineHandle) -> None:
    """Raises `Refused` for what the others obeyed."""
    for command in commands:
        try:
            await engine.control(command)
        except Refused:
            if not isinstance(command, UnloadAdapter):  # which it may have been told before
                raise


def _require_alike(info: EngineInfo, other: EngineInfo, name: str) -> None:
    for field in _ALIKE:
        here, there = getattr(info, field), getattr(other, field)
        if here != there:
            raise Refused(f"replica {name} is not of this model: its {field} is {there!r}, and the others' {here!r}")
