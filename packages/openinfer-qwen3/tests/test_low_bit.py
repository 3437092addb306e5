"""Prompts with quantised activations and heads in FP8, through the whole engine: what they change, and what not."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, InvalidRequest, Refused, RequestId, SamplingParams
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import LoadFormat, LoopHost, LowBitActivations
from openinfer_engine.testing import random_weights, run_at_once
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections
from openinfer_qwen3.family import Qwen3, Qwen3Definition

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
PREFILL = LowBitActivations.PREFILL
LEAST, MOST = 1e-4, 0.25
"""How far FP8 moves log-probabilities of this model in the mean, at least and at most."""


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(Qwen3Definition(), CONFIG), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def fp8_dir(plain_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fp8") / "model"
    write_quantised(plain_dir, target, SCHEMES["fp8 blocks F32"], projections(plain_dir))
    return target


def logprobs_of(model_dir: Path, num_tokens: int, **options: Any) -> np.ndarray:
    """Of the tokens of a prompt, then of four that follow it."""
    prompt = np.random.default_rng(1).integers(0, 512, num_tokens).tolist()
    sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, logprobs=0)
    asked = GenerateRequest(request_id=RequestId(0), prompt_token_ids=tuple(prompt), sampling=sampling)
    with closing(build_loop(resolve(Qwen3Definition(), model_dir, engine_options(**options)))) as loop:
        answer = run_at_once(loop, [asked])[0]
    return np.array([each.logprob for each in (*answer.prompt_logprobs, *answer.logprobs)])


def engine_options(**options: Any) -> EngineOptions:
    return EngineOptions(engine_host=LoopHost.THREAD, num_blocks=64, max_num_seqs=2, prefix_cache=False, **options)


def test_long_prompts_are_rounded_and_short_ones_are_not(fp8_dir: Path) -> None:
    exact, rounded = (logprobs_of(fp8_dir, 600, low_bit_activations=each) for each in LowBitActivations)
    assert LEAST < np.abs(exact - rounded).mean() < MOST
    short, same = (logprobs_of(fp8_dir, 100, low_bit_activations=each) for each in LowBitActivations)
    np.testing.assert_array_equal(short, same)


def test_head_in_fp8_moves_logprobs_a_little(plain_dir: Path) -> None:
    exact, rounded = (logprobs_of(plain_dir, 60, fp8_head=each) for each in (False, True))
    assert LEAST < np.abs(exact - rounded).mean() < MOST
    on_two_ranks = logprobs_of(plain_dir, 60, fp8_head=True, tensor_parallel_size=2)
    np.testing.assert_allclose(on_two_ranks, rounded, atol=1e-4)


def test_plan_names_them_with_the_bytes_of_the_head(fp8_dir: Path) -> None:
    plain, low_bit = (
        Qwen3().plan(fp8_dir, engine_options(fp8_head=each, low_bit_activations=activations))
        for each, activations in ((False, LowBitActivations.OFF), (True, PREFILL))
    )
    assert not {"activations", "output_head"} & {*plain.parts}
    assert low_bit.parts["activations"] == "e4m3 in steps of 513 tokens and more, 64 of a row"
    assert low_bit.parts["output_head"] == "e4m3 in groups of 1 x all with f32 scales"
    head_bytes = 512 * 128 + 512 * 4
    assert low_bit.memory_bytes["weights"] == pytest.approx(plain.memory_bytes["weights"] + head_bytes, rel=0.01)


def test_kv_that_was_computed_so_is_never_found_by_others(fp8_dir: Path) -> None:
    digests = {
        each: resolve(Qwen3Definition(), fp8_dir, engine_options(low_bit_activations=each)).layouts[0].digest
        for each in LowBitActivations
    }
    assert digests[LowBitActivations.OFF] != digests[PREFILL]


def test_models_without_a_product_that_could_are_refused_by_name(plain_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no matrix of this model is quantised"):
        resolve(Qwen3Definition(), plain_dir, engine_options(low_bit_activations=PREFILL))
    write_quantised(plain_dir, tmp_path / "awq", SCHEMES["awq"], projections(plain_dir))
    for load_format in LoadFormat:
        asked = engine_options(low_bit_activations=PREFILL, load_format=load_format)
        with pytest.raises(Refused, match=r"this model has .*int4 in groups of 1 x 32 .*takes quantised activations"):
            resolve(Qwen3Definition(), tmp_path / "awq", asked)


@pytest.mark.parametrize("option", [{"low_bit_activations": PREFILL}, {"fp8_head": True}], ids=str)
def test_batch_invariance_excludes_them(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exclude each other") as refused:
        engine_options(batch_invariant=True, **option)
    assert refused.value.field in option
