"""Ranks on GPUs of their own: the tokens and log-probabilities of one rank, and the end when one of them dies."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_core import Failed, GenerateRequest, Refused, RequestId, SamplingParams, Tokens, find_plugin
from openinfer_engine import EngineOptions, GroupBroken, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind, LoadFormat
from openinfer_engine.worker.process_runner import ProcessRunner

pytestmark = pytest.mark.gpu
FAMILY: Any = find_plugin("openinfer.models", "qwen3").load()()
CONFIG = {
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
BF16_LOGPROB = 0.15
"""How far a log-probability may be from one rank's: sums over ranks round elsewhere."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_loop(model_dir: Path, ranks: int, **options: Any) -> StepLoop:
    fields = {"num_blocks": 128, "max_num_seqs": 8, "load_format": LoadFormat.DUMMY, **options}
    given = EngineOptions(device=DeviceKind.CUDA, tensor_parallel_size=ranks, **fields)
    try:
        return build_loop(resolve(FAMILY.definition, model_dir, given))
    except Refused as reason:
        pytest.skip(str(reason))


def make_requests(count: int = 8, **sampling: Any) -> list[GenerateRequest]:
    rng = np.random.default_rng(5)
    params = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0, **sampling})
    prompts = [tuple(rng.integers(0, 1024, int(rng.integers(2, 90))).tolist()) for _ in range(count)]
    return [
        GenerateRequest(request_id=RequestId(i), prompt_token_ids=prompt, sampling=params)
        for i, prompt in enumerate(prompts)
    ]


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, list[Tokens]]:
    said: dict[int, list[Tokens]] = {request.request_id: [] for request in requests}
    events = [event for request in requests for event in loop.submit(request)]
    while loop.busy:
        events += loop.step()
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Tokens):
            said[event.request_id].append(event)
    return said


def prompt_logprobs(said: dict[int, list[Tokens]]) -> np.ndarray:
    events = [event for request in said.values() for event in request]
    return np.array([one.logprob for event in events for one in event.prompt_logprobs or ()])


@pytest.mark.parametrize("capture", [True, False])
def test_two_gpus_agree_with_one_and_with_themselves(model_dir: Path, capture: bool) -> None:
    both = make_loop(model_dir, 2, cuda_graph=capture)
    first, again = (run(both, make_requests()) for _ in range(2))
    both.close()
    alone = make_loop(model_dir, 1, cuda_graph=capture)
    expected = run(alone, make_requests())
    alone.close()
    assert np.array_equal(prompt_logprobs(first), prompt_logprobs(again))
    assert [event.token_ids for said in first.values() for event in said] == [
        event.token_ids for said in again.values() for event in said
    ]
    assert np.abs(prompt_logprobs(first) - prompt_logprobs(expected)).max() < BF16_LOGPROB


def test_sampled_tokens_are_rank_0s_whatever_is_asked_of_them(model_dir: Path) -> None:
    asked = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "logit_bias": {5: 1.0}, "max_tokens": 24}
    loop = make_loop(model_dir, 2)
    first, again = (run(loop, make_requests(**asked)) for _ in range(2))
    loop.close()
    for request_id, said in first.items():
        assert [event.token_ids for event in said] == [event.token_ids for event in again[request_id]]


def step_forever(loop: StepLoop) -> None:
    while True:
        loop.step()


def test_the_death_of_a_gpus_rank_ends_the_step(model_dir: Path) -> None:
    loop = make_loop(model_dir, 2)
    assert isinstance(loop.runner, ProcessRunner)
    (request,) = make_requests(1, max_tokens=400)
    loop.submit(request)
    for _ in range(5):
        loop.step()
    os.kill(loop.runner.process_ids[0], signal.SIGKILL)
    with pytest.raises(GroupBroken, match="rank 1 has died: its process ended with signal 9"):
        step_forever(loop)
    loop.close()


def test_more_ranks_than_gpus_and_ranks_in_threads_are_refused(model_dir: Path) -> None:
    make_loop(model_dir, 1).close()  # skips without a GPU
    given = {"device": DeviceKind.CUDA, "load_format": LoadFormat.DUMMY}
    many = model_dir.parent / "many"
    many.mkdir()
    (many / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 64, "num_key_value_heads": 64}))
    with pytest.raises(Refused, match=r"tensor_parallel_size is 64, .*each rank needs one"):
        resolve(FAMILY.definition, many, EngineOptions(tensor_parallel_size=64, **given))
    with pytest.raises(Refused, match="needs a process of its own"):
        resolve(FAMILY.definition, many, EngineOptions(tensor_parallel_size=2, rank_host="thread", **given))
