"""A step trace again: the same calls on a scheduler of the same name, each plan and each answer compared.

Requests of a trace have no text. A block's tokens are made of its number, so that what was shared is shared again; a
stop token is a stop token again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_core import (
    Failed,
    FailureKind,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from openinfer_core.plugins import QUEUE_POLICIES, SCHEDULERS, find_plugin
from openinfer_core.request import LoadedAdapter, RetainedPrefix
from openinfer_core.scheduling import (
    ChangesWeights,
    FlushesCache,
    HoldsRows,
    PlacesAdapters,
    QueuePolicyConfig,
    Scheduler,
    StepPlan,
    StepResult,
)
from openinfer_engine.tracing.step_trace import (
    Abort,
    Add,
    AnyRecord,
    Apply,
    Begin,
    Content,
    Drop,
    Flush,
    Held,
    Hold,
    Park,
    Plan,
    Renew,
    outcomes_of,
    read_step_trace,
)

_LARGEST_ID = 2**31 - 1
_AFTER_END = 0  # what rows yield whose request has ended; no block has it
_FAILED = "as recorded"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replay is another run than its trace."""

    step: int
    """The step that is planned or applied, or is next."""
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"step {self.step} differs in {self.what}: recorded {self.recorded}, replayed {self.replayed}"


class StepReplay(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a trace."""

    scheduler: str
    requests: int
    steps: int
    """That were planned as recorded."""
    tokens: int
    """That requests were told."""
    digest: str
    """Of all rows planned."""
    difference: Difference | None = None

    def __str__(self) -> str:
        if self.difference is not None:
            return str(self.difference)
        return (
            f"{self.scheduler} planned {self.steps} steps of {self.requests} requests as recorded, with {self.tokens} "
            f"tokens; rows {self.digest}"
        )


class _Differs(Exception):
    def __init__(self, what: str, recorded: object, replayed: object) -> None:
        super().__init__(what)
        self.what, self.recorded, self.replayed = what, str(recorded), str(replayed)


def replay_steps(path: Path) -> StepReplay:
    """Runs a trace on its scheduler, up to the first difference.

    Raises:
        InvalidRequest: the file is no step trace. PluginError: its scheduler is not installed.
    """
    begin, *records = read_step_trace(path)
    if not isinstance(begin, Begin):
        raise InvalidRequest(f"{path} is no step trace", field="steps")
    replayed = _Replay(begin, records)
    difference = None
    try:
        for record in records:
            replayed.take(record)
    except _Differs as error:
        difference = Difference(step=replayed.step, what=error.what, recorded=error.recorded, replayed=error.replayed)
    return StepReplay(
        scheduler=begin.scheduler,
        requests=replayed.requests,
        steps=replayed.steps,
        tokens=replayed.tokens,
        digest=replayed.digest.hexdigest(),
        difference=difference,
    )


@dataclass(slots=True)
class _Request:
    request: GenerateRequest
    token_ids: list[int]  # prompt and output
    num_told: int = 0
    """Outputs so far."""

    def next_ids(self, count: int) -> list[int]:
        first = len(self.request.prompt_token_ids) + self.num_told
        self.num_told += count
        found = self.token_ids[first : first + count]
        return found + [_AFTER_END] * (count - len(found))


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    requests: list[int]


class _RecordedAdapters:
    """Implements `AdapterPort` with the answers of a trace."""

    def __init__(self) -> None:
        self.held: dict[bytes, bool] = {}

    def is_held(self, digest: bytes) -> bool:
        return self.held.get(digest, False)

    def hold(self, digest: bytes) -> None:
        pass

    def pin(self, digest: bytes) -> None:
        pass

    def unpin(self, digest: bytes) -> None:
        pass

    def release(self, digest: bytes) -> None:
        pass


def _digest_of(adapter: int) -> bytes:
    return adapter.to_bytes(16, "little")


class _Replay:
    def __init__(self, begin: Begin, records: Sequence[AnyRecord]) -> None:
        self._size = begin.config.block_size_tokens
        policy = find_plugin(QUEUE_POLICIES, begin.queue_policy).make(
            QueuePolicyConfig(tenant_weights=begin.tenant_weights)
        )
        self._scheduler: Scheduler = find_plugin(SCHEDULERS, begin.scheduler).make(begin.config, policy)  # pyright: ignore[reportAssignmentType]
        self._adapters = _RecordedAdapters()
        if begin.config.max_adapters and isinstance(self._scheduler, PlacesAdapters):
            self._scheduler.use_adapters(self._adapters)
        self._contents: dict[int, deque[Content]] = {}
        num_blocks = 0
        for record in records:
            if isinstance(record, Content):
                self._contents.setdefault(record.request, deque()).append(record)
                num_blocks = max(num_blocks, *(block + 1 for block in record.blocks), 0)
        self._next_number = num_blocks  # of blocks that no other request has
        self._open: dict[int, _Request] = {}
        self._by_slot: dict[int, int] = {}
        self._in_flight: deque[_InFlight] = deque()
        self.digest = blake2b(digest_size=8)
        self.step = self.steps = self.requests = self.tokens = 0

    def take(self, record: AnyRecord) -> None:
        """One call. Raises `_Differs`: it has another answer."""
        if isinstance(record, Add):
            self._add(record)
        elif isinstance(record, Plan):
            self._plan(record)
        elif isinstance(record, Apply):
            self._apply(record)
        elif isinstance(record, Abort):
            self._scheduler.abort(RequestId(record.request))
            self._open.pop(record.request, None)
        else:
            self._tell(record)

    def _tell(self, record: AnyRecord) -> None:
        """What not every scheduler is told."""
        if isinstance(record, Hold) and isinstance(self._scheduler, HoldsRows):
            self._scheduler.hold(frozenset(map(RequestId, record.requests)))
        elif isinstance(record, Flush) and isinstance(self._scheduler, FlushesCache):
            self._scheduler.flush_cache()
        elif isinstance(record, Held):
            self._adapters.held[_digest_of(record.adapter)] = record.is_held
        elif isinstance(record, Drop) and isinstance(self._scheduler, PlacesAdapters):
            self._drop(record, self._scheduler)
        elif isinstance(record, Park) and isinstance(self._scheduler, ChangesWeights):
            self._park(record, self._scheduler)
        elif isinstance(record, Renew) and isinstance(self._scheduler, ChangesWeights):
            self._scheduler.renew_cache(f"recorded {record.weights}")

    def _park(self, record: Park, scheduler: ChangesWeights) -> None:
        if (has_ended := scheduler.park()) != record.has_ended:
            raise _Differs("whether all requests left the device", record.has_ended, has_ended)

    # --- requests ---------------------------------------------------------------------------------------

    def _add(self, record: Add) -> None:
        token_ids, stop = self._token_ids_of(record)
        sampling = SamplingParams(
            max_tokens=record.max_tokens,
            min_tokens=record.min_tokens,
            stop_token_ids=() if stop is None else (stop,),
            # Some restriction: the scheduler sees that there is one, and the trace has what followed from it.
            allowed_token_ids=(_AFTER_END,) if record.is_masked else None,
            prompt_logprobs=0 if record.has_prompt_logprobs else None,
        )
        request = GenerateRequest(
            request_id=RequestId(record.request),
            prompt_token_ids=tuple(token_ids[: record.prompt_tokens]),
            sampling=sampling,
            tenant=record.tenant,
            priority=record.priority,
            adapter=None if record.adapter is None else LoadedAdapter(digest=_digest_of(record.adapter)),
            choice=record.choice,
            retain_s=record.retain_s,
            cache_key=None if record.conversation is None else str(record.conversation),
            retained_prefixes=tuple(RetainedPrefix(*each) for each in record.retained_prefixes),
        )
        self.requests += 1
        self._open[record.request] = _Request(request, token_ids)
        events = self._scheduler.add(request, now_s=record.at_s)
        refusal = next((str(event.kind) for event in events if isinstance(event, Failed)), "")
        if refusal != record.refusal:
            raise _Differs(f"what request {record.request} was told", record.refusal or "taken", refusal or "taken")

    def _drop(self, record: Drop, scheduler: PlacesAdapters) -> None:
        events = scheduler.drop_adapter(_digest_of(record.adapter), FailureKind(record.kind), _FAILED)
        outcomes = outcomes_of(events)
        recorded = [tuple(outcome) for outcome in record.outcomes]
        if outcomes != recorded:
            raise _Differs("requests that an adapter ended", *_only_differing(recorded, outcomes))
        for request, _, _ in outcomes:
            self._open.pop(request, None)

    def _token_ids_of(self, record: Add) -> tuple[list[int], int | None]:
        contents = self._contents.get(record.request)
        if not contents:  # the trace was cut off before it ended
            content = Content(request=record.request, num_tokens=record.prompt_tokens, blocks=[], end="")
        else:
            content = contents.popleft()
        num_tokens = max(content.num_tokens, record.prompt_tokens)
        num_more = -(-num_tokens // self._size) - len(content.blocks)
        numbers = [*content.blocks, *range(self._next_number, self._next_number + num_more)]
        self._next_number += num_more
        if self._next_number * self._size >= _LARGEST_ID:
            raise InvalidRequest("the trace has more blocks than there are tokens to make them of", field="steps")
        places = np.array(numbers, np.int64)[:, None] * self._size + np.arange(1, self._size + 1)
        token_ids: list[int] = places.reshape(-1)[:num_tokens].tolist()
        return token_ids, token_ids[-1] if content.has_stop_token else None

    # --- steps ------------------------------------------------------------------------------------------

    def _plan(self, record: Plan) -> None:
        if record.step is not None:
            self.step = record.step
        plan = self._scheduler.plan(now_s=record.at_s)
        rows: list[tuple[int, int, int, int]] = []
        if plan is not None:
            self._by_slot |= {start.slot: start.request.request_id for start in plan.started}
            requests = [self._by_slot[slot] for slot in plan.slots.tolist()]
            columns = (plan.starts.tolist(), plan.counts.tolist(), plan.max_new.tolist())
            rows = list(zip(requests, *columns, strict=True))
            self._in_flight.append(_InFlight(plan, requests))
        recorded = [tuple(row) for row in record.rows]
        if rows != recorded or (plan is None) != (record.step is None):
            raise _Differs("its rows (request, start, tokens, new tokens)", *_only_differing(recorded, rows))
        self.digest.update(repr(rows).encode())
        self.steps += plan is not None

    def _apply(self, record: Apply) -> None:
        self.step = record.step
        if not self._in_flight or self._in_flight[0].plan.step != record.step:
            raise InvalidRequest(f"step {record.step} is applied and was not planned", field="steps")
        step = self._in_flight.popleft()
        ids: list[int] = []
        for request, count in zip(step.requests, record.new_counts, strict=True):
            found = self._open.get(request)
            ids += [_AFTER_END] * count if found is None else found.next_ids(count)
        result = StepResult(
            new_counts=np.array(record.new_counts, np.int32),
            token_ids=np.array(ids, np.int32),
            prompt_logprobs=self._prompt_logprobs(step),
            failed_rows=dict.fromkeys(record.failed_rows, _FAILED),
        )
        outcomes = outcomes_of(self._scheduler.apply(step.plan, result, now_s=record.at_s))
        recorded = [tuple(outcome) for outcome in record.outcomes]
        if outcomes != recorded:
            raise _Differs("what requests were told (request, tokens, end)", *_only_differing(recorded, outcomes))
        for request, count, end in outcomes:
            self.tokens += count
            if end:
                self._open.pop(request, None)

    def _prompt_logprobs(self, step: _InFlight) -> dict[int, tuple[TokenLogprobs, ...]]:
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        columns = (step.plan.starts.tolist(), step.plan.counts.tolist())
        for row, (request, start, count) in enumerate(zip(step.requests, *columns, strict=True)):
            asked = self._open.get(request)
            if asked is not None and asked.request.sampling.prompt_logprobs is not None:
                last = min(start + count, len(asked.request.prompt_token_ids) - 1)
                found[row] = (TokenLogprobs(-1.0, 1, (), ()),) * max(0, last - start)
        return found


def _only_differing(recorded: Sequence[Any], replayed: Sequence[Any]) -> tuple[str, str]:
    """Both without what they have in common; the first few of each."""
    ours, theirs = (
        [each for each in recorded if each not in replayed],
        [each for each in replayed if each not in recorded],
    )
    if not ours and not theirs:
        return "another order", str([*replayed][:4])
    return _few(ours), _few(theirs)


def _few(rows: Sequence[Any]) -> str:
    more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
    return f"{', '.join(map(str, rows[:4])) or 'nothing'}{more}"
