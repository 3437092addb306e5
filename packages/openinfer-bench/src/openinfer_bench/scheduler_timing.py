"""`measure_scheduler`: what a step costs on the host, without a device."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import (
    QueuePolicy,
    QueuePolicyConfig,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from openinfer_engine.scheduler import TokenBudgetScheduler

BLOCK_SIZE_TOKENS = 16
WARM_UP_STEPS = 32
_PROMPT_TOKENS = range(96, 160)
_STOP_TOKEN_IDS = (151643, 151645)
_NUM_TOKEN_IDS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTiming:
    """Host time of steps of `rows` decode rows each; growth and sealing of blocks included."""

    rows: int
    steps: int
    plan_s: float
    """Seconds of one `plan`, mean."""
    apply_s: float
    """Seconds of one `apply`, mean."""
    median_step_s: float
    """Seconds of `plan` and `apply` together, median."""
    worst_step_s: float
    """The same, of the slowest step."""

    @property
    def row_s(self) -> float:
        """Seconds of `plan` and `apply` together per row, mean."""
        return (self.plan_s + self.apply_s) / self.rows


def measure_scheduler(
    *,
    rows: int = 256,
    steps: int = 400,
    windows: Sequence[int] = (),
    factory: Callable[[SchedulerConfig, QueuePolicy], Scheduler] = TokenBudgetScheduler,
) -> ScheduleTiming:
    """Times a scheduler in steady decoding, with one step of overlap.

    Args:
        rows: sequences that decode at once; their prompts have 96 to 159 tokens.
        steps: steps to time, after the prompts and a warm-up.
        windows: of further block tables, in tokens, beside one that has none.
        factory: makes the scheduler.
    """
    loop = _TimedLoop(factory(_config(rows, steps, windows), FirstComeFirstServed(QueuePolicyConfig())))
    loop.add_requests(rows, max_tokens=_sampled_tokens(steps))
    while loop.step() < rows:
        pass
    for _ in range(WARM_UP_STEPS):
        loop.step()
    loop.forget()
    for _ in range(steps):
        loop.step()
    totals_s = [plan_s + apply_s for plan_s, apply_s in zip(loop.plan_s, loop.apply_s, strict=True)]
    return ScheduleTiming(
        rows=rows,
        steps=steps,
        plan_s=float(np.mean(loop.plan_s)),
        apply_s=float(np.mean(loop.apply_s)),
        median_step_s=float(np.median(totals_s)),
        worst_step_s=max(totals_s),
    )


def record_plans(*, rows: int, steps: int, windows: Sequence[int] = ()) -> tuple[SchedulerConfig, list[StepPlan]]:
    """All plans of our scheduler from the first prompt on, at the end `steps` of `rows` decode rows each."""
    config = _config(rows, steps, windows)
    loop = _TimedLoop(TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig())))
    loop.add_requests(rows, max_tokens=_sampled_tokens(steps))
    while loop.step() < rows:
        pass
    for _ in range(steps):
        loop.step()
    return config, loop.plans


class _TimedLoop:
    """Plans each step before the last one's result is applied; the results are random ids."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.plan_s: list[float] = []
        self.apply_s: list[float] = []
        self.plans: list[StepPlan] = []
        self._scheduler = scheduler
        self._in_flight: deque[StepPlan] = deque()
        self._rng = np.random.default_rng(0)

    def add_requests(self, count: int, *, max_tokens: int) -> None:
        """Queues requests with prompts that share nothing."""
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=_STOP_TOKEN_IDS)
        for index in range(count):
            num_tokens = _PROMPT_TOKENS[index % len(_PROMPT_TOKENS)]
            prompt = tuple(self._rng.integers(0, _NUM_TOKEN_IDS, num_tokens).tolist())
            request = GenerateRequest(request_id=RequestId(index), prompt_token_ids=prompt, sampling=sampling)
            self._scheduler.add(request, now_s=0.0)

    def step(self) -> int:
        """Runs and times one step; returns the rows that it decodes."""
        begin_s = time.perf_counter()
        plan = self._scheduler.plan(now_s=0.0)
        self.plan_s.append(time.perf_counter() - begin_s)
        if plan is None:
            raise RuntimeError("the scheduler has nothing to run: it is not in steady decoding")
        self.plans.append(plan)
        self._in_flight.append(plan)
        self.apply_s.append(self._apply() if len(self._in_flight) > 1 else 0.0)
        return int((plan.num_host_tokens == 0).sum())

    def forget(self) -> None:
        """Drops the times so far."""
        self.plan_s.clear()
        self.apply_s.clear()

    def _apply(self) -> float:
        plan = self._in_flight.popleft()
        token_ids = self._rng.integers(0, _NUM_TOKEN_IDS, plan.num_rows, dtype=np.int32)
        result = StepResult.of_single_tokens(np.where(plan.max_new > 0, token_ids, np.int32(-1)))
        begin_s = time.perf_counter()
        self._scheduler.apply(plan, result, now_s=0.0)
        return time.perf_counter() - begin_s


def _sampled_tokens(steps: int) -> int:
    """More than any sequence samples: in the timed steps, the warm-up, and those that others' prompts take."""
    return steps + WARM_UP_STEPS + 256


def _config(rows: int, steps: int, windows: Sequence[int]) -> SchedulerConfig:
    max_model_tokens = max(_PROMPT_TOKENS) + _sampled_tokens(steps)
    return SchedulerConfig(
        num_blocks=rows * (max_model_tokens // BLOCK_SIZE_TOKENS + 2) * (1 + len(windows)),
        block_size_tokens=BLOCK_SIZE_TOKENS,
        table_windows=(None, *windows),
        max_num_seqs=rows,
        max_step_tokens=max(8192, rows),
        max_model_tokens=max_model_tokens,
        max_waiting=rows,
    )
