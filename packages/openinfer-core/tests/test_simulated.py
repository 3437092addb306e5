"""The simulated engine keeps its times, honours what it is asked, and says the same twice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from openinfer_core import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    InvalidRequest,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, simulated_token

MakeRequest = Callable[..., GenerateRequest]


@dataclass
class FakeTime:
    """A clock that only sleeping moves, by a little more than was asked (as a real one does)."""

    now_s: float = 1000.0
    oversleep_s: float = 0.0
    sleeps_s: list[float] = field(default_factory=list[float])

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.sleeps_s.append(duration_s)
        self.now_s += duration_s + self.oversleep_s


class Bench:
    """Runs a simulated engine in fake time; keeps each event with the time it came."""

    def __init__(self, *, oversleep_s: float = 0.0, **options: Any) -> None:
        self.time = FakeTime(oversleep_s=oversleep_s)
        self.options = SimulatedOptions(**options)
        self.loop = SimulatedLoop(self.options, clock=self.time.clock, sleep=self.time.sleep)
        self.timed: list[tuple[float, TokenEvent]] = []

    def take(self, events: Iterable[TokenEvent]) -> None:
        self.timed += [(self.time.now_s - 1000.0, event) for event in events]

    def submit(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.take(self.loop.submit(request))

    def step(self) -> None:
        self.take(self.loop.step())

    def run(self, *requests: GenerateRequest) -> list[TokenEvent]:
        self.submit(*requests)
        while self.loop.busy:
            self.step()
        return self.events

    @property
    def events(self) -> list[TokenEvent]:
        return [event for _, event in self.timed]

    def token_times_s(self, request_id: int) -> list[float]:
        return [at_s for at_s, event in self.timed if isinstance(event, Tokens) and event.request_id == request_id]

    def token_ids(self, request_id: int) -> list[int]:
        mine = [event for event in self.events if isinstance(event, Tokens) and event.request_id == request_id]
        return [token_id for event in mine for token_id in event.token_ids]


def finished(request_id: int, reason: FinishReason, stop: int | None = None) -> Finished:
    return Finished(RequestId(request_id), reason, 0, 0, 0, stop)


# Time


def test_first_token_comes_after_ttft_and_each_further_one_after_tpot(make_request: MakeRequest) -> None:
    bench = Bench(ttft_s=0.25, tpot_s=0.01)
    bench.run(make_request(1, max_tokens=5))
    assert bench.token_times_s(1) == pytest.approx([0.25, 0.26, 0.27, 0.28, 0.29])
    assert bench.events[0] == Scheduled(RequestId(1), 0, pytest.approx(0.25))


def test_sleeping_too_long_does_not_add_up(make_request: MakeRequest) -> None:
    bench = Bench(tpot_s=0.01, oversleep_s=0.004)
    bench.run(make_request(1, max_tokens=101))
    assert bench.token_times_s(1)[-1] == pytest.approx(1.0, abs=0.005)


def test_steps_that_were_missed_are_not_made_up_for_in_a_burst(make_request: MakeRequest) -> None:
    bench = Bench(tpot_s=0.01)
    bench.submit(make_request(1, max_tokens=5))
    bench.step()
    bench.time.now_s += 10
    while bench.loop.busy:
        bench.step()
    assert bench.token_times_s(1) == pytest.approx([0.0, 10.0, 10.0, 10.01, 10.02], abs=1e-6)


def test_request_that_comes_later_joins_the_running_steps(make_request: MakeRequest) -> None:
    bench = Bench(ttft_s=0.05, tpot_s=0.02)
    bench.submit(make_request(1, max_tokens=10))
    while not bench.token_times_s(1):
        bench.step()
    bench.submit(make_request(2, max_tokens=2))  # at 0.05: due at 0.10, the next step after is at 0.11
    while bench.loop.busy:
        bench.step()
    assert bench.token_times_s(2) == pytest.approx([0.11, 0.13])
    assert bench.token_times_s(1) == pytest.approx([0.05 + 0.02 * i for i in range(10)])


def test_times_begin_anew_after_idleness(make_request: MakeRequest) -> None:
    bench = Bench(ttft_s=0.1, tpot_s=0.01)
    bench.run(make_request(1, max_tokens=2))
    bench.time.now_s = 1007.0
    bench.run(make_request(2, max_tokens=3))
    assert bench.token_times_s(2) == pytest.approx([7.1, 7.11, 7.12])


def test_waiting_is_cut_into_naps_so_that_commands_are_heard(make_request: MakeRequest) -> None:
    bench = Bench(ttft_s=10.0)
    bench.submit(make_request(1))
    bench.step()
    assert bench.events == []
    assert bench.time.now_s - 1000.0 < 0.1
    bench.take(bench.loop.abort(RequestId(1)))
    assert bench.events == [finished(1, FinishReason.ABORT)]
    assert not bench.loop.busy


def test_without_times_it_never_sleeps(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.run(*[make_request(i, max_tokens=50) for i in range(10)])
    assert bench.time.sleeps_s == []


def test_step_without_requests_does_nothing() -> None:
    assert SimulatedLoop(SimulatedOptions()).step() == []


# Rows


def test_more_requests_than_rows_wait_in_order_of_arrival(make_request: MakeRequest) -> None:
    bench = Bench(rows_per_step=2, tpot_s=0.01)
    bench.submit(*[make_request(i, max_tokens=2) for i in (5, 3, 9)])
    assert bench.loop.stats().running == 2
    assert bench.loop.stats().waiting == 1
    while bench.loop.busy:
        bench.step()
    scheduled = [(event.request_id, event.queued_s) for event in bench.events if isinstance(event, Scheduled)]
    assert [request_id for request_id, _ in scheduled] == [5, 3, 9]
    assert scheduled[2][1] == pytest.approx(0.02)


def test_queue_that_is_full_answers_overloaded(make_request: MakeRequest) -> None:
    bench = Bench(rows_per_step=2, max_waiting=3)
    bench.submit(*[make_request(i) for i in range(6)])
    assert bench.events == [Failed(RequestId(5), FailureKind.OVERLOADED, "the queue is full")]
    bench.loop.abort(RequestId(4))
    bench.submit(make_request(6))
    assert len(bench.events) == 1


# What is generated


def test_two_runs_give_the_same_tokens_and_another_prompt_gives_others(make_request: MakeRequest) -> None:
    first, second, other = Bench(), Bench(), Bench()
    first.run(make_request(1, max_tokens=50, seed=1))
    second.run(make_request(2, max_tokens=50, seed=2))
    other.run(make_request(1, prompt=(1, 2, 4), max_tokens=50))
    assert first.token_ids(1) == second.token_ids(2)
    assert first.token_ids(1) != other.token_ids(1)
    assert len(set(first.token_ids(1))) > 40


def test_tokens_are_those_of_simulated_token_whoever_shares_the_step(make_request: MakeRequest) -> None:
    bench = Bench(rows_per_step=3)
    requests = [make_request(i, prompt=(i, 7), max_tokens=10) for i in range(8)]
    bench.run(*requests)
    for request in requests:
        expected = [simulated_token(request, position, bench.options) for position in range(10)]
        assert bench.token_ids(request.request_id) == expected


def test_tokens_lie_in_the_range_of_the_options(make_request: MakeRequest) -> None:
    bench = Bench(num_token_ids=20, first_token_id=17)
    bench.run(make_request(1, max_tokens=200))
    assert set(bench.token_ids(1)) == {17, 18, 19}


def test_stop_token_ends_the_request_and_is_not_delivered(make_request: MakeRequest) -> None:
    request = make_request(1, max_tokens=50)
    stop = simulated_token(request, 4, SimulatedOptions())
    bench = Bench()
    bench.run(make_request(1, max_tokens=50, stop_token_ids=(stop,)))
    assert bench.token_ids(1) == [simulated_token(request, i, SimulatedOptions()) for i in range(4)]
    assert bench.events[-1] == finished(1, FinishReason.STOP, stop)
    assert bench.loop.stats().generated_tokens == 5


def test_min_tokens_passes_over_stop_tokens_until_then(make_request: MakeRequest) -> None:
    bench = Bench(num_token_ids=10)
    stops = (1, 3, 5, 7, 9)
    bench.run(make_request(1, max_tokens=500, min_tokens=200, stop_token_ids=stops))
    generated = bench.token_ids(1)
    assert len(generated) >= 200
    assert not set(generated) & set(stops)
    assert isinstance(bench.events[-1], Finished)
    assert bench.events[-1].reason is FinishReason.STOP


def test_only_allowed_tokens_come_and_no_bad_words(make_request: MakeRequest) -> None:
    bench = Bench(num_token_ids=10, first_token_id=5)
    bench.run(
        make_request(1, max_tokens=100, allowed_token_ids=(2, 7)),
        make_request(2, max_tokens=100, bad_words=((5,), (6, 7), (8, 8, 9))),
        make_request(3, max_tokens=100),
    )
    assert set(bench.token_ids(1)) == {2, 7}
    free, said = bench.token_ids(3), bench.token_ids(2)
    for word in ([5], [6, 7], [8, 8, 9]):
        assert any(free[i : i + len(word)] == word for i in range(100))
        assert not any(said[i : i + len(word)] == word for i in range(100))


def test_a_request_that_may_say_nothing_fails_alone(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.run(make_request(1, max_tokens=9, allowed_token_ids=(2,), bad_words=((2, 2),)), make_request(2, max_tokens=3))
    failed = [event for event in bench.events if isinstance(event, Failed)]
    assert [(event.request_id, event.kind) for event in failed] == [(1, FailureKind.INVALID)]
    assert len(bench.token_ids(2)) == 3


def test_max_tokens_and_the_context_end_a_request_with_length(make_request: MakeRequest) -> None:
    bench = Bench(max_model_tokens=8)
    bench.run(make_request(1, max_tokens=3), make_request(2, max_tokens=99), make_request(3, prompt=(1,) * 7))
    assert [len(bench.token_ids(i)) for i in (1, 2, 3)] == [3, 5, 1]
    ends = [event for event in bench.events if isinstance(event, Finished)]
    assert {end.reason for end in ends} == {FinishReason.LENGTH}


def test_abort_between_steps_ends_the_request(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.submit(make_request(1, max_tokens=9), make_request(2, max_tokens=9))
    bench.step()
    assert bench.loop.abort(RequestId(1)) == [finished(1, FinishReason.ABORT)]
    assert bench.loop.abort(RequestId(1)) == []
    assert bench.loop.abort(RequestId(77)) == []
    bench.run()
    assert (len(bench.token_ids(1)), len(bench.token_ids(2))) == (1, 9)


# Log-probabilities


def test_logprobs_are_given_when_asked_and_only_then(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.run(make_request(1, max_tokens=3), make_request(2, max_tokens=3, logprobs=0))
    for event in bench.events:
        if isinstance(event, Tokens):
            assert (event.logprobs is None) == (event.request_id == 1)
            assert event.prompt_logprobs is None
            if event.logprobs is not None:
                assert event.logprobs == (TokenLogprobs(-0.5, 1, (), ()),)


def test_logprobs_name_the_token_first_and_no_more_tokens_than_there_are(make_request: MakeRequest) -> None:
    bench = Bench(num_token_ids=4)
    bench.run(make_request(1, max_tokens=5, logprobs=20))
    for event in bench.events:
        if isinstance(event, Tokens):
            assert event.logprobs is not None
            assert event.logprobs[0].top_ids[0] == event.token_ids[0]
            assert sorted(event.logprobs[0].top_ids) == [0, 1, 2, 3]
            assert event.logprobs[0].top_logprobs == (-0.5, -1.5, -2.5, -3.5)


def test_prompt_logprobs_come_once_before_the_first_token(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.run(make_request(1, prompt=(5, 6, 7), max_tokens=2, prompt_logprobs=1))
    assert bench.events[1] == Tokens(
        RequestId(1), (), None, (TokenLogprobs(-0.5, 1, (6,), (-0.5,)), TokenLogprobs(-0.5, 1, (7,), (-0.5,)))
    )
    assert all(event.prompt_logprobs is None for event in bench.events[2:] if isinstance(event, Tokens))


def test_request_that_only_scores_its_prompt_generates_nothing(make_request: MakeRequest) -> None:
    bench = Bench(max_model_tokens=3)
    bench.run(
        make_request(1, max_tokens=0, prompt_logprobs=0), make_request(2, prompt=(1,), max_tokens=0, prompt_logprobs=0)
    )
    kinds = [(event.request_id, type(event)) for event in bench.events]
    assert kinds == [(1, Scheduled), (1, Tokens), (1, Finished), (2, Scheduled), (2, Finished)]
    assert bench.loop.stats().generated_tokens == 0


# Refusals and numbers


def test_what_it_cannot_serve_is_refused_with_the_reason(make_request: MakeRequest) -> None:
    bench = Bench(num_token_ids=10, max_model_tokens=4)
    sampling = SamplingParams(max_tokens=1)
    bench.submit(
        make_request(1, grammar=Grammar(kind=GrammarKind.REGEX, text="a")),
        make_request(2, prompt=(1, 2, 3, 4)),
        make_request(3, prompt=(1, 10)),
        GenerateRequest(request_id=RequestId(4), prompt_token_ids=(1,), sampling=sampling, lora="x"),
        make_request(5, min_tokens=1, stop_token_ids=tuple(range(10))),
        make_request(6, allowed_token_ids=(3, 10)),
        make_request(7, prompt=(1, 9)),
    )
    assert [(event.request_id, type(event)) for event in bench.events] == [(i, Failed) for i in range(1, 7)]
    messages = [event.message for event in bench.events if isinstance(event, Failed)]
    reasons = ["grammar", "context", "token id 10", "adapters", "stop token", "allowed_token_ids"]
    for message, word in zip(messages, reasons, strict=True):
        assert word in message
    assert all(event.kind is FailureKind.INVALID for event in bench.events if isinstance(event, Failed))
    assert bench.loop.stats().failed_requests == 6


def test_stats_count(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.run(make_request(1, max_tokens=3), make_request(2, prompt=(1,), max_tokens=5))
    stats = bench.loop.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens, stats.running) == (5, 4, 8, 0)


def test_close_forgets_everything_and_may_come_twice(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.submit(make_request(1))
    bench.loop.close()
    bench.loop.close()
    assert not bench.loop.busy
    assert bench.loop.stats().running == 0


def test_info_shows_the_options() -> None:
    options = SimulatedOptions(model="m", num_token_ids=9, eos_token_ids=(8,), rows_per_step=3, max_waiting=4)
    info = SimulatedLoop(options).info
    assert (info.model, info.num_token_ids, info.eos_token_ids) == ("m", 9, (8,))
    assert (info.max_num_seqs, info.max_waiting, info.family) == (3, 4, "simulated")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows_per_step", 0),
        ("num_token_ids", 0),
        ("max_model_tokens", 0),
        ("max_waiting", 0),
        ("first_token_id", -1),
        ("first_token_id", 1000),
        ("eos_token_ids", (1000,)),
        ("ttft_s", -0.1),
        ("tpot_s", 3600.0),
        ("tpot_s", float("nan")),
    ],
)
def test_options_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SimulatedOptions(**{field: value})
    assert caught.value.field == field


def test_drafts_change_no_token_and_bring_several_in_one_event(make_request: MakeRequest) -> None:
    plain, drafting = Bench(num_token_ids=50), Bench(num_token_ids=50, drafts_per_step=3, acceptance_rate=0.6)
    requests = [
        make_request(index, prompt=(index, 2, 3), max_tokens=max_tokens, logprobs=1, **fields)
        for index, (max_tokens, fields) in enumerate(
            [(40, {}), (1, {}), (2, {}), (40, {"stop_token_ids": (3, 7, 11, 30)}), (3, {"min_tokens": 3})]
        )
    ]
    for bench in (plain, drafting):
        bench.run(*requests)
    for request in requests:
        assert drafting.token_ids(request.request_id) == plain.token_ids(request.request_id)
    ends = [{e.request_id: e for e in bench.events if isinstance(e, Finished)} for bench in (plain, drafting)]
    assert ends[0] == ends[1]
    tokens = [event for event in drafting.events if isinstance(event, Tokens)]
    assert {len(event.token_ids) for event in tokens} == {1, 2, 3, 4}
    assert all(event.logprobs is not None and len(event.logprobs) == len(event.token_ids) for event in tokens)
    stats = drafting.loop.stats()
    assert stats.steps < plain.loop.stats().steps
    assert stats.spec_decode_num_draft_tokens == 3 * stats.spec_decode_num_drafts > 0
    assert sum(stats.spec_decode_num_accepted_tokens_per_pos) == stats.spec_decode_num_accepted_tokens > 0


@pytest.mark.parametrize(("rate", "tokens_per_step"), [(0.0, 1), (1.0, 5)])
def test_acceptance_rate_is_none_or_all_of_the_drafts(
    make_request: MakeRequest, rate: float, tokens_per_step: int
) -> None:
    bench = Bench(drafts_per_step=4, acceptance_rate=rate)
    bench.run(make_request(0, prompt=(1, 2), max_tokens=21))
    counts = [len(event.token_ids) for event in bench.events if isinstance(event, Tokens)]
    assert counts == [1, *[tokens_per_step] * (20 // tokens_per_step)]


def test_acceptance_rate_is_the_share_of_drafts_accepted_after_accepted_ones(make_request: MakeRequest) -> None:
    bench = Bench(drafts_per_step=2, acceptance_rate=0.7)
    bench.run(*(make_request(index, prompt=(index, 5), max_tokens=200) for index in range(20)))
    stats = bench.loop.stats()
    first, second = stats.spec_decode_num_accepted_tokens_per_pos
    assert first / stats.spec_decode_num_drafts == pytest.approx(0.7, abs=0.05)
    assert second / first == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize("options", [{"drafts_per_step": -1}, {"drafts_per_step": 65}, {"acceptance_rate": 1.5}])
def test_options_of_drafts_are_range_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        SimulatedOptions(**options)
