"""`EngineDriver`: the one consumer of an engine handle, which keeps and checks what is said of each request."""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from openinfer_core.engine import EngineHandle
from openinfer_core.errors import EngineClosed
from openinfer_core.events import TokenEvent
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import SamplingParams
from openinfer_core.testing.errors import ConformanceError, require
from openinfer_core.testing.transcript import Transcript

# Makes a new engine that runs; called within an event loop, may be a coroutine function.
MakeHandle: TypeAlias = Callable[[], EngineHandle | Awaitable[EngineHandle]]

Scenario: TypeAlias = Callable[["EngineDriver"], Awaitable[None]]


def drive(make_handle: MakeHandle, scenario: Scenario, *, deadline_s: float) -> None:
    """Runs a scenario on a new engine, closes it, and checks that every request got its one terminal event."""
    asyncio.run(_drive(make_handle, scenario, deadline_s))


async def _drive(make_handle: MakeHandle, scenario: Scenario, deadline_s: float) -> None:
    made = make_handle()
    handle = await made if inspect.isawaitable(made) else made
    driver = EngineDriver(handle)
    try:
        async with asyncio.timeout(deadline_s):
            await scenario(driver)
            await driver.finish()
    except BaseException as error:
        with contextlib.suppress(Exception):  # what went wrong first is what is told
            async with asyncio.timeout(deadline_s):
                await driver.stop()
        if isinstance(error, TimeoutError):
            raise ConformanceError(f"no end within {deadline_s} s; {driver.describe_open()}") from error
        raise


class EngineDriver:
    """Submits requests to a new engine and collects their transcripts."""

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self.info = handle.info
        self.transcripts: list[Transcript] = []
        self._current: dict[RequestId, Transcript] = {}
        self._changed = asyncio.Condition()
        self._consumer: asyncio.Task[None] | None = None
        self._consumed = False
        self._next_id = 1

    def request(self, prompt: tuple[int, ...], sampling: SamplingParams) -> GenerateRequest:
        # With a salt of its own, so that no cache has seen its prompt.
        request_id = RequestId(self._next_id)
        self._next_id += 1
        return GenerateRequest(
            request_id=request_id, prompt_token_ids=prompt, sampling=sampling, cache_salt=f"salt {request_id}"
        )

    def submit(self, request: GenerateRequest) -> Transcript:
        transcript = Transcript(request, self.info)
        before = self._current.get(request.request_id)
        self._current[request.request_id] = transcript
        try:
            self.handle.submit(request)
        except BaseException:
            if before is not None:
                self._current[request.request_id] = before
            raise
        self.transcripts.append(transcript)
        return transcript

    def start(self) -> None:
        if self._consumer is None:
            self._consumer = asyncio.create_task(self._consume())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Consumes events until a condition on transcripts holds."""
        self.start()
        async with self._changed:
            await self._changed.wait_for(lambda: condition() or self._consumed)
        if not condition():
            await self._require_good_end()
            raise ConformanceError(f"events() ended although the engine was not closed; {self.describe_open()}")

    async def end_of(self, *transcripts: Transcript) -> None:
        await self.until(lambda: all(transcript.terminal is not None for transcript in transcripts))

    async def serve(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Transcript:
        transcript = self.submit(self.request(prompt, sampling))
        await self.end_of(transcript)
        return transcript

    async def finish(self) -> None:
        await self.handle.close()
        self.start()
        await self._require_good_end()
        ended = all(transcript.terminal is not None for transcript in self.transcripts)
        require(ended, f"events() ended after close without a terminal event for each request; {self.describe_open()}")

    async def stop(self) -> None:
        if self._consumer is not None:
            self._consumer.cancel()
            await asyncio.gather(self._consumer, return_exceptions=True)
        await self.handle.close()

    def describe_open(self) -> str:
        still_open = [transcript.request.request_id for transcript in self.transcripts if transcript.terminal is None]
        return f"requests without a terminal event: {still_open or 'none'}"

    async def _consume(self) -> None:
        try:
            async for events in self.handle.events():
                require(events, "events() yielded an empty list")
                for event in events:
                    self._add(event)
                async with self._changed:
                    self._changed.notify_all()
        except EngineClosed as error:
            raise ConformanceError(f"the engine died: {error}") from error
        finally:
            self._consumed = True
            async with self._changed:
                self._changed.notify_all()

    def _add(self, event: TokenEvent) -> None:
        transcript = self._current.get(event.request_id)
        require(transcript is not None, f"{event} names a request that was never submitted")
        if transcript is not None:
            transcript.add(event)

    async def _require_good_end(self) -> None:
        if self._consumer is not None:
            await self._consumer
