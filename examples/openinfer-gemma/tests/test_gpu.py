"""The engine on a GPU: close to the CPU's answers, and the same in captured and uncaptured steps and after preemption.

Random weights at a head dimension that the GPU's attention serves. How far a GPU may be off is measured by what
rounding to BF16 alone costs the model. Tests of the GPU are skipped, with the reason, where there is none.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest
from openinfer_core.errors import Refused
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import (
    Distance,
    FamilyHarness,
    Golden,
    RoundedOps,
    answered_logprobs,
    computed_logprobs,
    random_requests,
    random_weights,
    run_at_once,
)
from openinfer_gemma import Gemma
from openinfer_kernels import KernelsError

gpu = pytest.mark.gpu
COMMON = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 100,
    "sliding_window": 40,
    "dtype": "bfloat16",
    "vocab_size": 1024,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": COMMON
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3": COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
MOST_TIMES = 1.5
"""How far a GPU may be from the CPU in float32, in what rounding costs."""
MOST_MEAN = 0.06
"""The golden gate's: of the differences of the log-probabilities of the eight likeliest tokens."""


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that BF16 holds exactly, so that both devices compute with the same ones."""
    config = CONFIGS[family]
    folder = tmp_path_factory.mktemp(family)
    (folder / "config.json").write_text(json.dumps(config))
    made = random_weights(Gemma.definition, config)
    zero_centred = {name: each - 1 if each.ndim == 1 else each for name, each in made.items()}
    save_file(zero_centred, folder / "model.safetensors")
    return folder


def make_requests(count: int = 12, **sampling: object) -> list[GenerateRequest]:
    return random_requests(count, vocab_size=1024, max_prompt_tokens=149, **sampling)


def logprobs_by(model_dir: Path, ops: object = None, **change: object) -> np.ndarray:
    """Of the prompts of `make_requests`, computed whole."""
    harness = FamilyHarness(Gemma.definition, model_dir, ops=ops, block_tokens=16, change=change)
    return computed_logprobs(harness, [request.prompt_token_ids for request in make_requests()])


@pytest.fixture(scope="module")
def truth(model_dir: Path) -> np.ndarray:
    """Log-probabilities of prompts by the CPU in float32."""
    return logprobs_by(model_dir)


@pytest.fixture(scope="module")
def rounding(model_dir: Path, truth: np.ndarray) -> Distance:
    """What rounding to BF16 alone costs."""
    return Distance.between(logprobs_by(model_dir, RoundedOps()), truth)


def make_loop(model_dir: Path, **options: object) -> StepLoop:
    fields = {"num_blocks": 256, "max_num_seqs": 16, "device": DeviceKind.CUDA, **options}
    try:
        return build_loop(resolve(Gemma.definition, model_dir, EngineOptions(**fields)))
    except Refused as reason:
        pytest.skip(str(reason))


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, Any]:
    """By request id."""
    with closing(loop):
        return run_at_once(loop, requests)


def tokens_of(answers: dict[int, Any]) -> dict[int, list[int]]:
    return {i: answer.token_ids for i, answer in answers.items()}


@gpu
@pytest.mark.parametrize("max_step_tokens", [2048, 48])
def test_log_probabilities_are_close_to_the_cpus(
    model_dir: Path, truth: np.ndarray, rounding: Distance, max_step_tokens: int
) -> None:
    """Whole prompts, and chunks of them beside decode rows; windows end inside of both."""
    answers = run(make_loop(model_dir, max_step_tokens=max_step_tokens), make_requests(max_tokens=1, prompt_logprobs=0))
    found = Distance.between(answered_logprobs(answers), truth)
    assert found.over(rounding) < MOST_TIMES, (found, rounding)


@pytest.mark.parametrize("wrong", [{"sliding_window": 39}, {"sliding_window": 41}, {"query_pre_attn_scalar": 64}])
def test_the_bound_finds_mistakes(
    model_dir: Path, truth: np.ndarray, rounding: Distance, wrong: dict[str, object]
) -> None:
    """A control, on the CPU: a model with a mistake does not pass for one that rounds."""
    assert len(truth) > 500
    found = Distance.between(logprobs_by(model_dir, **wrong), truth)
    assert found.over(rounding) > MOST_TIMES, (found, rounding)


@gpu
def test_models_of_real_widths_are_close_to_the_recorded_logits(wide_dir: Path) -> None:
    try:
        from openinfer_kernels.cuda import CudaOps

        ops = CudaOps()
    except KernelsError as reason:
        pytest.skip(str(reason))
    found, rounding = wide_distance(wide_dir, ops), wide_distance(wide_dir, RoundedOps())
    assert found.mean < MOST_MEAN, found
    assert found.over(rounding) < MOST_TIMES, (found, rounding)


def test_rounding_alone_is_within_the_golden_gates_mean(wide_dir: Path) -> None:
    """On the CPU: the bound above is one that a GPU without a mistake can keep."""
    assert wide_distance(wide_dir, RoundedOps()).mean < MOST_MEAN


def wide_distance(wide_dir: Path, ops: object) -> Distance:
    """Of the eight likeliest tokens at each recorded position."""
    golden = Golden(wide_dir)
    model = FamilyHarness(Gemma.definition, wide_dir, ops=ops, dummy=True, block_tokens=16, max_model_tokens=64)
    ours, theirs = [], []
    for name, (tokens, positions, expected) in golden.sequences.items():
        found, right = log_softmax(model.step({name: tokens})[name][positions]), log_softmax(expected)
        likeliest = np.argsort(right, axis=1)[:, -8:]
        ours.append(np.take_along_axis(found, likeliest, axis=1).ravel())
        theirs.append(np.take_along_axis(right, likeliest, axis=1).ravel())
    return Distance.between(np.concatenate(ours), np.concatenate(theirs))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@gpu
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}])
def test_captured_steps_say_what_uncaptured_ones_say(model_dir: Path, sampling: dict[str, object]) -> None:
    asked = make_requests(**sampling)
    captured = tokens_of(run(make_loop(model_dir), asked))
    again = tokens_of(run(make_loop(model_dir), asked))
    one_by_one = tokens_of(run(make_loop(model_dir, cuda_graph=False), asked))
    assert captured == again
    different = [i for i in captured if captured[i] != one_by_one[i]]
    assert len(different) <= 1, "padding to a captured size may turn a near tie of BF16, rarely"


@gpu
def test_a_tight_pool_preempts_and_every_request_gets_all_its_tokens(model_dir: Path, family: str) -> None:
    # 1.4 of what the longest request holds, in 2 block tables or 6
    loop = make_loop(model_dir, num_blocks={"gemma2": 30, "gemma3": 58}[family], max_step_tokens=64)
    said = tokens_of(run(loop, make_requests(max_tokens=100)))
    assert loop.stats().preemptions > 0
    assert {len(tokens) for tokens in said.values()} == {100}


@gpu
def test_batch_invariant_operators_give_the_same_tokens_alone_and_together(model_dir: Path) -> None:
    asked = make_requests(6)
    together = tokens_of(run(make_loop(model_dir, batch_invariant=True), asked))
    alone = {}
    for request in asked:
        alone |= tokens_of(run(make_loop(model_dir, batch_invariant=True), [request]))
    assert together == alone
