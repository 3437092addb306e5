"""Sessions on the real scheduler, block pool and order of eviction, in virtual time.

The device and the link to the host only count. A step takes `base_s`, and `token_s` for each token of a prompt; a block
comes from the host in `load_s` and goes there in `save_s`, on a link that does one after the other each way. What the
scheduler itself takes counts nothing in virtual time, so a run is the same on any machine; its processor time is noted
by turn beside it.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.events import Failed, Finished, Tokens
from openinfer_core.queue_policies import FairShare
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_kv_cache import Digest, PrefixHit

BLOCK_TOKENS = 16
OUTPUT_ID = 7


@dataclass(frozen=True, slots=True)
class Card:
    """What a device takes; the defaults are Qwen3-8B's on an H200, from `h200/sessions-qwen3-8b-split.json`."""

    base_s: float = 6.5e-3
    token_s: float = 41e-6
    load_s: float = 43.2e-6
    save_s: float = 43.2e-6
    outside_s: float = 25e-3
    """Of a turn, before and after the engine."""
    notice_s: float = 0.0
    """After a transfer's end, until the scheduler sees it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Ids that a turn adds, so many seconds after the turn before it."""

    new_ids: Sequence[int]
    wait_s: float


@dataclass(frozen=True, slots=True)
class Session:
    begin_s: float
    turns: Sequence[Turn]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Played:
    """One turn. Seconds are virtual, but for `cpu_s`: the scheduler's own, from when it was added until its end."""

    session: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    cpu_s: float


class _Hit:
    def __init__(self, digests: tuple[Digest, ...]) -> None:
        self.digests = digests

    def close(self) -> None:
        """Nothing is held: what was saved stays."""


@dataclass(slots=True, eq=False)
class _Transfer:
    num_blocks: int
    begin_s: float
    ends_s: float
    clock: Callable[[], float]
    on_over: Callable[[], None]
    is_noted: bool = False

    def is_over(self) -> bool:
        if self.clock() < self.ends_s:
            return False
        if not self.is_noted:
            self.is_noted = True
            self.on_over()
        return True

    @property
    def completed_blocks(self) -> int:
        return self.num_blocks

    def cancel(self) -> None:
        """It goes on to its end."""

    def wait(self, timeout_s: float) -> None:
        """Virtual time passes elsewhere."""


class Link:
    """Implements `TierPort` with a host tier that keeps everything."""

    chunks_per_slot = 0

    def __init__(self, card: Card, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._card = card
        self._held: set[Digest] = set()
        self._loads_until_s = self._saves_until_s = 0.0
        self.ends: list[float] = []
        """When transfers end, a heap."""
        self.loaded_blocks = 0

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        found = 0
        while found < len(digests) and digests[found] in self._held:
            found += 1
        return PrefixHit([_Hit(tuple(digests[:found]))] if found else [])  # type: ignore[list-item]

    def load(self, found: PrefixHit, places: Sequence[int]) -> _Transfer | None:
        num_blocks, found.hits = found.num_blocks, []
        if not num_blocks:
            return None
        self.loaded_blocks += num_blocks
        begin_s = max(self.clock(), self._loads_until_s)
        self._loads_until_s = begin_s + num_blocks * self._card.load_s
        return self._transfer(num_blocks, self._loads_until_s, lambda: None)

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> _Transfer:
        begin_s = max(self.clock(), self._saves_until_s)
        self._saves_until_s = begin_s + len(digests) * self._card.save_s
        return self._transfer(len(digests), self._saves_until_s, lambda: self._held.update(digests))

    def state_places(self, slot: int) -> Sequence[int]:
        return ()

    def _transfer(self, num_blocks: int, ends_s: float, on_over: Callable[[], None]) -> _Transfer:
        seen_s = ends_s + self._card.notice_s
        heapq.heappush(self.ends, seen_s)
        return _Transfer(num_blocks, self.clock(), seen_s, self.clock, on_over)


@dataclass(slots=True)
class _Open:
    session: int
    turn: int
    ids: tuple[int, ...]
    arrived_s: float
    cpu_s: float = 0.0
    first_s: float | None = None
    cached_tokens: int = 0
    said: list[int] = field(default_factory=list[int])


class World:
    """One scheduler, which plans the next step while one runs."""

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        num_blocks: int,
        card: Card,
        max_model_tokens: int,
        output_tokens: int = 16,
        max_num_seqs: int = 32,
        max_step_tokens: int = 8192,
        options: dict[str, str] | None = None,
        answers_change: bool = False,
    ) -> None:
        """With `answers_change` other tokens stand for an answer in the prompts after it, as many."""
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size_tokens=BLOCK_TOKENS,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            max_model_tokens=max_model_tokens,
            options=options or {},
        )
        self.scheduler = TokenBudgetScheduler(config, FairShare(QueuePolicyConfig()))
        self.link = Link(card, lambda: self.now_s)
        self.scheduler.use_tiers(self.link)  # type: ignore[arg-type]
        self.now_s = 0.0
        self._card, self._sessions, self._output_tokens = card, sessions, output_tokens
        self._answers_change = answers_change
        self._device_free_s = 0.0
        self._open: dict[RequestId, _Open] = {}
        self._num_requests = 0
        self._coming: list[tuple[float, int, int, tuple[int, ...]]] = [
            (session.begin_s, number, 0, tuple(session.turns[0].new_ids)) for number, session in enumerate(sessions)
        ]
        heapq.heapify(self._coming)
        self.played: list[Played] = []

    def run(self) -> list[Played]:
        in_flight = deque[tuple[StepPlan, float]]()
        while self._coming or self._open:
            while self._coming and self._coming[0][0] <= self.now_s:
                self._add(*heapq.heappop(self._coming))
            while len(in_flight) < 2 and self._is_busy and (plan := self._plan()) is not None:
                in_flight.append((plan, self._launch(plan)))
            if in_flight:
                plan, ends_s = in_flight.popleft()
                self.now_s = max(self.now_s, ends_s)
                self._apply(plan)
            else:
                self._pass_time()
        return self.played

    @property
    def _is_busy(self) -> bool:
        """Without requests and copies an engine sleeps, and plans nothing."""
        return bool(self._open or self.link.ends)

    def _pass_time(self) -> None:
        nexts = [*self.link.ends[:1], *(each[0] for each in self._coming[:1])]
        if not nexts:
            raise RuntimeError(f"{len(self._open)} requests wait for nothing")
        self.now_s = min(nexts)

    def _add(self, at_s: float, number: int, turn: int, ids: tuple[int, ...]) -> None:
        request_id = RequestId(self._num_requests)
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=self._output_tokens)
        tenant = self._sessions[number].tenant
        request = GenerateRequest(request_id=request_id, prompt_token_ids=ids, sampling=sampling, tenant=tenant)
        opened = self._open[request_id] = _Open(number, turn, ids, at_s)
        begin_s = time.process_time()
        refused = self.scheduler.add(request, now_s=self.now_s)
        opened.cpu_s += time.process_time() - begin_s
        if refused:
            raise RuntimeError(str(refused))

    def _plan(self) -> StepPlan | None:
        while self.link.ends and self.link.ends[0] <= self.now_s:
            heapq.heappop(self.link.ends)
        begin_s = time.process_time()
        plan = self.scheduler.plan(now_s=self.now_s)
        self._share(time.process_time() - begin_s)
        return plan

    def _share(self, cpu_s: float) -> None:
        """What a call took is all open turns' alike."""
        for each in self._open.values():
            each.cpu_s += cpu_s / len(self._open)

    def _launch(self, plan: StepPlan) -> float:
        begin_s = max(self.now_s, self._device_free_s)
        taken_s = self._card.base_s + self._card.token_s * int(plan.num_host_tokens.sum())
        self._device_free_s = begin_s + taken_s
        return self._device_free_s

    def _apply(self, plan: StepPlan) -> None:
        counts = plan.max_new
        result = StepResult(new_counts=counts, token_ids=np.full(int(counts.sum()), OUTPUT_ID, np.int32))
        begin_s = time.process_time()
        events = self.scheduler.apply(plan, result, now_s=self.now_s)
        self._share(time.process_time() - begin_s)
        for event in events:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            opened = self._open[event.request_id]
            if isinstance(event, Tokens):
                opened.said += event.token_ids
                if opened.first_s is None:
                    opened.first_s = self.now_s
            elif isinstance(event, Finished):
                opened.cached_tokens = event.cached_tokens
                self._end(self._open.pop(event.request_id))

    def _end(self, opened: _Open) -> None:
        first_s = self.now_s if opened.first_s is None else opened.first_s
        ttft_s = first_s - opened.arrived_s + self._card.outside_s
        self.played.append(
            Played(opened.session, opened.turn, len(opened.ids), opened.cached_tokens, ttft_s, opened.cpu_s)
        )
        turns = self._sessions[opened.session].turns
        if opened.turn + 1 < len(turns):
            turn = turns[opened.turn + 1]
            said = [each + 1 for each in opened.said] if self._answers_change else opened.said
            ids = (*opened.ids, *said, *turn.new_ids)
            at_s = self.now_s + self._card.outside_s + turn.wait_s
            heapq.heappush(self._coming, (at_s, opened.session, opened.turn + 1, ids))
