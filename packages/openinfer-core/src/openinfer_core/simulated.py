"""A simulated engine: real requests, events and timing, no model. For tests and for measuring frontends.

It takes requests in order of arrival, gives each its first token `ttft_s` after submission and one more every
`tpot_s`, at most `rows_per_step` of them in one step. Tokens are a function of the prompt and the position, so that
two runs agree. Run it in a thread with `InProcessEngine(SimulatedLoop(options))`, or in a process with `spawn_simulated(options)`.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec

from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.engine_process import run_engine_process
from openinfer_core.errors import InvalidRequest
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
from openinfer_core.remote import RemoteEngine, spawn_engine
from openinfer_core.request import GenerateRequest, RequestId


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the simulated engine behaves."""

    ttft_s: float = 0.0
    """Seconds from submission to the first token."""
    tpot_s: float = 0.0
    """Seconds from one step to the next; 0 goes as fast as it can."""
    rows_per_step: int = 256
    """Requests that get a token in one step at most; more wait."""
    num_token_ids: int = 1000
    first_token_id: int = 0
    """Tokens are drawn from `first_token_id .. num_token_ids - 1`."""
    eos_token_ids: tuple[int, ...] = ()
    max_model_tokens: int = 1 << 20
    max_waiting: int = 4096
    model: str = "simulated"

    def __post_init__(self) -> None:
        for name in ("rows_per_step", "num_token_ids", "max_model_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1", field=name)
        if not 0 <= self.first_token_id < self.num_token_ids:
            raise InvalidRequest("first_token_id must be below num_token_ids", field="first_token_id")
        if not (0 <= self.ttft_s < 3600 and 0 <= self.tpot_s < 3600):
            raise InvalidRequest("ttft_s and tpot_s must be in 0 .. 3600", field="ttft_s")


def simulated_token(request: GenerateRequest, position: int, options: SimulatedOptions) -> int:
    """The token the simulated engine gives to output `position` of a request."""
    seed = zlib.crc32(repr(request.prompt_token_ids[-8:]).encode()) + len(request.prompt_token_ids)
    mixed = (seed * 0x9E3779B1 + position * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    span = options.num_token_ids - options.first_token_id
    return options.first_token_id + (mixed ^ (mixed >> 13)) % span


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    arrived_s: float
    begun: bool = False
    produced: int = 0


class SimulatedLoop:
    """Implements `EngineLoop`."""

    def __init__(
        self,
        options: SimulatedOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._clock = clock
        self._sleep = sleep
        self._queue: dict[RequestId, _Running] = {}
        self._order: deque[RequestId] = deque()
        self._next_step_s = clock()
        self._steps = 0
        self._generated = 0

    @property
    def info(self) -> EngineInfo:
        """The options, as an engine shows them."""
        options = self._options
        return EngineInfo(
            model=options.model,
            family="simulated",
            max_model_tokens=options.max_model_tokens,
            num_token_ids=options.num_token_ids,
            eos_token_ids=options.eos_token_ids,
            block_size_tokens=16,
            num_blocks=1 << 20,
            max_num_seqs=options.rows_per_step,
            max_waiting=options.max_waiting,
            composition={"engine": "simulated (openinfer-core)"},
        )

    @property
    def busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._queue)

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        """Queues a request."""
        if len(self._queue) >= self._options.max_waiting + self._options.rows_per_step:
            return [Failed(request.request_id, FailureKind.OVERLOADED, "the queue is full")]
        if request.sampling.grammar is not None:
            return [Failed(request.request_id, FailureKind.INVALID, "the simulated engine has no grammar compiler")]
        if len(request.prompt_token_ids) >= self._options.max_model_tokens:
            return [Failed(request.request_id, FailureKind.INVALID, "the prompt exceeds the context length")]
        self._queue[request.request_id] = _Running(request, self._clock())
        self._order.append(request.request_id)
        return []

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        """Ends a request."""
        if self._queue.pop(request_id, None) is None:
            return []
        self._order.remove(request_id)
        return [_finished(request_id, FinishReason.ABORT)]

    def step(self) -> list[TokenEvent]:
        """Waits for the step's time, then gives each row that is due a token."""
        now_s = self._wait()
        self._steps += 1
        rows = [self._queue[request_id] for request_id in islice(self._order, self._options.rows_per_step)]
        events: list[TokenEvent] = []
        for row in rows:
            if now_s >= row.arrived_s + self._options.ttft_s:
                self._advance(row, now_s, events)
        if len(self._queue) != len(self._order):
            self._order = deque(request_id for request_id in self._order if request_id in self._queue)
        return events

    def stats(self) -> EngineStats:
        """Counts of open requests, steps and tokens."""
        waiting = max(0, len(self._queue) - self._options.rows_per_step)
        return EngineStats(
            running=len(self._queue) - waiting,
            waiting=waiting,
            blocks_total=1 << 20,
            steps=self._steps,
            generated_tokens=self._generated,
        )

    def close(self) -> None:
        """Forgets everything."""
        self._queue.clear()
        self._order.clear()

    def _wait(self) -> float:
        """Sleeps until the next step is due, or the first request's time to first token is over."""
        due_s = self._next_step_s
        if not any(row.begun for row in self._queue.values()):
            first = min(row.arrived_s for row in self._queue.values())
            due_s = max(due_s, first + self._options.ttft_s)
        now_s = self._clock()
        if due_s > now_s:
            self._sleep(min(due_s - now_s, max(self._options.tpot_s, 0.005)))
            now_s = self._clock()
        if now_s >= due_s:
            self._next_step_s = max(due_s, now_s - self._options.tpot_s) + self._options.tpot_s
        return now_s

    def _advance(self, row: _Running, now_s: float, events: list[TokenEvent]) -> None:
        request = row.request
        request_id, sampling = request.request_id, request.sampling
        if not row.begun:
            row.begun = True
            events.append(Scheduled(request_id, 0, now_s - row.arrived_s))
            if sampling.prompt_logprobs is not None:
                events.append(self._prompt_logprobs(request, sampling.prompt_logprobs))
        if row.produced < sampling.max_tokens:
            token_id = simulated_token(request, row.produced, self._options)
            row.produced += 1
            self._generated += 1
            if token_id in sampling.stop_token_ids and row.produced > sampling.min_tokens:
                self._end(row, _finished(request_id, FinishReason.STOP, token_id), events)
                return
            logprobs = None if sampling.logprobs is None else (self._logprobs(token_id, sampling.logprobs),)
            events.append(Tokens(request_id, (token_id,), logprobs))
        context_tokens = len(request.prompt_token_ids) + row.produced
        if row.produced >= sampling.max_tokens or context_tokens >= self._options.max_model_tokens:
            self._end(row, _finished(request_id, FinishReason.LENGTH), events)

    def _end(self, row: _Running, event: Finished, events: list[TokenEvent]) -> None:
        del self._queue[row.request.request_id]
        events.append(event)

    def _prompt_logprobs(self, request: GenerateRequest, top: int) -> Tokens:
        rest = request.prompt_token_ids[1:]
        return Tokens(request.request_id, (), None, tuple(self._logprobs(token_id, top) for token_id in rest))

    def _logprobs(self, token_id: int, top: int) -> TokenLogprobs:
        """The token is the likeliest; each further one is 1 nat less likely."""
        ids = tuple((token_id + i) % self._options.num_token_ids for i in range(top))
        return TokenLogprobs(-0.5, 1, ids, tuple(-0.5 - i for i in range(top)))


def _finished(request_id: RequestId, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
    """A terminal event; the ledger fills in the counts."""
    return Finished(request_id, reason, 0, 0, 0, stop_token_id)


def spawn_simulated(options: SimulatedOptions) -> RemoteEngine:
    """Runs the simulated engine in a process of its own."""
    return spawn_engine("openinfer_core.simulated", options)


def _build(spec: msgspec.Raw) -> SimulatedLoop:
    return SimulatedLoop(msgspec.json.decode(spec, type=SimulatedOptions))


if __name__ == "__main__":
    raise SystemExit(run_engine_process(_build))
