"""What steps with and without drafts take, measured at the start of an engine, so that the first request has drafts.

    probe (one token) ─► for 1, 2, 4 .. rows: begin (one token each) ─► plain x 4 ─► 1 draft x 2 ─► 3 x 2 .. all x 2

They are steps like others: plans for the runner, which hands them to every rank, so that all take part in the same
collectives, and rank 0's results are what is timed; one is launched before the one before it has ended. The scheduler
has not planned any by then and knows nothing of them: its blocks are free, and its sequence slots begin anew, as after
any sequence. So nothing is left but what a drafter or worker keeps of a sequence until its slot begins anew; a last
step, which samples nothing like the first, settles what was put off until the next one.

What a start may take longer is bounded (`MOST_S`). Few rows come first; what there is no time for is learned from steps
as they come, and so is what longer contexts cost.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.scheduling import (
    DecodeStepTime,
    Int32Column,
    SchedulerConfig,
    SlotStart,
    StepPlan,
    StepResult,
)
from openinfer_engine.worker.runner import PendingStep, Runner

MOST_S = 0.4
"""A start takes at most so much longer: a step is begun only if there is time for three of the longest of late, itself,
the one in flight and the last one. The very first has one token and is awaited; where it takes longer, no other is."""
_LATE_STEPS = 4  # the first one of all is slower than any after it, and need not be remembered for long
_PLAIN_STEPS, _DRAFTED_STEPS = 4, 2  # the first after others may bring with it what these had put off
_LARGEST_ID = 2**63 - 1  # of a request
_STRIDE = 7919  # between the tokens of rows: experts should differ as those of sequences do


def measure_step_times(
    runner: Runner,
    config: SchedulerConfig,
    *,
    num_token_ids: int,
    clock: Callable[[], float] = time.monotonic,
    most_s: float = MOST_S,
) -> list[DecodeStepTime]:
    """Runs steps on an engine that has run none, and says what each took, in the order in which they ran.

    Raises:
        GroupBroken: a rank is gone; or what a step raises.
    """
    measurement = _Measurement(runner, clock=clock, most_s=most_s)
    one = _Rows.fitting(1, config, num_token_ids=num_token_ids)
    if one is None:
        return []
    measurement.run_unsampled(one)
    size = 1
    while size < 2 * config.max_num_seqs and not measurement.is_over:
        rows = _Rows.fitting(min(size, config.max_num_seqs), config, num_token_ids=num_token_ids)
        if rows is None:
            break
        measurement.measure(rows)
        size *= 2
    if size > 1:
        measurement.run_unsampled(one)
    return measurement.times


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of sequences that begin, and the drafts of the steps that they take."""

    num_rows: int
    steps: tuple[int, ...]
    """Drafts of each step."""
    num_tokens: int
    """Of each row once all steps have run, if all drafts are accepted."""
    num_blocks: int
    """Of each of a row's tables."""
    num_tables: int
    num_token_ids: int

    @classmethod
    def fitting(cls, num_rows: int, config: SchedulerConfig, *, num_token_ids: int) -> "_Rows | None":
        """As many steps as context and pool have room for; None where these have none."""
        num_tables = len(config.table_windows)
        room = config.num_blocks // (num_rows * num_tables) * config.block_size_tokens
        most_tokens = min(room, config.max_model_tokens)
        steps, num_tokens = [0] * _PLAIN_STEPS, 1 + _PLAIN_STEPS
        if num_tokens > most_tokens:
            return None
        for num_drafts in _draft_sizes(num_rows, config.max_drafts):
            more_tokens = _DRAFTED_STEPS * (1 + -(-num_drafts // num_rows))
            if num_tokens + more_tokens > most_tokens or num_rows + num_drafts > config.max_step_tokens:
                break
            steps += [num_drafts] * _DRAFTED_STEPS
            num_tokens += more_tokens
        num_blocks = -(-num_tokens // config.block_size_tokens)
        return cls(num_rows, tuple(steps), num_tokens, num_blocks, num_tables, num_token_ids)

    def begin(self, number: int, *, released: int, samples: bool = True) -> StepPlan:
        """The step in which all sequences start, with one token each, after those in the first slots have left."""
        return StepPlan(
            step=number,
            slots=np.arange(self.num_rows, dtype=np.int32),
            starts=np.zeros(self.num_rows, np.int32),
            counts=np.ones(self.num_rows, np.int32),
            num_host_tokens=np.ones(self.num_rows, np.int32),
            max_new=np.full(self.num_rows, samples, np.int32),
            token_ids=np.asarray([self._token(row) for row in range(self.num_rows)], np.int32),
            new_block_counts=np.full((self.num_tables, self.num_rows), self.num_blocks, np.int32),
            new_blocks=np.arange(self.num_tables * self.num_rows * self.num_blocks, dtype=np.int32),
            started=tuple(self._start(row) for row in range(self.num_rows)),
            released=tuple(range(released)),
        )

    def draft_counts(self, num_drafts: int) -> Int32Column:
        """`[rows]`: as many for each row, and one more for the first ones."""
        share, rest = divmod(num_drafts, self.num_rows)
        return share + (np.arange(self.num_rows) < rest).astype(np.int32)

    def _token(self, row: int) -> int:
        return row * _STRIDE % self.num_token_ids

    def _start(self, row: int) -> SlotStart:
        sampling = SamplingParams(max_tokens=self.num_tokens, seed=row)
        name = RequestId(_LARGEST_ID - row)  # a drafter may keep something by it
        request = GenerateRequest(request_id=name, prompt_token_ids=(self._token(row),), sampling=sampling)
        return SlotStart(slot=row, request=request, seed=row)

    def decode(self, number: int, starts: Int32Column, draft_counts: Int32Column) -> StepPlan:
        """A step of the last sampled token of each row, and of so many drafts of the device."""
        none = np.zeros(0, np.int32)
        return StepPlan(
            step=number,
            slots=np.arange(self.num_rows, dtype=np.int32),
            starts=starts,
            counts=1 + draft_counts,
            num_host_tokens=np.zeros(self.num_rows, np.int32),
            max_new=1 + draft_counts,
            token_ids=none,
            new_block_counts=np.zeros((self.num_tables, self.num_rows), np.int32),
            new_blocks=none,
            draft_counts=draft_counts,
        )


def _draft_sizes(num_rows: int, max_drafts: int) -> list[int]:
    """Those that a pace weighs: 1, 3, 7, and so on, and as many as there can be."""
    most = num_rows * max_drafts
    return [*((1 << bits) - 1 for bits in range(1, most.bit_length()) if (1 << bits) - 1 < most), most]


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    at_s: float
    pending: PendingStep


class _Measurement:
    """Steps one after the other, within a time."""

    def __init__(self, runner: Runner, *, clock: Callable[[], float], most_s: float) -> None:
        self._runner, self._clock, self._most_s = runner, clock, most_s
        self._begin_s = self._done_s = clock()
        self._late_s = deque[float](maxlen=_LATE_STEPS)
        self._number = self._num_begun = 0
        self._has_failed = False
        self.times: list[DecodeStepTime] = []

    @property
    def is_over(self) -> bool:
        """Whether there is no time for a further step, or a row has failed."""
        spent_s = self._clock() - self._begin_s
        return self._has_failed or spent_s + 3 * max(self._late_s, default=0.0) > self._most_s

    def measure(self, rows: _Rows) -> None:
        """Begins the rows and runs their steps."""
        self._begin(rows)
        starts, before = np.ones(rows.num_rows, np.int32), None
        for num_drafts in rows.steps:
            if self.is_over:
                break
            launched = self._launch(rows.decode(self._next_number(), starts, rows.draft_counts(num_drafts)))
            starts = starts + launched.plan.counts
            if before is not None:  # what it refused, bounds of later rows need not have
                starts -= before.plan.max_new - self._note(before).new_counts
            before = launched
        if before is not None:
            self._note(before)

    def run_unsampled(self, row: _Rows) -> None:
        """A step that samples nothing, and after which nothing is put off until the next one."""
        self._begin(row, samples=False)

    def _begin(self, rows: _Rows, *, samples: bool = True) -> None:
        plan = rows.begin(self._next_number(), released=self._num_begun, samples=samples)
        self._num_begun = rows.num_rows
        self._wait(self._launch(plan))

    def _next_number(self) -> int:
        self._number -= 1  # steps of schedulers begin with 0
        return self._number

    def _launch(self, plan: StepPlan) -> _Launched:
        return _Launched(plan, self._clock(), self._runner.launch(plan))

    def _note(self, launched: _Launched) -> StepResult:
        result, took_s = self._wait(launched)
        if not self._has_failed and took_s > 0:
            plan = launched.plan
            self.times.append(DecodeStepTime(plan.num_rows, int(plan.draft_counts.sum()), took_s * 1e3))
        return result

    def _wait(self, launched: _Launched) -> tuple[StepResult, float]:
        """The result, and what the step took, in seconds."""
        result = launched.pending.result()
        self._has_failed = self._has_failed or bool(result.failed_rows)
        now_s = self._clock()
        took_s, self._done_s = now_s - max(self._done_s, launched.at_s), now_s
        self._late_s.append(took_s)
        return result, took_s
