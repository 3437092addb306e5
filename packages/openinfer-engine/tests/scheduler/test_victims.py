"""The queue policy chooses who gives way: only among those that may, and a bad choice harms none."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from openinfer_core import GenerateRequest
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import QueuePolicyConfig
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.scheduler_victims import check_chosen_victims
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.run_queue import RunQueue
from openinfer_engine.scheduler.sequence import Sequence as Scheduled


class Chooser(FirstComeFirstServed):
    def __init__(self, choose: Callable[[list[int]], Any]) -> None:
        super().__init__(QueuePolicyConfig())
        self.asked: list[list[int]] = []
        self._choose = choose

    def victim(self, candidates: Sequence[GenerateRequest]) -> int:
        self.asked.append([request.request_id for request in candidates])
        return self._choose(self.asked[-1])


def raise_error(candidates: list[int]) -> int:
    raise ValueError(candidates)


def start(make_driver: Any, make_request: Any, policy: FirstComeFirstServed, *, max_in_flight: int = 1) -> Any:
    """Four sequences that fill the pool of 8 blocks with two blocks each."""
    driver = make_driver(num_blocks=8, policy=policy, prefix_cache=False, max_in_flight=max_in_flight)
    for index in range(4):
        driver.submit(make_request(index, (index,) * 4, max_tokens=12))
    return driver


def started_in_order(driver: Any) -> list[int]:
    found: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        found += [start.request.request_id for start in plan.started] if plan else []
    driver.run()
    return found


def test_policy_chooses_among_all_but_the_oldest_and_those_with_a_row(make_driver: Any, make_request: Any) -> None:
    policy = Chooser(lambda candidates: 0)
    driver = start(make_driver, make_request, policy)
    while not driver.scheduler.stats().preemptions:
        driver.step()
    # The two blocks of 1 go to 0 and 2. Then 3 is short, and the only one without a row.
    assert policy.asked == [[1, 2, 3], [3]]
    assert driver.running_ids == {0, 2}
    assert driver.scheduler.stats().policy_faults == 0
    driver.run()


def test_older_one_that_waits_for_its_last_token_is_a_candidate(make_driver: Any, make_request: Any) -> None:
    policy = Chooser(lambda candidates: 0)
    driver = make_driver(num_blocks=7, policy=policy, prefix_cache=False, max_in_flight=2)
    grammar = Grammar(kind=GrammarKind.REGEX, text=".*")
    for index in range(3):
        driver.submit(make_request(index, (index,) * 4, max_tokens=16, grammar=grammar if index == 1 else None))
    driver.run()
    assert [1, 2] in policy.asked
    assert all(candidates == sorted(candidates) for candidates in policy.asked)


def test_preempted_resume_by_age_whoever_was_chosen_first(make_driver: Any, make_request: Any) -> None:
    policy = Chooser(lambda candidates: len(candidates) - 1)
    driver = start(make_driver, make_request, policy)
    assert started_in_order(driver) == [0, 1, 2, 3, 2, 3]
    assert [candidates[-1] for candidates in policy.asked] == [3, 2]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(
    "choose",
    [raise_error, len, lambda _: -1, lambda _: 0.0, lambda _: None],
    ids=["raises", "beyond", "negative", "float", "none"],
)
def test_bad_choice_is_counted_and_the_youngest_gives_way(
    make_driver: Any, make_request: Any, choose: Callable[[list[int]], Any], max_in_flight: int
) -> None:
    plain = start(make_driver, make_request, FirstComeFirstServed(QueuePolicyConfig()), max_in_flight=max_in_flight)
    policy = Chooser(choose)
    driver = start(make_driver, make_request, policy, max_in_flight=max_in_flight)
    assert started_in_order(driver) == started_in_order(plain)
    stats = driver.scheduler.stats()
    assert stats.policy_faults == len(policy.asked) == plain.scheduler.stats().preemptions > 0
    assert stats.failed_requests == 0


@pytest.mark.parametrize(
    ("spared", "message"), [("rows", "the oldest that ran"), ("oldest", "has a row and was never started")]
)
def test_kit_notices_when_too_many_may_be_chosen(monkeypatch: pytest.MonkeyPatch, spared: str, message: str) -> None:
    def choose(self: RunQueue, planned: Sequence[Scheduled]) -> Scheduled:
        candidates = self.running[1:] if spared == "oldest" else [each for each in self.running if each not in planned]
        chosen = self.waiting.victim([sequence.request for sequence in candidates]) if candidates else None
        victim = self.running[-1] if chosen is None else candidates[chosen]
        return self.running[-1] if victim is self.running[0] else victim

    monkeypatch.setattr(RunQueue, "_choose_victim", choose)
    with pytest.raises(ConformanceError, match=message):
        check_chosen_victims(TokenBudgetScheduler)
