"""Whatever a mad scheduler says, each request gets exactly one terminal event, with the ledger's counts."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openinfer_core import (
    ContractViolation,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    Ledger,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    Tokens,
)

NUM_IDS = 5


def request(request_id: int, prompt_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(range(prompt_tokens)),
        sampling=SamplingParams(max_tokens=9),
    )


def finished(request_id: int, *, reason: FinishReason = FinishReason.LENGTH, stop: int | None = None) -> Finished:
    return Finished(RequestId(request_id), reason, 999, 999, 999, stop)


ids = st.integers(0, NUM_IDS + 1).map(RequestId)  # two of them are never opened
counts = st.integers(0, 100)
mad_events: st.SearchStrategy[TokenEvent] = st.one_of(
    st.builds(Scheduled, ids, counts, st.floats(0, 9)),
    st.builds(Tokens, ids, st.lists(counts, max_size=4).map(tuple)),
    st.builds(Finished, ids, st.sampled_from(FinishReason), counts, counts, counts, st.none() | counts),
    st.builds(Failed, ids, st.sampled_from(FailureKind), st.just("no")),
)


@given(st.lists(st.lists(mad_events, max_size=20), max_size=6))
def test_ledger_lets_exactly_one_terminal_event_through_for_each_request(batches: list[list[TokenEvent]]) -> None:
    ledger = Ledger()
    for request_id in range(NUM_IDS):
        ledger.open(request(request_id, prompt_tokens=request_id + 1))
    recorded = [event for batch in batches for event in ledger.record(batch)]
    assert ledger.dropped_events == sum(map(len, batches)) - len(recorded)
    delivered: dict[int, list[TokenEvent]] = defaultdict(list)
    for event in recorded + ledger.fail_all(FailureKind.SHUTDOWN, "end"):
        delivered[event.request_id].append(event)
    assert len(ledger) == 0
    assert sorted(delivered) == list(range(NUM_IDS))
    for request_id, events in delivered.items():
        *before, last = events
        assert isinstance(last, (Finished, Failed))
        assert not any(isinstance(event, (Finished, Failed)) for event in before)
        scheduled = [event for event in before if isinstance(event, Scheduled)]
        assert len(scheduled) <= 1
        if isinstance(last, Finished):
            sampled = sum(len(event.token_ids) for event in before if isinstance(event, Tokens))
            assert last.prompt_tokens == request_id + 1
            assert last.completion_tokens == sampled + (last.stop_token_id is not None)
            assert last.cached_tokens == (scheduled[0].cached_tokens if scheduled else 0)


def test_ledger_keeps_what_a_terminal_event_says_beside_its_counts() -> None:
    ledger = Ledger()
    ledger.open(request(1))
    events = ledger.record(
        [Scheduled(RequestId(1), 2, 0.5), Tokens(RequestId(1), (4, 5)), finished(1, reason=FinishReason.STOP, stop=7)]
    )
    assert events[2] == Finished(RequestId(1), FinishReason.STOP, 3, 3, 2, 7)


def test_ledger_drops_and_counts_events_after_the_end_and_of_strangers() -> None:
    ledger = Ledger()
    ledger.open(request(1))
    late = Tokens(RequestId(1), (1,))
    assert ledger.record([finished(1), late, finished(1), Tokens(RequestId(2), (1,))]) == [
        Finished(RequestId(1), FinishReason.LENGTH, 3, 0, 0)
    ]
    assert ledger.dropped_events == 3


def test_ledger_says_scheduled_once_though_a_preempted_request_is_scheduled_again() -> None:
    ledger = Ledger()
    ledger.open(request(1))
    first = Scheduled(RequestId(1), 0, 0.5)
    assert ledger.record([first, Scheduled(RequestId(1), 2, 0.9)]) == [first]
    assert ledger.dropped_events == 1


def test_ledger_knows_who_is_open() -> None:
    ledger = Ledger()
    for request_id in (4, 2, 3):
        ledger.open(request(request_id))
    ledger.record([finished(2)])
    assert ledger.open_ids == (4, 3)
    assert (4 in ledger, 2 in ledger, len(ledger)) == (True, False, 2)


def test_ledger_open_with_an_id_in_use_is_a_violation_and_after_its_end_is_not() -> None:
    ledger = Ledger()
    ledger.open(request(1))
    with pytest.raises(ContractViolation, match="request id 1 is in use"):
        ledger.open(request(1))
    ledger.record([finished(1)])
    ledger.open(request(1))


def test_fail_all_fails_the_open_ones_oldest_first() -> None:
    ledger = Ledger()
    for request_id in (3, 1):
        ledger.open(request(request_id))
    assert ledger.fail_all(FailureKind.SHUTDOWN, "bye") == [
        Failed(RequestId(3), FailureKind.SHUTDOWN, "bye"),
        Failed(RequestId(1), FailureKind.SHUTDOWN, "bye"),
    ]
    assert ledger.fail_all(FailureKind.SHUTDOWN, "bye") == []
