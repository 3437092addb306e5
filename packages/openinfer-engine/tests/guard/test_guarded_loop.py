"""The step loop with its guard: whose requests are whose, and what the host does with what is lost or late."""

from concurrent.futures import Future

import pytest

from openinfer_core import (
    EngineInfo,
    Failed,
    FailureKind,
    GenerateRequest,
    InvalidRequest,
    PluginFault,
    RequestId,
    SamplingParams,
)
from openinfer_core.events import TokenEvent
from openinfer_core.grammars import TokenMatcher
from openinfer_core.process.host import LoopRunner
from openinfer_core.process.wire import Close, Submit
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_engine.guard import GuardOptions
from openinfer_engine.loop import StepLoop
from openinfer_engine.options import EngineOptions
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.worker.runner import PendingStep

CONFIG = SchedulerConfig(num_blocks=16, block_size_tokens=4, max_num_seqs=2, max_step_tokens=8, max_model_tokens=32)
INFO = EngineInfo(
    model="none",
    family="none",
    max_model_tokens=32,
    num_token_ids=100,
    eos_token_ids=(),
    block_size_tokens=4,
    num_blocks=16,
    max_num_seqs=2,
    max_waiting=8,
)


class NoRunner:
    """Nothing is ever launched."""

    failure = None

    def launch(self, plan: StepPlan) -> PendingStep:
        raise AssertionError(f"step {plan.step} was launched")

    def close(self) -> None: ...


class Pending:
    """A grammar compiler that does not come to an end."""

    def compile(self, request: GenerateRequest) -> "Future[TokenMatcher]":
        del request
        return Future()

    def close(self) -> None: ...


class Losing(TokenBudgetScheduler):
    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        del request, now_s
        return []


class Wedged(TokenBudgetScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        del now_s
        return None


def make_loop(kind: type[TokenBudgetScheduler]) -> StepLoop:
    return StepLoop(
        info=INFO,
        scheduler=kind(CONFIG, FirstComeFirstServed(QueuePolicyConfig())),
        runner=NoRunner(),
        guard=GuardOptions(plugin="mine (my-package 1.0)"),
        grammar_compiler=Pending(),
    )


def request(index: int, *, is_masked: bool = False, deadline_s: float | None = None) -> GenerateRequest:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a") if is_masked else None
    return GenerateRequest(
        request_id=RequestId(index),
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=4, grammar=grammar),
        deadline_s=deadline_s,
    )


def test_request_that_waits_for_its_grammar_is_not_lost() -> None:
    loop = make_loop(Losing)
    assert loop.submit(request(0, is_masked=True)) == []
    assert loop.submit(request(1)) == []
    (lost,) = loop.reconcile({RequestId(0), RequestId(1)})
    assert lost.request_id == 1
    assert loop.busy  # for the grammar


def test_request_that_waits_for_its_grammar_ends_at_its_deadline() -> None:
    loop = make_loop(Losing)
    host = LoopRunner(loop)
    delivered: list[TokenEvent] = []

    def deliver(events: list[TokenEvent]) -> None:
        delivered.extend(events)
        host.post(Close())

    host.post(Submit(request(0, is_masked=True, deadline_s=0.05)))
    host.run(deliver)
    assert delivered == [
        Failed(RequestId(0), FailureKind.DEADLINE, "the request was not done within its deadline_s of 0.05")
    ]
    assert not loop.busy


def test_wedged_scheduler_is_named() -> None:
    loop = make_loop(Wedged)
    loop.submit(request(0))
    with pytest.raises(PluginFault, match=r"the scheduler mine \(my-package 1.0\) is wedged: it has 1 requests"):
        loop.step()


@pytest.mark.parametrize("seconds", [0, -1, 86_401])
def test_starvation_timeout_out_of_range_is_refused(seconds: int) -> None:
    assert EngineOptions(starvation_timeout_s=86_400).starvation_timeout_s == 86_400
    with pytest.raises(InvalidRequest, match="must be between 1 and 86400") as caught:
        EngineOptions(starvation_timeout_s=seconds)
    assert caught.value.field == "starvation_timeout_s"
