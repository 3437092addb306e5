"""The engine on a GPU: the same answers in captured and uncaptured steps and after preemption; close to the CPU's.

Random weights, the attention of the published sizes. Skipped, with the reason, where there is no GPU.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.errors import Refused
from openinfer_deepseek.family import DeepseekV2
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, prompt_differences, random_requests, random_weights, run_at_once

pytestmark = pytest.mark.gpu
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "v_head_dim": 128,
    "vocab_size": 1024,
}
BF16_LOGPROB = 0.5
"""How far a log-probability may be from the CPU's in float32: BF16 turns near ties of the router, and so experts."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that BF16 holds exactly, so that both devices compute with the same ones."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(DeepseekV2().definition, CONFIG), folder / "model.safetensors")
    return folder


def make_loop(model_dir: Path, *, device: DeviceKind = DeviceKind.CUDA, **options: object) -> StepLoop:
    fields = {"num_blocks": 256, "max_num_seqs": 16, "device": device, **options}
    try:
        return build_loop(resolve(DeepseekV2().definition, model_dir, EngineOptions(**fields)))
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
    assert max(differences) < BF16_LOGPROB
    assert np.mean(differences) < BF16_LOGPROB / 10


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


def test_long_prompts_expand_latents_and_agree_with_chunks_that_do_not(model_dir: Path) -> None:
    rng = np.random.default_rng(6)
    prompt = tuple(rng.integers(0, 1024, 900).tolist())
    asked = [
        GenerateRequest(
            request_id=RequestId(0),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        )
    ]
    whole = run(make_loop(model_dir), asked)
    chunks = run(make_loop(model_dir, max_step_tokens=128), asked)
    differences = prompt_differences(chunks, whole)
    assert len(differences) == 899
    assert differences.mean() < BF16_LOGPROB / 10


def test_batch_invariance_is_refused_before_anything_is_loaded(model_dir: Path) -> None:
    options = EngineOptions(device=DeviceKind.CUDA, batch_invariant=True)
    with pytest.raises(Refused, match=r"attention over latents has no such kernel|no NVIDIA driver|module cupy"):
        resolve(DeepseekV2().definition, model_dir, options)
