"""Refusals (429) of one who asks again and again come no faster than their pace."""

from openinfer_server.http.api_errors import RETRY_AFTER_S
from openinfer_server.limits.refusals import BURST, MOST_WAITING, MOST_WAITING_IN_ALL, RATE_PER_S, RefusalPace


def ended(pace: RefusalPace, owner: str, *, now_s: float) -> float:
    wait_s = pace.begin(owner, now_s=now_s)
    if wait_s:
        pace.end(owner)
    return wait_s


def test_a_burst_is_refused_at_once_and_what_follows_by_the_pace():
    pace = RefusalPace()
    assert [ended(pace, "a", now_s=100.0) for _ in range(BURST)] == [0.0] * BURST
    waits_s = [ended(pace, "a", now_s=100.0) for _ in range(3)]
    assert waits_s == [1 / RATE_PER_S, 2 / RATE_PER_S, 3 / RATE_PER_S]
    assert ended(pace, "b", now_s=100.0) == 0.0


def test_no_refusal_waits_longer_than_it_tells_its_client_to():
    pace = RefusalPace()
    waits_s = [ended(pace, "a", now_s=5.0) for _ in range(1000)]
    assert max(waits_s) == waits_s[-1] == RETRY_AFTER_S


def test_one_who_waits_as_long_as_it_is_told_to_is_refused_at_once():
    pace = RefusalPace()
    for second in range(100):
        assert ended(pace, "a", now_s=second * float(RETRY_AFTER_S)) == 0.0
    for _ in range(1000):
        ended(pace, "a", now_s=200.0)
    assert ended(pace, "a", now_s=200.0 + 2 * RETRY_AFTER_S + 1 / RATE_PER_S) == 0.0


def test_few_wait_at_a_time_of_one_owner_and_of_all():
    pace = RefusalPace()

    def flood(owner: str) -> int:
        return sum(pace.begin(owner, now_s=7.0) > 0 for _ in range(1000))

    assert flood("a") == MOST_WAITING
    pace.end("a")
    assert flood("a") == 1
    assert sum(flood(f"of {number}") for number in range(100)) == MOST_WAITING_IN_ALL - MOST_WAITING
    assert pace.num_waiting == MOST_WAITING_IN_ALL
    for _ in range(MOST_WAITING):
        pace.end("a")
    assert pace.num_waiting == MOST_WAITING_IN_ALL - MOST_WAITING


def test_owners_that_were_refused_long_ago_are_forgotten():
    pace = RefusalPace()
    for number in range(5000):
        ended(pace, f"of {number}", now_s=3.0)
    assert len(pace._next_s) <= 1024
