"""The measurement measures what it says; how fast it is decides nothing here."""

from typing import Any

import pytest

from openinfer_bench.guard_timing import measure_guard
from openinfer_bench.scheduler_timing import WARM_UP_STEPS, measure_scheduler
from openinfer_core.scheduling import StepPlan
from openinfer_engine.scheduler import TokenBudgetScheduler


def test_measure_scheduler_times_decode_steps_of_all_rows() -> None:
    plans: list[StepPlan] = []

    class Recorded(TokenBudgetScheduler):
        def plan(self, **arguments: Any) -> StepPlan | None:
            plan = super().plan(**arguments)
            assert plan is not None
            plans.append(plan)
            return plan

    timing = measure_scheduler(rows=80, steps=50, factory=Recorded)
    assert (timing.rows, timing.steps) == (80, 50)
    assert len(plans) > 50 + WARM_UP_STEPS
    assert all(plan.num_rows == 80 and plan.num_host_tokens.sum() == 0 for plan in plans[-50:])
    assert sum(plan.new_block_counts.sum() for plan in plans[-48:]) == 80 * 3  # a block each 16 steps
    assert timing.row_s == pytest.approx((timing.plan_s + timing.apply_s) / 80)
    assert 0 < timing.median_step_s <= timing.worst_step_s


@pytest.mark.parametrize("windows", [(), (64, 32)])
def test_measure_guard_plays_plans_that_pass_its_check(windows: tuple[int, ...]) -> None:
    timing = measure_guard(rows=40, steps=80, windows=windows)
    assert timing.rows == 40
    assert timing.plan_check_s > 0
    assert timing.reconcile_s > 0
    # A guard without the check has less to do than one with it.
    assert timing.calls_s < timing.plan_check_s + timing.reconcile_s
