"""The step loop: plan, run, apply, with one step of overlap.

    step():  plan N+1 ─► launch N+1 ─► wait for N ─► apply N ─► events of N

While the device runs step N, the host plans N + 1 and queues it behind N, so the device never waits for Python.
A stop that step N brings to light leaves one row of N + 1 wasted, never a wrong token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from openinfer_core import EngineInfo, EngineStats, Failed, FailureKind, GenerateRequest, RequestId, TokenEvent
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import Scheduler, StepPlan
from openinfer_engine.runner import PendingStep, Runner


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    pending: PendingStep


class StepLoop:
    """Implements `openinfer_core.host.EngineLoop` with a scheduler and a runner."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._in_flight: _InFlight | None = None

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        return self._info

    @property
    def scheduler(self) -> Scheduler:
        """What plans; for those who look at its books."""
        return self._scheduler

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished or a step is in flight."""
        return self._scheduler.unfinished > 0 or self._in_flight is not None

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        """Queues a request, or fails it at once if this engine cannot serve it."""
        refusal = self._refusal(request)
        if refusal is not None:
            return [Failed(request.request_id, FailureKind.INVALID, refusal)]
        return self._scheduler.add(request, now_s=self._clock())

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        """Ends a request."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Plans and launches a step, then waits for the one before it.

        Raises:
            ContractViolation: the scheduler has unfinished requests and nothing to run: it is wedged.
        """
        plan = self._scheduler.plan(now_s=self._clock())
        before, self._in_flight = self._in_flight, None
        if plan is not None:
            self._in_flight = _InFlight(plan, self._runner.launch(plan))
        elif before is None and self._scheduler.unfinished > 0:
            raise ContractViolation(f"the scheduler is wedged: {self._scheduler.unfinished} requests and no plan")
        if before is None:
            return []
        return self._scheduler.apply(before.plan, before.pending.result(), now_s=self._clock())

    def stats(self) -> EngineStats:
        """The scheduler's snapshot."""
        return self._scheduler.stats()

    def close(self) -> None:
        """Waits for the step in flight and frees the runner."""
        self._in_flight = None
        self._runner.close()

    def _refusal(self, request: GenerateRequest) -> str | None:
        """Why this engine cannot serve a request; None if it can."""
        limit = self._info.num_token_ids
        if max(request.prompt_token_ids) >= limit:
            return f"the prompt has a token id beyond the model's {limit} tokens"
        if any(token_id >= limit for token_id in request.sampling.logit_bias):
            return f"logit_bias names a token id beyond the model's {limit} tokens"
        if request.sampling.grammar is not None:
            return "no grammar compiler is installed; send the request without a grammar"
        if request.lora is not None:
            return f"no LoRA adapter is loaded under the name {request.lora[:64]!r}"
        return None
