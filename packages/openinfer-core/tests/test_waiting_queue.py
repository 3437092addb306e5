"""The waiting queue, and the fault boundary around its policy."""

import logging
from typing import Any

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.waiting_queue import WaitingQueue


class Scripted:
    """Keys are the requests' priorities; it raises where it is told to."""

    def __init__(self, raises: str = "") -> None:
        self.raises = raises
        self.calls: list[str] = []

    def key(self, request: Any, arrival: int) -> Any:
        self.note("key", request)
        return request.priority, arrival

    def admitted(self, request: Any) -> None:
        self.note("admitted", request)

    def withdrawn(self, request: Any) -> None:
        self.note("withdrawn", request)

    def note(self, hook: str, request: Any) -> None:
        call = f"{hook} {request.request_id}"
        self.calls.append(call)
        if call == self.raises:
            raise ZeroDivisionError(call)


def make(request_id: int, *, priority: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        priority=priority,
    )


def make_queue(policy: Scripted) -> WaitingQueue[int]:
    """Its items are request ids."""
    return WaitingQueue[int](policy)


def test_smallest_key_is_the_head() -> None:
    queue = make_queue(Scripted())
    for request_id, priority in enumerate((3, 1, 2, 1)):
        assert queue.add(request_id, make(request_id, priority=priority))
    served: list[int] = []
    while queue.head is not None:
        served.append(queue.head)
        assert queue.admit_head()
    assert served == [1, 3, 2, 0]
    assert len(queue) == 0


def test_withdrawn_item_is_gone_and_the_policy_is_told() -> None:
    policy = Scripted()
    queue = make_queue(policy)
    for request_id in range(3):
        queue.add(request_id, make(request_id))
    assert queue.withdraw(1)
    assert queue.head == 0
    queue.admit_head()
    assert queue.head == 2
    assert policy.calls[3:] == ["withdrawn 1", "admitted 0"]


def test_withdrawing_who_is_not_here_changes_nothing() -> None:
    policy = Scripted()
    queue = make_queue(policy)
    queue.add(0, make(0))
    assert not queue.withdraw(1)
    assert (len(queue), policy.calls) == (1, ["key 0"])


@pytest.mark.parametrize("hook", ["key", "admitted", "withdrawn"])
def test_policy_that_raises_is_fenced_counted_and_logged(caplog: pytest.LogCaptureFixture, hook: str) -> None:
    queue = make_queue(Scripted(f"{hook} 1"))
    with caplog.at_level(logging.ERROR, "openinfer.scheduler"):
        assert [queue.add(i, make(i)) for i in range(3)] == [True, hook != "key", True]
        if hook == "withdrawn":
            queue.withdraw(1)
        admitted = [queue.admit_head() for _ in range(len(queue))]
    assert admitted.count(False) == (hook == "admitted")
    assert queue.faults == 1
    (record,) = caplog.records
    assert record.getMessage() == f"queue policy Scripted: {hook} raised"
    assert record.exc_info is not None


def test_key_without_an_order_costs_its_own_request_only() -> None:
    class Mixed(Scripted):
        def key(self, request: GenerateRequest, arrival: int) -> Any:
            self.note("key", request)
            return "a string" if request.request_id == 1 else arrival

    policy = Mixed()
    queue = make_queue(policy)
    assert [queue.add(i, make(i)) for i in range(3)] == [True, False, True]
    assert "withdrawn 1" in policy.calls
    assert (len(queue), queue.faults) == (2, 1)
