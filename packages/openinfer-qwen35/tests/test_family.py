"""The family as openinfer finds and starts it: through its entry point, in a thread and in a process of its own."""

import shutil
from pathlib import Path

import pytest

from openinfer_core import InvalidCheckpoint, ModelFamily, Refused, find_plugin
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import ask_launched, check_launched
from openinfer_qwen35 import Qwen35


@pytest.fixture
def family() -> ModelFamily:
    found = find_plugin(MODELS, "qwen35").load()
    assert found is Qwen35
    return found()


@pytest.mark.parametrize("host", LoopHost)
@pytest.mark.parametrize("ranks", [1, 2])
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(
    family: ModelFamily, fixtures: Path, host: LoopHost, ranks: int
) -> None:
    options = EngineOptions(engine_host=host, tensor_parallel_size=ranks, num_blocks=32, max_num_seqs=4)
    check_launched(family, fixtures / "vision_language", options, tolerance=1e-3)


def test_plan_says_what_an_engine_would_be_made_of(family: ModelFamily, fixtures: Path) -> None:
    options = EngineOptions(num_blocks=32, tensor_parallel_size=2, max_num_seqs=3)
    plan = family.plan(fixtures / "text_tied", options)
    assert plan.model_type == "qwen3_5_text"
    assert plan.limits["max_model_tokens"] == 512
    assert plan.limits["num_blocks"] == 32
    assert plan.parts["prefix_cache"] == "where one of 32 copies of recurrent states is kept"
    channels, state = (2 * 2 * 16 + 4 * 24) * 3, 4 * 16 * 24
    assert plan.memory_bytes["states"] == 3 * 3 * (channels + state) * 4, "slots, layers, numbers, bytes of each"
    assert plan.memory_bytes["state_snapshots"] == 32 * 3 * (channels + state) * 4
    off = family.plan(fixtures / "text_tied", EngineOptions(num_blocks=10, prefix_cache=False))
    assert off.parts["prefix_cache"] == "off"
    assert off.memory_bytes["state_snapshots"] == 0


def test_dummy_weights_need_a_config_and_nothing_else(family: ModelFamily, fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "vision_language" / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"has neither model.safetensors nor"):
        family.plan(tmp_path, EngineOptions())
    options = EngineOptions(load_format=LoadFormat.DUMMY, engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4)
    assert ask_launched(family, tmp_path, options, range(41)).finished is not None


def test_options_that_the_model_cannot_do_are_refused(family: ModelFamily, fixtures: Path) -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model"):
        family.plan(fixtures / "vision_language", EngineOptions(tensor_parallel_size=3))
