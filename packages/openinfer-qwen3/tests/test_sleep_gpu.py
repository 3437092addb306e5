"""Engines on a GPU that sleep and change their weights: the same graphs, the right answers, no request lost.

Random weights at a head dimension that the GPU's attention serves. Skipped, with the reason, where there is no GPU.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_model import CONFIG
from lifecycle_models import LEVELS, MakeLoop, opened_loops
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import EngineCapability, Failed, FailureKind, GenerateRequest, RequestId, SamplingParams, Tokens
from openinfer_core.control import Sleep, UpdateWeights, Wake
from openinfer_core.engine import EngineState
from openinfer_core.errors import InvalidCheckpoint, Refused
from openinfer_core.shared_weights import SharedTensor, SharedWeights
from openinfer_engine import StepLoop
from openinfer_engine.options import DeviceKind, LoadFormat, LowBitActivations
from openinfer_engine.testing import Answer, random_requests, random_weights, run_at_once
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections
from openinfer_kernels.weights.low_bit_activations import PromptSteps
from openinfer_qwen3.family import Qwen3, Qwen3Moe

pytestmark = pytest.mark.gpu
MIXTURE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "num_experts": 21,
    "num_experts_per_tok": 4,
}
FAMILIES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {"qwen3": (Qwen3, CONFIG), "qwen3_moe": (Qwen3Moe, MIXTURE)}
LOW_BIT_SCHEMES = ("fp8 blocks BF16", "fp8 per channel", "w8a8")
"""Whose prompts may have quantised activations."""
Weights = Mapping[str, NDArray[np.float32]]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_loop() -> Iterator[MakeLoop]:
    given = {"num_blocks": 256, "max_num_seqs": 16, "device": DeviceKind.CUDA, "enable_sleep": True}

    def make(folder: Path, **options: object) -> StepLoop:
        name = json.loads((folder / "config.json").read_text())["model_type"]
        definition = FAMILIES[name][0]().definition
        return opened(folder, definition=definition, **{**given, "weights_root": str(folder.parent), **options})

    with opened_loops(skips_refused=True) as opened:
        yield make


def weights_of(family: str, *, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Every tensor differs from those of another seed."""
    rng = np.random.default_rng(seed)
    whole = random_weights(FAMILIES[family][0]().definition, FAMILIES[family][1])
    return {name: each * rng.uniform(0.7, 1.3, each.shape).astype(np.float32) for name, each in whole.items()}


def write(folder: Path, family: str, *, seed: int = 0, dtype: type = np.float32) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[family][1]))
    weights = {name: each.astype(dtype) for name, each in weights_of(family, seed=seed).items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def requests(count: int = 12) -> list[GenerateRequest]:
    return random_requests(count, vocab_size=1024, max_prompt_tokens=89, logprobs=1)


def greedy(number: int, prompt: range) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(number),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=16, temperature=0.0, logprobs=1),
    )


def said(answers: Mapping[int, Answer]) -> dict[int, tuple[list[int], list[float]]]:
    return {key: (each.token_ids, [one.logprob for one in each.logprobs]) for key, each in answers.items()}


def run(loop: StepLoop) -> dict[int, tuple[list[int], list[float]]]:
    return said(run_at_once(loop, requests()))


def tokens(loop: StepLoop) -> dict[int, list[int]]:
    """What engines agree on whose products were tuned each for itself."""
    return {key: token_ids for key, (token_ids, _) in run(loop).items()}


def used_bytes() -> int:
    from openinfer_kernels.cuda.common.libraries import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


@pytest.mark.parametrize("keeps_weights", LEVELS)
@pytest.mark.parametrize("options", [{}, {"cuda_graph": False}, {"batch_invariant": True}], ids=str)
def test_answers_after_a_sleep_are_those_before(
    make_loop: MakeLoop,
    tmp_path: Path,
    family: str,
    captures: list[None],
    options: Mapping[str, object],
    *,
    keeps_weights: bool,
) -> None:
    loop = make_loop(write(tmp_path / "model", family), **options)
    assert EngineCapability.SLEEP in loop.info.capabilities
    expected, num_captured = run(loop), len(captures)
    for _ in range(3):
        assert loop.control(Sleep(keeps_weights=keeps_weights)) == []
        assert loop.stats().state is EngineState.ASLEEP
        loop.control(Wake())
        assert run(loop) == expected
    assert len(captures) == num_captured
    assert loop.stats().weights_version == ""
    loop.scheduler.check_integrity()


@pytest.mark.whole_gpu
@pytest.mark.parametrize("keeps_weights", LEVELS)
def test_memory_is_given_back_and_taken_again(make_loop: MakeLoop, tmp_path: Path, *, keeps_weights: bool) -> None:
    num_blocks, numbers_of_block = 1 << 15, 3 * 2 * 2 * 16 * 128
    loop = make_loop(write(tmp_path / "model", "qwen3"), num_blocks=num_blocks)
    pool_bytes = 2 * num_blocks * numbers_of_block
    for _ in range(3):
        run(loop)
        awake = used_bytes()
        loop.control(Sleep(keeps_weights=keeps_weights))
        assert awake - used_bytes() > pool_bytes
        loop.control(Wake())
        assert abs(used_bytes() - awake) < pool_bytes / 4


def test_requests_in_flight_go_on_after_the_sleep(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(write(tmp_path / "model", "qwen3"), batch_invariant=True)
    sampling = SamplingParams(max_tokens=40, temperature=0)
    prompt = tuple(range(41))

    def events_of(request_id: int) -> list[Any]:
        return loop.submit(
            GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=sampling)
        )

    def finish(events: list[Any]) -> list[int]:
        while loop.busy:
            events += loop.step()
        return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]

    expected = finish(events_of(1))
    events = events_of(2)
    for _ in range(8):
        events += loop.step()
    events += loop.control(Sleep())
    (refused,) = events_of(3)
    assert isinstance(refused, Failed)
    assert refused.kind is FailureKind.UNAVAILABLE
    events += loop.control(Wake())
    assert finish(events) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("source", ["folder", "shared memory"])
def test_answers_after_an_update_are_those_of_a_fresh_engine(
    make_loop: MakeLoop, tmp_path: Path, family: str, captures: list[None], source: str, dtype: type
) -> None:
    old, new = write(tmp_path / "old", family), write(tmp_path / "new", family, seed=1, dtype=dtype)
    fresh = tokens(make_loop(new))
    loop = make_loop(old)
    before, num_captured = tokens(loop), len(captures)
    weights = {name: each.astype(dtype) for name, each in weights_of(family, seed=1).items()}
    tensors = {
        name: SharedTensor("F32" if dtype is np.float32 else "F16", each.shape, each.data)
        for name, each in weights.items()
    }
    for _ in range(2):
        if source == "folder":
            loop.control(UpdateWeights(path="new"))
        else:
            with SharedWeights(tensors) as shared:
                loop.control(UpdateWeights(segments=shared.names))
        assert tokens(loop) == fresh != before
    assert len(captures) == num_captured
    loop.control(Sleep())
    loop.control(Wake())
    assert tokens(loop) == fresh


def test_logprobs_while_generating_are_the_prompt_logprobs_of_the_same_tokens(
    make_loop: MakeLoop, tmp_path: Path, family: str
) -> None:
    write(tmp_path / "new", family, seed=1)
    loop = make_loop(write(tmp_path / "old", family), batch_invariant=True)
    for _ in range(2):  # with the weights that it began with, and after an update
        asked = [
            GenerateRequest(
                request_id=RequestId(number),
                prompt_token_ids=tuple(range(number, 29 * number)),
                sampling=SamplingParams(max_tokens=33, temperature=1.0, seed=number, logprobs=0),
            )
            for number in range(1, 9)
        ]
        answers = run_at_once(loop, asked)
        scoring = [
            GenerateRequest(
                request_id=request.request_id,
                prompt_token_ids=(*request.prompt_token_ids, *answers[request.request_id].token_ids),
                sampling=SamplingParams(max_tokens=1, prompt_logprobs=0),
            )
            for request in asked
        ]
        scored = run_at_once(loop, scoring)
        for key, answer in answers.items():
            said = [each.logprob for each in answer.logprobs]
            assert [each.logprob for each in scored[key].prompt_logprobs[-len(said) :]] == said
        loop.control(UpdateWeights(path="new"))


@pytest.mark.parametrize("tier", ["host=64MiB", "disk={folder},64MiB"])
@pytest.mark.parametrize("keeps_weights", LEVELS)
def test_kv_tiers_keep_what_the_pool_forgets(
    make_loop: MakeLoop, tmp_path: Path, family: str, tier: str, *, keeps_weights: bool
) -> None:
    pytest.importorskip("openinfer_kv_offload")
    options = {"kv_tier": [tier.format(folder=tmp_path / "kv")], "kv_load_timeout_ms": 60_000}
    loop = make_loop(write(tmp_path / "model", family), **options)
    for number in range(2):
        first = run_at_once(loop, [greedy(10 * number + 1, range(100 * number, 100 * number + 82))])
        loop.control(Sleep(keeps_weights=keeps_weights))
        loop.control(Wake())
        again = run_at_once(loop, [greedy(10 * number + 2, range(100 * number, 100 * number + 82))])
        (before,), (after,) = first.values(), again.values()
        assert (before.cached_tokens, after.cached_tokens) == (0, 80)
        assert after.token_ids == before.token_ids
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_quantised_weights_are_updated_and_read_again(make_loop: MakeLoop, tmp_path: Path, scheme: str) -> None:
    folders = []
    for seed, name in enumerate(("old", "new")):
        plain = write(tmp_path / f"plain-{name}", "qwen3", seed=seed)
        write_quantised(plain, tmp_path / name, SCHEMES[scheme], projections(plain))
        folders.append(tmp_path / name)
    fresh = tokens(make_loop(folders[1]))
    loop = make_loop(folders[0])
    before = tokens(loop)
    loop.control(Sleep(keeps_weights=False))
    loop.control(Wake())
    assert tokens(loop) == before
    loop.control(UpdateWeights(path="new"))
    assert tokens(loop) == fresh != before


@pytest.mark.parametrize("scheme", LOW_BIT_SCHEMES)
def test_low_bit_activations_and_heads_sleep_and_are_updated(make_loop: MakeLoop, tmp_path: Path, scheme: str) -> None:
    """A head that is quantised when it is loaded, and prompts whose activations are."""
    folders = []
    for seed, name in enumerate(("old", "new")):
        plain = write(tmp_path / f"plain-{name}", "qwen3", seed=seed)
        (plain / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 1024}))
        write_quantised(plain, tmp_path / name, SCHEMES[scheme], projections(plain))
        folders.append(tmp_path / name)
    low_bit = {"low_bit_activations": LowBitActivations.PREFILL, "fp8_head": True}
    # One prompt, of one step: which activations are quantised depends on what is in a step.
    asked = [greedy(1, range(100, 150 + PromptSteps().least_tokens))]
    fresh = said(run_at_once(make_loop(folders[1], **low_bit), asked))
    as_they_are = said(run_at_once(make_loop(folders[0]), asked))
    loop = make_loop(folders[0], **low_bit)
    before = said(run_at_once(loop, asked))
    assert before != as_they_are, "the options change what is computed"
    for keeps_weights in (True, False):
        loop.control(Sleep(keeps_weights=keeps_weights))
        loop.control(Wake())
        assert said(run_at_once(loop, asked)) == before
    loop.control(UpdateWeights(path="new"))
    updated = said(run_at_once(loop, asked))
    assert updated[1][0] == fresh[1][0]
    assert updated != before


def test_random_weights_are_replaced_by_a_trainers(make_loop: MakeLoop, tmp_path: Path, family: str) -> None:
    folder = write(tmp_path / "model", family)
    expected = tokens(make_loop(folder))
    loop = make_loop(folder, load_format=LoadFormat.DUMMY)
    dummy = tokens(loop)
    loop.control(Sleep(keeps_weights=False))
    loop.control(Wake())
    assert tokens(loop) == dummy != expected
    loop.control(UpdateWeights(path="model"))
    assert tokens(loop) == expected


def test_update_that_does_not_fit_changes_nothing(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(write(tmp_path / "model", "qwen3"), batch_invariant=True)
    expected = run(loop)
    weights = weights_of("qwen3", seed=1)
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    (tmp_path / "short").mkdir()
    save_file(weights, tmp_path / "short" / "model.safetensors")
    with pytest.raises((InvalidCheckpoint, Refused)):
        loop.control(UpdateWeights(path="short"))
    assert run(loop) == expected


@pytest.mark.whole_gpu
def test_memory_that_others_took_leaves_the_engine_asleep(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(write(tmp_path / "model", "qwen3"), num_blocks=1 << 15)  # skips without a GPU
    from openinfer_kernels.cuda.common.libraries import cupy

    expected = run(loop)
    loop.control(Sleep())
    free, _ = cupy.cuda.runtime.memGetInfo()
    other = cupy.cuda.runtime.malloc(free - (128 << 20))
    try:
        for _ in range(2):
            with pytest.raises(Refused, match="stays asleep: other processes hold"):
                loop.control(Wake())
            assert loop.stats().state is EngineState.ASLEEP
    finally:
        cupy.cuda.runtime.free(other)
    loop.control(Wake())
    assert run(loop) == expected


def test_engine_without_the_option_cannot_sleep(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(write(tmp_path / "model", "qwen3"), enable_sleep=False)
    with pytest.raises(Refused, match="cannot do sleep"):
        loop.control(Sleep())
