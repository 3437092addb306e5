"""`StepTrace`: every call of a scheduler, one JSON object per line, so that a run can be repeated without a GPU.

    begin                          scheduler, queue policy and their options
    add, abort, hold, flush, drop  what the scheduler was told, in order
    park, renew                    the same, of a sleep or new weights: requests left the device, and KV was forgotten
    held                           what it was answered about an adapter, where that has changed
    plan                           its rows: request, start, tokens, new tokens; none where nothing could run
    apply                          new tokens per row, and what that meant for requests
    content                        once a request has ended: its blocks

What requests share is in it, what they say is not: a full block of tokens is a number, the same one wherever the whole
prefix up to it is the same (adapter and cache salt included). Times are the engine's monotonic seconds.
`openinfer simulate replay --steps FILE` runs the same calls again and names the first step that differs.
"""

import gzip
import hashlib
import logging
from array import array
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from openinfer_core import (
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    TokenEvent,
    Tokens,
)
from openinfer_core.scheduling import (
    AdapterPort,
    ChangesWeights,
    HoldsRows,
    Scheduler,
    SchedulerCapabilities,
    SchedulerConfig,
    StepPlan,
    StepResult,
)

logger = logging.getLogger("openinfer.engine")

MAX_STEPS = 1_000_000
"""After so many a file is closed: some gigabytes, and an hour and more of a busy engine."""
OPEN = "open"
"""The end of a request that had none when the file was closed."""
_BUFFER_BYTES = 1 << 20
_DIGEST_BYTES = 16

Outcome = tuple[int, int, str]
"""Request, new tokens, and its end: a finish reason, a failure's kind, or nothing."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="record"):
    """One line."""


class Begin(Record, frozen=True, kw_only=True, tag="begin"):
    """The first line."""

    scheduler: str
    """Name in the group openinfer.schedulers."""
    queue_policy: str
    """Name in the group openinfer.queue_policies."""
    config: SchedulerConfig
    """Without the key that blocks are named with."""
    tenant_weights: dict[str, float] = {}


class Add(Record, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """A request came."""

    at_s: float
    request: int
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    is_masked: bool = False
    """It has a row only once its last token is known."""
    has_prompt_logprobs: bool = False
    refusal: str = ""
    """The kind of failure that it was answered with at once."""
    adapter: int | None = None
    """A number for its content, the same one for the same content."""
    choice: int = 0
    retain_s: float | None = None
    conversation: int | None = None
    """A number for its `cache_key`, the same one for the same key, salt and adapter."""
    retained_prefixes: list[tuple[int, float]] = []
    """Tokens and seconds of each."""


class Abort(Record, frozen=True, kw_only=True, tag="abort"):
    """A client left, or a deadline was over."""

    request: int


class Hold(Record, frozen=True, kw_only=True, tag="hold"):
    """Requests whose mask is not computed, from now on."""

    requests: list[int]


class Flush(Record, frozen=True, kw_only=True, tag="flush"):
    """The cache was emptied."""


class Held(Record, frozen=True, kw_only=True, tag="held"):
    """Whether an adapter is in the memory of all ranks, as the scheduler was answered from now on; at first none is."""

    adapter: int
    is_held: bool


class Drop(Record, frozen=True, kw_only=True, tag="drop"):
    """Requests that wait for an adapter were ended: it was unloaded, or is lost."""

    adapter: int
    kind: str
    """Of their failure."""
    outcomes: list[Outcome]


class Park(Record, frozen=True, kw_only=True, tag="park"):
    """Requests were to give up slots and KV."""

    has_ended: bool
    """Whether none had any afterwards: else it was called again."""


class Renew(Record, frozen=True, kw_only=True, tag="renew"):
    """All KV was forgotten; what is computed from now on belongs to these weights."""

    weights: int
    """A number for their version, the same one for the same version."""


class Plan(Record, frozen=True, kw_only=True, omit_defaults=True, tag="plan"):
    """A step was planned."""

    at_s: float
    step: int | None = None
    """None: nothing could run."""
    rows: list[tuple[int, int, int, int]] = []
    """Request, first position, tokens, new tokens at most."""


class Apply(Record, frozen=True, kw_only=True, omit_defaults=True, tag="apply"):
    """A step's result came."""

    at_s: float
    step: int
    new_counts: list[int]
    """New tokens of each row."""
    failed_rows: list[int] = []
    outcomes: list[Outcome] = []
    """What was told of requests, in order."""


class Content(Record, frozen=True, kw_only=True, omit_defaults=True, tag="content"):
    """A request's blocks, once it has ended."""

    request: int
    num_tokens: int
    """Prompt and output."""
    blocks: list[int]
    """A number for each full block."""
    end: str
    """Finish reason, kind of failure, or `OPEN`."""
    has_stop_token: bool = False
    """Whether its last token ended it."""


AnyRecord = Begin | Add | Abort | Hold | Flush | Held | Drop | Park | Renew | Plan | Apply | Content
_decoder = msgspec.json.Decoder(AnyRecord)
_encoder = msgspec.json.Encoder()


def read_step_trace(path: Path) -> Iterator[AnyRecord]:
    """The records of a file, in order; a last line that was cut off ends it. One that ends in `.gz` is unpacked.

    Raises:
        InvalidRequest: the file is no step trace, or cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                record = _decoder.decode(line)
                if (number == 1) != isinstance(record, Begin):
                    raise InvalidRequest(f"{path}, line {number}: a step trace begins with one `begin`", field="steps")
                yield record
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no step trace: {error}", field="steps") from error


def outcomes_of(events: Sequence[TokenEvent]) -> list[Outcome]:
    """What events mean for requests: tokens and ends; that one was scheduled is seen in the plan."""
    found: list[Outcome] = []
    for event in events:
        if isinstance(event, Tokens):
            found.append((event.request_id, len(event.token_ids), ""))
        elif isinstance(event, Finished):
            found.append((event.request_id, 0, str(event.reason)))
        elif isinstance(event, Failed):
            found.append((event.request_id, 0, str(event.kind)))
    return found


class StepTrace:
    """Writes a step trace; used from the loop's thread.

    Args:
        path: of the file, which is begun anew.
        begin: the first record.
        max_steps: after so many nothing more is written.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, begin: Begin, *, max_steps: int = MAX_STEPS) -> None:
        self._path = path
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._block_size = begin.config.block_size_tokens
        self._max_steps = max_steps
        self._numbers: dict[bytes, int] = {}  # of blocks, by the digest of their prefix
        self._open: dict[int, _Tokens] = {}
        self._requests: dict[int, int] = {}  # by sequence slot
        self._rows: dict[int, list[int]] = {}  # requests of the rows of each step in flight
        self._held: list[int] = []
        self._adapters: dict[bytes, int] = {}  # numbers of contents
        self._are_held: dict[int, bool] = {}  # as the scheduler was told last
        self._versions: dict[str, int] = {}  # numbers of weights
        self._conversations: dict[tuple[str | None, ...], int] = {}  # numbers of cache keys
        self._write(begin)

    def recorded(self, scheduler: Scheduler) -> Scheduler:
        """The scheduler, whose calls are written from now on."""
        holds, changes = isinstance(scheduler, HoldsRows), isinstance(scheduler, ChangesWeights)
        if holds and changes:
            return _HoldingChangingScheduler(scheduler, self)
        if changes:
            return _ChangingScheduler(scheduler, self)
        return _HoldingScheduler(scheduler, self) if holds else _Recorded(scheduler, self)

    def recorded_port(self, port: AdapterPort) -> AdapterPort:
        """What a scheduler asks about adapters, whose answers are written from now on."""
        return _RecordedPort(port, self)

    def added(self, request: GenerateRequest, events: Sequence[TokenEvent], *, now_s: float) -> None:
        sampling = request.sampling
        refusal = next((str(event.kind) for event in events if isinstance(event, Failed)), "")
        self._write(
            Add(
                at_s=now_s,
                request=request.request_id,
                prompt_tokens=len(request.prompt_token_ids),
                max_tokens=sampling.max_tokens,
                min_tokens=sampling.min_tokens,
                tenant=request.tenant,
                priority=request.priority,
                is_masked=sampling.is_masked,
                has_prompt_logprobs=sampling.prompt_logprobs is not None,
                refusal=refusal,
                adapter=None if request.adapter is None else self._number_of(request.adapter.digest),
                choice=request.choice,
                retain_s=request.retain_s,
                conversation=None if request.cache_key is None else self._conversation_of(request),
                retained_prefixes=[(each.num_tokens, each.retain_s) for each in request.retained_prefixes],
            )
        )
        self._open[request.request_id] = _Tokens(request)
        if refusal:
            self._end(request.request_id, refusal)

    def aborted(self, request_id: RequestId) -> None:
        self._write(Abort(request=request_id))
        self._end(request_id, "abort")

    def held(self, request_ids: AbstractSet[RequestId]) -> None:
        requests = sorted(request_ids)
        if requests != self._held:
            self._held = [*requests]
            self._write(Hold(requests=self._held))

    def answered(self, digest: bytes, *, is_held: bool) -> None:
        """A scheduler has asked whether an adapter is held."""
        adapter = self._number_of(digest)
        if self._are_held.get(adapter, False) != is_held:
            self._are_held[adapter] = is_held
            self._write(Held(adapter=adapter, is_held=is_held))

    def dropped(self, digest: bytes, kind: FailureKind, events: Sequence[TokenEvent]) -> None:
        """`PlacesAdapters.drop_adapter` was called."""
        outcomes = outcomes_of(events)
        self._write(Drop(adapter=self._number_of(digest), kind=str(kind), outcomes=outcomes))
        for request, _, end in outcomes:
            self._end(request, end)

    def flushed(self) -> None:
        self._write(Flush())

    def parked(self, *, has_ended: bool) -> None:
        self._write(Park(has_ended=has_ended))

    def renewed(self, kv_version: str) -> None:
        self._write(Renew(weights=self._versions.setdefault(kv_version, len(self._versions))))

    def planned(self, plan: StepPlan | None, *, now_s: float) -> None:
        if plan is None:
            self._write(Plan(at_s=now_s))
            return
        self._requests |= {start.slot: start.request.request_id for start in plan.started}
        requests = [self._requests[slot] for slot in plan.slots.tolist()]
        self._rows[plan.step] = requests
        columns = (plan.starts.tolist(), plan.counts.tolist(), plan.max_new.tolist())
        self._write(Plan(at_s=now_s, step=plan.step, rows=list(zip(requests, *columns, strict=True))))

    def applied(self, plan: StepPlan, result: StepResult, events: Sequence[TokenEvent], *, now_s: float) -> None:
        for request, token_ids in zip(self._rows.pop(plan.step), result.tokens_of_rows, strict=True):
            if (tokens := self._open.get(request)) is not None:
                tokens.ids.extend(token_ids)
        self._write(
            Apply(
                at_s=now_s,
                step=plan.step,
                new_counts=result.new_counts.tolist(),
                failed_rows=sorted(result.failed_rows),
                outcomes=outcomes_of(events),
            )
        )
        for event in events:
            if isinstance(event, Finished):
                self._end(event.request_id, str(event.reason), has_stop_token=event.stop_token_id is not None)
            elif isinstance(event, Failed):
                self._end(event.request_id, str(event.kind))
        if plan.step + 1 >= self._max_steps:
            logger.warning("the step trace %s ends after %d steps", self._path, self._max_steps)
            self.close()

    def close(self) -> None:
        """Writes what is open, too. Idempotent."""
        if not self._file.closed:
            for request in [*self._open]:
                self._end(request, OPEN)
            self._file.close()

    def _end(self, request: int, end: str, *, has_stop_token: bool = False) -> None:
        tokens = self._open.pop(request, None)
        if tokens is not None:
            blocks = [*self._blocks_of(tokens)]
            self._write(
                Content(
                    request=request,
                    num_tokens=len(tokens.ids),
                    blocks=blocks,
                    end=end,
                    has_stop_token=has_stop_token,
                )
            )

    def _conversation_of(self, request: GenerateRequest) -> int:
        key = request.cache_salt, request.lora, request.cache_key
        return self._conversations.setdefault(key, len(self._conversations))

    def _number_of(self, digest: bytes) -> int:
        return self._adapters.setdefault(digest, len(self._adapters))

    def _blocks_of(self, tokens: "_Tokens") -> Iterator[int]:
        size, digest = self._block_size, tokens.root
        for first in range(0, len(tokens.ids) - size + 1, size):
            content = digest + tokens.ids[first : first + size].tobytes()
            digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
            yield self._numbers.setdefault(digest, len(self._numbers))

    def _write(self, record: Record) -> None:
        if not self._file.closed:
            self._file.write(_encoder.encode(record) + b"\n")


class _Tokens:
    """What a request consists of so far."""

    __slots__ = ("ids", "root")

    def __init__(self, request: GenerateRequest) -> None:
        self.ids = array("I", request.prompt_token_ids)
        adapter = None if request.adapter is None else request.adapter.digest.hex()
        self.root = repr((adapter or request.lora, request.cache_salt)).encode()


class _Recorded:
    """A scheduler whose calls are written."""

    def __init__(self, scheduler: Scheduler, trace: StepTrace) -> None:
        self._scheduler = scheduler
        self._trace = trace

    @property
    def capabilities(self) -> SchedulerCapabilities:
        return self._scheduler.capabilities

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        return self._scheduler.unfinished_ids

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        events = self._scheduler.add(request, now_s=now_s)
        self._trace.added(request, events, now_s=now_s)
        return events

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        self._trace.aborted(request_id)
        return self._scheduler.abort(request_id)

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = self._scheduler.plan(now_s=now_s)
        self._trace.planned(plan, now_s=now_s)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        events = self._scheduler.apply(plan, result, now_s=now_s)
        self._trace.applied(plan, result, events, now_s=now_s)
        return events

    def stats(self) -> EngineStats:
        return self._scheduler.stats()


class _RecordedPort:
    """Adapters in host memory, whose answers are written."""

    def __init__(self, port: AdapterPort, trace: StepTrace) -> None:
        self._port = port
        self._trace = trace

    def is_held(self, digest: bytes) -> bool:
        is_held = self._port.is_held(digest)
        self._trace.answered(digest, is_held=is_held)
        return is_held

    def hold(self, digest: bytes) -> None:
        self._port.hold(digest)

    def pin(self, digest: bytes) -> None:
        self._port.pin(digest)

    def unpin(self, digest: bytes) -> None:
        self._port.unpin(digest)

    def release(self, digest: bytes) -> None:
        self._port.release(digest)


class _HoldingScheduler(_Recorded):
    """One that can hold rows."""

    def hold(self, request_ids: AbstractSet[RequestId]) -> None:
        self._trace.held(request_ids)
        if isinstance(self._scheduler, HoldsRows):
            self._scheduler.hold(request_ids)


class _ChangingScheduler(_Recorded):
    """One whose requests can leave the device, and begin anew on other weights."""

    def park(self) -> bool:
        has_ended = isinstance(self._scheduler, ChangesWeights) and self._scheduler.park()
        self._trace.parked(has_ended=has_ended)
        return has_ended

    def renew_cache(self, kv_version: str) -> None:
        self._trace.renewed(kv_version)
        if isinstance(self._scheduler, ChangesWeights):
            self._scheduler.renew_cache(kv_version)


class _HoldingChangingScheduler(_HoldingScheduler, _ChangingScheduler):
    """One that can do both."""
