"""The family as openinfer finds and starts it, from stored codes and from dummies of them."""

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
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    find_plugin,
)
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineHost, EngineOptions, LoadFormat
from openinfer_kimi_k2 import KimiK2

FIXTURES = Path(__file__).parent / "fixtures"


async def generate(model_dir: Path, options: EngineOptions, prompt: list[int], max_tokens: int) -> list[TokenEvent]:
    family = find_plugin(MODELS, "kimi_k2").load()
    assert family is KimiK2
    engine = family().launch(model_dir, options)
    events: list[TokenEvent] = []
    try:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = GenerateRequest(request_id=RequestId(7), prompt_token_ids=tuple(prompt), sampling=sampling)
        engine.submit(request)
        async for arrived in engine.events():
            events += arrived
            if any(isinstance(event, Finished) for event in arrived):
                break
    finally:
        await engine.close()
    return events


@pytest.mark.parametrize(("name", "ranks"), [("plain", 2), ("fp8", 1), ("int4", 8)])
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(name: str, ranks: int) -> None:
    options = EngineOptions(
        engine_host=EngineHost.THREAD, tensor_parallel_size=ranks, num_blocks=32, max_num_seqs=4, max_model_tokens=512
    )
    with np.load(FIXTURES / name / "logits.npz", allow_pickle=False) as recorded:
        prompt, logits = recorded["token_ids"].tolist(), recorded["logits"]
    events = asyncio.run(generate(FIXTURES / name, options, prompt, 1))
    (tokens,) = [event for event in events if isinstance(event, Tokens)]
    assert tokens.token_ids == (int(logits[-1].argmax()),)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_dummy_weights_need_a_config_and_nothing_else(name: str, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    options = EngineOptions(
        engine_host=EngineHost.THREAD, num_blocks=32, max_num_seqs=4, max_model_tokens=512, load_format=LoadFormat.DUMMY
    )
    events = asyncio.run(generate(tmp_path, options, [5, 6, 7], 4))
    assert isinstance(events[-1], Finished)
    assert events[-1].completion_tokens == 4


def test_folder_without_weights_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "int4" / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"neither model\.safetensors nor"):
        KimiK2().plan(tmp_path, EngineOptions(num_blocks=10))


def test_checkpoint_of_another_storage_is_refused(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "plain" / "config.json", tmp_path)
    shutil.copy(FIXTURES / "fp8" / "model.safetensors", tmp_path)
    with pytest.raises(InvalidCheckpoint, match="the checkpoint does not fit its config"):
        KimiK2().plan(tmp_path, EngineOptions(num_blocks=10))
