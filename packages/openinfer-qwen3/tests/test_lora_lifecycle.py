"""Adapters of engines that sleep and change their weights: slots come back, and KV is of adapter and weights."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lifecycle_models import CPU_CONFIG as CONFIG
from lifecycle_models import LEVELS, RANKS, SMALL, MakeLoop, opened_loops, write_adapted

from openinfer_core import (
    EngineCapability,
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    Refused,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
)
from openinfer_core.control import LoadAdapter, Pause, Resume, Sleep, UnloadAdapter, UpdateWeights, Wake
from openinfer_core.engine import EngineState
from openinfer_engine import StepLoop
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.testing import Answer
from openinfer_engine.testing.answers import run_at_once
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")

ADAPTERS = {"two": 2, "eight": 8, "sixteen": 16}
PROMPT = tuple(range(41))
Said = Mapping[int, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one config, `old` and `new`, and adapters."""
    return write_adapted(tmp_path_factory.mktemp("adapted"), CONFIG, ADAPTERS)


@pytest.fixture
def make_loop(folder: Path) -> Iterator[MakeLoop]:
    given = {**SMALL, "num_blocks": 96, "max_loras": 2, "lora_root": str(folder), "weights_root": str(folder)}

    def make(model: Path | str = "old", *, names: tuple[str, ...] = tuple(ADAPTERS), **options: object) -> StepLoop:
        lora = [f"{name}={folder / name}" for name in names]
        return opened(folder / model, **{**given, "lora": lora, **options})

    with opened_loops() as opened:
        yield make


def one(number: int, lora: str | None, *, max_tokens: int = 12) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=0)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=PROMPT, sampling=sampling, lora=lora)


def said(answers: Mapping[int, Answer]) -> Said:
    return {key: (each.token_ids, [one.logprob for one in each.logprobs]) for key, each in answers.items()}


def of_each(loop: StepLoop, names: tuple[str | None, ...] = (*ADAPTERS, None)) -> Said:
    """One request of each adapter and one of none, together."""
    return said(run_at_once(loop, [one(number, name) for number, name in enumerate(names)]))


def run(loop: StepLoop, events: list[TokenEvent]) -> dict[int, Answer]:
    """To the end; of all requests that events speak of."""
    while loop.busy:
        events = events + loop.step()
    found: dict[int, Answer] = {}
    for event in events:
        found.setdefault(event.request_id, Answer()).take(event)
    return found


def some_steps(loop: StepLoop, request: GenerateRequest, *, steps: int = 6) -> list[TokenEvent]:
    events = loop.submit(request)
    for _ in range(steps):
        events += loop.step()
    num_said = sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
    assert 2 < num_said < request.sampling.max_tokens
    return events


def load(loop: StepLoop, name: str, path: str, *, in_place: bool = False) -> str | None:
    """Why it was not loaded."""
    answers: list[str | None] = []
    assert loop.begin_control(LoadAdapter(name, path, in_place), answers.append)
    while not answers:
        assert loop.busy, "a host steps a loop that is busy alone"
        loop.step()
    return answers[0]


# --- sleep -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_weights", LEVELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_answers_after_a_sleep_are_those_before(
    make_loop: MakeLoop, ranks: Mapping[str, object], *, keeps_weights: bool
) -> None:
    loop = make_loop(**ranks)
    assert {EngineCapability.SLEEP, EngineCapability.LOAD_ADAPTER} <= set(loop.info.capabilities)
    expected = of_each(loop)
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(expected), "each adapter must be seen"
    for _ in range(2):
        assert loop.control(Sleep(keeps_weights=keeps_weights)) == []
        assert loop.stats().state is EngineState.ASLEEP
        loop.control(Wake())
        assert of_each(loop) == expected
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("keeps_weights", LEVELS)
def test_requests_in_flight_go_on_with_what_was_in_their_slot(make_loop: MakeLoop, *, keeps_weights: bool) -> None:
    loop = make_loop()
    expected = run_at_once(loop, [one(0, "eight", max_tokens=20)])[0].token_ids
    events = some_steps(loop, one(1, "eight", max_tokens=20))
    events += loop.control(Sleep(keeps_weights=keeps_weights))
    events += loop.control(Wake())
    assert run(loop, events)[1].token_ids == expected


@pytest.mark.parametrize("when", ["before", "asleep"])
def test_requests_in_flight_go_on_though_their_adapter_is_unloaded(make_loop: MakeLoop, when: str) -> None:
    """Host memory has it no more: it is in the slot alone."""
    loop = make_loop()
    expected = run_at_once(loop, [one(0, "eight", max_tokens=20)])[0].token_ids
    events = some_steps(loop, one(1, "eight", max_tokens=20))
    if when == "before":
        events += loop.control(UnloadAdapter("eight"))
    events += loop.control(Sleep())
    if when == "asleep":
        events += loop.control(UnloadAdapter("eight"))
    events += loop.control(Wake())
    assert run(loop, events)[1].token_ids == expected
    (refused,) = loop.submit(one(2, "eight"))
    assert isinstance(refused, Failed)
    assert refused.kind is FailureKind.NOT_FOUND


def test_slots_that_are_not_restored_would_be_seen(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(names=("eight",))
    expected = of_each(loop, ("eight", None))
    monkeypatch.setattr(RankAdapters, "restore_slots", lambda self: ())
    loop.control(Sleep())
    loop.control(Wake())
    found = of_each(loop, ("eight", None))
    assert found[1] == expected[1]
    assert found[0] != expected[0]


def test_memory_of_slots_is_given_back(make_loop: MakeLoop) -> None:
    loop = make_loop(names=("eight",))
    of_each(loop, ("eight",))
    (adapters,) = loop.runner.adapters
    assert any(array.any() for array in adapters.slot_arrays)
    loop.control(Sleep())
    assert not any(array.any() for array in adapters.slot_arrays)
    loop.control(Wake())
    assert any(array.any() for array in adapters.slot_arrays)


@pytest.mark.parametrize(
    ("stop", "go_on"), [(Sleep(), Wake()), (Sleep(keeps_weights=False), Wake()), (Pause(), Resume())]
)
def test_adapters_are_loaded_and_unloaded_while_the_engine_stands_still(
    make_loop: MakeLoop, stop: Any, go_on: Any
) -> None:
    loop, fresh = make_loop(names=("two",)), make_loop(names=("eight",))
    events = some_steps(loop, one(1, None, max_tokens=20))
    events += loop.submit(one(2, "two"))
    events += loop.control(stop)
    assert load(loop, "late", "eight") is None
    assert "adapter_config.json cannot be read" in (load(loop, "absent", "new") or "")
    events += loop.control(UnloadAdapter("two"))
    assert [adapter.name for adapter in loop.stats().adapters] == ["late"]
    events += loop.control(go_on)
    events += loop.submit(one(3, "late"))
    while loop.busy:
        events += loop.step()
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.request_id, event.kind) for event in failed] == [(2, FailureKind.NOT_FOUND)]
    late = run(loop, [event for event in events if event.request_id == 3])[3]
    assert late.token_ids == run_at_once(fresh, [one(3, "eight")])[3].token_ids


def restricted(number: int, lora: str) -> GenerateRequest:
    """One whose first mask is computed before the scheduler has it."""
    sampling = SamplingParams(max_tokens=12, temperature=0, logprobs=0, allowed_token_ids=tuple(range(64)))
    return msgspec.structs.replace(one(number, lora), sampling=sampling)


def test_requests_that_wait_for_a_mask_keep_the_content_that_their_name_had(make_loop: MakeLoop) -> None:
    loop, fresh = make_loop(names=("two",)), make_loop(names=("two", "eight"))
    expected = run_at_once(fresh, [restricted(1, "two"), restricted(2, "eight")])
    loop.control(Pause())
    events = loop.submit(restricted(1, "two"))
    assert load(loop, "two", "eight", in_place=True) is None
    events += loop.submit(restricted(2, "two"))
    events += loop.control(Resume())
    assert said(run(loop, events)) == said(expected)


def test_requests_that_wait_for_a_mask_end_with_their_adapter(make_loop: MakeLoop) -> None:
    loop = make_loop(names=("two", "eight"))
    loop.control(Pause())
    events = loop.submit(restricted(1, "two")) + loop.submit(restricted(2, "eight"))
    events += loop.control(UnloadAdapter("two"))
    (failed,) = events
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.kind) == (1, FailureKind.NOT_FOUND)
    loop.control(Resume())
    assert run(loop, [])[2].finished is not None


def test_request_whose_content_goes_under_another_name_is_not_told_that_name(make_loop: MakeLoop) -> None:
    """That may be of another tenant: both had the same content."""
    loop = make_loop(names=("two",))
    assert load(loop, "public", "two") is None
    loop.control(Pause())
    events = loop.submit(one(1, "public"))
    assert load(loop, "public", "eight", in_place=True) is None
    events += loop.control(UnloadAdapter("two"))
    (failed,) = events
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.message) == (FailureKind.NOT_FOUND, "the adapter that was asked for was unloaded")


def test_wake_that_cannot_read_keeps_the_slots_for_the_next_one(
    make_loop: MakeLoop, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "old", tmp_path / "model")
    loop = make_loop(tmp_path / "model", names=("eight",))
    expected = run_at_once(loop, [one(0, "eight", max_tokens=20)])[0].token_ids
    events = some_steps(loop, one(1, "eight", max_tokens=20))
    events += loop.control(UnloadAdapter("eight"))
    events += loop.control(Sleep(keeps_weights=False))
    (tmp_path / "model/model.safetensors").rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(Exception, match="safetensors"):
            loop.control(Wake())
        assert loop.stats().state is EngineState.ASLEEP
    (tmp_path / "away").rename(tmp_path / "model/model.safetensors")
    events += loop.control(Wake())
    assert run(loop, events)[1].token_ids == expected


# --- updates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_answers_after_an_update_are_those_of_a_fresh_engine(make_loop: MakeLoop, ranks: Mapping[str, object]) -> None:
    loop, fresh = make_loop("old", **ranks), make_loop("new", **ranks)
    before = of_each(loop)
    loop.control(UpdateWeights(path="new"))
    after, expected = of_each(loop), of_each(fresh)
    assert after == expected
    assert all(before[number] != after[number] for number in before)
    loop.control(Sleep(keeps_weights=False))
    loop.control(Wake())
    assert of_each(loop) == expected


def test_requests_in_flight_go_on_with_their_adapter_over_the_new_weights(make_loop: MakeLoop) -> None:
    loop, fresh = make_loop("old"), make_loop("new")
    events = some_steps(loop, one(1, "eight", max_tokens=20))
    events += loop.control(UpdateWeights(path="new"))
    before = [each for event in events if isinstance(event, Tokens) for each in event.token_ids]
    answer = run(loop, events)[1]
    assert answer.token_ids[: len(before)] == before
    sampling = SamplingParams(max_tokens=20 - len(before), temperature=0, logprobs=0)
    prompt = (*PROMPT, *before)
    request = GenerateRequest(request_id=RequestId(1), prompt_token_ids=prompt, sampling=sampling, lora="eight")
    continued = run_at_once(fresh, [request])[1]
    assert answer.token_ids[len(before) :] == continued.token_ids


def test_kv_is_of_an_adapter_and_of_the_weights(make_loop: MakeLoop, tmp_path: Path) -> None:
    """In the pool and in a tier: neither an adapter's on other weights, nor another adapter's on the same."""
    pytest.importorskip("openinfer_kv_offload")
    loop = make_loop(kv_tier=[f"disk={tmp_path / 'kv'},64MiB"], kv_load_timeout_ms=60_000)
    known, other = "a" * 64, "b" * 64
    numbers = iter(range(1, 100))

    def cached(lora: str | None) -> int:
        number = next(numbers)
        return run(loop, loop.submit(one(number, lora)))[number].cached_tokens or 0

    assert [cached("eight"), cached("eight"), cached("two"), cached(None)] == [0, 40, 0, 0]
    loop.control(UpdateWeights(path="new", content_hash=known))
    assert [cached("eight"), cached("eight"), cached("two"), cached(None)] == [0, 40, 0, 0]
    loop.control(UpdateWeights(path="new", content_hash=other))
    assert [cached("eight"), cached(None)] == [0, 0]
    loop.control(UpdateWeights(path="new", content_hash=known))
    assert [cached("eight"), cached("two"), cached(None), cached("sixteen")] == [40, 40, 40, 0]


def test_failed_update_leaves_adapters_as_they_were(
    make_loop: MakeLoop, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, fresh = make_loop(weights_root=str(tmp_path)), make_loop("new")
    for name in ("damaged", "new"):
        shutil.copytree(folder / "new", tmp_path / name)
    weights, park = tmp_path / "damaged/model.safetensors", loop.park

    def cut_and_park() -> bool:
        """Cuts the file off after it was checked and before it is read."""
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        return park()

    of_each(loop)
    monkeypatch.setattr(loop, "park", cut_and_park)
    with pytest.raises(Refused, match="no weights"):
        loop.control(UpdateWeights(path="damaged"))
    monkeypatch.setattr(loop, "park", park)
    assert loop.stats().state is EngineState.WITHOUT_WEIGHTS
    assert len(loop.stats().adapters) == len(ADAPTERS)
    loop.control(UpdateWeights(path="new"))
    assert of_each(loop) == of_each(fresh)


@pytest.mark.parametrize("scheme", ["fp8 blocks BF16", "awq"])
def test_adapters_over_quantised_weights_sleep_and_are_updated(
    make_loop: MakeLoop, folder: Path, tmp_path: Path, scheme: str
) -> None:
    for name in ("old", "new"):
        write_quantised(folder / name, tmp_path / name, SCHEMES[scheme], projections(folder / name))
    loop, fresh = (make_loop(tmp_path / name, weights_root=str(tmp_path)) for name in ("old", "new"))
    before, expected = of_each(loop), of_each(fresh)
    loop.control(Sleep(keeps_weights=False))
    loop.control(Wake())
    assert of_each(loop) == before != expected
    loop.control(UpdateWeights(path="new"))
    assert of_each(loop) == expected


def test_sleeps_and_updates_under_traffic_with_adapters_lose_no_request(make_loop: MakeLoop) -> None:
    loop, fresh = make_loop(), make_loop("new")
    names = (*ADAPTERS, None)
    coming = [one(number, names[number % len(names)]) for number in range(16)]
    answers = {request.request_id: Answer() for request in coming}

    def deliver(events: list[TokenEvent]) -> None:
        for event in events:
            assert not isinstance(event, Failed), event
            answers[event.request_id].take(event)

    for number, request in enumerate(coming):
        deliver(loop.submit(request))
        deliver(loop.step())
        if number % 5 == 2:
            deliver(loop.control(Sleep(keeps_weights=number % 2 == 0)))
            deliver(loop.control(Wake()))
        if number % 5 == 4:
            deliver(loop.control(UpdateWeights(path="new")))
        loop.scheduler.check_integrity()
    while loop.busy:
        deliver(loop.step())
    assert all(isinstance(answer.finished, Finished) for answer in answers.values())
    assert {len(answer.token_ids) for answer in answers.values()} == {12}
    assert of_each(loop) == of_each(fresh)
