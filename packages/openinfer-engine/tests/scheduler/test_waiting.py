"""The waiting queue, and the fence around its policy."""

import logging
from typing import Any

import pytest

from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.waiting import WaitingQueue
from openinfer_kv_cache import KvCache, KvCacheOptions


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


@pytest.fixture
def make_sequence(make_request: Any) -> Any:
    kv = KvCache(KvCacheOptions(num_blocks=4))

    def make(request_id: int, *, priority: int = 0) -> Sequence:
        request = make_request(request_id, (1,), priority=priority)
        return Sequence(request, kv.sequence((1,)), seed=0, arrived_s=0.0, max_model_tokens=8)

    return make


def test_smallest_key_is_the_head(make_sequence: Any) -> None:
    queue = WaitingQueue(Scripted())
    for request_id, priority in enumerate((3, 1, 2, 1)):
        assert queue.add(make_sequence(request_id, priority=priority))
    served: list[int] = []
    while queue.head is not None:
        served.append(queue.head.request_id)
        assert queue.admit_head()
    assert served == [1, 3, 2, 0]
    assert len(queue) == 0


def test_withdrawn_sequence_is_gone_and_the_policy_is_told(make_sequence: Any) -> None:
    policy = Scripted()
    queue = WaitingQueue(policy)
    sequences = [make_sequence(request_id) for request_id in range(3)]
    for sequence in sequences:
        queue.add(sequence)
    queue.withdraw(sequences[1])
    assert queue.head is sequences[0]
    queue.admit_head()
    assert queue.head is sequences[2]
    assert policy.calls[3:] == ["withdrawn 1", "admitted 0"]


@pytest.mark.parametrize("hook", ["key", "admitted", "withdrawn"])
def test_policy_that_raises_is_fenced_counted_and_logged(
    make_sequence: Any, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    queue = WaitingQueue(Scripted(f"{hook} 1"))
    sequences = [make_sequence(request_id) for request_id in range(3)]
    with caplog.at_level(logging.ERROR, "openinfer.scheduler"):
        assert [queue.add(sequence) for sequence in sequences] == [True, hook != "key", True]
        if hook == "withdrawn":
            queue.withdraw(sequences[1])
        admitted = [queue.admit_head() for _ in range(len(queue))]
    assert admitted.count(False) == (hook == "admitted")
    assert queue.faults == 1
    (record,) = caplog.records
    assert record.getMessage() == f"queue policy Scripted: {hook} raised"
    assert record.exc_info is not None


def test_key_without_an_order_costs_its_own_request_only(make_sequence: Any) -> None:
    class Mixed(Scripted):
        def key(self, request: Any, arrival: int) -> Any:
            self.note("key", request)
            return "a string" if request.request_id == 1 else arrival

    policy = Mixed()
    queue = WaitingQueue(policy)
    assert [queue.add(make_sequence(request_id)) for request_id in range(3)] == [True, False, True]
    assert "withdrawn 1" in policy.calls
    assert (len(queue), queue.faults) == (2, 1)
