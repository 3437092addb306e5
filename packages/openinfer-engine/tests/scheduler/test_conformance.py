"""The default scheduler passes the kit, and the kit catches it when a part of it is broken."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import EngineStats, GenerateRequest, TokenEvent
from openinfer_core.plugins import SCHEDULERS, find_plugin
from openinfer_core.scheduling import QueuePolicy, SchedulerConfig, SlotStart, StepPlan, StepResult
from openinfer_core.scheduling.draft_counter import DraftCounter
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.scheduler import SCHEDULER_CHECKS, SchedulerCheck, check_pressure, check_scheduler
from openinfer_engine.scheduler import TokenBudgetScheduler


@pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
def test_scheduler_conforms(check: SchedulerCheck, checked_scheduler: type[TokenBudgetScheduler]) -> None:
    check(checked_scheduler)


class CountsDrafts(TokenBudgetScheduler):
    """As an engine's loop does."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.drafts = DraftCounter(config.max_drafts)

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        self.drafts.count(result)
        return super().apply(plan, result, now_s=now_s)

    def stats(self) -> EngineStats:
        return self.drafts.told_in(super().stats())


def test_kit_makes_the_scheduler_preempt_match_and_waste() -> None:
    made: list[CountsDrafts] = []

    def make(config: SchedulerConfig, policy: QueuePolicy) -> CountsDrafts:
        made.append(CountsDrafts(config, policy))
        return made[-1]

    check_scheduler(make)
    stats = [scheduler.stats() for scheduler in made]
    assert sum(s.preemptions for s in stats) > 20
    assert sum(s.cached_tokens for s in stats) > 200
    assert sum(s.wasted_rows for s in stats) > 20
    assert sum(s.policy_faults for s in stats) > 8 + 50  # of keys and hooks, and of victims
    assert sum(s.spec_decode_num_drafts for s in stats) > 2000
    assert sum(s.spec_decode_num_accepted_tokens for s in stats) > 2000
    made.clear()
    check_pressure(make)
    assert all(scheduler.stats().preemptions > 0 for scheduler in made)


def test_scheduler_is_found_by_name() -> None:
    assert find_plugin(SCHEDULERS, "token-budget").load() is TokenBudgetScheduler


class IgnoresNames(TokenBudgetScheduler):
    """Knows requests without what separates their prefixes; the runner sees them as they are."""

    hidden = ("cache_salt", "lora")

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.real: dict[int, GenerateRequest] = {}

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        self.real[request.request_id] = request
        return super().add(msgspec.structs.replace(request, **dict.fromkeys(self.hidden)), now_s=now_s)

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is None:
            return None
        started = [
            SlotStart(
                slot=start.slot,
                request=self.real[start.request.request_id],
                seed=start.seed,
                output_token_ids=start.output_token_ids,
            )
            for start in plan.started
        ]
        return changed(plan, started=tuple(started))


class IgnoresSalts(IgnoresNames):
    hidden = ("cache_salt",)


class IgnoresAdapters(IgnoresNames):
    hidden = ("lora", "adapter")


class KnowsAdaptersByNameAlone(IgnoresNames):
    hidden = ("adapter",)


class ForgetsOutputsAtResumption(TokenBudgetScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is None:
            return None
        started = [SlotStart(slot=s.slot, request=s.request, seed=s.seed) for s in plan.started]
        return changed(plan, started=tuple(started))


class DrawsASeedAtResumption(TokenBudgetScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is None:
            return None
        started = [
            SlotStart(
                slot=s.slot,
                request=s.request,
                seed=s.seed ^ len(s.output_token_ids),
                output_token_ids=s.output_token_ids,
            )
            for s in plan.started
        ]
        return changed(plan, started=tuple(started))


class MisplacesANewBlock(TokenBudgetScheduler):
    """Sends the blocks of two rows the wrong way round."""

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is None or plan.step < 2:
            return plan
        return changed(plan, new_blocks=plan.new_blocks[::-1].copy())


class SealsWhatIsNotComputed(TokenBudgetScheduler):
    """Computes one position less than it says, so that a block is found that is not full."""

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is None or not (plan.counts > 1).any() or not (plan.max_new > 0).all():
            return plan
        row = int(np.argmax(plan.counts))
        last = int(plan.num_host_tokens[: row + 1].sum()) - 1
        one = np.arange(plan.num_rows) == row
        return changed(
            plan,
            counts=(plan.counts - one).astype(np.int32),
            num_host_tokens=(plan.num_host_tokens - one).astype(np.int32),
            max_new=np.where(one, 0, plan.max_new).astype(np.int32),
            token_ids=np.delete(plan.token_ids, last),
        )

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        ids = np.array([(row or [0])[0] for row in result.tokens_of_rows], np.int32)
        return super().apply(plan, StepResult.of_single_tokens(ids), now_s=now_s)


class SharesPrefixesAllTheSame(TokenBudgetScheduler):
    """Heeds neither that `prefix_cache` is off, nor the states of a model that has some."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(msgspec.structs.replace(config, prefix_cache=True, num_snapshots=0), policy)


class SharesPrefixesWithoutTheirStates(SharesPrefixesAllTheSame):
    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        if config.num_snapshots:
            super().__init__(config, policy)
        else:
            TokenBudgetScheduler.__init__(self, config, policy)


def changed(plan: StepPlan, **changes: Any) -> StepPlan:
    return StepPlan(**{**{name: getattr(plan, name) for name in StepPlan.__slots__}, **changes})


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (IgnoresSalts, "holds the KV of another prefix"),
        (IgnoresAdapters, "holds the KV of another prefix"),
        (KnowsAdaptersByNameAlone, "holds the KV of another prefix"),
        (ForgetsOutputsAtResumption, "only . ids are there"),
        (DrawsASeedAtResumption, "starts with seed"),
        (MisplacesANewBlock, "write to the same block|holds nothing|another prefix|have room"),
        (SharesPrefixesAllTheSame, "cached tokens; prefix_cache is off"),
        (SharesPrefixesWithoutTheirStates, "its slot holds the states of another prefix"),
        (SealsWhatIsNotComputed, "its last row ended|the model gives"),
    ],
)
def test_kit_refuses_a_broken_default_scheduler(
    mutant: Callable[[SchedulerConfig, QueuePolicy], TokenBudgetScheduler], message: str
) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_scheduler(mutant)
