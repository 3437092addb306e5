"""Who is awake, who waits, who gives way: models that do nothing but say when they were woken."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from openinfer.several.turns import CannotWake, Phase, TooMany, Turns


class Nap:
    """Notes what it is told; fails as long as `fault` is set, and takes until `go`."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.fault: BaseException | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def wake(self) -> None:
        await self._do("wake")

    async def sleep(self) -> None:
        await self._do("sleep")

    async def _do(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        await self.go.wait()
        if self.fault is not None:
            raise self.fault


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """Models a, b and c, and what requests of them have done."""

    def __init__(self, **options: object) -> None:
        self.log: list[str] = []
        self.clock = Clock()
        self.models = {name: Nap(name, self.log) for name in "abc"}
        settings = {"max_awake": 1, "max_waiting": 4, "turn_s": 10.0, **options}
        self.turns = Turns(self.models, clock=self.clock, **settings)
        self.ends: dict[str, asyncio.Event] = {}
        self.asking: dict[str, asyncio.Task[None]] = {}

    def ask(self, request: str) -> "asyncio.Task[None]":
        """A request of the model that its first letter names; it runs until `end`."""
        self.ends[request] = asyncio.Event()

        async def run() -> None:
            async with self.turns.turn(request[0]):
                self.log.append(f"run {request}")
                await self.ends[request].wait()

        self.asking[request] = asyncio.create_task(run())
        return self.asking[request]

    async def close(self) -> None:
        await self.turns.close()
        for end in self.ends.values():
            end.set()
        await asyncio.gather(*self.asking.values(), return_exceptions=True)

    async def end(self, request: str) -> None:
        self.ends[request].set()
        await self.asking[request]
        await settled()


async def settled() -> None:
    """All that can happen now has happened: nothing here waits for time."""
    for _ in range(20):
        await asyncio.sleep(0)


def on_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@on_loop
async def test_model_is_woken_once_for_all_that_wait_for_it() -> None:
    bench = Bench()
    bench.models["a"].go.clear()
    for request in ("a1", "a2", "a3"):
        bench.ask(request)
    await settled()
    assert (bench.log, bench.turns.phase("a"), bench.turns.num_waiting("a")) == (["wake a"], Phase.WAKING, 3)
    bench.models["a"].go.set()
    await settled()
    assert bench.log == ["wake a", "run a1", "run a2", "run a3"]
    for request in ("a1", "a2", "a3"):
        await bench.end(request)
    bench.ask("a4")
    await settled()
    assert bench.log[-1] == "run a4"
    await bench.close()


@on_loop
async def test_model_that_runs_nothing_gives_way_at_once_and_the_least_recently_used_one() -> None:
    bench = Bench(max_awake=2)
    for request in ("a1", "b1", "a2"):
        bench.ask(request)
        await settled()
        bench.clock.now_s += 1
        await bench.end(request)
    bench.ask("c1")
    await settled()
    assert bench.log == ["wake a", "run a1", "wake b", "run b1", "run a2", "sleep b", "wake c", "run c1"]
    await bench.close()


@on_loop
async def test_traffic_of_one_model_does_not_starve_another() -> None:
    bench = Bench()
    bench.ask("a1")
    await settled()
    bench.ask("b1")
    await settled()
    bench.clock.now_s += 9.9
    bench.ask("a2")  # within its turn it takes more
    await settled()
    assert bench.log == ["wake a", "run a1", "run a2"]
    bench.clock.now_s += 0.2
    bench.turns.look()
    bench.ask("a3")  # after it none
    await bench.end("a1")
    assert (bench.turns.phase("a"), bench.turns.num_waiting("a")) == (Phase.LEAVING, 1)
    await bench.end("a2")
    assert bench.log == ["wake a", "run a1", "run a2", "sleep a", "wake b", "run b1"]
    await bench.end("b1")
    assert bench.log[-3:] == ["sleep b", "wake a", "run a3"]
    await bench.close()


@on_loop
async def test_models_come_in_order_of_their_oldest_request() -> None:
    bench = Bench(turn_s=0.0)
    bench.ask("a1")
    await settled()
    for request in ("c1", "b1", "c2"):
        bench.clock.now_s += 1
        bench.ask(request)
        await settled()
    await bench.end("a1")
    await bench.end("c1")
    await bench.end("c2")
    await bench.end("b1")
    woken = [each for each in bench.log if each.startswith("wake")]
    assert woken == ["wake a", "wake c", "wake b"]
    await bench.close()


@on_loop
async def test_model_that_cannot_wake_fails_its_own_requests_alone_and_may_be_asked_again() -> None:
    bench = Bench()
    bench.models["a"].fault = CannotWake("no memory")
    first, second = bench.ask("a1"), bench.ask("a2")
    bench.ask("b1")
    await settled()
    for each in (first, second):
        with pytest.raises(CannotWake, match="no memory"):
            await each
    await settled()
    assert bench.log == ["wake a", "wake b", "run b1"]
    await bench.end("b1")
    bench.models["a"].fault = None
    bench.ask("a3")
    await settled()
    assert bench.log[-3:] == ["sleep b", "wake a", "run a3"]
    await bench.close()


@on_loop
async def test_model_whose_waking_raises_what_is_no_answer_fails_alone() -> None:
    bench = Bench()
    bench.models["a"].fault = RuntimeError("a mistake")
    first = bench.ask("a1")
    bench.ask("b1")
    await settled()
    with pytest.raises(CannotWake, match="cannot be had now"):
        await first
    await settled()
    assert bench.log[-1] == "run b1"
    await bench.close()


@on_loop
async def test_queue_of_a_model_is_bounded_and_others_are_not_counted() -> None:
    bench = Bench(max_waiting=2)
    bench.models["a"].go.clear()
    bench.ask("a1")
    bench.ask("a2")
    await settled()
    with pytest.raises(TooMany, match="2 requests wait for the model a"):
        await bench.ask("a3")
    bench.ask("b1")
    await settled()
    assert bench.turns.num_waiting("b") == 1
    bench.models["a"].go.set()
    await bench.close()


@on_loop
async def test_request_that_leaves_while_it_waits_leaves_nothing() -> None:
    bench = Bench()
    bench.models["a"].go.clear()
    leaving, staying = bench.ask("a1"), bench.ask("a2")
    await settled()
    leaving.cancel()
    await settled()
    assert bench.turns.num_waiting("a") == 1
    bench.models["a"].go.set()
    await settled()
    assert bench.log == ["wake a", "run a2"]
    bench.ask("b1")
    await bench.end("a2")
    assert not staying.cancelled()
    assert bench.log[-3:] == ["sleep a", "wake b", "run b1"]
    await bench.close()


@on_loop
async def test_those_that_wait_are_told_when_all_ends() -> None:
    bench = Bench()
    bench.models["a"].go.clear()
    waiting = bench.ask("a1")
    await settled()
    await bench.close()
    with pytest.raises(CannotWake, match="shutting down"):
        await waiting
