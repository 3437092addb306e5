"""The family as openinfer finds and starts it: through its entry point, in a thread and in a process of its own."""

import asyncio
import shutil
from pathlib import Path

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
from openinfer_deepseek_v2_lite import DeepseekV2Lite
from openinfer_engine.options import EngineHost, EngineOptions, LoadFormat

PROMPT_TOKENS = 41


@pytest.fixture
def family() -> ModelFamily:
    found = find_plugin(MODELS, "deepseek_v2").load()
    assert found is DeepseekV2Lite
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
    events = asyncio.run(generate(family, fixtures / "lite", options))
    with np.load(fixtures / "lite" / "logits.npz") as recorded:
        logits = recorded["logits_1"][-1].astype(np.float64)
    (tokens,) = [event for event in events if isinstance(event, Tokens)]
    assert tokens.token_ids == (int(logits.argmax()),)
    assert tokens.logprobs is not None
    assert abs(tokens.logprobs[0].logprob - (logits.max() - np.log(np.exp(logits).sum()))) < 1e-4
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.prompt_tokens) == (FinishReason.LENGTH, PROMPT_TOKENS)


def test_plan_says_what_an_engine_would_be_made_of(family: ModelFamily, fixtures: Path) -> None:
    plan = family.plan(fixtures / "lite", EngineOptions(num_blocks=10, tensor_parallel_size=2))
    assert plan.model_type == "deepseek_v2"
    assert plan.limits["max_model_tokens"] == 2560
    assert plan.limits["num_blocks"] == 10


def test_dummy_weights_need_a_config_and_nothing_else(family: ModelFamily, fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "lite" / "config.json", tmp_path)
    shutil.copy(fixtures / "lite" / "logits.npz", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"has neither model.safetensors nor"):
        family.plan(tmp_path, EngineOptions())
    options = EngineOptions(load_format=LoadFormat.DUMMY, engine_host=EngineHost.THREAD, num_blocks=32, max_num_seqs=4)
    events = asyncio.run(generate(family, tmp_path, options))
    assert isinstance(events[-1], Finished)


def test_options_that_the_model_cannot_do_are_refused(family: ModelFamily, fixtures: Path) -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model"):
        family.plan(fixtures / "lite", EngineOptions(tensor_parallel_size=3))
