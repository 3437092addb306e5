"""The engine on a GPU: close to the CPU's answers, in captured and uncaptured steps, on shared prefixes, however cut.

Random weights with the published sizes of heads, so that the kernels of published models run. Skipped, with the reason,
where there is no GPU.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, RequestId, SamplingParams, Scheduled, TokenEvent, Tokens
from openinfer_core.errors import Refused
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_qwen35 import Qwen35

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
BF16_LOGPROB = 0.15
"""How far a log-probability may be from the CPU's in float32, with four layers of random weights."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that BF16 holds exactly, so that both devices compute with the same ones; decays in float32."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    definition, rng = Qwen35().definition, np.random.default_rng(0)
    weights = {}
    for name, shape in definition.tensors(definition.parse(CONFIG)).items():
        values = rng.normal(size=shape).astype(np.float32)
        if name.endswith("A_log"):
            weights[name] = np.log(rng.uniform(0.02, 2.0, shape)).astype(np.float32)
            continue
        values = values / 10 if len(shape) == 1 else values * np.float32(shape[-1] ** -0.5)
        weights[name] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


def make_loop(model_dir: Path, *, device: DeviceKind = DeviceKind.CUDA, **options: object) -> StepLoop:
    fields = {"num_blocks": 256, "max_num_seqs": 16, "device": device, **options}
    try:
        return build_loop(resolve(Qwen35().definition, model_dir, EngineOptions(**fields)))
    except Refused as reason:
        pytest.skip(str(reason))


def make_requests(count: int = 12, *, shared: int = 0, **sampling: object) -> list[GenerateRequest]:
    """Prompts of 1 to 200 tokens, the first `shared` of which are alike."""
    rng = np.random.default_rng(5)
    prefix = rng.integers(0, 1024, shared).tolist()
    return [
        GenerateRequest(
            request_id=RequestId(i),
            prompt_token_ids=(*prefix, *rng.integers(0, 1024, int(rng.integers(1, 200))).tolist()),
            sampling=SamplingParams(**{"max_tokens": 24, "temperature": 0.0, **sampling}),
        )
        for i in range(count)
    ]


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, list[Tokens]]:
    """What each request said."""
    said: dict[int, list[Tokens]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert loop.submit(request) == []
    while loop.busy:
        for event in loop.step():
            if isinstance(event, Tokens):
                said[event.request_id].append(event)
    loop.close()
    return said


def tokens_of(said: dict[int, list[Tokens]]) -> dict[int, list[int]]:
    return {i: [token for event in events for token in event.token_ids] for i, events in said.items()}


@pytest.mark.parametrize("max_step_tokens", [2048, 48])
def test_log_probabilities_are_close_to_the_cpus(model_dir: Path, max_step_tokens: int) -> None:
    asked = make_requests(max_tokens=1, prompt_logprobs=0)
    cpu = run(make_loop(model_dir, device=DeviceKind.CPU), asked)
    gpu = run(make_loop(model_dir, max_step_tokens=max_step_tokens), asked)
    differences = [
        abs(ours.logprob - theirs.logprob)
        for i in cpu
        for ours, theirs in zip(
            [one for event in gpu[i] for one in event.prompt_logprobs or ()],
            [one for event in cpu[i] for one in event.prompt_logprobs or ()],
            strict=True,
        )
    ]
    assert len(differences) > 600
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
    loop, cached = make_loop(model_dir), 0
    for request in asked:  # one after the other, so that copies are there
        assert loop.submit(request) == []
        events: list[TokenEvent] = []
        while loop.busy:
            events += loop.step()
        cached += sum(event.cached_tokens for event in events if isinstance(event, Scheduled))
        ours, theirs = (
            dict(zip(one.top_ids, one.top_logprobs, strict=True))
            for said in (events, computed[request.request_id])
            for event in said
            if isinstance(event, Tokens)
            for one in event.logprobs or ()
        )
        shared = [*(ours.keys() & theirs.keys())]
        assert len(shared) > 4, "near ties of BF16 may change places at the end of the list"
        assert max(abs(ours[token] - theirs[token]) for token in shared) < BF16_LOGPROB
    assert cached >= 96 * (len(asked) - 2), "the first prompt is computed, the second one leaves a copy"
    assert loop.stats().state_snapshots > 0
    loop.close()


def test_kv_cache_leaves_states_their_memory(model_dir: Path) -> None:
    options = EngineOptions(device=DeviceKind.CUDA, gpu_memory_fraction=0.06, max_num_seqs=4096)
    try:
        composition = resolve(Qwen35().definition, model_dir, options)
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
            [(one.top_ids, one.logprob) for event in said[request.request_id] for one in event.logprobs or ()]
            for said in (together, alone)
        )
        assert ours == theirs
        assert tokens_of(alone)[request.request_id] == tokens_of(together)[request.request_id]
