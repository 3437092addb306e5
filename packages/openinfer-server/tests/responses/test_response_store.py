"""What is kept of responses, and what makes room."""

import pytest

from openinfer_server.http.api_errors import ApiError
from openinfer_server.responses.items import MessageItem
from openinfer_server.responses.objects import ResponseObject
from openinfer_server.responses.store import ResponseRecord, ResponseStore


def record(
    name: str, *, status: str = "completed", tenant: str = "", text: str = "", owner: str | None = None
) -> ResponseRecord:
    response = ResponseObject(id=name, created_at=0, model="parrot", status=status)
    items = [MessageItem(role="user", content=text)]
    return ResponseRecord(response, items, tenant, tenant if owner is None else owner)


@pytest.fixture
def store() -> ResponseStore:
    return ResponseStore(max_responses=3, max_bytes=10_000)


def is_kept(store: ResponseStore, name: str, tenant: str) -> bool:
    try:
        store.find(name, tenant)
    except ApiError:
        return False
    return True


def names(store: ResponseStore, tenant: str = "") -> set[str]:
    return {name for name in "abcdef" if is_kept(store, name, tenant)}


def test_oldest_makes_room_and_being_found_makes_young(store):
    for name in "abc":
        store.add(record(name))
    store.find("a", "")
    store.add(record("d"))
    assert names(store) == {"a", "c", "d"}


def test_bytes_make_room_too(store):
    for name in "abc":
        store.add(record(name, text="x" * 4000))
    assert names(store) == {"b", "c"}
    assert store.num_bytes < 10_000
    store.add(record("d", text="x" * 20_000))
    assert names(store) == set()
    assert store.num_bytes == 0


def test_response_in_the_making_is_never_thrown_out(store):
    for name in "abc":
        store.add(record(name, status="in_progress"))
    with pytest.raises(ApiError) as error:
        store.add(record("d"))
    assert error.value.status == 429
    assert names(store) == {"a", "b", "c"}
    store.find("a", "").response.status = "failed"
    store.add(record("d"))
    assert names(store) == {"b", "c", "d"}


def test_response_is_weighed_again_when_it_has_ended(store):
    made = record("a", status="in_progress")
    store.add(made)
    before = store.num_bytes
    made.items[0] = MessageItem(role="user", content="x" * 1000)
    store.weigh(made)
    assert store.num_bytes == before + 1000
    store.remove(made)
    store.weigh(made)
    assert store.num_bytes == 0


def test_response_of_another_tenant_is_not_there(store):
    store.add(record("a", tenant="ann"))
    assert names(store, "ann") == {"a"}
    assert names(store, "bob") == set()


def test_owner_with_most_responses_makes_room():
    store = ResponseStore(max_responses=4, max_bytes=10**6)
    store.add(record("a", owner="quiet", text="x" * 1000))
    for name in "bcdef":
        store.add(record(name, owner="flood"))
    assert names(store) == {"a", "d", "e", "f"}
    assert [(use.used, use.limit, use.refused) for use in store.uses()] == [(4, 4, 0), (store.num_bytes, 10**6, 2)]


def test_owner_with_most_bytes_makes_room():
    store = ResponseStore(max_responses=100, max_bytes=12_000)
    for name in "ab":
        store.add(record(name, owner="quiet"))
    for name in "cdef":
        store.add(record(name, owner="flood", text="x" * 4000))
    assert names(store) == {"a", "b", "e", "f"}


def test_one_owners_background_responses_leave_room_for_anothers():
    store = ResponseStore(max_responses=8, max_bytes=10**6)

    def begin(owner: str, number: int) -> None:
        store.add(record(f"{owner}{number}", owner=owner, status="in_progress"))

    for number in range(6):
        begin("flood", number)
    with pytest.raises(ApiError, match="6 of them are yours") as refusal:
        begin("flood", 6)
    assert refusal.value.status == 429
    for number in range(2):
        begin("quiet", number)
    with pytest.raises(ApiError) as refusal:
        begin("third", 0)
    assert refusal.value.status == 503
    assert [use.refused for use in store.uses()] == [2, 0]
    assert len(store) == 8
