"""The queue policies' kit refuses policies without an order, or that raise."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import ChoosesVictim, QueuePolicyConfig, WaitingRequest
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.queue_policy import WatchedPolicy, check_queue_policy


class WithoutTies(FirstComeFirstServed):
    """Forgets to end its keys with the arrival number."""

    def key(self, waiting: WaitingRequest) -> Any:
        return len(waiting.request.prompt_token_ids)


class LastComeFirstServed(FirstComeFirstServed):
    def key(self, waiting: WaitingRequest) -> Any:
        return -waiting.arrival


class NotANumber(FirstComeFirstServed):
    def key(self, waiting: WaitingRequest) -> Any:
        return (float("nan"), waiting.arrival)


class Changing:
    """A key that another one's arrival moves."""

    arrivals = 0

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival
        Changing.arrivals = arrival

    def __lt__(self, other: "Changing") -> bool:
        return (self.arrival - Changing.arrivals) % 3 < (other.arrival - Changing.arrivals) % 3


class ChangesItsMind(FirstComeFirstServed):
    def key(self, waiting: WaitingRequest) -> Any:
        return Changing(waiting.arrival)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (WithoutTies, "end keys with the arrival number"),
        (LastComeFirstServed, "not as they arrived"),
        (NotANumber, "must be smaller"),
        (ChangesItsMind, "must be smaller"),
    ],
)
def test_kit_refuses_a_policy_without_a_fair_order(policy: Any, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_queue_policy(policy)


class MixesTypes(FirstComeFirstServed):
    def key(self, waiting: WaitingRequest) -> Any:
        return waiting.arrival if waiting.arrival % 2 else str(waiting.arrival)


class LosesTrack(FirstComeFirstServed):
    """Assumes that only the last one who came can be withdrawn."""

    def key(self, waiting: WaitingRequest) -> Any:
        self.last = {waiting.request.request_id: waiting.arrival}
        return waiting.arrival

    def withdrawn(self, request: GenerateRequest) -> None:
        del self.last[request.request_id]


@pytest.mark.parametrize(
    ("policy", "error"), [(MixesTypes, TypeError), (LosesTrack, KeyError)], ids=[MixesTypes.__name__, "LosesTrack"]
)
def test_kit_lets_through_what_a_policy_raises(policy: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_queue_policy(policy)


@pytest.mark.parametrize(
    ("calls", "violation"),
    [
        (["key", "key"], "key of request 1 is asked twice"),
        (["admitted"], "admitted of request 1, which is not queued"),
        (["key", "admitted", "withdrawn"], "withdrawn of request 1, which is not queued"),
    ],
    ids=str,
)
def test_watched_policy_notes_calls_out_of_order(calls: list[str], violation: str, make_request: Any) -> None:
    watched = WatchedPolicy(FirstComeFirstServed(Any))
    for arrival, name in enumerate(calls):
        hook = attrgetter(name)(watched)
        hook(WaitingRequest(request=make_request(1), arrival=arrival) if name == "key" else make_request(1))
    with pytest.raises(ConformanceError, match=violation):
        watched.check()


class ChoosesNoCandidate(FirstComeFirstServed):
    def victim(self, candidates: Sequence[GenerateRequest]) -> int:
        return len(candidates)


def test_policy_whose_victim_is_no_candidate_is_refused() -> None:
    with pytest.raises(ConformanceError, match="victim answered 1 for 1 candidates"):
        check_queue_policy(ChoosesNoCandidate)


@pytest.mark.parametrize(
    ("candidates", "message"), [([1, 0], "not in order of admission"), ([0, 2], "not all admitted"), ([], "without")]
)
def test_wrong_candidates_are_noted(candidates: list[int], message: str) -> None:
    requests = [
        GenerateRequest(request_id=RequestId(index), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
        for index in range(3)
    ]
    policy = WatchedPolicy(ChoosesNoCandidate(QueuePolicyConfig()))
    for arrival, request in enumerate(requests):
        policy.key(WaitingRequest(request=request, arrival=arrival))
    for request in requests[:2]:
        policy.admitted(request)
    assert isinstance(policy, ChoosesVictim)
    policy.victim([requests[index] for index in (0, 1)])
    policy.check()

    policy.victim([requests[index] for index in candidates])

    with pytest.raises(ConformanceError, match=message):
        policy.check()
    assert not isinstance(WatchedPolicy(FirstComeFirstServed(QueuePolicyConfig())), ChoosesVictim)
