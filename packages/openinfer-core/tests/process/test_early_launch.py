"""An engine that begins early is given away once, or closed."""

import asyncio
import threading

import pytest

from openinfer_core import Refused
from openinfer_core.process.early_launch import EarlyLaunch

DEADLINE_S = 30.0


class Engine:
    """As much of an `EngineHandle` as is called here."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.closings = 0

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closings += 1
        self.closed.set()


def test_it_launches_before_it_is_asked() -> None:
    engine, begun = Engine(), threading.Event()

    def launch() -> Engine:
        begun.set()
        return engine

    early = EarlyLaunch(launch)  # pyright: ignore[reportArgumentType]
    assert begun.wait(DEADLINE_S)
    assert early.result() is engine
    assert early.result() is engine


def test_what_the_launch_raised_is_raised_by_result() -> None:
    def launch() -> Engine:
        raise Refused("no such device")

    early = EarlyLaunch(launch)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refused, match="no such device"):
        early.result()
    early.abandon()


def test_an_engine_that_nobody_took_is_closed_when_it_is_there() -> None:
    engine, go = Engine(), threading.Event()

    def launch() -> Engine:
        assert go.wait(DEADLINE_S)
        return engine

    early = EarlyLaunch(launch)  # pyright: ignore[reportArgumentType]
    early.abandon()
    assert engine.closings == 0
    go.set()
    assert engine.closed.wait(DEADLINE_S)


def test_an_engine_that_was_taken_is_closed_by_who_took_it() -> None:
    engine = Engine()
    early = EarlyLaunch(lambda: engine)  # pyright: ignore[reportArgumentType,reportReturnType]
    asyncio.run(early.result().close())
    early.abandon()
    assert engine.closings == 1


def test_an_event_loop_goes_on_until_the_engine_is_there_and_has_it_then() -> None:
    engine, go = Engine(), threading.Event()

    def launch() -> Engine:
        assert go.wait(DEADLINE_S)
        return engine

    async def scenario() -> None:
        early = EarlyLaunch(launch)  # pyright: ignore[reportArgumentType]
        asyncio.get_running_loop().call_soon(go.set)
        assert await early.ready() is engine
        await asyncio.to_thread(early.abandon)
        assert engine.closings == 0

    asyncio.run(scenario())


def test_what_the_launch_raised_is_raised_in_an_event_loop() -> None:
    def launch() -> Engine:
        raise Refused("no such device")

    with pytest.raises(Refused, match="no such device"):
        asyncio.run(EarlyLaunch(launch).ready())  # pyright: ignore[reportArgumentType]


def test_an_engine_whose_taker_was_cancelled_is_closed_before_the_abandoning_returns() -> None:
    engine, go = Engine(), threading.Event()

    def launch() -> Engine:
        assert go.wait(DEADLINE_S)
        return engine

    async def taken(early: EarlyLaunch) -> None:
        taking = asyncio.create_task(early.ready())
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking

    early = EarlyLaunch(launch)  # pyright: ignore[reportArgumentType]
    asyncio.run(taken(early))
    go.set()
    early.abandon(wait_s=DEADLINE_S)
    early.abandon()
    assert engine.closings == 1
