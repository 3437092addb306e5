"""Breaker, bounds and the fence around a tier's own code."""

import logging
import os
import threading

import pytest

from openinfer_kv_cache import TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import ended
from openinfer_kv_offload import QueueOptions, TierConfigError
from openinfer_kv_offload.transfer.breaker import CircuitBreaker
from openinfer_kv_offload.transfer.counters import TierTotals
from openinfer_kv_offload.transfer.queue import TransferQueue, Urgency


@pytest.fixture
def make_queue():
    queues = []

    def made(**options):
        clock = options.pop("clock", None)
        counters = TierTotals("test")
        given = {} if clock is None else {"clock": clock}
        queues.append(TransferQueue("test", QueueOptions(**options), counters, **given))
        return queues[-1], lambda: counters.snapshot(stored_blocks=0).failures

    yield made
    for queue in queues:
        queue.close()


def submit(queue, job, *, timeout_s=None, urgency=Urgency.SAVE, release=lambda: None):
    return queue.submit(job, num_blocks=1, timeout_s=timeout_s, urgency=urgency, release=release)


def fail(transfer):
    raise OSError(5, "input/output error")


def test_breaker_opens_after_failures_in_a_row_and_lets_one_trial_through():
    now_s = [0.0]
    breaker = CircuitBreaker(num_failures=2, cooldown_s=10.0, clock=lambda: now_s[0])
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.admit()
    breaker.failed()
    assert breaker.is_open
    assert not breaker.admit()
    now_s[0] = 10.0
    assert [breaker.admit(), breaker.admit()] == [True, False]
    breaker.failed()
    assert not breaker.admit()
    now_s[0] = 20.0
    assert breaker.admit()
    breaker.succeeded()
    assert [breaker.admit(), breaker.admit()] == [True, True]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to processors")
@pytest.mark.parametrize(("usable", "num_threads"), [(1, 2), (6, 3), (64, 8)])
def test_a_tier_has_half_as_many_threads_as_its_process_may_use_processors(monkeypatch, usable, num_threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    assert QueueOptions().num_threads == num_threads


def test_a_tier_that_fails_is_left_alone_until_its_cooldown(make_queue):
    now_s = [0.0]
    queue, failures = make_queue(breaker_failures=2, breaker_cooldown_s=5.0, clock=lambda: now_s[0])
    for _ in range(2):
        assert ended(submit(queue, fail)) is TransferState.PARTIAL
    assert queue.is_refusing
    refused = submit(queue, lambda transfer: transfer.complete_blocks())
    assert refused.failure is TierFailure.BREAKER_OPEN
    now_s[0] = 6.0
    assert ended(submit(queue, lambda transfer: transfer.complete_blocks())) is TransferState.COMPLETED
    assert not queue.is_refusing
    assert failures()[TierFailure.IO_ERROR] == 2
    assert failures()[TierFailure.BREAKER_OPEN] == 1


def hanging(queue):
    """A transfer that has a queue's only thread until the event is set, and completes then."""
    begun, go_on = threading.Event(), threading.Event()

    def hang(transfer):
        begun.set()
        go_on.wait(30)
        transfer.complete_blocks()

    transfer = submit(queue, hang)
    begun.wait(30)
    return transfer, go_on


def test_more_transfers_than_may_wait_end_busy(make_queue):
    queue, _ = make_queue(num_threads=1, max_queued=1)
    first, go_on = hanging(queue)
    second = submit(queue, lambda transfer: transfer.complete_blocks())
    released = []
    third = submit(queue, lambda transfer: transfer.complete_blocks(), release=lambda: released.append(True))
    assert third.poll() is TransferState.PARTIAL
    assert third.failure is TierFailure.BUSY
    assert released == [True]
    go_on.set()
    assert [ended(first), ended(second)] == [TransferState.COMPLETED] * 2


def test_a_long_load_is_queued_whole_while_saves_are_as_many_as_may_wait(make_queue):
    queue, failures = make_queue(num_threads=1, max_queued=1)
    first, go_on = hanging(queue)
    save = submit(queue, lambda transfer: transfer.complete_blocks())
    loads = [submit(queue, lambda transfer: transfer.complete_blocks(), urgency=Urgency.LOAD) for _ in range(300)]
    refused = submit(queue, lambda transfer: transfer.complete_blocks())
    assert refused.failure is TierFailure.BUSY
    go_on.set()
    assert {ended(each) for each in (first, save, *loads)} == {TransferState.COMPLETED}
    assert failures()[TierFailure.BUSY] == 1
    assert ended(submit(queue, lambda transfer: transfer.complete_blocks())) is TransferState.COMPLETED


def test_more_loads_than_may_wait_end_busy(make_queue):
    queue, _ = make_queue(num_threads=1, max_queued_loads=2)
    first, go_on = hanging(queue)
    loads = [submit(queue, lambda transfer: transfer.complete_blocks(), urgency=Urgency.LOAD) for _ in range(3)]
    assert [each.failure for each in loads] == [None, None, TierFailure.BUSY]
    go_on.set()
    assert [ended(each) for each in (first, *loads)] == [TransferState.COMPLETED] * 3 + [TransferState.PARTIAL]


def test_a_bug_in_a_tier_is_logged_counted_and_not_fatal(make_queue, caplog):
    queue, failures = make_queue()
    with caplog.at_level(logging.ERROR):
        transfer = submit(queue, lambda transfer: {}["no such key"])
        assert ended(transfer) is TransferState.PARTIAL
    assert transfer.failure is TierFailure.ERROR
    assert failures()[TierFailure.ERROR] == 1
    queue.close()
    assert "KeyError: 'no such key'" in caplog.text
    assert ended(submit(queue, fail)) is TransferState.PARTIAL


def test_close_ends_what_waits_and_gives_back_what_it_holds(make_queue):
    queue, failures = make_queue(num_threads=1)
    begun, go_on = threading.Event(), threading.Event()
    released = []

    def hang(transfer):
        begun.set()
        go_on.wait(30)
        transfer.complete_blocks()

    first = submit(queue, hang, release=lambda: released.append("first"))
    begun.wait(30)
    second = submit(queue, hang, release=lambda: released.append("second"))
    closer = threading.Thread(target=queue.close)
    closer.start()
    assert [ended(first), ended(second)] == [TransferState.PARTIAL] * 2
    go_on.set()
    closer.join(30)
    assert sorted(released) == ["first", "second"]
    assert failures()[TierFailure.CLOSED] == 2


def test_what_hangs_in_a_copy_is_left_behind_and_ends_with_it(make_queue):
    queue, failures = make_queue(num_threads=1)
    begun, go_on = threading.Event(), threading.Event()
    closed = []

    def hang(transfer):
        with transfer.touching():
            begun.set()
            go_on.wait(30)
        transfer.complete_blocks()

    transfer = submit(queue, hang)
    begun.wait(30)
    waiting = submit(queue, hang)
    assert not queue.close(0.0, after=lambda: closed.append("files"))
    assert (transfer.poll(), closed) == (TransferState.PENDING, [])  # its copy goes on
    assert ended(waiting) is TransferState.PARTIAL
    go_on.set()
    assert queue.close(30.0)
    assert ended(transfer) is TransferState.PARTIAL
    assert failures()[TierFailure.CLOSED] == 2
    assert closed == ["files"]


@pytest.mark.parametrize("field", QueueOptions.__struct_fields__)
def test_options_out_of_range_are_refused(field):
    with pytest.raises(TierConfigError, match=f"{field} is 0"):
        QueueOptions(**{field: 0})


def test_loads_go_before_saves_that_wait_longer(make_queue):
    queue, _ = make_queue(num_threads=1)
    begun, gate = threading.Event(), threading.Event()
    order = []

    def hold(transfer):
        begun.set()
        assert gate.wait(30)
        transfer.complete_blocks()

    def job(name):
        return lambda transfer: (order.append(name), transfer.complete_blocks())

    held = submit(queue, hold)
    assert begun.wait(30)
    waiting = [
        submit(queue, job(name), urgency=urgency)
        for name, urgency in (("a", Urgency.SAVE), ("b", Urgency.SAVE), ("c", Urgency.LOAD), ("d", Urgency.LOAD))
    ]
    gate.set()
    assert {ended(transfer) for transfer in (held, *waiting)} == {TransferState.COMPLETED}
    assert order == ["c", "d", "a", "b"]


def test_transfers_that_wait_too_long_for_a_thread_do_not_open_the_breaker(make_queue):
    now_s = [0.0]
    queue, failures = make_queue(num_threads=1, breaker_failures=2, clock=lambda: now_s[0])
    begun, gate = threading.Event(), threading.Event()

    def hold(transfer):
        begun.set()
        assert gate.wait(30)
        transfer.complete_blocks()

    held = submit(queue, hold)
    assert begun.wait(30)
    waiting = [submit(queue, lambda transfer: transfer.complete_blocks(), timeout_s=1.0) for _ in range(5)]
    now_s[0] = 2.0
    assert {transfer.poll() for transfer in waiting} == {TransferState.PARTIAL}
    assert failures()[TierFailure.DEADLINE] == 5
    assert not queue.is_refusing
    gate.set()
    assert ended(held) is TransferState.COMPLETED
