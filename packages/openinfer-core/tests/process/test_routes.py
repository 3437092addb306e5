"""Several clients use the same ids, and each gets its own events."""

import pytest

from openinfer_core import (
    ContractViolation,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    RequestId,
    Scheduled,
    TokenEvent,
    Tokens,
)
from openinfer_core.process.routes import Routes


def tokens(request_id: int) -> Tokens:
    return Tokens(RequestId(request_id), (7,))


def finished(request_id: int) -> Finished:
    return Finished(RequestId(request_id), FinishReason.LENGTH, 1, 1, 0)


def test_one_clients_requests_keep_their_ids_and_its_events_are_not_copied() -> None:
    routes: Routes[str] = Routes()
    assert routes.add("a", RequestId(5)) == 5
    event = tokens(5)
    assert routes.sort([event])["a"][0] is event


def test_two_clients_with_the_same_id_each_get_their_own_events_under_it() -> None:
    routes: Routes[str] = Routes()
    first, second = routes.add("a", RequestId(5)), routes.add("b", RequestId(5))
    assert first != second
    events: list[TokenEvent] = [
        Scheduled(second, 0, 0.5),
        tokens(first),
        Failed(second, FailureKind.INTERNAL, "no"),
        finished(first),
    ]
    assert routes.sort(events) == {
        "b": [Scheduled(RequestId(5), 0, 0.5), Failed(RequestId(5), FailureKind.INTERNAL, "no")],
        "a": [tokens(5), finished(5)],
    }


def test_a_clients_id_in_use_is_a_violation_until_its_terminal_event() -> None:
    routes: Routes[str] = Routes()
    routes.add("a", RequestId(5))
    second = routes.add("b", RequestId(5))
    for client in ("a", "b"):
        with pytest.raises(ContractViolation, match="request id 5 is in use"):
            routes.add(client, RequestId(5))
    routes.sort([finished(second)])
    assert routes.find("b", RequestId(5)) is None
    routes.add("b", RequestId(5))


def test_an_id_that_another_client_got_as_a_spare_one_is_renamed_too() -> None:
    routes: Routes[str] = Routes()
    routes.add("a", RequestId(5))
    spare = routes.add("b", RequestId(5))
    inner = routes.add("c", spare)
    assert inner not in (5, spare)
    assert routes.sort([tokens(inner), tokens(spare)]) == {"c": [tokens(spare)], "b": [tokens(5)]}


def test_find_gives_the_engines_id_to_its_client_alone() -> None:
    routes: Routes[str] = Routes()
    routes.add("a", RequestId(5))
    inner = routes.add("b", RequestId(5))
    assert routes.find("b", RequestId(5)) == inner
    assert routes.find("c", RequestId(5)) is None
    assert routes.find("b", RequestId(6)) is None


def test_dropped_clients_requests_are_named_and_their_events_lead_nowhere() -> None:
    routes: Routes[str] = Routes()
    routes.add("a", RequestId(1))
    kept, gone = routes.add("b", RequestId(1)), routes.add("b", RequestId(2))
    routes.sort([finished(kept)])
    assert routes.drop("b") == [gone]
    assert routes.drop("b") == []
    assert routes.sort([tokens(gone), tokens(1)]) == {"a": [tokens(1)]}


def test_an_id_of_a_dropped_client_stays_taken_until_the_engine_has_ended_it() -> None:
    routes: Routes[str] = Routes()
    routes.add("a", RequestId(1))
    routes.drop("a")
    assert routes.add("b", RequestId(1)) != 1
    routes.sort([finished(1)])
    assert routes.add("c", RequestId(1)) == 1


def test_events_of_unknown_requests_lead_nowhere() -> None:
    assert Routes[str]().sort([tokens(9), finished(9)]) == {}
