"""What is kept of responses, and what makes room."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    failed = store.find("a", "")
    failed.response.status = "failed"
    store.weigh(failed)
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


class CountedRecord(ResponseRecord):
    """A record that counts how often the store asks whether one has ended."""

    num_looks = 0

    @property
    def ended(self) -> bool:
        CountedRecord.num_looks += 1
        return super().ended


def test_adding_one_looks_at_few_of_those_that_are_kept():
    store = ResponseStore(max_responses=500, max_bytes=10**9)

    def add(number: int, status: str) -> None:
        response = ResponseObject(id=f"r{number}", created_at=0, model="parrot", status=status)
        store.add(CountedRecord(response, [], "", f"owner {number % 50}"))

    for number in range(500):
        add(number, "completed" if number % 2 else "in_progress")
    CountedRecord.num_looks = 0
    for number in range(500, 550):
        add(number, "completed")
    assert len(store) == 500
    assert CountedRecord.num_looks <= 4 * 50  # 500 for each that is added where all are looked at


class Reference:
    """What is kept, by looking at all."""

    def __init__(self, max_responses: int) -> None:
        self.max_responses = max_responses
        self.kept: dict[str, tuple[str, bool]] = {}  # owner, and whether it has ended; the youngest last

    def add(self, name: str, owner: str, *, ended: bool) -> None:
        while len(self.kept) >= self.max_responses:
            owned = Counter(owner for owner, _ in self.kept.values())
            oldest: dict[str, str] = {}
            for each, (its_owner, has_ended) in self.kept.items():
                if has_ended:
                    oldest.setdefault(its_owner, each)
            if not oldest:
                return
            del self.kept[oldest[max(oldest, key=lambda owner: owned[owner])]]
        self.kept[name] = (owner, ended)


STEPS = st.lists(st.tuples(st.sampled_from(["add", "begin", "end", "find", "remove"]), st.integers(0, 30)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_what_makes_room_is_what_looking_at_all_would_choose(steps):
    store, reference = ResponseStore(max_responses=6, max_bytes=10**9), Reference(6)
    records = {}
    for number, (what, choice) in enumerate(steps):
        if what in {"add", "begin"}:
            name, owner = f"r{number}", "abcd"[choice % 4]
            made = record(name, owner=owner, status="completed" if what == "add" else "in_progress")
            try:
                store.add(made)
            except ApiError:  # its share of what is in the making, which the reference does not know
                continue
            records[name] = made
            reference.add(name, owner, ended=what == "add")
        elif reference.kept:
            name = sorted(reference.kept)[choice % len(reference.kept)]
            if what == "remove":
                store.remove(records[name])
                del reference.kept[name]
            elif what == "find" and is_kept(store, name, ""):
                reference.kept[name] = reference.kept.pop(name)
            elif what == "end" and not reference.kept[name][1]:
                records[name].response.status = "completed"
                store.weigh(records[name])
                reference.kept[name] = (reference.kept.pop(name)[0], True)
        assert len(store) == len(reference.kept)
    # Looked for at the end alone: what is found becomes the youngest.
    assert {name for name in records if is_kept(store, name, "")} == set(reference.kept)
