"""The engine on a GPU: close to the CPU's answers, in captured and uncaptured steps, on shared prefixes, however cut.

Random weights with the published sizes of heads, so that the kernels of published models run. Skipped, with the reason,
where there is no GPU.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, read_config
from openinfer_core.control import Sleep, Wake
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
    bf16_exact,
    check_drafts,
    computed_logprobs,
    prompt_differences,
    random_requests,
    run_alone,
    run_at_once,
    top_differences,
)
from openinfer_engine.testing.adapters import write_adapter
from openinfer_qwen35 import Qwen35, Qwen35Moe

pytestmark = pytest.mark.gpu
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 1024,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}
MIXTURE = {key: value for key, value in CONFIG.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 96,
    "num_experts": 21,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 96,
}
EVERY_EXPERT = MIXTURE | {"num_experts_per_tok": MIXTURE["num_experts"]}
MODELS = {
    "qwen3_5_text": (Qwen35, CONFIG),
    "qwen3_5_moe_text": (Qwen35Moe, MIXTURE),
    "every expert": (Qwen35Moe, EVERY_EXPERT),
}
BF16_LOGPROB = 0.15
"""How far a log-probability may be from the CPU's in float32, with four layers of random weights and no choice."""
MOST_TIMES = 2.0
"""How many times as far from the CPU a mixture may be as rounding alone makes it. Rounding turns near ties of
routers, and then single tokens are far off: the largest difference says nothing.
"""


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that BF16 holds exactly, so that both devices compute with the same ones; decays in float32."""
    folder = tmp_path_factory.mktemp("model")
    _, config = MODELS[request.param]
    (folder / "config.json").write_text(json.dumps(config))
    definition, rng = definition_of(folder), np.random.default_rng(0)
    weights = {}
    for name, shape in definition.tensors(definition.parse(config)).items():
        values = rng.normal(size=shape).astype(np.float32)
        if name.endswith("A_log"):
            weights[name] = np.log(rng.uniform(0.02, 2.0, shape)).astype(np.float32)
            continue
        values = values / 10 if len(shape) == 1 else values * np.float32(shape[-1] ** -0.5)
        weights[name] = bf16_exact(values)
    save_file(weights, folder / "model.safetensors")
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


def make_requests(count: int = 12, *, shared: int = 0, **sampling: object) -> list[GenerateRequest]:
    return random_requests(count, vocab_size=1024, max_prompt_tokens=199, shared_tokens=shared, **sampling)


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, Answer]:
    with closing(loop):
        return run_at_once(loop, requests)


def tokens_of(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {i: answer.token_ids for i, answer in answers.items()}


@pytest.mark.parametrize("max_step_tokens", [2048, 48])
def test_log_probabilities_are_close_to_the_cpus(model_dir: Path, max_step_tokens: int) -> None:
    asked = make_requests(max_tokens=1, prompt_logprobs=0)
    cpu = run(make_loop(model_dir, device=DeviceKind.CPU), asked)
    gpu = run(make_loop(model_dir, max_step_tokens=max_step_tokens), asked)
    differences = prompt_differences(gpu, cpu)
    assert len(differences) > 600
    if chooses_experts(model_dir):
        found = Distance.between(answered_logprobs(gpu), answered_logprobs(cpu))
        assert found.over(rounding(model_dir, asked)) < MOST_TIMES
    else:
        assert max(differences) < BF16_LOGPROB
        assert np.mean(differences) < BF16_LOGPROB / 5


def test_captured_steps_say_what_uncaptured_ones_say(model_dir: Path) -> None:
    asked = make_requests()
    captured = tokens_of(run(make_loop(model_dir), asked))
    again = tokens_of(run(make_loop(model_dir), asked))
    one_by_one = tokens_of(run(make_loop(model_dir, cuda_graph=False), asked))
    assert captured == again
    different = [i for i in captured if captured[i] != one_by_one[i]]
    assert len(different) <= 1, "padding to a captured size may turn a near tie of BF16, rarely"


def test_a_tight_pool_preempts_and_every_request_gets_all_its_tokens(model_dir: Path) -> None:
    loop = make_loop(model_dir, num_blocks=48, max_step_tokens=64)
    said = tokens_of(run(loop, make_requests(max_tokens=100)))
    assert loop.stats().preemptions > 0
    assert {len(tokens) for tokens in said.values()} == {100}


def test_states_restored_from_copies_give_the_log_probabilities_of_computed_ones(model_dir: Path) -> None:
    asked = make_requests(shared=100, max_tokens=1, logprobs=8)
    computed = run(make_loop(model_dir, prefix_cache=False), asked)
    loop = make_loop(model_dir)
    answers = run_alone(loop, asked)  # one after the other, so that copies are there
    for i, answer in answers.items():
        (ours,), (theirs,) = answer.logprobs, computed[i].logprobs
        differences = top_differences(ours, theirs)
        assert len(differences) > 4, "near ties of BF16 may change places at the end of the list"
        assert (np.mean if chooses_experts(model_dir) else max)(differences) < BF16_LOGPROB
    cached = sum(answer.cached_tokens for answer in answers.values())
    assert cached >= 96 * (len(asked) - 2), "the first prompt is computed, the second one leaves a copy"
    assert loop.stats().state_snapshots > 0
    loop.close()


def test_kv_cache_leaves_states_their_memory(model_dir: Path) -> None:
    options = EngineOptions(device=DeviceKind.CUDA, gpu_memory_fraction=0.06, max_num_seqs=4096)
    try:
        composition = resolve(definition_of(model_dir), model_dir, options)
    except Refused as reason:
        pytest.skip(str(reason))
    from openinfer_kernels.cuda import Device

    planned, granted = composition.memory_bytes, Device.open().memory_bytes * options.gpu_memory_fraction
    assert planned["states"] > 3 << 30
    assert 0.99 * granted < sum(planned.values()) <= granted


def test_batch_invariant_answers_do_not_depend_on_the_batch(model_dir: Path) -> None:
    asked = make_requests(6, shared=40, max_tokens=12, logprobs=0)
    together = run(make_loop(model_dir, batch_invariant=True), asked)
    for request in asked[:3]:
        alone = run(make_loop(model_dir, batch_invariant=True, max_step_tokens=33, prefix_cache=False), [request])
        ours, theirs = (
            [(one.top_ids, one.logprob) for one in said[request.request_id].logprobs] for said in (together, alone)
        )
        assert ours == theirs
        assert tokens_of(alone)[request.request_id] == tokens_of(together)[request.request_id]


@pytest.mark.parametrize("capture", [True, False])
def test_answers_with_drafts_are_those_without(model_dir: Path, capture: bool) -> None:
    options = {"device": DeviceKind.CUDA, "block_size_tokens": 16, "cuda_graph": capture}
    try:
        check_drafts(definition_of(model_dir), model_dir, seeds=[int(capture), 2], **options)
    except Refused as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("capture", [True, False])
def test_answers_with_drafts_after_a_sleep_are_those_before(model_dir: Path, capture: bool) -> None:
    """What drafted tokens change states by is given back asleep, too."""
    options = {"enable_sleep": True, "batch_invariant": True, "cuda_graph": capture}
    options |= {"speculative": "ngram,k=3,n_min=1,adaptive=false"}
    asked = make_requests()
    with closing(make_loop(model_dir, **options)) as loop:
        before = tokens_of(run_at_once(loop, asked))
        for keeps_weights in (True, False, True):
            loop.control(Sleep(keeps_weights=keeps_weights))
            loop.control(Wake())
            assert tokens_of(run_at_once(loop, asked)) == before
        assert loop.stats().spec_decode_num_draft_tokens > 0
        assert loop.stats().drafter_faults == 0


ADAPTER_RANKS = {"eight": 8, "sixteen": 16}
LEAST_EFFECT = 0.05
"""Mean difference of log-probabilities below which an adapter might be ignored unseen."""


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 64}], ids=["whole prompts", "chunks"])
def test_adapters_and_none_in_one_batch_say_what_the_cpu_says(
    model_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    if chooses_experts(model_dir):
        pytest.skip("adapters turn near ties of routers")
    for seed, (name, rank) in enumerate(ADAPTER_RANKS.items()):
        write_adapter(tmp_path / name, definition_of(model_dir), read_config(model_dir), rank=rank, seed=seed)
    given = {"lora": [f"{name}={tmp_path / name}" for name in ADAPTER_RANKS], "max_loras": 2, "max_lora_rank": 16}
    names = ("eight", "sixteen", None, "eight", "sixteen", None, None, "sixteen")
    asked = [
        msgspec.structs.replace(request, lora=name)
        for request, name in zip(make_requests(len(names), max_tokens=1, prompt_logprobs=0), names, strict=True)
    ]
    gpu, cpu, plain = (
        run(make_loop(model_dir, **fields), requests)
        for fields, requests in (
            (given | options, asked),
            (given | {"device": DeviceKind.CPU}, asked),
            ({"device": DeviceKind.CPU}, [msgspec.structs.replace(request, lora=None) for request in asked]),
        )
    )
    differences = prompt_differences(gpu, cpu)
    assert max(differences) < BF16_LOGPROB
    assert np.mean(differences) < BF16_LOGPROB / 5
    for request, name in zip(asked, names, strict=True):
        number = request.request_id
        effect = np.mean(prompt_differences({number: gpu[number]}, {number: plain[number]}))
        assert effect > LEAST_EFFECT if name else effect < BF16_LOGPROB / 5, (name, effect)
