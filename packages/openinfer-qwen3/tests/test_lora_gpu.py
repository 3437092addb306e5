"""Adapters on a GPU: the CPU's answers, over plain and quantised weights, in captured steps, and each row as if alone.

Random weights at a head dimension that the GPU's attention serves. Skipped, with the reason, where there is no GPU.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_model import CONFIG
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.control import LoadAdapter, UnloadAdapter
from openinfer_core.errors import Refused
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, prompt_differences, random_weights, run_alone, run_at_once
from openinfer_engine.testing.adapters import write_adapter
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections
from openinfer_qwen3.family import Qwen3Definition

pytestmark = pytest.mark.gpu
RANKS = {"one": 1, "eight": 8, "sixteen": 16, "forty": 40}
LEAST_EFFECT = 0.05
"""Mean difference of log-probabilities below which an adapter might be ignored unseen."""
BF16_LOGPROB = 0.15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and adapters."""
    made = tmp_path_factory.mktemp("adapted")
    (made / "model").mkdir()
    (made / "model/config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(Qwen3Definition(), CONFIG), made / "model/model.safetensors")
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(made / name, Qwen3Definition(), CONFIG, rank=rank, seed=seed)
    return made


def make_loop(
    folder: Path, names: Sequence[str] = tuple(RANKS), *, model: Path | None = None, **options: Any
) -> StepLoop:
    fields: dict[str, Any] = {"num_blocks": 256, "max_num_seqs": 16, "device": DeviceKind.CUDA, "max_lora_rank": 40}
    fields |= {"lora": [f"{name}={folder / name}" for name in names], "lora_root": str(folder)} | options
    try:
        return build_loop(resolve(Qwen3Definition(), model or folder / "model", EngineOptions(**fields)))
    except Refused as reason:
        pytest.skip(str(reason))


def requests_for(
    names: Sequence[str | None], *, max_tokens: int = 1, prompt_tokens: int = 60, tops: int = 0
) -> list[GenerateRequest]:
    """As many requests; those of one place have one prompt whatever their adapter."""
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=tops, prompt_logprobs=0)
    return [
        GenerateRequest(
            request_id=RequestId(i),
            prompt_token_ids=tuple(rng.integers(0, 1024, prompt_tokens - 3 * (i % 7)).tolist()),
            lora=name,
            sampling=sampling,
        )
        for i, name in enumerate(names)
    ]


def answers(loop: StepLoop, asked: Sequence[GenerateRequest]) -> dict[int, Answer]:
    with closing(loop):
        return run_at_once(loop, asked)


def told(found: Mapping[int, Answer]) -> dict[int, Any]:
    return {i: (answer.token_ids, answer.logprobs, answer.prompt_logprobs) for i, answer in found.items()}


def gap_of_first_difference(answer: Answer, other: Answer) -> float:
    """By how much the first token that another answer has otherwise was likelier than that one; 0 where none is."""
    for token, others, logprobs in zip(answer.token_ids, other.token_ids, answer.logprobs, strict=True):
        if token != others:
            likeliest = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
            return logprobs.logprob - likeliest.get(others, -np.inf)
    return 0.0


MIXED = ("one", None, "eight", "sixteen", "forty", None, "sixteen", "one", "forty", "eight")
SMALL = tuple("eight" if name == "forty" else name for name in MIXED)
OF_SMALL_RANKS = {"names": ("one", "eight", "sixteen"), "max_lora_rank": 16}
"""With these, products with adapters are one launch on Hopper; with larger slots adapters are added after them."""


@pytest.mark.parametrize("options", [{}, {"max_loras": 2}, {"max_step_tokens": 64}, {"cuda_graph": False}], ids=str)
@pytest.mark.parametrize("small", [False, True], ids=["ranks up to 40", "ranks up to 16"])
def test_mixed_batches_say_what_the_cpu_says(folder: Path, small: bool, options: dict[str, Any]) -> None:
    names = SMALL if small else MIXED
    options = {**options, **(OF_SMALL_RANKS if small else {})}
    asked = requests_for(names)
    gpu, cpu = (answers(make_loop(folder, device=each, **options), asked) for each in (DeviceKind.CUDA, DeviceKind.CPU))
    differences = prompt_differences(gpu, cpu)
    assert max(differences) < BF16_LOGPROB
    assert np.mean(differences) < BF16_LOGPROB / 5
    plain = answers(make_loop(folder), requests_for([None] * len(MIXED)))
    for i, name in enumerate(names):
        effect = np.mean(prompt_differences({i: gpu[i]}, {i: plain[i]}))
        assert effect > LEAST_EFFECT if name else effect < BF16_LOGPROB / 5, (name, effect)


@pytest.mark.parametrize("num_requests", [1, 10], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("scheme", ["fp8 blocks BF16", "awq"])
def test_adapters_over_quantised_weights_say_what_the_cpu_says(
    folder: Path, tmp_path: Path, scheme: str, num_requests: int
) -> None:
    write_quantised(folder / "model", tmp_path / "model", SCHEMES[scheme], projections(folder / "model"))
    asked = requests_for(MIXED[:num_requests], prompt_tokens=60 if num_requests > 1 else 24)
    gpu, cpu = (
        answers(make_loop(folder, model=tmp_path / "model", device=each), asked)
        for each in (DeviceKind.CUDA, DeviceKind.CPU)
    )
    differences = prompt_differences(gpu, cpu)
    assert max(differences) < BF16_LOGPROB
    assert np.mean(differences) < BF16_LOGPROB / 5


def test_rows_are_what_they_are_alone_bit_for_bit(folder: Path) -> None:
    asked = requests_for(MIXED, max_tokens=24)
    with closing(make_loop(folder, batch_invariant=True, max_loras=3)) as loop:
        together = told(run_at_once(loop, asked))
        assert told(run_alone(loop, asked)) == together
    chunked = make_loop(folder, batch_invariant=True, max_loras=3, max_step_tokens=48, cuda_graph=False)
    assert told(answers(chunked, asked)) == together


def test_captured_steps_say_what_uncaptured_ones_say(folder: Path) -> None:
    asked = requests_for(SMALL, max_tokens=24, tops=2)
    captured, again = (answers(make_loop(folder, **OF_SMALL_RANKS), asked) for _ in range(2))
    one_by_one = answers(make_loop(folder, cuda_graph=False, **OF_SMALL_RANKS), asked)
    assert told(captured) == told(again)
    assert max(prompt_differences(captured, one_by_one)) < BF16_LOGPROB
    for i, answer in captured.items():
        # Padding to a captured size may turn a near tie of BF16, and nothing else.
        assert gap_of_first_difference(answer, one_by_one[i]) < BF16_LOGPROB, i


def test_a_name_that_is_used_again_has_its_new_content(folder: Path) -> None:
    with closing(make_loop(folder, (), batch_invariant=True, max_loras=1)) as loop:
        for content in ("eight", "forty", "eight"):
            told_of: list[str | None] = []
            assert loop.begin_control(LoadAdapter("late", content), told_of.append)
            while not told_of:
                loop.step()
            assert told_of == [None]
            found = told(run_at_once(loop, requests_for(["late"] * 3, max_tokens=8)))
            loop.control(UnloadAdapter("late"))
            fresh = make_loop(folder, (content,), batch_invariant=True)
            assert told(answers(fresh, requests_for([content] * 3, max_tokens=8))) == found


def test_drafts_change_no_answer(folder: Path) -> None:
    asked = requests_for(MIXED, max_tokens=24)
    plain = told(answers(make_loop(folder, batch_invariant=True), asked))
    assert told(answers(make_loop(folder, batch_invariant=True, speculative="ngram,k=3"), asked)) == plain
