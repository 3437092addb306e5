"""Who may be passed, by how many and for how long: one bound for adapters, common prefixes and cached turns."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed, Priority
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.order.bypass import MAX_BYPASS_REQUESTS, MAX_BYPASS_S, Bypass
from openinfer_engine.scheduler.order.cached_first import LEAST_GAIN_TOKENS
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_kv_cache import KvCache, KvCacheOptions

# Long prompts with checks after every verb are slow: blocks are large.
LONG = LEAST_GAIN_TOKENS + 64
WIDE = {
    "block_size_tokens": 16,
    "num_blocks": 1024,
    "max_model_tokens": 2048,
    "max_step_tokens": 512,
    "max_num_seqs": 2,
}
HISTORY = tuple(number % 50 + 1 for number in range(320))
STATES = {"prefix_cache": False, "num_snapshots": 8}
KINDS = pytest.mark.parametrize("kind", [{}, STATES], ids=["dense", "hybrid"])


def cold(number: int, length: int = LONG) -> tuple[int, ...]:
    """A prompt of which nothing is cached."""
    return (number + 2, *(each % 41 for each in range(length - 1)))


def order(driver: Any) -> list[int]:
    """Runs to the end; the requests in the order in which they first ran."""
    found: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        found += [] if plan is None else [start.request.request_id for start in plan.started]
    return list(dict.fromkeys(found))


@pytest.fixture
def make_history(make_driver: Any, make_request: Any) -> Any:
    """A driver that has answered a first turn of a conversation, and computes two long prompts in its two slots."""

    def make(**limits: Any) -> Any:
        driver = make_driver(**WIDE | limits)
        driver.submit(make_request(0, HISTORY, max_tokens=1))
        driver.run()
        for number in (1, 2):
            driver.submit(make_request(number, (300 + number, 1, 2), max_tokens=40))
        driver.step()
        return driver

    return make


@KINDS
def test_cached_turn_goes_before_a_long_prompt_of_its_tenant(make_history: Any, make_request: Any, kind: Any) -> None:
    driver = make_history(**kind)
    driver.submit(make_request(3, cold(3), max_tokens=1))
    driver.submit(make_request(4, (*HISTORY, 7, 8), max_tokens=1))
    assert order(driver) == [4, 3]


def test_next_in_order_stays_where_it_gains_little(make_history: Any, make_request: Any) -> None:
    driver = make_history()
    driver.submit(make_request(3, cold(3, 400), max_tokens=1))
    driver.submit(make_request(4, (*HISTORY, 7, 8), max_tokens=1))
    driver.submit(make_request(5, cold(5), max_tokens=1))
    driver.submit(make_request(6, cold(6, 600), max_tokens=1))  # more than a quarter of the one before it
    assert order(driver) == [3, 4, 5, 6]


def test_policy_that_does_not_let_it_keeps_its_order(make_history: Any, make_request: Any) -> None:
    driver = make_history(policy=Priority(QueuePolicyConfig()))
    driver.submit(make_request(3, cold(3), max_tokens=1))
    driver.submit(make_request(4, (*HISTORY, 7, 8), max_tokens=1))
    assert order(driver) == [3, 4]


def test_another_tenants_turn_is_not_taken(make_history: Any, make_request: Any) -> None:
    driver = make_history(policy=FairShare(QueuePolicyConfig()))
    driver.submit(make_request(3, cold(3), max_tokens=1, tenant="a"))
    driver.submit(make_request(4, (*HISTORY, 7, 8), max_tokens=1, tenant="b"))
    assert order(driver)[0] == 3


@KINDS
def test_stream_of_cached_turns_does_not_starve_a_long_prompt(make_history: Any, make_request: Any, kind: Any) -> None:
    """A turn of the conversation is there whenever a slot is free: the long one is passed as often as is allowed."""
    driver = make_history(**kind, max_num_seqs=2, max_waiting=4096)
    driver.submit(make_request(3, cold(3), max_tokens=1))
    flood = range(10, 10 + 3 * MAX_BYPASS_REQUESTS)
    for number in flood:
        driver.submit(make_request(number, (*HISTORY, number), max_tokens=1))
    began = order(driver)
    passed = began.index(3)
    assert 1 <= passed <= MAX_BYPASS_REQUESTS
    assert len(began) == len(flood) + 1


def test_bound_is_of_requests_and_of_seconds(make_request: Any) -> None:
    cache = KvCache(KvCacheOptions(num_blocks=4, block_size_tokens=4))
    requests = [make_request(number, (number, 1)) for number in range(2)]
    first, second = (
        Sequence(request, cache.sequence_of(request), seed=0, arrived_s=0.0, max_model_tokens=8) for request in requests
    )
    bypass = Bypass()
    bypass.begin(first)
    for _ in range(MAX_BYPASS_REQUESTS - 1):
        bypass.count([first, second])
    assert not bypass.is_overdue(first)
    bypass.count([first])
    assert (bypass.is_overdue(first), bypass.is_overdue(second)) == (True, False)
    bypass.now_s += MAX_BYPASS_S
    assert bypass.is_overdue(second)
    bypass.forget(first)
    bypass.forget(second)
    assert not bypass.is_overdue(second)
    assert not len(bypass)


class BypassMachine(RuleBasedStateMachine):
    """Any arrivals of conversations, long prompts and sub-agents: a request is passed by so many later ones at most.

    One that arrived later passes if it first runs before. One may be passed in the queue, and then while it follows
    another, which has the same bound.
    """

    @initialize(
        policy=st.sampled_from((FirstComeFirstServed, FairShare)),
        num_snapshots=st.sampled_from((0, 6)),
        max_num_seqs=st.integers(1, 2),
    )
    def make(self, *, policy: Any, num_snapshots: int, max_num_seqs: int) -> None:
        config = SchedulerConfig(
            num_blocks=220,
            block_size_tokens=16,
            max_num_seqs=max_num_seqs,
            max_step_tokens=256,
            max_model_tokens=2048,
            max_waiting=4096,
            prefix_cache=not num_snapshots,
            num_snapshots=num_snapshots,
        )
        self.driver = SchedulerDriver(TokenBudgetScheduler, config, policy=policy(QueuePolicyConfig()))
        self.num_requests = 0
        self.began: list[int] = []
        self.gone: set[int] = set()
        for which in range(3):
            self.turns(which, number=0, times=1)
        self.step(8)

    def submit(self, prompt: tuple[int, ...]) -> None:
        request_id = RequestId(self.num_requests)
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=2)
        self.driver.submit(GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))

    @rule(number=st.integers(0, 40))
    def long_prompt(self, number: int) -> None:
        self.submit(cold(number))

    @rule(which=st.integers(0, 2), number=st.integers(0, 30), times=st.integers(1, 100))
    def turns(self, which: int, number: int, times: int) -> None:
        for each in range(times):
            self.submit((which + 50, *HISTORY[:160], number, each))

    @rule(number=st.integers(0, 40), which=st.integers(0, 2))
    def long_prompt_and_a_flood(self, number: int, which: int) -> None:
        for each in range(3):
            self.submit(cold(number + each))
        self.turns(which, number=number, times=2 * MAX_BYPASS_REQUESTS)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.driver.step()
            self.note(plan)
        self.driver.scheduler.check_integrity()

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        if self.num_requests:
            request_id = data.draw(st.integers(0, self.num_requests - 1))
            self.gone.add(request_id)
            self.driver.abort(RequestId(request_id))

    def note(self, plan: StepPlan | None) -> None:
        self.began += [] if plan is None else [start.request.request_id for start in plan.started]

    @invariant()
    def none_is_passed_beyond_the_bound(self) -> None:
        if not hasattr(self, "began"):
            return
        first_runs = list(dict.fromkeys(self.began))
        waiting = set(range(self.num_requests)) - set(first_runs) - self.gone
        for request_id in sorted(waiting)[:3]:
            num_passed = sum(each > request_id for each in first_runs)
            assert num_passed <= 2 * MAX_BYPASS_REQUESTS, (request_id, num_passed)

    def teardown(self) -> None:
        while self.driver.scheduler.unfinished_ids:
            self.note(self.driver.step())
            self.none_is_passed_beyond_the_bound()
        self.driver.run()


def test_any_arrivals_pass_none_beyond_the_bound() -> None:
    run_state_machine_as_test(
        BypassMachine,
        settings=settings(
            max_examples=8,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            phases=(Phase.generate,),  # an example is seconds long: none is shrunk
            suppress_health_check=list(HealthCheck),
        ),
    )
