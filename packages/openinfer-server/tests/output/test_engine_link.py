"""The link: events to choices, the fault boundary, what is counted."""

import asyncio
from collections.abc import Coroutine

import pytest

from openinfer_core.errors import EngineClosed
from openinfer_core.events import Failed, FailureKind, Finished, FinishReason, Scheduled, Tokens
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import SamplingParams
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.output.response import Choice, Response


class FakeEngine:
    """Remembers; events are handed to the link by the test."""

    def __init__(self) -> None:
        self.submitted = []
        self.aborted = []
        self.closed = False

    def submit(self, request) -> None:
        if self.closed:
            raise EngineClosed("gone")
        self.submitted.append(request.request_id)

    def abort(self, request_id) -> None:
        self.aborted.append(request_id)


class FakeChoice(Choice):
    """Keeps token ids; fails on token 13."""

    def __init__(self, response, index=0) -> None:
        super().__init__(response, index, prompt_tokens=3)
        self.seen = []

    def tokens(self, event) -> None:
        if 13 in event.token_ids:
            raise ValueError("unlucky")
        self.seen += event.token_ids


class World:
    """A link with a clock the test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.engine = FakeEngine()
        self.metrics = ServerMetrics(max_model_tokens=2048)
        self.link = EngineLink(self.engine, self.metrics, clock=lambda: self.now_s)

    def ask(self, n: int = 1) -> tuple[Response, list[FakeChoice]]:
        response = Response(self.link)
        choices = [FakeChoice(response, i) for i in range(n)]
        requests = [
            GenerateRequest(
                request_id=self.link.new_id(), prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9)
            )
            for _ in range(n)
        ]
        run_now(response.submit(choices, requests))
        return response, choices


def run_now(work: Coroutine[None, None, None]) -> None:
    """Runs what does not have to wait."""
    with pytest.raises(StopIteration):
        work.send(None)


def in_loop(test):
    async def main() -> None:
        test(World())

    return lambda: asyncio.run(main())


def outcomes(metrics) -> dict[str, int]:
    return {outcome: count for outcome, count in (metrics.ended + metrics.failures).items() if count}


def finished(choice) -> Finished:
    return Finished(choice.request_id, FinishReason.LENGTH, 3, 2, 1)


@in_loop
def test_events_reach_their_choices_and_end_the_answer_once(world):
    response, (a, b) = world.ask(2)
    world.link.dispatch([Scheduled(a.request_id, 1, 0.5), Tokens(b.request_id, (5,)), Tokens(a.request_id, (6, 7))])
    assert response.began.done()
    assert (a.seen, b.seen, a.cached_tokens) == ([6, 7], [5], 1)
    world.link.dispatch([finished(a)])
    assert not response.done.done()
    world.link.dispatch([Tokens(a.request_id, (8,)), finished(b)])
    assert response.done.done()
    assert a.seen == [6, 7]
    assert response.failure is None
    assert world.link.num_open == 0
    assert world.engine.aborted == []


@in_loop
def test_events_of_unknown_requests_are_dropped(world):
    world.link.dispatch([Tokens(RequestId(77), (1,)), Failed(RequestId(77), FailureKind.INTERNAL, "x")])
    assert outcomes(world.metrics) == {}


@in_loop
def test_choice_goes_on_with_another_request_and_counts_as_one(world):
    response, (a,) = world.ask()
    first, begun_s = a.request_id, a.submitted_s
    world.link.dispatch([Scheduled(first, 0, 0.0), Tokens(first, (5,))])
    world.now_s += 1
    sampling = SamplingParams(max_tokens=9)
    again = GenerateRequest(request_id=world.link.new_id(), prompt_token_ids=(1, 2, 3, 5), sampling=sampling)
    world.link.replace(a, again)
    assert (world.engine.aborted, world.engine.submitted[-1], a.request_id) == (
        [first],
        again.request_id,
        again.request_id,
    )
    world.link.dispatch([Tokens(first, (6,)), Finished(first, FinishReason.ABORT, 3, 2, 0), Tokens(a.request_id, (7,))])
    assert (a.seen, a.submitted_s, response.done.done()) == ([5, 7], begun_s, False)
    world.link.dispatch([finished(a)])
    assert response.done.done()
    assert outcomes(world.metrics) == {FinishReason.LENGTH: 1}
    assert world.link.num_open == 0
    world.link.replace(a, again)  # it has ended: nothing goes on
    assert world.engine.submitted.count(again.request_id) == 1


@in_loop
def test_choice_cannot_go_on_before_an_engine_that_has_ended(world):
    response, (a,) = world.ask()
    world.engine.closed = True
    sampling = SamplingParams(max_tokens=9)
    world.link.replace(a, GenerateRequest(request_id=world.link.new_id(), prompt_token_ids=(1,), sampling=sampling))
    assert response.failure.kind is FailureKind.SHUTDOWN


@in_loop
def test_fault_in_one_choice_fails_its_answer_alone(world):
    bad, (a, b) = world.ask(2)
    good, (c,) = world.ask()
    world.link.dispatch([Tokens(a.request_id, (13,)), Tokens(c.request_id, (1,)), Tokens(b.request_id, (2,))])
    assert bad.failure.kind is FailureKind.INTERNAL
    assert "unlucky" not in bad.failure.message
    assert sorted(world.engine.aborted) == sorted([a.request_id, b.request_id])
    assert (c.seen, good.done.done()) == ([1], False)
    assert world.metrics.faults.value == 1
    assert world.link.num_open == 1


@in_loop
def test_failure_of_one_choice_aborts_the_others(world):
    response, (a, b, c) = world.ask(3)
    world.link.dispatch([Failed(b.request_id, FailureKind.OVERLOADED, "full")])
    assert response.done.done()
    assert response.failure.kind is FailureKind.OVERLOADED
    assert world.engine.aborted == [a.request_id, c.request_id]
    assert outcomes(world.metrics) == {"overloaded": 1, "abort": 2}


@in_loop
def test_closed_engine_fails_at_submission_and_submits_no_more(world):
    world.engine.closed = True
    response, _ = world.ask(3)
    assert response.failure.kind is FailureKind.SHUTDOWN
    assert world.link.num_open == 0
    assert outcomes(world.metrics) == {"shutdown": 1}


@in_loop
def test_abort_by_somebody_else_is_a_failure(world):
    response, (a,) = world.ask()
    world.link.dispatch([Finished(a.request_id, FinishReason.ABORT, 3, 0, 0)])
    assert response.failure.kind is FailureKind.SHUTDOWN


@in_loop
def test_latencies_are_counted_once_per_token(world):
    _, (a, b) = world.ask(2)
    for gap_s in (0.2, 0.03, 0.04):
        world.now_s += gap_s
        world.link.dispatch([Tokens(a.request_id, (1,)), Tokens(b.request_id, (1, 2))])
    world.now_s += 0.6
    world.link.dispatch([Tokens(a.request_id, (1,))])
    world.now_s += 0.1
    world.link.dispatch([Tokens(b.request_id, (1,))])
    metrics = world.metrics
    assert sum(metrics.time_to_first_token_s.counts) == 2
    assert metrics.time_to_first_token_s.total == pytest.approx(0.4)
    assert sum(metrics.inter_token_s.counts) == 6
    assert metrics.inter_token_s.total == pytest.approx(2 * 0.03 + 2 * 0.04 + 0.6 + 0.7)
    assert metrics.generated_tokens.value == 3 + 6 + 2


@in_loop
def test_life_of_a_request_is_cut_into_queue_prefill_and_decode(world):
    _, (a,) = world.ask()
    world.now_s += 5.0
    world.link.dispatch([Scheduled(a.request_id, 2, 1.5), Tokens(a.request_id, (1,))])
    for _ in range(4):
        world.now_s += 0.25
        world.link.dispatch([Tokens(a.request_id, (1,))])
    world.now_s += 0.5
    world.link.dispatch([Finished(a.request_id, FinishReason.STOP, 3, 6, 2, 9)])
    metrics = world.metrics
    observed = {
        name: (sum(histogram.counts), round(histogram.total, 9))
        for name in ("queue_s", "prefill_s", "decode_s", "inference_s", "request_s", "time_per_output_token_s")
        for histogram in (getattr(metrics, name),)
    }
    assert observed == {
        "queue_s": (1, 1.5),
        "prefill_s": (1, 3.5),
        "decode_s": (1, 1.5),
        "inference_s": (1, 5.0),
        "request_s": (1, 6.5),
        "time_per_output_token_s": (1, 0.3),
    }
    assert (metrics.prompt_tokens.value, metrics.cached_tokens.value) == (3, 2)
    assert (metrics.request_generation_tokens.total, metrics.request_max_tokens.total) == (6, 9)


@in_loop
def test_aborted_request_has_an_end_and_no_latency(world):
    response, (a,) = world.ask()
    world.link.dispatch([Scheduled(a.request_id, 0, 0.0), Tokens(a.request_id, (1,))])
    response.abort()
    assert outcomes(world.metrics) == {"abort": 1}
    assert sum(world.metrics.request_s.counts) == sum(world.metrics.decode_s.counts) == 0


@in_loop
def test_request_that_replaces_another_left_the_queue_once(world):
    _, (a,) = world.ask()
    world.link.dispatch([Scheduled(a.request_id, 1, 0.25), Tokens(a.request_id, (5,))])
    sampling = SamplingParams(max_tokens=9)
    again = GenerateRequest(request_id=world.link.new_id(), prompt_token_ids=(1, 2, 3, 5), sampling=sampling)
    world.link.replace(a, again)
    world.link.dispatch([Scheduled(a.request_id, 3, 0.75)])
    assert world.metrics.queue_s.total == 0.25
    assert world.metrics.prompt_tokens.value == 3


@in_loop
def test_prompt_logprobs_alone_are_no_token(world):
    _, (a,) = world.ask()
    world.link.dispatch([Tokens(a.request_id, (), None, ())])
    assert world.metrics.time_to_first_token_s.total == 0
    assert a.last_token_s == 0


class BrokenWriter:
    """Its connection fails in the middle of a flush."""

    def __init__(self) -> None:
        self.dropped = False

    def flush(self) -> None:
        raise RuntimeError("closed")

    def drop(self) -> None:
        self.dropped = True


@in_loop
def test_connection_that_fails_in_a_flush_is_dropped_alone(world):
    broken = [BrokenWriter(), BrokenWriter()]
    world.link.dirty += broken
    world.link.dispatch([])
    assert all(writer.dropped for writer in broken)
    assert world.link.dirty == []
