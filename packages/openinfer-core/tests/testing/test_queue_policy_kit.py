"""The queue policies' kit refuses policies without an order, or that raise."""

from operator import attrgetter
from typing import Any

import pytest

from openinfer_core import GenerateRequest
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import WaitingRequest
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
