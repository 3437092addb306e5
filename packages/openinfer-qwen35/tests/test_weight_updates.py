"""New weights for a model with recurrent states: neither states nor copies of them outlive the weights."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.control import Sleep, UpdateWeights, Wake
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.testing import Answer
from openinfer_engine.testing.quantised_checkpoints import write_safetensors
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_qwen35.family import Qwen35Definition

MakeLoop = Callable[..., StepLoop]
RANKS = [pytest.param({}, id="one-rank"), pytest.param({"tensor_parallel_size": 2}, id="two-ranks")]


@pytest.fixture
def new(fixtures: Path, tmp_path: Path) -> Path:
    """The recorded model with other numbers: the last bits of each mantissa are turned over."""
    folder = tmp_path / "new"
    shutil.copytree(fixtures / "text_tied", folder)
    with Checkpoint.open(fixtures / "text_tied") as checkpoint:
        tensors = {}
        for name, info in checkpoint.tensors.items():
            bits = checkpoint.read(name).copy()
            tensors[name] = info.dtype, bits ^ 0x1F if info.dtype == "BF16" else bits
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[MakeLoop]:
    loops: list[StepLoop] = []

    def make(folder: Path, **options: object) -> StepLoop:
        fields = {"num_blocks": 64, "block_size_tokens": 8, "max_num_seqs": 4, "batch_invariant": True, **options}
        options_of = EngineOptions(weights_root=str(tmp_path), **fields)
        loops.append(build_loop(resolve(Qwen35Definition(), folder, options_of)))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


def one(request_id: int, *, max_tokens: int = 12, more: tuple[int, ...] = ()) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=0)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=(*range(3, 38), *more), sampling=sampling)


def run(loop: StepLoop, events: list, request_id: int) -> Answer:
    while loop.busy:
        events = events + loop.step()
    answer = Answer()
    for event in events:
        if event.request_id == request_id:
            answer.take(event)
    return answer


def said(answer: Answer) -> tuple[list[int], list[float]]:
    return answer.token_ids, [each.logprob for each in answer.logprobs]


@pytest.mark.parametrize("ranks", RANKS)
def test_states_of_the_old_weights_are_not_gone_on_from(
    make_loop: MakeLoop, fixtures: Path, new: Path, ranks: dict[str, int]
) -> None:
    loop, fresh = make_loop(fixtures / "text_tied", **ranks), make_loop(new, **ranks)
    before = said(run(loop, loop.submit(one(1)), 1))
    events = loop.submit(one(2, max_tokens=20))
    for _ in range(6):
        events += loop.step()
    events += loop.control(UpdateWeights(path="new"))
    known = [each for event in events for each in getattr(event, "token_ids", ())]
    assert 2 < len(known) < 20
    going_on = run(loop, events, 2)
    continued = run(fresh, fresh.submit(one(2, max_tokens=20 - len(known), more=tuple(known))), 2)
    assert going_on.token_ids == [*known, *continued.token_ids]
    again, expected = run(loop, loop.submit(one(3)), 3), run(fresh, fresh.submit(one(3)), 3)
    assert said(again) == said(expected) != before
    # Copies of states are kept anew, and found.
    found = run(loop, loop.submit(one(4)), 4)
    assert (said(found), found.cached_tokens > 0) == (said(expected), True)
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_states_after_a_sleep_are_computed_anew(make_loop: MakeLoop, fixtures: Path, keeps_weights: bool) -> None:
    loop = make_loop(fixtures / "text_tied")
    before = said(run(loop, loop.submit(one(1)), 1))
    loop.control(Sleep(keeps_weights=keeps_weights))
    loop.control(Wake())
    again = run(loop, loop.submit(one(2)), 2)
    assert (said(again), again.cached_tokens) == (before, 0)
    assert run(loop, loop.submit(one(3)), 3).cached_tokens > 0
