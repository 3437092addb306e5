"""How many replicas there are follows the tokens that wait, within bounds, and does not swing."""

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openinfer_core import InvalidRequest
from openinfer_ray.cluster import number_of_replicas
from openinfer_ray.options import RayOptions
from openinfer_ray.scaling import ScaleLimits, ScaleLoad, ScaleState, decide
from openinfer_ray.scaling_policy import WaitingTokensPolicy

LIMITS = ScaleLimits(min_replicas=1, max_replicas=4, waiting_tokens=1000, up_after_s=5.0, down_after_s=60.0)


class Scaled:
    """Decides every second; replicas follow when a test says so."""

    def __init__(self, target: int = 1, limits: ScaleLimits = LIMITS) -> None:
        self.target = self.running_replicas = target
        self.now_s = 0.0
        self._limits = limits
        self._state = ScaleState()

    def after(self, seconds: int, *, waiting_tokens: float = 0, running: float = 0.0, follow: bool = True) -> int:
        for _ in range(seconds):
            self.now_s += 1.0
            load = ScaleLoad(waiting_tokens=waiting_tokens, busy=running / 10, replicas=self.running_replicas)
            self.target, self._state = decide(
                self._state, load, target=self.target, now_s=self.now_s, limits=self._limits
            )
            if follow:
                self.running_replicas = self.target
        return self.target


def test_tokens_that_wait_for_long_enough_bring_as_many_replicas_as_they_need() -> None:
    scaled = Scaled()
    assert scaled.after(5, waiting_tokens=2500) == 1
    assert scaled.after(1, waiting_tokens=2500) == 3
    assert Scaled().after(60, waiting_tokens=1_000_000) == 4


def test_a_burst_that_is_over_before_that_brings_none() -> None:
    scaled = Scaled()
    for _ in range(10):
        scaled.after(4, waiting_tokens=9000)
        assert scaled.after(1, waiting_tokens=1000) == 1


def test_no_more_are_asked_for_while_those_that_were_load() -> None:
    scaled = Scaled()
    assert scaled.after(6, waiting_tokens=1500, follow=False) == 2
    assert scaled.after(600, waiting_tokens=9000, follow=False) == 2
    scaled.running_replicas = 2
    assert scaled.after(7, waiting_tokens=9000) == 4


def test_a_replica_that_never_loads_does_not_keep_others_from_being_asked_for() -> None:
    scaled = Scaled()
    scaled.after(6, waiting_tokens=1500, follow=False)
    assert scaled.after(1000, waiting_tokens=9000, follow=False) == 4


def test_replicas_go_one_by_one_when_nothing_has_waited_for_long() -> None:
    scaled = Scaled(target=3)
    assert scaled.after(60, running=2) == 3
    assert scaled.after(1, running=2) == 2
    assert scaled.after(60, running=2) == 2
    assert scaled.after(2, running=2) == 1
    assert scaled.after(1000) == 1


def test_a_replica_stays_while_the_others_would_be_full_without_it_or_anything_waits() -> None:
    assert Scaled(target=2).after(1000, running=9) == 2
    assert Scaled(target=2).after(1000, running=8) == 1
    assert Scaled(target=2).after(1000, waiting_tokens=1) == 2


def test_a_number_out_of_bounds_is_brought_within() -> None:
    assert Scaled(target=9).after(1, waiting_tokens=99_999) == 4


class Fleet(RuleBasedStateMachine):
    """Load comes and goes, replicas load and drain as slowly as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.waiting = self.running = 0
        self.changes: list[tuple[float, int]] = []

    @rule(waiting=st.integers(0, 8000), running=st.integers(0, 50))
    def load(self, waiting: int, running: int) -> None:
        self.waiting, self.running = waiting, running

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            before = self.scaled.target
            after = self.scaled.after(1, waiting_tokens=self.waiting, running=self.running, follow=False)
            if after != before:
                assert after > before if self.waiting else after == before - 1
                self.changes.append((self.scaled.now_s, after - before))

    @precondition(lambda self: self.scaled.running_replicas != self.scaled.target)
    @rule()
    def follow(self) -> None:
        self.scaled.running_replicas += 1 if self.scaled.running_replicas < self.scaled.target else -1

    @invariant()
    def is_within_bounds(self) -> None:
        assert LIMITS.min_replicas <= self.scaled.target <= LIMITS.max_replicas

    @invariant()
    def does_not_swing(self) -> None:
        for (first_s, _), (then_s, change) in zip(self.changes, self.changes[1:], strict=False):
            assert then_s - first_s >= (LIMITS.up_after_s if change > 0 else LIMITS.down_after_s)


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleet = Fleet.TestCase


def test_serves_controller_is_answered_with_what_it_is_to_remember() -> None:
    policy = WaitingTokensPolicy(**{name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__})
    context = SimpleNamespace(
        aggregated_metrics={"waiting_tokens": {"a": 900.0, "b": 1700.0}, "busy": {"a": 0.3}},
        current_num_replicas=2,
        target_num_replicas=2,
        current_time=100.0,
        policy_state={"kept by Serve": 1},
    )
    target, context.policy_state = policy(context)
    assert (target, context.policy_state["more_since_s"]) == (2, 100.0)
    context.current_time = 105.0
    assert policy(context)[0] == 3
    context.aggregated_metrics = None  # no replica has told anything yet
    assert policy(context)[0] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="replicas on Ray need Linux")
def test_the_policy_answers_after_ray_serve_has_carried_it() -> None:
    """As the controller has it: by value. Structs that go with it are no longer what they were."""
    from ray import cloudpickle

    told = number_of_replicas(RayOptions(replicas=2, max_replicas=4, scale_waiting_tokens=1000, scale_up_after_s=0.0))
    policy = told["autoscaling_config"]["policy"]
    module, _, name = policy["policy_function"].partition(":")
    cloudpickle.register_pickle_by_value(importlib.import_module(module))
    try:
        carried = cloudpickle.dumps(getattr(importlib.import_module(module), name))
    finally:
        cloudpickle.unregister_pickle_by_value(importlib.import_module(module))
    asked = {"limits": policy["policy_kwargs"], "carried": carried.hex()}
    controller = [sys.executable, "-c", CONTROLLER]
    answered = subprocess.run(controller, input=json.dumps(asked), capture_output=True, text=True, check=False)
    assert answered.stdout.split() == ["3"], answered.stderr


CONTROLLER = """
import json, sys
from types import SimpleNamespace
from ray import cloudpickle

asked = json.load(sys.stdin)
policy = cloudpickle.loads(bytes.fromhex(asked["carried"]))(**asked["limits"])
context = SimpleNamespace(
    aggregated_metrics={"waiting_tokens": {"a": 2500.0}}, current_num_replicas=2, target_num_replicas=2,
    current_time=100.0, policy_state={},
)
print(policy(context)[0])
"""


@pytest.mark.parametrize(
    "wrong",
    [{"max_replicas": 1}, {"max_replicas": 5000}, {"scale_waiting_tokens": 0}, {"scale_down_after_s": -1.0}],
)
def test_a_bound_that_cannot_be_is_refused_by_its_name(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        RayOptions(**({"replicas": 2} | wrong))  # type: ignore[arg-type]
    assert refusal.value.field == next(iter(wrong))
