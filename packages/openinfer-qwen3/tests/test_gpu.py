"""The engine on a GPU: the same answers in captured and uncaptured steps and after preemption; close to the CPU's.

Random weights at a head dimension that the GPU's attention serves. Skipped, with the reason, where there is no GPU.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, RequestId, SamplingParams, read_config
from openinfer_core.errors import Refused
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import (
    Answer,
    Distance,
    FamilyHarness,
    RoundedOps,
    answered_logprobs,
    check_drafts,
    check_greedy_drafts,
    check_recorded_drafts,
    computed_logprobs,
    prompt_differences,
    random_requests,
    random_weights,
    record_golden,
    run_at_once,
)
from openinfer_qwen3.family import Qwen3, Qwen3Moe

pytestmark = pytest.mark.gpu
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}
MIXTURE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "mlp_only_layers": [1],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "num_experts": 21,
    "num_experts_per_tok": 4,
}
EVERY_EXPERT = MIXTURE | {"num_experts_per_tok": MIXTURE["num_experts"]}
MODELS = {"qwen3": (Qwen3, CONFIG), "qwen3_moe": (Qwen3Moe, MIXTURE), "every expert": (Qwen3Moe, EVERY_EXPERT)}
BF16_LOGPROB = 0.15
"""How far a log-probability may be from the CPU's in float32, with three layers of random weights and no choice."""
MOST_TIMES = 2.0
"""How many times as far from the CPU a mixture may be as rounding alone makes it. Rounding turns near ties of
routers, and then single tokens are far off: the largest difference says nothing.
"""


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that BF16 holds exactly, so that both devices compute with the same ones."""
    folder = tmp_path_factory.mktemp("model")
    family, config = MODELS[request.param]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(family().definition, config), folder / "model.safetensors")
    return folder


def definition_of(model_dir: Path) -> ModelDefinition[Any]:
    families = {config["model_type"]: family for family, config in MODELS.values()}
    return families[read_config(model_dir)["model_type"]]().definition


def chooses_experts(model_dir: Path) -> bool:
    config = read_config(model_dir)
    return config.get("num_experts_per_tok", 0) < config.get("num_experts", 0)


def rounding(model_dir: Path, asked: Sequence[GenerateRequest]) -> Distance:
    """What rounding to BF16 alone costs."""
    prompts = [request.prompt_token_ids for request in asked]
    by = (FamilyHarness(definition_of(model_dir), model_dir, ops=ops) for ops in (RoundedOps(), None))
    return Distance.between(*(computed_logprobs(harness, prompts) for harness in by))


def make_loop(model_dir: Path, *, device: DeviceKind = DeviceKind.CUDA, **options: object) -> StepLoop:
    fields = {"num_blocks": 256, "max_num_seqs": 16, "device": device, **options}
    try:
        return build_loop(resolve(definition_of(model_dir), model_dir, EngineOptions(**fields)))
    except Refused as reason:
        pytest.skip(str(reason))


def make_requests(count: int = 12, **sampling: object) -> list[GenerateRequest]:
    return random_requests(count, vocab_size=1024, max_prompt_tokens=89, **sampling)


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, Answer]:
    with closing(loop):
        return run_at_once(loop, requests)


def tokens_of(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {i: answer.token_ids for i, answer in answers.items()}


def test_log_probabilities_are_close_to_the_cpus(model_dir: Path) -> None:
    asked = make_requests(max_tokens=1, prompt_logprobs=0)
    cpu = run(make_loop(model_dir, device=DeviceKind.CPU), asked)
    gpu = run(make_loop(model_dir), asked)
    differences = prompt_differences(gpu, cpu)
    assert len(differences) > 300
    if chooses_experts(model_dir):
        found = Distance.between(answered_logprobs(gpu), answered_logprobs(cpu))
        assert found.over(rounding(model_dir, asked)) < MOST_TIMES
    else:
        assert max(differences) < BF16_LOGPROB
        assert np.mean(differences) < BF16_LOGPROB / 5


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}])
def test_captured_steps_say_what_uncaptured_ones_say(model_dir: Path, sampling: dict[str, object]) -> None:
    asked = make_requests(**sampling)
    captured = tokens_of(run(make_loop(model_dir), asked))
    again = tokens_of(run(make_loop(model_dir), asked))
    one_by_one = tokens_of(run(make_loop(model_dir, cuda_graph=False), asked))
    assert captured == again
    different = [i for i in captured if captured[i] != one_by_one[i]]
    assert len(different) <= 1, "padding to a captured size may turn a near tie of BF16, rarely"


def test_a_tight_pool_preempts_and_every_request_gets_all_its_tokens(model_dir: Path) -> None:
    loop = make_loop(model_dir, num_blocks=16, max_step_tokens=64)
    said = tokens_of(run(loop, make_requests(max_tokens=100)))
    assert loop.stats().preemptions > 0
    assert {len(tokens) for tokens in said.values()} == {100}


def test_every_sampling_field_runs_beside_plain_rows(model_dir: Path) -> None:
    plain = make_requests(6)
    fancy = [
        GenerateRequest(request_id=RequestId(100 + i), prompt_token_ids=(5, 6, 7), sampling=params)
        for i, params in enumerate(
            [
                SamplingParams(
                    max_tokens=8, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2, seed=1
                ),
                SamplingParams(max_tokens=8, logit_bias={3: 5.0, 4: float("-inf")}, seed=2),
                SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=tuple(range(200)), seed=3),
                SamplingParams(max_tokens=8, logprobs=3, min_p=0.05, seed=4),
            ]
        )
    ]
    together = run(make_loop(model_dir), [*plain, *fancy])
    alone = tokens_of(run(make_loop(model_dir), plain))
    said = tokens_of(together)
    assert sum(said[i] == alone[i] for i in alone) >= len(alone) - 1
    assert len(together[103].logprobs) == len(together[103].token_ids)
    assert 4 not in said[101]


@pytest.mark.parametrize("capture", [True, False])
def test_rows_with_drafts_are_close_to_the_cpu_in_float32(model_dir: Path, capture: bool) -> None:
    """Products and attention of rows of up to eight tokens, in default mode; replayed where tokens alone are asked."""
    if chooses_experts(model_dir):
        pytest.skip("rounding turns near ties of routers: the largest difference says nothing")
    definition = definition_of(model_dir)
    options = {"device": DeviceKind.CUDA, "block_size_tokens": 16, "cuda_graph": capture}
    record_golden(definition, model_dir, (140, 60, 9))
    try:
        check_recorded_drafts(definition, model_dir, tolerance=BF16_LOGPROB, **options)
        check_greedy_drafts(definition, model_dir, tolerance=2 * BF16_LOGPROB, **options)  # of two logits
    except Refused as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("capture", [True, False])
def test_answers_with_drafts_are_those_without(model_dir: Path, capture: bool) -> None:
    options = {"device": DeviceKind.CUDA, "block_size_tokens": 16, "cuda_graph": capture}
    try:
        check_drafts(definition_of(model_dir), model_dir, seeds=[int(capture), 2], **options)
    except Refused as reason:
        pytest.skip(str(reason))
