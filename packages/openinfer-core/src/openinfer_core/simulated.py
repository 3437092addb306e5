"""A simulated engine: real requests, events and timing, no model. For tests and for measuring frontends.

It takes requests in order of arrival, gives each its first token `ttft_s` after submission at the earliest and one more
every `tpot_s`, at most `rows_per_step` of them in one step; a later request waits until one of these has ended. With
`drafts_per_step` a step after the first gives several tokens, in one event. Tokens are a function of the prompt and the
position alone: two runs agree, whatever the seed and the drafts, and what shapes a distribution (temperature,
penalties, bias) shapes nothing here. Everything else of a request is honoured or refused.

Run it in a thread with `InProcessEngine(SimulatedLoop(options))`, or in a process of its own with
`spawn_simulated(options)`.
"""

import time
import zlib
from collections.abc import Callable, Container
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from openinfer_core.control import ControlCommand, FlushCache, refusal_of
from openinfer_core.engine import EngineCapability, EngineInfo, EngineStats
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
from openinfer_core.process.engine_process import LinkKind, run_engine_process
from openinfer_core.process.remote import RemoteEngine, spawn_engine
from openinfer_core.request import GenerateRequest, RequestId, token_id_beyond
from openinfer_core.sampling import BadWords

_NAP_S = 0.02  # the longest sleep: commands are heard between two
_NUM_BLOCKS = 1 << 20
_MOST_DRAFTS = 64  # as `SchedulerConfig.max_drafts`, whose module needs NumPy


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the simulated engine behaves."""

    ttft_s: float = 0.0
    """Seconds from submission to the first token."""
    tpot_s: float = 0.0
    """Seconds from one step to the next; 0 goes as fast as it can."""
    rows_per_step: int = 256
    """Requests that get a token in one step at most; more wait."""
    drafts_per_step: int = 0
    """Drafts of each row after its first; those up to the first that is not accepted add a token each."""
    acceptance_rate: float = 0.7
    """Share of drafts that are accepted where all before them were."""
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
        if any(not 0 <= token_id < self.num_token_ids for token_id in self.eos_token_ids):
            raise InvalidRequest("eos_token_ids must be below num_token_ids", field="eos_token_ids")
        if not 0 <= self.drafts_per_step <= _MOST_DRAFTS:
            raise InvalidRequest(f"drafts_per_step must be in 0 .. {_MOST_DRAFTS}", field="drafts_per_step")
        if not 0 <= self.acceptance_rate <= 1:  # also refuses NaN
            raise InvalidRequest("acceptance_rate must be in 0 .. 1", field="acceptance_rate")
        for name in ("ttft_s", "tpot_s"):
            if not 0 <= getattr(self, name) < 3600:  # also refuses NaN
                raise InvalidRequest(f"{name} must be in 0 .. 3600", field=name)


def simulated_token(request: GenerateRequest, position: int, options: SimulatedOptions) -> int:
    """The token the simulated engine gives to output `position` of a request; a forbidden stop token is passed over."""
    return _draw(_prompt_digest(request), position, options)


def _prompt_digest(request: GenerateRequest) -> int:
    prompt = request.prompt_token_ids
    return (zlib.crc32(repr(prompt[-8:]).encode()) + len(prompt)) * 0x9E3779B1 & 0xFFFFFFFF


def _draw(digest: int, position: int, options: SimulatedOptions) -> int:
    span = options.num_token_ids - options.first_token_id
    return options.first_token_id + _mix(digest, position) % span


def _mix(digest: int, position: int) -> int:
    mixed = (digest + position * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return mixed ^ (mixed >> 13)


@dataclass(slots=True)
class _Row:
    request: GenerateRequest
    arrived_s: float
    digest: int
    max_tokens: int  # the request's, or what the context leaves
    stop_token_ids: frozenset[int]
    restriction: "_Restriction"
    begun: bool = False
    produced: int = 0


class _Restriction:
    """What `allowed_token_ids` and `bad_words` leave of the tokens."""

    def __init__(self, request: GenerateRequest) -> None:
        allowed = request.sampling.allowed_token_ids
        self._allowed = None if allowed is None else sorted(set(allowed))
        self._words = BadWords(request.sampling.bad_words)
        self._said: list[int] = []

    def first(self, token_id: int, forbidden: Container[int], options: SimulatedOptions) -> int | None:
        """A token in place of the one that was drawn, that one if it may come; it is the next of the output."""
        allowed = self._allowed
        if allowed is None:
            ids = chain(range(token_id, options.num_token_ids), range(options.first_token_id, token_id))
        else:
            place = token_id % len(allowed)
            ids = chain(allowed[place:], allowed[:place])
        banned = self._words.single | self._words.completing(self._said)
        found = next((each for each in ids if each not in banned and each not in forbidden), None)
        if found is not None:
            self._said.append(found)
        return found


class SimulatedLoop:
    """Implements `EngineLoop`; `clock` gives monotonic seconds."""

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
        self._rows: dict[RequestId, _Row] = {}  # in order of arrival
        self._num_begun = 0
        self._next_step_s = clock()
        self._steps = 0
        self._prompt_tokens = 0
        self._generated = 0
        self._failed = 0
        self._drafted_rows = 0
        self._accepted_per_pos = [0] * options.drafts_per_step

    @property
    def info(self) -> EngineInfo:
        options = self._options
        return EngineInfo(
            model=options.model,
            family="simulated",
            max_model_tokens=options.max_model_tokens,
            num_token_ids=options.num_token_ids,
            eos_token_ids=options.eos_token_ids,
            block_size_tokens=16,
            num_blocks=_NUM_BLOCKS,
            max_num_seqs=options.rows_per_step,
            max_waiting=options.max_waiting,
            capabilities=(EngineCapability.FLUSH_CACHE,),
            composition={"engine": "simulated (openinfer-core)"},
        )

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        if len(self._rows) >= self._options.max_waiting + self._options.rows_per_step:
            return [self._fail(request, FailureKind.OVERLOADED, "the queue is full")]
        refusal = _refusal(request, self._options)
        if refusal is not None:
            return [self._fail(request, FailureKind.INVALID, refusal)]
        room_tokens = self._options.max_model_tokens - len(request.prompt_token_ids)
        self._rows[request.request_id] = _Row(
            request,
            arrived_s=self._clock(),
            digest=_prompt_digest(request),
            max_tokens=min(request.sampling.max_tokens, room_tokens),
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
            restriction=_Restriction(request),
        )
        return []

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        row = self._rows.get(request_id)
        return [] if row is None else [self._end(row, FinishReason.ABORT)]

    def step(self) -> list[TokenEvent]:
        """Gives each row that is due its tokens; sleeps a little and returns nothing if it is too early for that."""
        if not self._rows or not self._wait():
            return []
        self._steps += 1
        now_s = self._clock()
        events: list[TokenEvent] = []
        for row in list(islice(self._rows.values(), self._options.rows_per_step)):
            if row.begun or now_s >= row.arrived_s + self._options.ttft_s:
                self._advance(row, now_s, events)
        return events

    def reconcile(self, open_ids: AbstractSet[RequestId]) -> list[TokenEvent]:
        """Loses none."""
        del open_ids
        return []

    def stats(self) -> EngineStats:
        num_rows = len(self._rows)
        waiting = max(0, num_rows - self._options.rows_per_step)
        return EngineStats(
            running=num_rows - waiting,
            waiting=waiting,
            waiting_tokens=sum(
                len(row.request.prompt_token_ids)
                for row in islice(self._rows.values(), self._options.rows_per_step, None)
            ),
            blocks_total=_NUM_BLOCKS,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            failed_requests=self._failed,
            spec_decode_num_drafts=self._drafted_rows,
            spec_decode_num_draft_tokens=self._drafted_rows * self._options.drafts_per_step,
            spec_decode_num_accepted_tokens=sum(self._accepted_per_pos),
            spec_decode_num_accepted_tokens_per_pos=tuple(self._accepted_per_pos),
        )

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        """Has no cache, so that one is flushed at any time, and can do nothing else."""
        if not isinstance(command, FlushCache):
            raise refusal_of(command, self.info.capabilities)
        return []

    def close(self) -> None:
        self._rows.clear()
        self._num_begun = 0

    def _wait(self) -> bool:
        # Steps lie `tpot_s` apart on a grid, so that what one is late the next makes up for; a whole step that was
        # missed is not. While no request has begun, the grid begins anew with the first one's first token.
        due_s = self._next_step_s
        if not self._num_begun:
            first = next(iter(self._rows.values()))
            due_s = max(due_s, first.arrived_s + self._options.ttft_s)
        now_s = self._clock()
        if now_s < due_s:
            self._sleep(min(due_s - now_s, _NAP_S))
            now_s = self._clock()
        if now_s < due_s:
            return False
        tpot_s = self._options.tpot_s
        self._next_step_s = max(due_s, now_s - tpot_s) + tpot_s
        return True

    def _advance(self, row: _Row, now_s: float, events: list[TokenEvent]) -> None:
        num_tokens = 1 + self._count_accepted(row) if row.begun else 1
        if not row.begun:
            self._begin(row, now_s, events)
        token_ids, stop_token_id = list[int](), None
        while stop_token_id is None and len(token_ids) < num_tokens and row.produced < row.max_tokens:
            token_id = self._next_token(row)
            if token_id is None:
                events.append(self._dead_end(row))
                return
            if token_id in row.stop_token_ids:
                stop_token_id = token_id
            else:
                token_ids.append(token_id)
        if token_ids:
            top = row.request.sampling.logprobs
            logprobs = None if top is None else tuple(self._logprobs(token_id, top) for token_id in token_ids)
            events.append(Tokens(row.request.request_id, tuple(token_ids), logprobs))
        if stop_token_id is not None:
            events.append(self._end(row, FinishReason.STOP, stop_token_id))
        elif row.produced >= row.max_tokens:
            events.append(self._end(row, FinishReason.LENGTH))

    def _count_accepted(self, row: _Row) -> int:
        """Drafts of a row's next step that are accepted; a function of prompt and position."""
        options, num_accepted = self._options, 0
        if not options.drafts_per_step:
            return 0
        self._drafted_rows += 1
        bound = options.acceptance_rate * 2**32
        for place in range(options.drafts_per_step):
            if _mix(row.digest ^ 0x5BD1E995, row.produced + place) >= bound:
                break
            self._accepted_per_pos[place] += 1
            num_accepted += 1
        return num_accepted

    def _begin(self, row: _Row, now_s: float, events: list[TokenEvent]) -> None:
        request = row.request
        row.begun = True
        self._num_begun += 1
        self._prompt_tokens += len(request.prompt_token_ids)
        events.append(Scheduled(request.request_id, 0, now_s - row.arrived_s))
        top, predicted = request.sampling.prompt_logprobs, request.prompt_token_ids[1:]
        if top is not None and predicted:
            logprobs = tuple(self._logprobs(token_id, top) for token_id in predicted)
            events.append(Tokens(request.request_id, (), None, logprobs))

    def _next_token(self, row: _Row) -> int | None:
        """The next token; None if all are forbidden."""
        sampling = row.request.sampling
        token_id: int | None = _draw(row.digest, row.produced, self._options)
        is_early = row.produced < sampling.min_tokens
        if is_early or sampling.is_restricted:
            token_id = row.restriction.first(token_id, row.stop_token_ids if is_early else (), self._options)
        row.produced += 1
        self._generated += 1
        return token_id

    def _dead_end(self, row: _Row) -> Failed:
        del self._rows[row.request.request_id]
        self._num_begun -= row.begun
        return self._fail(row.request, FailureKind.INVALID, "nothing may be sampled here: every token is forbidden")

    def _end(self, row: _Row, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        del self._rows[row.request.request_id]
        self._num_begun -= row.begun
        return Finished(row.request.request_id, reason, 0, 0, 0, stop_token_id)

    def _fail(self, request: GenerateRequest, kind: FailureKind, message: str) -> Failed:
        self._failed += 1
        return Failed(request.request_id, kind, message)

    def _logprobs(self, token_id: int, top: int) -> TokenLogprobs:
        num_token_ids = self._options.num_token_ids
        count = min(top, num_token_ids)
        ids = tuple((token_id + i) % num_token_ids for i in range(count))
        return TokenLogprobs(-0.5, 1, ids, tuple(-0.5 - i for i in range(count)))


def _refusal(request: GenerateRequest, options: SimulatedOptions) -> str | None:
    sampling, prompt = request.sampling, request.prompt_token_ids
    if sampling.grammar is not None:
        return "the simulated engine has no grammar compiler"
    if request.lora is not None:
        return "the simulated engine has no adapters"
    if len(prompt) + min(1, sampling.max_tokens) > options.max_model_tokens:
        return f"the prompt has {len(prompt)} tokens; the context has {options.max_model_tokens}, prompt and completion"
    if sampling.min_tokens and set(sampling.stop_token_ids).issuperset(
        range(options.first_token_id, options.num_token_ids)
    ):
        return "every token is a stop token, and min_tokens forbids them all"
    return _unknown_ids(request, options.num_token_ids)


def _unknown_ids(request: GenerateRequest, num_token_ids: int) -> str | None:
    if (highest := token_id_beyond(request, num_token_ids)) is not None:
        return f"the prompt has token id {highest}; the model has ids below {num_token_ids}"
    field = request.sampling.field_beyond(num_token_ids)
    return None if field is None else f"{field} names a token id beyond the model's {num_token_ids} tokens"


def spawn_simulated(
    options: SimulatedOptions, *, link: LinkKind | None = None, host: str | None = None
) -> RemoteEngine:
    """Runs the simulated engine in a process of its own; `link` and `host` as for `spawn_engine`."""
    return spawn_engine("openinfer_core.simulated", options, link=link, host=host)


def _build(spec: msgspec.Raw) -> SimulatedLoop:
    return SimulatedLoop(msgspec.json.decode(spec, type=SimulatedOptions))


if __name__ == "__main__":
    raise SystemExit(run_engine_process(_build))
