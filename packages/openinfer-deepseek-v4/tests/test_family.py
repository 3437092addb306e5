"""The family as openinfer finds and starts it: through its entry point, in a thread and in a process of its own."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_core import (
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidCheckpoint,
    ModelFamily,
    Refused,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    find_plugin,
)
from openinfer_core.plugins import MODELS
from openinfer_deepseek_v4 import DeepseekV4
from openinfer_engine.options import EngineHost, EngineOptions, LoadFormat

PROMPT_TOKENS = 53


@pytest.fixture
def family() -> ModelFamily:
    found = find_plugin(MODELS, "deepseek_v4").load()
    assert found is DeepseekV4
    return found()


async def generate(family: ModelFamily, model_dir: Path, options: EngineOptions) -> list[TokenEvent]:
    """The events of one greedy request for one token after the recorded sequence 1."""
    with np.load(model_dir / "logits.npz") as recorded:
        prompt = tuple(recorded["token_ids_1"].tolist())
    engine = family.launch(model_dir, options)
    events: list[TokenEvent] = []
    try:
        sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=0)
        engine.submit(GenerateRequest(request_id=RequestId(7), prompt_token_ids=prompt, sampling=sampling))
        async for arrived in engine.events():
            events += arrived
            if any(isinstance(event, Finished) for event in arrived):
                break
    finally:
        await engine.close()
    return events


@pytest.mark.parametrize("host", EngineHost)
@pytest.mark.parametrize("ranks", [1, 2])
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(
    family: ModelFamily, fixtures: Path, host: EngineHost, ranks: int
) -> None:
    options = EngineOptions(engine_host=host, tensor_parallel_size=ranks, num_blocks=32, max_num_seqs=4)
    events = asyncio.run(generate(family, fixtures / "all_kinds", options))
    with np.load(fixtures / "all_kinds" / "logits.npz") as recorded:
        logits = recorded["logits_1"][-1].astype(np.float64)
    (tokens,) = [event for event in events if isinstance(event, Tokens)]
    assert tokens.token_ids == (int(logits.argmax()),)
    assert tokens.logprobs is not None
    assert abs(tokens.logprobs[0].logprob - (logits.max() - np.log(np.exp(logits).sum()))) < 1e-3
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.prompt_tokens) == (FinishReason.LENGTH, PROMPT_TOKENS)


def test_plan_says_what_an_engine_would_be_made_of(family: ModelFamily, fixtures: Path) -> None:
    plan = family.plan(
        fixtures / "all_kinds",
        EngineOptions(num_blocks=10, block_size_tokens=16, tensor_parallel_size=2, max_num_seqs=3),
    )
    assert plan.model_type == "deepseek_v4"
    assert plan.limits["num_blocks"] == 10
    assert plan.parts["prefix_cache"] == "where one of 10 copies of recurrent states is kept"
    window, sparse, heavy = 4 * 12 * 32, 2 * 8 * 4 * (32 + 16), 3 * 32
    rows = 2 * 4 * (32 + 16) + 32
    assert plan.memory_bytes["states"] == 2 * 3 * 4 * (window + sparse + heavy), "ranks, slots, bytes of each number"
    assert plan.memory_bytes["kv_cache"] == 2 * 10 * 4 * rows


def test_published_size_does_not_fit_a_small_host_and_plan_says_what_it_takes(
    family: ModelFamily, tmp_path: Path, published: dict[str, Any]
) -> None:
    """Codes and scales are counted as they are stored, widened what is not quantised, and what each of 8 ranks has."""
    (tmp_path / "config.json").write_text(json.dumps(published | {"eos_token_id": 1}))
    options = EngineOptions(load_format=LoadFormat.DUMMY, num_blocks=8, max_num_seqs=1, tensor_parallel_size=8)
    plan = family.plan(tmp_path, options)
    assert 8 * 21.62e9 < plan.memory_bytes["weights"] < 8 * 23.5e9


def test_dummy_weights_need_a_config_and_nothing_else(family: ModelFamily, fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "all_kinds" / "config.json", tmp_path)
    shutil.copy(fixtures / "all_kinds" / "logits.npz", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"has neither model.safetensors nor"):
        family.plan(tmp_path, EngineOptions())
    options = EngineOptions(load_format=LoadFormat.DUMMY, engine_host=EngineHost.THREAD, num_blocks=32, max_num_seqs=4)
    events = asyncio.run(generate(family, tmp_path, options))
    assert isinstance(events[-1], Finished)


def test_options_that_the_model_cannot_do_are_refused(family: ModelFamily, fixtures: Path) -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model"):
        family.plan(fixtures / "all_kinds", EngineOptions(tensor_parallel_size=3))
