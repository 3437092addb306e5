"""A GPU that takes the fitted time for each step and says any token: the real one's were of random weights, too."""

from collections.abc import Callable, Sequence

import numpy as np

from openinfer_bench.simulate.latency import StepLatency
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_core.testing.simulation.world import World


class TimedRunner:
    """Implements `openinfer_engine.worker.runner.Runner`: steps run one after the other, in virtual time.

    Args:
        world: whose time passes.
        latency: of steps.
        token_ids: what rows say in turn.
        charge: called with a plan before it is launched: what the host does for it.
    """

    failure: BaseException | None = None

    def __init__(
        self, world: World, latency: StepLatency, token_ids: Sequence[int], *, charge: Callable[[StepPlan], None]
    ) -> None:
        self._world = world
        self._latency = latency
        self._token_ids = np.array(token_ids, np.int32)
        self._charge = charge
        self._free_s = 0.0
        self.busy_s = 0.0
        """Of all steps."""

    def launch(self, plan: StepPlan) -> "_Pending":
        self._charge(plan)
        step_s = self._latency.of(plan)
        self.busy_s += step_s
        self._free_s = max(self._free_s, self._world.now_s) + step_s
        return _Pending(self, plan, self._free_s)

    def finish(self, plan: StepPlan, end_s: float) -> StepResult:
        if end_s > self._world.now_s:
            self._world.sleep(end_s - self._world.now_s)
        places = (plan.slots + plan.step) % len(self._token_ids)
        return StepResult.of_single_tokens(np.where(plan.max_new > 0, self._token_ids[places], np.int32(-1)))

    def close(self) -> None:
        pass


class _Pending:
    def __init__(self, runner: TimedRunner, plan: StepPlan, end_s: float) -> None:
        self._finish: Callable[[], StepResult] = lambda: runner.finish(plan, end_s)

    def result(self) -> StepResult:
        return self._finish()
