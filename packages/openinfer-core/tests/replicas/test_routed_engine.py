"""Several engines as one handle: the contract of every handle, replicas that die, and requests that are sent again."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from openinfer_core import (
    EngineClosed,
    EngineHandle,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    InvalidRequest,
    Refused,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    Tokens,
)
from openinfer_core.control import (
    ControlCommand,
    LoadAdapter,
    LoadStep,
    Pause,
    Resume,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from openinfer_core.process.engine_process import LinkKind
from openinfer_core.process.local import InProcessEngine
from openinfer_core.process.remote import RemoteEngine, join_engine
from openinfer_core.replicas import RoutedEngine
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, simulated_token, spawn_simulated
from openinfer_core.testing.engine import ENGINE_CHECKS, EngineCheck

KEY = b"k" * 16
OPTIONS = SimulatedOptions()
SLOW = SimulatedOptions(ttft_s=3000.0)
ENDLESS = SimulatedOptions(tpot_s=0.001)


def simulated(options: SimulatedOptions = OPTIONS) -> InProcessEngine:
    return InProcessEngine(SimulatedLoop(options))


def routed(*engines: EngineHandle) -> RoutedEngine:
    return RoutedEngine({f"replica {number}": engine for number, engine in enumerate(engines)}, key=KEY)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=attrgetter("__name__"))
def test_two_replicas_keep_the_contract_of_one_engine(check: EngineCheck) -> None:
    check(lambda: routed(simulated(), simulated()))


def ask(request_id: int, *prompt: int, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt or (request_id,), sampling=params)


class Reader:
    """Reads a handle's events in a task of its own."""

    def __init__(self, handle: EngineHandle) -> None:
        self.seen: list[TokenEvent] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read(handle.events()))

    async def _read(self, events: AsyncIterator[list[TokenEvent]]) -> None:
        async for batch in events:
            self.seen += batch
            self._changed.set()

    async def wait_for(self, count: int, kind: type | tuple[type, ...]) -> list[Any]:
        while len(found := [event for event in self.seen if isinstance(event, kind)]) < count:
            self._changed.clear()
            await self._changed.wait()
        return found

    async def end(self) -> None:
        await self._task


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def kill(engine: RemoteEngine) -> None:
    """As the death of its machine would look."""
    import os
    import signal

    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


def of(engine: RoutedEngine, names: list[str]) -> None:
    assert engine.replicas == names


def test_a_request_that_has_shown_nothing_is_sent_again_once_with_its_seed() -> None:
    async def scenario() -> None:
        dying = spawn_simulated(SLOW, link=LinkKind.TCP)
        engine = routed(dying)
        reader = Reader(engine)
        request = ask(1, 5, 6, 7, seed=42)
        engine.submit(request)
        await dying.stats()  # it has it
        engine.add("other", simulated())
        kill(dying)
        (finished,) = await reader.wait_for(1, (Finished, Failed))
        assert isinstance(finished, Finished)
        tokens = [token for event in reader.seen if isinstance(event, Tokens) for token in event.token_ids]
        assert tokens == [simulated_token(request, at, OPTIONS) for at in range(4)]
        assert len([event for event in reader.seen if isinstance(event, Scheduled)]) == 1
        of(engine, ["other"])
        await engine.close()
        await reader.end()
        await dying.close()

    run(scenario())


def test_a_request_that_has_shown_tokens_ends_with_its_replica() -> None:
    async def scenario() -> None:
        dying = spawn_simulated(ENDLESS, link=LinkKind.TCP)
        engine = routed(dying)
        reader = Reader(engine)
        engine.submit(ask(1, max_tokens=100_000))
        await reader.wait_for(1, Tokens)
        engine.add("other", simulated())
        kill(dying)
        (failed,) = await reader.wait_for(1, (Finished, Failed))
        assert failed == Failed(RequestId(1), FailureKind.SHUTDOWN, "the replica that served the request has ended")
        await engine.close()
        await reader.end()
        await dying.close()

    run(scenario())


def test_the_last_replicas_death_leaves_none_that_hangs() -> None:
    async def scenario() -> None:
        dying = spawn_simulated(SLOW, link=LinkKind.TCP)
        engine = routed(dying)
        reader = Reader(engine)
        for number in range(5):
            engine.submit(ask(number))
        await dying.stats()
        kill(dying)
        failures = await reader.wait_for(5, Failed)
        assert {failure.kind for failure in failures} == {FailureKind.UNAVAILABLE}
        with pytest.raises(EngineClosed):
            await engine.stats()
        engine.submit(ask(9))
        assert (await reader.wait_for(6, Failed))[-1].request_id == 9
        engine.add("new", simulated())
        engine.submit(ask(10))
        await reader.wait_for(1, Finished)
        await engine.close()
        await reader.end()
        await dying.close()

    run(scenario())


def test_a_request_is_sent_again_once_only() -> None:
    async def scenario() -> None:
        dying = [spawn_simulated(SLOW, link=LinkKind.TCP) for _ in range(2)]
        engine = routed(dying[0])
        reader = Reader(engine)
        engine.submit(ask(1))
        await dying[0].stats()
        engine.add("second", dying[1])
        kill(dying[0])
        while (await dying[1].stats()).waiting + (await dying[1].stats()).running == 0:  # noqa: ASYNC110 - it asks another process
            await asyncio.sleep(0)
        engine.add("third", simulated())
        kill(dying[1])
        (failed,) = await reader.wait_for(1, (Finished, Failed))
        assert failed.kind is FailureKind.SHUTDOWN
        await engine.close()
        await reader.end()
        for each in dying:
            await each.close()

    run(scenario())


def test_queues_of_replicas_that_come_and_go_are_counted() -> None:
    async def scenario() -> None:
        engine = routed(simulated())
        reader = Reader(engine)
        places = [engine.max_waiting]
        await engine.join("other", simulated(SimulatedOptions(max_waiting=5)))
        places.append(engine.max_waiting)
        await engine.drain("replica 0")
        places.append(engine.max_waiting)
        assert places == [OPTIONS.max_waiting, OPTIONS.max_waiting + 5, 5]
        assert engine.info.max_waiting == OPTIONS.max_waiting
        await engine.close()
        await reader.end()

    run(scenario())


def test_draining_ends_what_runs_and_sends_the_rest_elsewhere() -> None:
    async def scenario() -> None:
        engine = routed(simulated(ENDLESS))
        reader = Reader(engine)
        engine.submit(ask(1, max_tokens=50))
        engine.add("other", simulated())
        draining = asyncio.create_task(engine.drain("replica 0"))
        await asyncio.sleep(0)
        of(engine, ["other"])
        engine.submit(ask(2))
        finished = await reader.wait_for(2, (Finished, Failed))
        assert {type(each) for each in finished} == {Finished}
        assert next(each for each in finished if each.request_id == 1).completion_tokens == 50
        await draining
        await engine.close()
        await reader.end()

    run(scenario())


def test_replicas_of_another_model_or_name_are_refused() -> None:
    async def scenario() -> None:
        engine, other = routed(simulated()), simulated(SimulatedOptions(num_token_ids=77))
        with pytest.raises(Refused, match="replica b is not of this model: its num_token_ids is 77"):
            engine.add("b", other)
        with pytest.raises(InvalidRequest, match="there is a replica replica 0 already"):
            engine.add("replica 0", other)
        await other.close()
        await engine.close()

    run(scenario())
    with pytest.raises(ValueError, match="at least one replica"):
        RoutedEngine({}, key=KEY)


def test_stats_and_bounds_are_those_of_all_replicas() -> None:
    async def scenario() -> None:
        one = simulated()
        alone, engine = one.info, routed(one, simulated())
        assert engine.info.num_blocks == 2 * alone.num_blocks
        assert engine.info.max_waiting == 2 * alone.max_waiting
        reader = Reader(engine)
        for number in range(10):
            engine.submit(ask(number, *range(number, number + 20)))
        await reader.wait_for(10, Finished)
        stats = await engine.stats()
        assert stats.prompt_tokens == 200
        assert stats.generated_tokens == 40
        await engine.close()
        await reader.end()

    run(scenario())


def test_an_engine_that_listens_at_an_address_is_joined_by_whom_has_the_token() -> None:
    async def scenario() -> None:
        host = "127.0.0.2"  # another address of this machine than the one that is taken by default
        owner = spawn_simulated(OPTIONS, host=host)
        assert owner.access is not None
        assert owner.access.address.tcp_host == host
        engine = RoutedEngine({"far": join_engine(owner.access)}, key=KEY)
        reader = Reader(engine)
        engine.submit(ask(1))
        await reader.wait_for(1, Finished)
        stranger = msgspec.structs.replace(owner.access, token="another")
        with pytest.raises(EngineClosed):
            join_engine(stranger)
        await engine.close()  # ends the link, not the engine
        await reader.end()
        assert (await owner.stats()).generated_tokens == 4
        await owner.close()

    with contextlib.suppress(OSError):
        import socket

        socket.create_server(("127.0.0.2", 0)).close()
        run(scenario())


class WithAdapters(SimulatedLoop):
    """Has the paths of names; refuses one more where it `is_full`, and takes its time where it has a `gate`."""

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.paths: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.is_full = False
        self.gate: threading.Event | None = None

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        if self.gate is not None:
            assert self.gate.wait(30)
        match command:
            case LoadAdapter(step=LoadStep.NAME):
                self.paths[command.name] = self.kept.pop(command.name)
            case LoadAdapter(step=LoadStep.DROP):
                self.kept.pop(command.name, None)
            case LoadAdapter():
                if self.is_full:
                    raise Refused("no room")
                where = self.kept if command.step is LoadStep.HOLD else self.paths
                where[command.name] = command.path
            case UnloadAdapter():
                del self.paths[command.name]
            case _:
                pass
        return []

    @property
    def names(self) -> list[str]:
        return list(self.paths)


@pytest.mark.parametrize("full", [0, 1])
def test_adapter_that_one_replica_refuses_is_on_none(full: int) -> None:
    loops = [WithAdapters(), WithAdapters()]
    loops[full].is_full = True

    async def live() -> None:
        engine = routed(*map(InProcessEngine, loops))
        try:
            with pytest.raises(Refused, match="no room"):
                await engine.control(LoadAdapter("tuned", "folder"))
            assert [loop.names for loop in loops] == [[], []]
            loops[full].is_full = False
            await engine.control(LoadAdapter("tuned", "folder"))
            assert [loop.names for loop in loops] == [["tuned"], ["tuned"]]
        finally:
            await engine.close()

    asyncio.run(live())


def test_refusal_is_told_when_every_replica_has_answered() -> None:
    loops = [WithAdapters(), WithAdapters()]
    loops[0].is_full = True
    gate = loops[1].gate = threading.Event()

    async def live() -> None:
        engine = routed(*map(InProcessEngine, loops))
        try:
            command = asyncio.create_task(engine.control(LoadAdapter("tuned", "folder", in_place=True)))
            await asyncio.wait((command,), timeout=0.2)  # long enough for the first one alone
            assert not command.done()
            gate.set()
            with pytest.raises(Refused, match="no room"):
                await command
        finally:
            gate.set()
            await engine.close()

    asyncio.run(live())


@pytest.mark.parametrize("full", [0, 1])
def test_adapter_that_one_replica_refuses_takes_no_others_place(full: int) -> None:
    """What they have under its name stays, though its folder has other content by now."""
    loops = [WithAdapters(), WithAdapters()]

    async def live() -> None:
        engine = routed(*map(InProcessEngine, loops))
        try:
            await engine.control(LoadAdapter("tuned", "old"))
            loops[full].is_full = True
            with pytest.raises(Refused, match="no room"):
                await engine.control(LoadAdapter("tuned", "new", in_place=True))
            assert [(loop.paths, loop.kept) for loop in loops] == [({"tuned": "old"}, {})] * 2
            loops[full].is_full = False
            await engine.control(LoadAdapter("tuned", "new", in_place=True))
            assert [(loop.paths, loop.kept) for loop in loops] == [({"tuned": "new"}, {})] * 2
        finally:
            await engine.close()

    asyncio.run(live())


def test_replica_that_joins_while_others_hold_an_adapter_loads_it() -> None:
    loops = [WithAdapters(), WithAdapters()]
    gate = loops[0].gate = threading.Event()

    async def live() -> None:
        engine = routed(InProcessEngine(loops[0]))
        try:
            command = asyncio.create_task(engine.control(LoadAdapter("tuned", "new", in_place=True)))
            engine.add("later", InProcessEngine(loops[1]))
            gate.set()
            await command
            assert [(loop.paths, loop.kept) for loop in loops] == [({"tuned": "new"}, {})] * 2
        finally:
            gate.set()
            await engine.close()

    asyncio.run(live())


def test_replica_that_is_gone_keeps_no_command_from_the_others() -> None:
    loops = [WithAdapters(), WithAdapters()]

    async def live() -> None:
        engines = [*map(InProcessEngine, loops)]
        engine = routed(*engines)
        try:
            command = engine.control(LoadAdapter("tuned", "folder"))
            await engines[0].close()
            await command
            assert loops[1].names == ["tuned"]
            await engines[1].close()
            with pytest.raises(EngineClosed):
                await engine.control(LoadAdapter("other", "folder"))
        finally:
            await engine.close()

    asyncio.run(live())


class Obedient(SimulatedLoop):
    """Notes what it is told, and refuses it where it `refuses`; an update's path is its version of the weights."""

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.told: list[ControlCommand] = []
        self.refuses = False
        self.gate = threading.Event()
        self.gate.set()
        self.weights_version = ""

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        assert self.gate.wait(30)
        if self.refuses:
            raise Refused("not now")
        self.told.append(command)
        if isinstance(command, UpdateWeights):
            self.weights_version = command.path or ""
        return []

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(super().stats(), weights_version=self.weights_version)


def later(*commands: ControlCommand) -> list[ControlCommand]:
    """What a replica is told that comes after these."""
    first, second = Obedient(), Obedient()

    async def live() -> None:
        engine = routed(InProcessEngine(first))
        for command in commands:
            await engine.control(command)
        await engine.join("later", InProcessEngine(second))
        of(engine, ["later", "replica 0"])
        await engine.close()

    run(live())
    expected: list[ControlCommand] = []
    for command in commands:
        if isinstance(command, LoadAdapter) and command.in_place:
            expected += [msgspec.structs.replace(command, step=step) for step in (LoadStep.HOLD, LoadStep.NAME)]
        else:
            expected.append(command)
    assert first.told == expected
    return second.told


def loaded(name: str, path: str) -> LoadAdapter:
    return LoadAdapter(name, path, in_place=True)


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        ([], []),
        (
            [LoadAdapter("a", "x"), LoadAdapter("b", "y", tenants=("t",))],
            [loaded("a", "x"), LoadAdapter("b", "y", True, ("t",))],
        ),
        ([LoadAdapter("a", "x"), UnloadAdapter("a")], []),
        ([LoadAdapter("a", "x"), loaded("a", "y")], [loaded("a", "y")]),
        # One that replicas have from their start.
        ([UnloadAdapter("a")], [UnloadAdapter("a")]),
        ([UnloadAdapter("a"), LoadAdapter("a", "x")], [loaded("a", "x")]),
        ([UnloadAdapter("a"), LoadAdapter("a", "x"), UnloadAdapter("a")], [UnloadAdapter("a")]),
        ([loaded("a", "x"), UnloadAdapter("a")], [UnloadAdapter("a")]),
        ([Pause(), Sleep()], [Pause(), Sleep()]),
        ([Pause(), Sleep(), Wake(), Resume()], []),
    ],
)
def test_replica_that_comes_later_is_told_what_still_counts(
    commands: list[ControlCommand], told: list[ControlCommand]
) -> None:
    assert later(*commands) == told


def test_replica_that_cannot_be_as_the_others_does_not_join() -> None:
    async def live() -> None:
        engine, second = routed(InProcessEngine(Obedient())), Obedient()
        await engine.control(LoadAdapter("a", "x"))
        second.refuses = True
        stranger = InProcessEngine(second)
        with pytest.raises(Refused, match="not now"):
            await engine.join("later", stranger)
        of(engine, ["replica 0"])
        await stranger.close()
        await engine.close()

    run(live())


def test_command_that_comes_while_a_replica_joins_is_told_to_it() -> None:
    async def live() -> None:
        first, second = Obedient(), Obedient()
        engine = routed(InProcessEngine(first))
        await engine.control(LoadAdapter("a", "x"))
        second.gate.clear()
        joining = asyncio.create_task(engine.join("later", InProcessEngine(second)))
        await engine.control(LoadAdapter("b", "y"))  # obeyed by the first alone
        of(engine, ["replica 0"])
        second.gate.set()
        await joining
        assert second.told == [loaded("a", "x"), loaded("a", "x"), loaded("b", "y")]
        of(engine, ["later", "replica 0"])
        await engine.close()

    run(live())


def test_replica_that_joins_while_others_obey_is_told_too() -> None:
    async def live() -> None:
        first, second = Obedient(), Obedient()
        engine = routed(InProcessEngine(first))
        first.gate.clear()
        command = asyncio.create_task(engine.control(LoadAdapter("a", "x")))
        await asyncio.sleep(0)  # it is on its way
        engine.add("later", InProcessEngine(second))
        first.gate.set()
        await command
        assert second.told == [LoadAdapter("a", "x")]
        await engine.close()

    run(live())


def test_replica_of_other_weights_gets_no_requests_until_an_update_that_it_obeys() -> None:
    async def live() -> None:
        loops = [Obedient(), Obedient(), Obedient()]
        engine = routed(*map(InProcessEngine, loops[:2]))
        await engine.control(UpdateWeights(path="one"))
        await engine.join("later", InProcessEngine(loops[2]))
        of(engine, ["replica 0", "replica 1"])
        loops[1].refuses = True
        with pytest.raises(Refused, match="not now"):
            await engine.control(UpdateWeights(path="two"))
        of(engine, ["later", "replica 0"])  # the second has weights that no other has
        loops[1].refuses = False
        await engine.control(UpdateWeights(path="three"))
        of(engine, ["later", "replica 0", "replica 1"])
        await engine.close()

    run(live())


def test_update_that_all_refuse_takes_requests_from_none() -> None:
    async def live() -> None:
        loops = [Obedient(), Obedient()]
        engine = routed(*map(InProcessEngine, loops))
        for loop in loops:
            loop.refuses = True
        with pytest.raises(Refused, match="not now"):
            await engine.control(UpdateWeights(path="one"))
        of(engine, ["replica 0", "replica 1"])
        await engine.close()

    run(live())
