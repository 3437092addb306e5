"""The adapters of an engine: what all ranks hold, whatever is loaded, unloaded and dropped at the same time."""

import threading
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.control import LoadAdapter, LoadStep
from openinfer_core.process.wire import ENDED
from openinfer_core.scheduling import AdapterLoad
from openinfer_engine.lora.adapter_config import CONFIG_FILE
from openinfer_engine.lora.adapter_folder import WEIGHTS_FILE, Adapter
from openinfer_engine.lora.store import AdapterStore

SIZE = 100


class Rank:
    """Counts what it holds; reads a folder's name as its content, when `gate` lets it."""

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.refuses = False

    def read(self, folder: Path) -> Adapter:
        assert self.gate.wait(20)
        if not folder.exists():
            raise InvalidCheckpoint(f"{folder} is not there")
        content = (folder / WEIGHTS_FILE).read_bytes().ljust(16, b".")
        return Adapter(digest=content, rank=1)

    def hold(self, adapter: Adapter, folder: Path | None = None) -> int:
        del folder
        if self.refuses:
            raise Refused("this rank has no room")
        self.held[adapter.digest] = self.held.get(adapter.digest, 0) + 1
        return SIZE

    def prepare(self) -> None:
        pass

    def drop(self, digest: bytes) -> None:
        self.held[digest] -= 1
        if not self.held[digest]:
            del self.held[digest]

    def place(self, load: AdapterLoad) -> None:
        assert load.digest in self.held


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG_FILE).write_text("{}")
        (tmp_path / name / WEIGHTS_FILE).write_text(name)
    return tmp_path


@pytest.fixture
def ranks() -> list[Rank]:
    return [Rank(), Rank(), Rank()]


def make(ranks: list[Rank], root: Path | None, *, max_bytes: int = 10**9) -> AdapterStore:
    first: Any = ranks[0]
    return AdapterStore(first, others=ranks[1:], max_bytes=max_bytes, root=root)


def load(store: AdapterStore, name: str, path: str, **fields: Any) -> str | None:
    answers: list[str | None] = []
    store.begin_load(LoadAdapter(name, path, **fields), answers.append)
    while not answers:
        store.wait(0.01)
        store.settle()
    return answers[0]


def digest(store: AdapterStore, name: str) -> bytes:
    found = store.find(name, tenant="")
    assert found is not None
    return found.digest


def test_all_ranks_hold_what_is_named_and_none_what_is_unloaded(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root)
    assert load(store, "one", "a") is load(store, "same", "a") is load(store, "other", "b") is None
    assert digest(store, "one") == digest(store, "same")
    assert all(rank.held == {b"a".ljust(16, b"."): 1, b"b".ljust(16, b"."): 1} for rank in ranks)
    assert store.unload("one") is None  # another name stands for it
    content = store.unload("same")
    assert content is not None
    store.forget(content)
    assert all(list(rank.held) == [b"b".ljust(16, b".")] for rank in ranks)
    with pytest.raises(Refused, match="no LoRA adapter is loaded"):
        store.unload("same")
    store.close()


def test_rank_that_cannot_hold_one_leaves_none_held(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root)
    assert load(store, "one", "a") is None
    ranks[2].refuses = True
    assert load(store, "again", "a") == load(store, "two", "b") == "this rank has no room"
    assert all(rank.held == {b"a".ljust(16, b"."): 1} for rank in ranks)
    assert store.find("two", tenant="") is None
    store.close()


def test_content_that_is_dropped_while_it_is_read_under_another_name_is_still_held(
    ranks: list[Rank], root: Path
) -> None:
    store = make(ranks, root, max_bytes=0)
    assert load(store, "one", "a") is None
    assert not ranks[0].held  # there is room for none
    ranks[0].gate.clear()
    answers: list[str | None] = []
    store.hold(digest(store, "one"))
    store.begin_load(LoadAdapter("two", "a"), answers.append)
    assert store.settle() == []
    assert store.is_loading
    ranks[0].gate.set()
    while not answers or store.is_loading:
        store.wait(0.01)
        store.settle()
    assert store.is_held(digest(store, "two"))
    assert all(rank.held == {b"a".ljust(16, b"."): 1} for rank in ranks)
    store.close()


def test_memory_is_bounded_but_for_what_a_slot_waits_for(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root, max_bytes=2 * SIZE * len(ranks))
    for name in "abcd":
        assert load(store, name, name) is None
    assert {bytes(each[:1]) for each in ranks[0].held} == {b"c", b"d"}
    for name in "ab":
        store.hold(digest(store, name))
    while store.is_loading:
        store.wait(0.01)
        store.settle()
    assert {bytes(each[:1]) for each in ranks[0].held} == {b"a", b"b"}
    for name in "cd":
        store.hold(digest(store, name))
    while store.is_loading:
        store.wait(0.01)
        store.settle()
    assert len(ranks[0].held) == 4  # all are waited for
    for name in "abcd":
        store.release(digest(store, name))
    store.settle()
    assert len(ranks[0].held) == 2
    store.close()


def test_what_a_plan_needs_stays_until_it_was_applied(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root, max_bytes=0)
    assert load(store, "one", "a") is None
    content = digest(store, "one")
    store.hold(content)
    while store.is_loading:
        store.wait(0.01)
        store.settle()
    store.pin(content)
    assert store.unload("one") == content
    store.forget(content)
    store.settle()
    assert ranks[0].held
    store.unpin(content)
    assert not any(rank.held for rank in ranks)
    assert not store.is_held(content)
    store.close()


def test_content_that_requests_wait_for_stays_though_no_name_stands_for_it(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root)
    waiting = {b"a".ljust(16, b"."): 1}
    store.count_waiting_by(lambda digest: waiting.get(digest, 0))
    assert load(store, "one", "a") is None
    a = digest(store, "one")
    assert load(store, "one", "b", in_place=True) is None
    assert store.is_held(a)
    waiting.clear()
    store.forget(a)
    assert all(rank.held == {digest(store, "one"): 1} for rank in ranks)
    store.close()


def test_folder_that_has_changed_is_a_loss_whose_reason_is_told_to_operators_alone(
    ranks: list[Rank], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(ranks, root, max_bytes=0)
    assert load(store, "one", "a") is None
    (root / "a" / WEIGHTS_FILE).write_text("other")
    store.hold(digest(store, "one"))
    losses: list[Any] = []
    while store.is_loading:
        store.wait(0.01)
        losses += store.settle()
    assert [each.digest for each in losses] == [digest(store, "one")]
    assert losses[0].message == "the adapter could not be read again, and the log says why"
    assert "the adapter of one could not be read again: the folder of this adapter, a, has changed" in caplog.text
    assert not any(rank.held for rank in ranks)
    store.close()


def test_name_that_was_taken_meanwhile_is_not_overwritten(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root)
    ranks[0].gate.clear()
    answers: list[str | None] = []
    for path in "ab":
        store.begin_load(LoadAdapter("one", path), answers.append)
    ranks[0].gate.set()
    while len(answers) < 2:
        store.wait(0.01)
        store.settle()
    assert sorted(each is None for each in answers) == [False, True]
    assert all(len(rank.held) == 1 for rank in ranks)
    store.close()


def test_load_that_is_under_way_at_the_end_is_answered(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root)
    answers: list[str | None] = []
    store.begin_load(LoadAdapter("one", "a"), answers.append)
    store.close()
    store.close()
    assert answers == [ENDED]


@pytest.mark.parametrize("name", [" a", "a\n", "a\x00b", "\u202ea"])
def test_names_that_would_not_be_seen_are_refused(ranks: list[Rank], root: Path, name: str) -> None:
    store = make(ranks, root)
    with pytest.raises(Refused, match="no name of an adapter may have"):
        store.begin_load(LoadAdapter(name, "a"), lambda refusal: None)
    store.close()


@pytest.mark.parametrize("path", ["..", "../x", "/etc", "a/../..", "a\x00", "missing", "a/adapter_config.json"])
def test_paths_that_are_no_folder_below_the_root_are_refused(ranks: list[Rank], root: Path, path: str) -> None:
    store = make(ranks, root)
    with pytest.raises(Refused, match=r"--lora-root|cannot be resolved"):
        store.begin_load(LoadAdapter("one", path), lambda refusal: None)
    store.close()


def test_links_that_leave_the_root_are_refused_and_others_followed(ranks: list[Rank], root: Path) -> None:
    (root / "inside").mkdir()
    outside = root / "a"
    inner = root / "inside"
    (inner / "folder").symlink_to(outside)
    (inner / "file").mkdir()
    (inner / "file" / CONFIG_FILE).write_text("{}")
    (inner / "file" / WEIGHTS_FILE).symlink_to(outside / WEIGHTS_FILE)
    store = make(ranks, inner)
    for path in ("folder", "file"):
        with pytest.raises(Refused, match="does not lie below --lora-root"):
            store.begin_load(LoadAdapter("one", path), lambda refusal: None)
    store.close()
    wider = make(ranks, root)
    assert load(wider, "one", "inside/folder") is load(wider, "two", "inside/file") is None
    wider.close()
    none = make(ranks, None)
    with pytest.raises(Refused, match="--lora-root alone, and it was not given"):
        none.begin_load(LoadAdapter("one", "a"), lambda refusal: None)
    none.close()


def test_what_is_held_first_changes_no_name_until_it_is_named(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root)
    a, b, c = (each.ljust(16, b".") for each in (b"a", b"b", b"c"))
    assert load(store, "one", "a") is None
    assert load(store, "one", "b", in_place=True, step=LoadStep.HOLD) is None
    assert digest(store, "one") == a
    assert all(rank.held == {a: 1, b: 1} for rank in ranks)
    (root / "b" / WEIGHTS_FILE).write_text("c")  # what was held counts, not what is there by then
    assert load(store, "one", "b", in_place=True, step=LoadStep.NAME) is None
    assert digest(store, "one") == b
    assert all(rank.held == {b: 1} for rank in ranks)
    for path in ("a", "b"):  # the second is kept in the place of the first
        assert load(store, "one", path, in_place=True, step=LoadStep.HOLD) is None
    assert all(rank.held == {b: 1, c: 1} for rank in ranks)
    for _ in range(2):
        assert load(store, "one", "b", in_place=True, step=LoadStep.DROP) is None
    assert all(rank.held == {b: 1} for rank in ranks)
    with pytest.raises(Refused, match="no adapter is held for the name"):
        load(store, "one", "b", in_place=True, step=LoadStep.NAME)
    store.close()


def test_what_is_held_for_one_load_is_neither_named_nor_dropped_by_another(ranks: list[Rank], root: Path) -> None:
    """Two operators replace one name at once, on several replicas: each says for whom its own content is."""
    store = make(ranks, root)
    gold: dict[str, Any] = {"path": "a", "in_place": True, "tenants": ("gold",)}
    silver: dict[str, Any] = {"path": "b", "in_place": True, "tenants": ("silver",)}
    for each in (gold, silver):
        assert load(store, "one", **each, step=LoadStep.HOLD) is None
    with pytest.raises(Refused, match="another one was loaded meanwhile"):
        load(store, "one", **gold, step=LoadStep.NAME)
    assert load(store, "one", **gold, step=LoadStep.DROP) is None
    assert load(store, "one", **silver, step=LoadStep.NAME) is None
    assert store.find("one", tenant="gold") is None
    found = store.find("one", tenant="silver")
    assert found is not None
    assert found.digest == b"b".ljust(16, b".")
    assert all(rank.held == {found.digest: 1} for rank in ranks)
    store.close()


def test_what_is_held_first_is_refused_as_a_load_is_and_counts_as_memory(ranks: list[Rank], root: Path) -> None:
    store = make(ranks, root, max_bytes=4 * SIZE)
    assert load(store, "one", "a") is None
    with pytest.raises(Refused, match="unload it, or load with load_inplace"):
        load(store, "one", "b", step=LoadStep.HOLD)
    ranks[2].refuses = True
    assert load(store, "one", "b", in_place=True, step=LoadStep.HOLD) == "this rank has no room"
    ranks[2].refuses = False
    assert all(rank.held == {b"a".ljust(16, b"."): 1} for rank in ranks)
    assert load(store, "one", "b", in_place=True, step=LoadStep.HOLD) is None
    store.settle()
    assert not store.is_held(b"a".ljust(16, b".")), "it is read again when a request needs it"
    assert all(rank.held == {b"b".ljust(16, b"."): 1} for rank in ranks)
    store.close()
