"""The waiting queue, and the fault boundary around its policy."""

import logging
from typing import Any

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.scheduling import WaitingRequest
from openinfer_core.scheduling.waiting_queue import ASKED_AGAIN, WaitingQueue


class Scripted:
    """Keys are the requests' priorities; it raises where it is told to."""

    def __init__(self, raises: str = "") -> None:
        self.raises = raises
        self.error: type[BaseException] = ZeroDivisionError
        self.calls: list[str] = []

    def key(self, waiting: WaitingRequest) -> Any:
        self.note("key", waiting.request)
        return waiting.request.priority, waiting.arrival

    def admitted(self, request: Any) -> None:
        self.note("admitted", request)

    def withdrawn(self, request: Any) -> None:
        self.note("withdrawn", request)

    def note(self, hook: str, request: Any) -> None:
        call = f"{hook} {request.request_id}"
        self.calls.append(call)
        if call == self.raises:
            raise self.error(call)


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


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("hook", ["key", "admitted", "withdrawn"])
def test_policy_that_raises_is_fenced_counted_and_logged(
    caplog: pytest.LogCaptureFixture, hook: str, error: type[BaseException]
) -> None:
    policy = Scripted(f"{hook} 1")
    policy.error = error
    queue = make_queue(policy)
    with caplog.at_level(logging.ERROR, "openinfer.scheduler"):
        assert [queue.add(i, make(i)) for i in range(3)] == [True, hook != "key", True]
        if hook == "withdrawn":
            queue.withdraw(1)
        admitted = [queue.admit_head() for _ in range(len(queue))]
    assert admitted.count(False) == (hook == "admitted")
    assert queue.faults == 1
    (record,) = caplog.records
    assert record.getMessage() == f"queue policy {__name__}:Scripted: {hook} raised"
    assert record.exc_info is not None
    assert queue.fault_message == f"the queue policy {__name__}:Scripted failed on this request"


def test_key_without_an_order_costs_its_own_request_only() -> None:
    class Mixed(Scripted):
        def key(self, waiting: WaitingRequest) -> Any:
            self.note("key", waiting.request)
            return "a string" if waiting.request.request_id == 1 else waiting.arrival

    policy = Mixed()
    queue = make_queue(policy)
    assert [queue.add(i, make(i)) for i in range(3)] == [True, False, True]
    assert "withdrawn 1" in policy.calls
    assert (len(queue), queue.faults) == (2, 1)


class CachedFirst(Scripted):
    """The more of a prompt is cached, the earlier; then order of arrival."""

    asks_again = True
    max_bypass_s = 10.0

    def key(self, waiting: WaitingRequest) -> Any:
        self.note("key", waiting.request)
        return -waiting.cached_tokens, not waiting.is_adapter_loaded, waiting.arrival


def test_policy_that_is_asked_again_sees_what_is_cached_by_then() -> None:
    cached = {0: 0, 1: 0, 2: 0}
    queue = WaitingQueue[int](CachedFirst(), describe=lambda item: (cached[item], True))
    for item in cached:
        queue.add(item, make(item), now_s=0.0)
    assert queue.head == 0
    cached[2] = 64
    queue.ask_again(now_s=1.0)
    assert queue.head == 2


def test_policy_that_is_asked_again_sees_which_adapters_are_loaded() -> None:
    loaded = {0: False, 1: True}
    queue = WaitingQueue[int](CachedFirst(), describe=lambda item: (0, loaded[item]))
    for item in loaded:
        queue.add(item, make(item), now_s=0.0)
    assert queue.head == 1
    loaded[0] = True
    queue.ask_again(now_s=1.0)
    assert queue.head == 0


def test_policy_that_does_not_ask_for_it_is_asked_once_and_not_told_what_is_cached() -> None:
    policy = Scripted()
    queue = WaitingQueue[int](policy, describe=lambda item: 1 // 0)
    for item in range(3):
        queue.add(item, make(item))
    queue.ask_again(now_s=100.0)
    assert policy.calls == ["key 0", "key 1", "key 2"]


def test_no_request_is_passed_by_later_ones_for_longer_than_the_bound() -> None:
    queue = WaitingQueue[int](CachedFirst(), describe=lambda item: (item, True))
    queue.add(0, make(0), now_s=0.0)
    queue.add(1, make(1), now_s=1.0)
    queue.add(2, make(2), now_s=9.5)
    queue.ask_again(now_s=9.9)
    assert queue.head == 2
    queue.ask_again(now_s=10.0)
    assert queue.head == 0
    queue.ask_again(now_s=11.0)
    served: list[int | None] = []
    while len(queue):
        served.append(queue.head)
        queue.admit_head()
    assert served == [0, 1, 2]


def test_asking_again_is_bounded_and_reaches_every_request_in_turn() -> None:
    policy = CachedFirst()
    queue = WaitingQueue[int](policy, describe=lambda item: (0, True))
    for item in range(3 * ASKED_AGAIN):
        queue.add(item, make(item))
    for _ in range(3):
        before = len(policy.calls)
        queue.ask_again(now_s=0.0)
        assert len(policy.calls) - before == ASKED_AGAIN
    assert {f"key {item}" for item in range(3 * ASKED_AGAIN)} == set(policy.calls[3 * ASKED_AGAIN :])


@pytest.mark.parametrize("what", ["key", "comparison"])
def test_fault_while_asking_again_keeps_the_order_and_is_counted(what: str) -> None:
    class TurnsBad(CachedFirst):
        is_bad = False

        def key(self, waiting: WaitingRequest) -> Any:
            if self.is_bad and what == "key":
                raise ZeroDivisionError
            return "a string" if self.is_bad and waiting.request.request_id == 1 else -waiting.arrival

    policy = TurnsBad()
    queue = WaitingQueue[int](policy)
    for item in range(3):
        queue.add(item, make(item))
    policy.is_bad = True
    queue.ask_again(now_s=0.0)
    assert queue.faults == (3 if what == "key" else 1)
    assert (len(queue), queue.head) == (3, 2)
