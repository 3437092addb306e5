"""An engine that repeats its prompt, one that follows a script, and a server in a thread.

`ParrotLoop` makes any text come out of the server token by token: its completion is the prompt. Tests hold it still
(`hold`, `go`), count what is aborted (`RecordingEngine`) and break it (`die`). `ScriptedLoop` says what it is told to.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from openinfer_core.control import ControlCommand, FlushCache, refusal_of
from openinfer_core.engine import EngineCapability, EngineHandle, EngineInfo, EngineStats
from openinfer_core.events import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Scheduled,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.process.host import EngineLoop
from openinfer_core.process.local import InProcessEngine
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_server.app import load_app
from openinfer_server.http.protocol import bounded_protocol
from openinfer_server.options import ServerOptions
from openinfer_server.server import listen, serve_app

DEADLINE_S = 20.0  # how long a test waits for what must happen


@dataclass(slots=True)
class _Row:
    request: GenerateRequest
    answer: Sequence[int]
    produced: int = 0


class ParrotLoop:
    """An `EngineLoop` whose completion of a prompt is the prompt, again and again until `max_tokens`.

    Args:
        info: what it claims to be; `max_waiting` open requests are taken.
        tokens_per_event: how many tokens come at once, as with speculative decoding.
        step_s: how long a step takes at least.

    Attributes:
        num_flushes: how often its cache was flushed, which it can if `info` says so.
    """

    def __init__(self, info: EngineInfo, *, tokens_per_event: int = 1, step_s: float = 0.0) -> None:
        self._info = info
        self._tokens_per_event = tokens_per_event
        self._step_s = step_s
        self._rows: dict[RequestId, _Row] = {}
        self._going = threading.Event()
        self._going.set()
        self._fault: Exception | None = None
        self._steps_until_hold: int | None = None
        self.num_flushes = 0

    def hold(self, *, after_steps: int = 0) -> None:
        """No more tokens come until `go`, or none after so many more steps."""
        self._steps_until_hold = after_steps or None
        if not after_steps:
            self._going.clear()

    def go(self) -> None:
        """Tokens come again."""
        self._steps_until_hold = None
        self._going.set()

    def die(self) -> None:
        """The next step raises; `go` is implied."""
        self._fault = RuntimeError("this parrot is no more")
        self._going.set()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def busy(self) -> bool:
        return bool(self._rows) or self._fault is not None

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        if len(self._rows) >= self._info.max_waiting:
            return [Failed(request.request_id, FailureKind.OVERLOADED, "the queue is full")]
        self._rows[request.request_id] = _Row(request, self.answer(request))
        return [Scheduled(request.request_id, len(request.prompt_token_ids) // 2, 0.0)]

    def answer(self, request: GenerateRequest) -> Sequence[int]:
        """What is said to a request, again and again."""
        return request.prompt_token_ids

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        del self._rows[request_id]
        return [Finished(request_id, FinishReason.ABORT, 0, 0, 0)]

    def step(self) -> list[TokenEvent]:
        is_going = self._going.wait(0.002)
        if self._fault is not None:  # also where the step before has just begun to hold
            raise self._fault
        if not is_going:
            return []
        time.sleep(self._step_s)
        events = [event for row in list(self._rows.values()) for event in self._advance(row)]
        if self._steps_until_hold is not None:
            self._steps_until_hold -= 1
            if not self._steps_until_hold:
                self.hold()
        return events

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        if not (isinstance(command, FlushCache) and EngineCapability.FLUSH_CACHE in self._info.capabilities):
            raise refusal_of(command, self._info.capabilities)
        self.num_flushes += 1
        return []

    def reconcile(self, open_ids: AbstractSet[RequestId]) -> list[TokenEvent]:
        """Loses none."""
        del open_ids
        return []

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._rows), blocks_used=len(self._rows), blocks_total=self._info.num_blocks)

    def close(self) -> None:
        self._rows.clear()

    def _advance(self, row: _Row) -> list[TokenEvent]:
        sampling, answer, first = row.request.sampling, row.answer, row.produced
        room = min(self._tokens_per_event, sampling.max_tokens - first)
        said: list[int] = []
        for token_id in (answer[place % len(answer)] for place in range(first, first + room)):
            row.produced += 1
            if token_id in sampling.stop_token_ids and row.produced > sampling.min_tokens:
                return [self._tokens(row, said, first), self._end(row, FinishReason.STOP, token_id)]
            said.append(token_id)
        events: list[TokenEvent] = [self._tokens(row, said, first)]
        if row.produced == sampling.max_tokens:
            events.append(self._end(row, FinishReason.LENGTH))
        return events

    def _tokens(self, row: _Row, said: list[int], first: int) -> Tokens:
        request, sampling = row.request, row.request.sampling
        top, prompt_top = sampling.logprobs, sampling.prompt_logprobs
        logprobs = None if top is None else tuple(self.logprobs(token_id, top) for token_id in said)
        prompt_logprobs = None
        if first == 0 and prompt_top is not None:
            prompt_logprobs = tuple(self.logprobs(token_id, prompt_top) for token_id in request.prompt_token_ids[1:])
        return Tokens(request.request_id, tuple(said), logprobs, prompt_logprobs)

    def logprobs(self, token_id: int, top: int) -> TokenLogprobs:
        """The second likeliest token is said; each likelier or less likely one has the next id."""
        ids = tuple((token_id + 1 - place) % self._info.num_token_ids for place in range(top))
        return TokenLogprobs(-1.5, 2, ids, tuple(-0.5 - place for place in range(top)))

    def _end(self, row: _Row, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        del self._rows[row.request.request_id]
        accepted, rejected = self._drafts(row)
        return Finished(
            row.request.request_id,
            reason,
            0,
            0,
            0,
            stop_token_id,
            accepted_drafts=accepted,
            rejected_drafts=rejected,
        )

    def _drafts(self, row: _Row) -> tuple[int, int]:
        """All of a prediction is drafted at once: what the answer begins with is accepted."""
        prediction = row.request.prediction_token_ids
        said = [row.answer[place % len(row.answer)] for place in range(row.produced)]
        pairs = zip(prediction, said, strict=False)
        accepted = next((place for place, (draft, token) in enumerate(pairs) if draft != token), None)
        if accepted is None:
            accepted = min(len(prediction), len(said))
        return accepted, len(prediction) - accepted


class ScriptedLoop(ParrotLoop):
    """Answers each request with what a script says, which is asked when the request comes.

    Args:
        info: see `ParrotLoop`.
        script: the token ids of a request's answer. It ends if they end with a stop token; else they come again and
            again, until `max_tokens` or an abort.
        step_s: how long a step takes at least.
    """

    def __init__(
        self, info: EngineInfo, script: Callable[[GenerateRequest], Sequence[int]], *, step_s: float = 0.0
    ) -> None:
        super().__init__(info, step_s=step_s)
        self._script = script

    def answer(self, request: GenerateRequest) -> Sequence[int]:
        """What the script says to a request."""
        return self._script(request)


class RecordingEngine:
    """An `EngineHandle` around another one, which remembers what was asked of it."""

    def __init__(self, inner: EngineHandle) -> None:
        self._inner = inner
        self.submitted: list[GenerateRequest] = []
        self.aborted: list[RequestId] = []

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    def submit(self, request: GenerateRequest) -> None:
        self.submitted.append(request)
        self._inner.submit(request)

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self._inner.abort(request_id)

    def events(self) -> AsyncIterator[list[TokenEvent]]:
        return self._inner.events()

    async def stats(self) -> EngineStats:
        return await self._inner.stats()

    async def control(self, command: ControlCommand) -> None:
        await self._inner.control(command)

    async def close(self) -> None:
        await self._inner.close()


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = DEADLINE_S) -> None:
    """Returns when a condition holds."""
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.002)


class ThreadedServer(AbstractContextManager["ThreadedServer"]):
    """A server on a free port, in a thread; leaving the context drains it and closes the engine.

    Attributes:
        engine: what the server asked of its engine.
        url: where it listens.
        exit_code: what `serve` returned; None while it runs.
    """

    def __init__(
        self,
        loop: EngineLoop,
        model_dir: Path,
        options: ServerOptions,
        *,
        protocol: type[asyncio.Protocol] | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self.engine = RecordingEngine(InProcessEngine(loop))
        self.url = ""
        self.exit_code: int | None = None
        self._loop = loop
        self._model_dir = model_dir
        self._options = options
        self._protocol = protocol or bounded_protocol(options)
        self._loop_factory = loop_factory
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="openinfer-test-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(DEADLINE_S) or self._failure is not None:
            raise AssertionError("the server did not start") from self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(self._loop, ParrotLoop):
            self._loop.go()
        self.stop()
        self.join()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.partition("://")[2].rsplit(":", 1)
        return host, int(port)

    def stop(self) -> None:
        if self._event_loop is not None and self._stop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> int:
        self._thread.join(DEADLINE_S)
        if self._thread.is_alive() or self._failure is not None or self.exit_code is None:
            raise AssertionError("the server did not end") from self._failure
        return self.exit_code

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                self.exit_code = runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()
            raise

    async def _serve(self) -> int:
        self._event_loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = load_app(self.engine, self._model_dir, self._options)
        self.service = app.service
        with listen(self._options) as listener:
            code = await serve_app(
                app, listener, self._options, on_ready=self._is_ready, stop=self._stop, protocol=self._protocol
            )
        await self.engine.close()
        return code

    def _is_ready(self, url: str) -> None:
        self.url = url
        self._ready.set()
