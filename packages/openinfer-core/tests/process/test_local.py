"""An engine in a thread loses nothing: without a reader, across event loops, when it dies."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from openinfer_core import (
    EngineClosed,
    EngineHandle,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    TokenEvent,
    Tokens,
)
from openinfer_core.process.local import DIED, InProcessEngine
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, simulated_token

MakeRequest = Callable[..., GenerateRequest]
RunAsync = Callable[..., Any]


def engine(**options: Any) -> InProcessEngine:
    return InProcessEngine(SimulatedLoop(SimulatedOptions(**options)))


async def read_until_finished(handle: EngineHandle, *request_ids: int) -> list[TokenEvent]:
    """Events up to the terminal ones of these requests."""
    left, seen = set(request_ids), []
    async for events in handle.events():
        seen += events
        left -= {event.request_id for event in events if isinstance(event, (Finished, Failed))}
        if not left:
            break
    return seen


async def read_into(seen: list[TokenEvent], handle: EngineHandle) -> None:
    async for events in handle.events():
        seen += events


def token_ids(events: list[TokenEvent], request_id: int) -> list[int]:
    mine = [event for event in events if isinstance(event, Tokens) and event.request_id == request_id]
    return [token_id for event in mine for token_id in event.token_ids]


def test_engine_in_a_thread_is_an_engine_handle(run_async: RunAsync) -> None:
    handle = engine(model="m")
    assert isinstance(handle, EngineHandle)
    assert handle.info.model == "m"
    run_async(handle.close())


def test_request_submitted_before_anyone_reads_is_served(make_request: MakeRequest, run_async: RunAsync) -> None:
    handle = engine()
    request = make_request(1, max_tokens=5)
    handle.submit(request)  # outside of any event loop

    async def main() -> list[TokenEvent]:
        events = await read_until_finished(handle, 1)
        await handle.close()
        return events

    events = run_async(main())
    assert token_ids(events, 1) == [simulated_token(request, i, SimulatedOptions()) for i in range(5)]
    assert events[-1] == Finished(RequestId(1), FinishReason.LENGTH, 3, 5, 0)


def test_events_wait_for_the_next_event_loop_when_the_first_was_closed(
    make_request: MakeRequest, run_async: RunAsync
) -> None:
    handle = engine(tpot_s=0.001)
    handle.submit(make_request(1, max_tokens=400))

    async def first_events() -> list[TokenEvent]:
        events = handle.events()
        batch = await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        return batch

    async def rest() -> list[TokenEvent]:
        events = await read_until_finished(handle, 1)
        await handle.close()
        return events

    seen = run_async(first_events())  # asyncio.run closes its event loop, while the engine goes on
    seen += run_async(rest())
    assert len(token_ids(seen, 1)) == 400
    assert [type(event) for event in seen[-1:]] == [Finished]


def test_reader_whose_loop_ends_while_events_are_on_their_way_loses_none(
    make_request: MakeRequest, run_async: RunAsync
) -> None:
    handle = engine()
    total = 3000
    handle.submit(make_request(1, max_tokens=total))
    seen: list[TokenEvent] = []

    async def one_batch() -> None:
        async for events in handle.events():
            seen.extend(events)
            break

    while not (seen and isinstance(seen[-1], Finished)):
        run_async(one_batch())
    run_async(handle.close())
    assert len(token_ids(seen, 1)) == total


def test_close_before_anyone_reads_gives_the_reader_the_failures_and_the_end(
    make_request: MakeRequest, run_async: RunAsync
) -> None:
    handle = engine(ttft_s=3000)
    handle.submit(make_request(1))

    async def main() -> list[list[TokenEvent]]:
        await handle.close()
        await handle.close()
        with pytest.raises(EngineClosed, match="was closed"):
            handle.submit(make_request(2))
        with pytest.raises(EngineClosed, match="was closed"):
            await handle.stats()
        handle.abort(RequestId(1))
        return [events async for events in handle.events()]

    assert run_async(main()) == [[Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine has shut down")]]


def test_close_while_a_task_reads_ends_its_iteration(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> list[TokenEvent]:
        handle = engine(ttft_s=3000)
        handle.submit(make_request(1))
        seen: list[TokenEvent] = []

        reader = asyncio.create_task(read_into(seen, handle))
        await asyncio.sleep(0)
        await asyncio.gather(handle.close(), handle.close())
        await reader
        return seen

    assert run_async(main()) == [Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine has shut down")]


def test_close_ends_the_thread(run_async: RunAsync) -> None:
    before = set(threading.enumerate())
    handle = engine()
    (thread,) = set(threading.enumerate()) - before
    run_async(handle.close())
    assert not thread.is_alive()


def test_id_in_use_is_refused_and_free_after_its_end(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> None:
        handle = engine()
        handle.submit(make_request(1, max_tokens=1_000_000))
        with pytest.raises(InvalidRequest, match="request id 1 is in use"):
            handle.submit(make_request(1))
        handle.abort(RequestId(1))
        await read_until_finished(handle, 1)
        handle.submit(make_request(1, max_tokens=2))
        assert len(token_ids(await read_until_finished(handle, 1), 1)) == 2
        await handle.close()

    run_async(main())


def test_abort_of_an_unknown_id_does_nothing(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> None:
        handle = engine()
        handle.abort(RequestId(77))
        handle.submit(make_request(1))
        events = await read_until_finished(handle, 1)
        assert {event.request_id for event in events} == {1}
        await handle.close()

    run_async(main())


class DyingLoop(SimulatedLoop):
    """Raises in the step after its third."""

    def step(self) -> list[TokenEvent]:
        if self.stats().steps == 3:
            raise RuntimeError("device lost")
        return super().step()


def test_engine_that_dies_fails_its_requests_and_then_raises(
    make_request: MakeRequest, run_async: RunAsync, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        handle = InProcessEngine(DyingLoop(SimulatedOptions()))
        handle.submit(make_request(1, max_tokens=10))
        seen: list[TokenEvent] = []
        with pytest.raises(EngineClosed, match=DIED):
            await read_into(seen, handle)
        assert len(token_ids(seen, 1)) == 3
        assert seen[-1] == Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine failed")
        with pytest.raises(EngineClosed, match=DIED):
            handle.submit(make_request(2))
        with pytest.raises(EngineClosed, match=DIED):
            await handle.stats()
        await handle.close()

    run_async(main())
    assert "device lost" in caplog.text


class SlowlyEndingLoop(DyingLoop):
    """Closes when it may."""

    def __init__(self) -> None:
        super().__init__(SimulatedOptions())
        self.may_close = threading.Event()

    def close(self) -> None:
        self.may_close.wait(60)
        super().close()


def test_reader_is_told_of_a_death_before_the_loop_is_closed(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> None:
        loop = SlowlyEndingLoop()
        handle = InProcessEngine(loop)
        handle.submit(make_request(1, max_tokens=10))
        async with asyncio.timeout(20):
            with pytest.raises(EngineClosed, match=DIED):
                await read_into([], handle)
        loop.may_close.set()
        await handle.close()

    run_async(main())


def test_engine_that_died_before_anyone_reads_says_so(
    make_request: MakeRequest, run_async: RunAsync, caplog: pytest.LogCaptureFixture
) -> None:
    handle = InProcessEngine(DyingLoop(SimulatedOptions()))
    handle.submit(make_request(1, max_tokens=10))

    async def main() -> list[TokenEvent]:
        seen: list[TokenEvent] = []
        with pytest.raises(EngineClosed, match=DIED):
            await read_into(seen, handle)
        await handle.close()
        return seen

    assert isinstance(run_async(main())[-1], Failed)


def test_stats_come_from_the_loop(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> EngineStats:
        handle = engine()
        handle.submit(make_request(1, max_tokens=6))
        await read_until_finished(handle, 1)
        stats = await handle.stats()
        await handle.close()
        return stats

    stats = run_async(main())
    assert (stats.generated_tokens, stats.prompt_tokens, stats.running, stats.waiting) == (6, 3, 0, 0)


def test_engine_that_is_never_read_nor_closed_does_not_keep_the_process(make_request: MakeRequest) -> None:
    before = set(threading.enumerate())
    handle = engine(ttft_s=3000)
    handle.submit(make_request(1))
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    asyncio.run(handle.close())
