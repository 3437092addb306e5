"""`measure_guard`: what the guard around a scheduler costs in each step, without the scheduler."""

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from openinfer_bench.scheduler_timing import record_plans
from openinfer_core.engine import EngineStats
from openinfer_core.events import TokenEvent
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import SchedulerCapabilities, StepPlan, StepResult
from openinfer_engine.guard import GuardOptions, PlanCheck, SchedulerGuard

_NUM_TOKEN_IDS = 200_000
_WARM_UP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardTiming:
    """Medians, in seconds, of steps of `rows` decode rows each."""

    rows: int
    calls_s: float
    """Of one step, for any scheduler: what the guard adds to `plan` and `apply`."""
    plan_check_s: float
    """Of one step, for schedulers of other packages besides: the check of its plan and of its events."""
    reconcile_s: float
    """Of one comparison with the ledger; there are four in a second."""


def measure_guard(*, rows: int = 256, steps: int = 400, windows: Sequence[int] = ()) -> GuardTiming:
    """`windows` are those of further block tables, in tokens, beside one that has none."""
    config, plans = record_plans(rows=rows, steps=steps, windows=windows)
    recorded = _Recorded(plans, rows)
    bare_s = _time_steps(plans, lambda: recorded.plan(now_s=0.0), lambda plan: recorded.apply(plan, _RESULT, now_s=0.0))
    seconds = {False: 0.0, True: 0.0}
    reconcile_s = 0.0
    for checks_plans in seconds:
        recorded = _Recorded(plans, rows)
        check = PlanCheck(config, num_token_ids=_NUM_TOKEN_IDS) if checks_plans else None
        guard = SchedulerGuard(
            recorded, GuardOptions(plugin="recorded", rows=config, starvation_timeout_s=300, plan_check=check)
        )
        for request in recorded.requests:
            guard.add(request, now_s=0.0)
        apply = guard.apply
        seconds[checks_plans] = _time_steps(plans, guard.plan, lambda plan, apply=apply: apply(plan, _RESULT))
        reconcile_s = _median(lambda guard=guard, ids=recorded.unfinished_ids: guard.reconcile(ids), 64)
    calls_s = seconds[False] - bare_s
    return GuardTiming(rows=rows, calls_s=calls_s, plan_check_s=seconds[True] - seconds[False], reconcile_s=reconcile_s)


_RESULT = StepResult(new_counts=np.zeros(0, np.int32), token_ids=np.zeros(0, np.int32))


class _Recorded:
    """A scheduler that costs nothing: it plays plans that were made before."""

    capabilities = SchedulerCapabilities()

    def __init__(self, plans: list[StepPlan], rows: int) -> None:
        self.requests = [start.request for plan in plans for start in plan.started]
        self.unfinished_ids: AbstractSet[RequestId] = {request.request_id for request in self.requests}
        self._plans = iter(plans)
        self._events: list[TokenEvent] = []
        self._stats = EngineStats(running=rows, blocks_total=1)

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        return self._events

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        return self._events

    def plan(self, *, now_s: float) -> StepPlan | None:
        return next(self._plans, None)

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        return self._events

    def stats(self) -> EngineStats:
        return self._stats


def _time_steps(
    plans: list[StepPlan], plan: Callable[[], StepPlan | None], apply: Callable[[StepPlan], list[TokenEvent]]
) -> float:
    times_s: list[float] = []
    for _ in plans:
        begin_s = time.perf_counter()
        made = plan()
        if made is None:
            raise RuntimeError("fewer plans were recorded than are played")
        apply(made)
        times_s.append(time.perf_counter() - begin_s)
    return float(np.median(times_s[min(_WARM_UP, len(times_s) // 2) :]))


def _median(call: Callable[[], object], repeats: int) -> float:
    times_s: list[float] = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin_s)
    return float(np.median(times_s))
