"""`batch_invariant`: one request, one answer, bit for bit, whatever the batch, the chunks and the cache are."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import Finished, GenerateRequest, InvalidRequest, RequestId, SamplingParams, TokenLogprobs, Tokens
from openinfer_core.errors import Refused
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.backends import open_backend
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import random_weights
from openinfer_qwen3.family import Qwen3

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
PROMPT_TOKENS, NEW_TOKENS = 150, 20
DEVICES = [pytest.param(DeviceKind.CPU, id="cpu"), pytest.param(DeviceKind.CUDA, id="cuda", marks=pytest.mark.gpu)]

Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]
"""Ids, log-probabilities, log-probabilities of the prompt."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(Qwen3().definition, CONFIG), folder / "model.safetensors")
    return folder


@pytest.fixture(params=DEVICES)
def make_loop(request: pytest.FixtureRequest, model_dir: Path):
    def make(**options: object) -> StepLoop:
        fields = {"num_blocks": 256, "max_num_seqs": 16, "device": request.param, "batch_invariant": True, **options}
        return build_loop(resolve(Qwen3().definition, model_dir, EngineOptions(**fields)))

    if request.param is DeviceKind.CUDA:
        try:
            open_backend(EngineOptions(device=DeviceKind.CUDA))
        except Refused as refused:
            pytest.skip(str(refused))
    return make


def make_request(request_id: int, num_tokens: int, *, max_tokens: int = NEW_TOKENS, **sampling: object):
    rng = np.random.default_rng(request_id)
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(rng.integers(0, CONFIG["vocab_size"], num_tokens).tolist()),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=7, logprobs=3, **sampling),
    )


def answer(loop: StepLoop, request: GenerateRequest, others: Sequence[GenerateRequest] = ()) -> Answer:
    """Of one request; the others are submitted before it, some steps apart, and are under way when it begins."""
    events = []
    for other in others:
        events += [*loop.submit(other), *loop.step()]
    events += loop.submit(request)
    ids, logprobs, prompt_logprobs, finished = [], [], [], False
    while loop.busy:
        events += loop.step()
    for event in events:
        if event.request_id != request.request_id:
            continue
        if isinstance(event, Tokens):
            ids += event.token_ids
            logprobs += event.logprobs or ()
            prompt_logprobs += event.prompt_logprobs or ()
        finished = finished or isinstance(event, Finished)
    assert finished
    assert len(ids) == NEW_TOKENS
    return ids, logprobs, prompt_logprobs


@pytest.fixture
def request_under_test() -> GenerateRequest:
    return make_request(0, PROMPT_TOKENS, prompt_logprobs=2)


@pytest.fixture
def alone(make_loop, request_under_test) -> Answer:
    return answer(make_loop(), request_under_test)


def test_answer_is_the_same_among_others(make_loop, request_under_test, alone):
    others = [make_request(i, 13 * i, max_tokens=40) for i in range(1, 8)]
    assert answer(make_loop(), request_under_test, others) == alone


@pytest.mark.parametrize("max_step_tokens", [16, 37, 149])
def test_answer_is_the_same_in_chunks(make_loop, request_under_test, alone, max_step_tokens):
    others = [make_request(i, 5 * i, max_tokens=60) for i in range(1, 4)]
    assert answer(make_loop(max_step_tokens=max_step_tokens), request_under_test, others) == alone


def test_answer_is_the_same_with_cached_prefix_and_after_preemption(make_loop, request_under_test, alone):
    scored = alone
    plain = make_request(0, PROMPT_TOKENS)
    loop = make_loop()
    assert answer(loop, plain)[:2] == scored[:2]
    assert answer(loop, plain)[:2] == scored[:2]
    few_blocks = make_loop(num_blocks=24)
    others = [make_request(i, 60 + i, max_tokens=90) for i in range(1, 4)]
    assert answer(few_blocks, plain, others)[:2] == scored[:2]


def test_answer_is_the_same_when_its_own_words_come_back_as_a_prompt(make_loop, request_under_test, alone):
    """What was generated token by token has the log-probabilities that the same tokens have as a prompt."""
    ids, logprobs, _ = alone
    prompt = (*request_under_test.prompt_token_ids, *ids)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=7, logprobs=3, prompt_logprobs=3)
    again = GenerateRequest(request_id=RequestId(0), prompt_token_ids=prompt, sampling=sampling)
    assert answer(make_loop(), again)[2][PROMPT_TOKENS - 1 :] == logprobs


def test_operators_of_other_packages_are_refused():
    with pytest.raises(InvalidRequest, match="batch_invariant is kept by our own operators"):
        EngineOptions(batch_invariant=True, kernel_providers={"linear": "other"})
