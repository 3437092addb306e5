"""Adapters of engines on a GPU that sleep and change their weights: the same graphs, and what was in their slots.

Random weights at a head dimension that the GPU's attention serves. Skipped, with the reason, where there is no GPU.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpu_model import CONFIG
from lifecycle_models import LEVELS, MakeLoop, opened_loops, write_adapted

from openinfer_core import EngineCapability, GenerateRequest, RequestId, SamplingParams, TokenEvent
from openinfer_core.control import LoadAdapter, Sleep, UnloadAdapter, UpdateWeights, Wake
from openinfer_engine import StepLoop
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, run_at_once
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections

pytestmark = pytest.mark.gpu
ADAPTERS = {"one": 1, "eight": 8, "sixteen": 16}
OPTIONS: list[Any] = [
    pytest.param({"max_lora_rank": 16}, id="in the products"),
    pytest.param({"max_lora_rank": 64, "max_loras": 3}, id="around the products"),
    pytest.param({"batch_invariant": True}, id="batch-invariant"),
]
PROMPT = tuple(range(57))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one config, `old` and `new`, and adapters."""
    return write_adapted(tmp_path_factory.mktemp("adapted"), CONFIG, ADAPTERS)


@pytest.fixture
def make_loop(folder: Path) -> Iterator[MakeLoop]:
    given = {"num_blocks": 256, "max_num_seqs": 16, "device": DeviceKind.CUDA, "max_loras": 2, "enable_sleep": True}

    def make(model: Path | str = "old", *, names: tuple[str, ...] = tuple(ADAPTERS), **options: object) -> StepLoop:
        roots = {"lora_root": str(folder), "weights_root": str(folder)}
        lora = [f"{name}={folder / name}" for name in names]
        return opened(folder / model, **{**given, **roots, "lora": lora, **options})

    with opened_loops(skips_refused=True) as opened:
        yield make


def one(number: int, lora: str | None, *, max_tokens: int = 16) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=0)
    prompt = PROMPT[: len(PROMPT) - 3 * (number % 5)]
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=prompt, sampling=sampling, lora=lora)


def of_each(loop: StepLoop, names: tuple[str | None, ...] = (*ADAPTERS, None, "eight")) -> dict[int, Any]:
    answers = run_at_once(loop, [one(number, name) for number, name in enumerate(names)])
    return {key: (each.token_ids, [one.logprob for one in each.logprobs]) for key, each in answers.items()}


def tokens(said: Mapping[int, Any]) -> dict[int, list[int]]:
    """What engines agree on whose products were tuned each for itself."""
    return {key: token_ids for key, (token_ids, _) in said.items()}


def run(loop: StepLoop, events: list[TokenEvent]) -> dict[int, Answer]:
    while loop.busy:
        events = events + loop.step()
    found: dict[int, Answer] = {}
    for event in events:
        found.setdefault(event.request_id, Answer()).take(event)
    return found


@pytest.mark.parametrize("keeps_weights", LEVELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_answers_after_a_sleep_are_those_before(
    make_loop: MakeLoop, captures: list[None], options: Mapping[str, object], *, keeps_weights: bool
) -> None:
    loop = make_loop(**options)
    assert {EngineCapability.SLEEP, EngineCapability.LOAD_ADAPTER} <= set(loop.info.capabilities)
    expected, num_captured = of_each(loop), len(captures)
    for _ in range(3):
        loop.control(Sleep(keeps_weights=keeps_weights))
        loop.control(Wake())
        assert of_each(loop) == expected
    assert len(captures) == num_captured
    loop.scheduler.check_integrity()


def test_slots_that_are_not_restored_would_be_seen(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(names=("eight",))
    expected = of_each(loop, ("eight", None))
    monkeypatch.setattr(RankAdapters, "restore_slots", lambda self: ())
    loop.control(Sleep())
    loop.control(Wake())
    found = of_each(loop, ("eight", None))
    assert found[1] == expected[1]
    assert found[0] != expected[0]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("keeps_weights", LEVELS)
def test_requests_in_flight_go_on_though_their_adapter_is_unloaded(
    make_loop: MakeLoop, options: Mapping[str, object], *, keeps_weights: bool
) -> None:
    """Host memory has it no more: what is in the slot is copied from the device."""
    loop = make_loop(**{**options, "batch_invariant": True})
    expected = run_at_once(loop, [one(0, "eight", max_tokens=40)])[0].token_ids
    events = loop.submit(one(5, "eight", max_tokens=40))
    for _ in range(9):
        events += loop.step()
    events += loop.control(UnloadAdapter("eight"))
    events += loop.control(Sleep(keeps_weights=keeps_weights))
    events += loop.control(Wake())
    assert run(loop, events)[5].token_ids == expected


def test_adapters_are_loaded_while_the_engine_is_asleep(make_loop: MakeLoop) -> None:
    loop, fresh = make_loop(names=("one",), batch_invariant=True), make_loop(names=("eight",), batch_invariant=True)
    loop.control(Sleep())
    told: list[str | None] = []
    assert loop.begin_control(LoadAdapter("late", "eight"), told.append)
    while not told:
        loop.step()
    assert told == [None]
    loop.control(Wake())
    assert of_each(loop, ("late", None)) == of_each(fresh, ("eight", None))


@pytest.mark.parametrize("options", OPTIONS)
def test_answers_after_an_update_are_those_of_a_fresh_engine(
    make_loop: MakeLoop, captures: list[None], options: Mapping[str, object]
) -> None:
    fresh = of_each(make_loop("new", **options))
    loop = make_loop("old", **options)
    before, num_captured = of_each(loop), len(captures)
    for _ in range(2):
        loop.control(UpdateWeights(path="new"))
        assert tokens(of_each(loop)) == tokens(fresh) != tokens(before)
    loop.control(Sleep())
    loop.control(Wake())
    assert tokens(of_each(loop)) == tokens(fresh)
    assert len(captures) == num_captured


def test_adapters_over_quantised_weights_sleep_and_are_updated(
    make_loop: MakeLoop, folder: Path, tmp_path: Path
) -> None:
    for name in ("old", "new"):
        write_quantised(folder / name, tmp_path / name, SCHEMES["fp8 blocks BF16"], projections(folder / name))
    options = {"weights_root": str(tmp_path), "batch_invariant": True}
    expected = of_each(make_loop(tmp_path / "new", **options))
    loop = make_loop(tmp_path / "old", **options)
    before = of_each(loop)
    loop.control(Sleep(keeps_weights=False))
    loop.control(Wake())
    assert of_each(loop) == before != expected
    loop.control(UpdateWeights(path="new"))
    assert of_each(loop) == expected
