"""The engine on a GPU: close to the CPU's answers, in captured and uncaptured steps, on shared prefixes, however cut.

Random weights, heads and streams of the published sizes, all kinds of layers and routers. Skipped, with the reason,
where there is no GPU, but for what the bound on differences is worth.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from v4_gpu_model import CONFIG, bf16_weights

from openinfer_core import GenerateRequest
from openinfer_core.errors import Refused
from openinfer_deepseek_v4 import DeepseekV4
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind, LoadFormat
from openinfer_engine.testing import (
    Answer,
    Distance,
    FamilyHarness,
    QueriesOneOff,
    RoundedOps,
    answered_logprobs,
    computed_logprobs,
    random_requests,
    run_alone,
    run_at_once,
    top_differences,
)

gpu = pytest.mark.gpu
VOCAB: int = CONFIG["vocab_size"]
QUANTISED = {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
MOST_TIMES = 2.0
"""How many times as far as what rounding alone costs a GPU may be from the CPU: it rounds inside of operators too."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that BF16 holds exactly, so that both devices compute with the same ones."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    definition, rng = DeepseekV4().definition, np.random.default_rng(0)
    weights = bf16_weights(definition.tensors(definition.parse(CONFIG)), rng)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def quantised_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config alone, for dummies in the published formats."""
    folder = tmp_path_factory.mktemp("quantised")
    (folder / "config.json").write_text(json.dumps(CONFIG | QUANTISED))
    return folder


@pytest.fixture(scope="module")
def truth(model_dir: Path) -> np.ndarray:
    """Of all tokens of the prompts of `make_requests`, in float32."""
    return logprobs_by(None, model_dir)


@pytest.fixture(scope="module")
def rounding(model_dir: Path, truth: np.ndarray) -> Distance:
    """What rounding to BF16 alone costs, which turns near ties of routers and of index scores."""
    return Distance.between(logprobs_by(RoundedOps(), model_dir), truth)


def logprobs_by(ops: object, model_dir: Path) -> np.ndarray:
    there = {"num_blocks": 40, "max_model_tokens": 1024, "block_tokens": 16}
    harness = FamilyHarness(DeepseekV4().definition, model_dir, ops=ops, **there)
    return computed_logprobs(harness, [request.prompt_token_ids for request in make_requests()])


def make_loop(model_dir: Path, *, device: DeviceKind = DeviceKind.CUDA, **options: object) -> StepLoop:
    fields = {"num_blocks": 256, "max_num_seqs": 16, "device": device, **options}
    try:
        return build_loop(resolve(DeepseekV4().definition, model_dir, EngineOptions(**fields)))
    except Refused as reason:
        pytest.skip(str(reason))


def make_requests(count: int = 12, *, shared: int = 0, longest: int = 299, **sampling: object) -> list[GenerateRequest]:
    return random_requests(
        count, vocab_size=VOCAB, max_prompt_tokens=longest, shared_tokens=shared, **{"max_tokens": 24, **sampling}
    )


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, Answer]:
    with closing(loop):
        return run_at_once(loop, requests)


def tokens_of(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {i: answer.token_ids for i, answer in answers.items()}


@gpu
@pytest.mark.parametrize(("max_step_tokens", "block_size_tokens"), [(2048, 16), (48, 128), (600, 6)])
def test_log_probabilities_are_close_to_the_cpus(
    model_dir: Path, truth: np.ndarray, rounding: Distance, max_step_tokens: int, block_size_tokens: int
) -> None:
    """In steps of any length, captured and launched, with blocks that hold whole windows or pieces of them."""
    asked = make_requests(max_tokens=1, prompt_logprobs=0)
    blocks = {"block_size_tokens": block_size_tokens, "num_blocks": 8192 // block_size_tokens}
    answers = run(make_loop(model_dir, max_step_tokens=max_step_tokens, **blocks), asked)
    found = Distance.between(answered_logprobs(answers), truth)
    assert found.over(rounding) < MOST_TIMES, (found, rounding)


def test_the_bound_finds_queries_at_the_next_position(model_dir: Path, truth: np.ndarray, rounding: Distance) -> None:
    """A control, on the CPU: a model with a mistake does not pass for one that rounds."""
    assert len(truth) > 800
    found = Distance.between(logprobs_by(QueriesOneOff(), model_dir), truth)
    assert found.over(rounding) > 2 * MOST_TIMES, (found, rounding)


@gpu
@pytest.mark.parametrize("ranks", [2])
def test_ranks_are_close_to_the_cpus(model_dir: Path, truth: np.ndarray, rounding: Distance, ranks: int) -> None:
    asked = make_requests(max_tokens=8, prompt_logprobs=0)
    answers = run(make_loop(model_dir, tensor_parallel_size=ranks), asked)
    found = Distance.between(answered_logprobs(answers), truth)
    assert found.over(rounding) < MOST_TIMES, (found, rounding)


@gpu
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}])
def test_captured_steps_say_what_uncaptured_ones_say(model_dir: Path, sampling: dict[str, object]) -> None:
    asked = make_requests(**sampling)
    captured = tokens_of(run(make_loop(model_dir), asked))
    again = tokens_of(run(make_loop(model_dir), asked))
    one_by_one = tokens_of(run(make_loop(model_dir, cuda_graph=False), asked))
    assert captured == again
    different = [i for i in captured if captured[i] != one_by_one[i]]
    assert len(different) <= 2, "padding to a captured size may turn a near tie of BF16, rarely"


@gpu
def test_a_tight_pool_preempts_and_every_request_gets_all_its_tokens(model_dir: Path) -> None:
    loop = make_loop(model_dir, num_blocks=48, max_step_tokens=64)
    said = tokens_of(run(loop, make_requests(longest=199, max_tokens=100)))
    assert loop.stats().preemptions > 0
    assert {len(tokens) for tokens in said.values()} == {100}


@gpu
def test_states_restored_from_copies_give_the_log_probabilities_of_computed_ones(
    model_dir: Path, rounding: Distance
) -> None:
    asked = make_requests(shared=100, longest=100, max_tokens=1, logprobs=8)
    computed = run(make_loop(model_dir, prefix_cache=False), asked)
    loop = make_loop(model_dir)
    answers = run_alone(loop, asked)  # one after the other, so that copies are there
    differences: list[float] = []
    for i, answer in answers.items():
        (ours,), (theirs,) = answer.logprobs, computed[i].logprobs
        shared = top_differences(ours, theirs)
        assert len(shared) > 3, "near ties of BF16 may change places at the end of the list"
        differences += shared
    assert np.mean(differences) < MOST_TIMES * rounding.mean
    cached = sum(answer.cached_tokens for answer in answers.values())
    assert cached >= 96 * (len(asked) - 2), "the first prompt is computed, the second one leaves a copy"
    assert loop.stats().state_snapshots > 0
    loop.close()


@gpu
def test_dummies_in_the_published_formats_are_made_on_the_device(quantised_dir: Path) -> None:
    """They say something else about each prompt, however likely; and the same in captured steps and others."""
    asked = make_requests(logprobs=0)
    dummies = {"load_format": LoadFormat.DUMMY}
    captured = run(make_loop(quantised_dir, **dummies), asked)
    one_by_one = run(make_loop(quantised_dir, cuda_graph=False, **dummies), asked)
    assert len({token for answer in captured.values() for token in answer.token_ids}) > 40
    logprobs = [one.logprob for answer in captured.values() for one in answer.logprobs]
    assert -6 < np.mean(logprobs) < -0.1, "neither flat nor certain"
    different = [i for i in captured if captured[i].token_ids != one_by_one[i].token_ids]
    assert len(different) <= 2, "padding to a captured size may turn a near tie of BF16, rarely"


@gpu
def test_entries_of_sizes_without_kernels_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 256}))
    with pytest.raises(Refused, match=r"entries of 1 x 256 values are not possible|no NVIDIA driver|module cupy"):
        resolve(
            DeepseekV4().definition,
            tmp_path,
            EngineOptions(device=DeviceKind.CUDA, load_format=LoadFormat.DUMMY, num_blocks=8),
        )


@gpu
def test_batch_invariant_answers_do_not_depend_on_the_batch(model_dir: Path) -> None:
    asked = make_requests(6, shared=40, max_tokens=12, logprobs=0)
    together = run(make_loop(model_dir, batch_invariant=True), asked)
    for request in asked[:3]:
        alone = run(make_loop(model_dir, batch_invariant=True, max_step_tokens=33, prefix_cache=False), [request])
        ours, theirs = (
            [(one.top_ids, one.logprob) for one in answers[request.request_id].logprobs]
            for answers in (together, alone)
        )
        assert ours == theirs
        assert tokens_of(alone)[request.request_id] == tokens_of(together)[request.request_id]
