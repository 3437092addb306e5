"""The family as openinfer finds and starts it: through its entry point, in a thread and in a process of its own."""

import shutil
from pathlib import Path

import pytest

from openinfer_core import InvalidCheckpoint, ModelFamily, Refused, find_plugin
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import ask_launched, check_launched
from openinfer_qwen3 import Qwen3


@pytest.fixture
def family() -> ModelFamily:
    found = find_plugin(MODELS, "qwen3").load()
    assert found is Qwen3
    return found()


@pytest.mark.parametrize("host", LoopHost)
@pytest.mark.parametrize("ranks", [1, 2])
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(
    family: ModelFamily, fixtures: Path, host: LoopHost, ranks: int
) -> None:
    options = EngineOptions(engine_host=host, tensor_parallel_size=ranks, num_blocks=32, max_num_seqs=4)
    check_launched(family, fixtures / "tied", options, tolerance=1e-4)


def test_plan_says_what_an_engine_would_be_made_of(family: ModelFamily, fixtures: Path) -> None:
    plan = family.plan(fixtures / "untied_yarn", EngineOptions(num_blocks=16, tensor_parallel_size=2))
    assert plan.model_type == "qwen3"
    assert plan.limits["max_model_tokens"] == 256
    assert plan.limits["num_blocks"] == 16


def test_dummy_weights_need_a_config_and_nothing_else(family: ModelFamily, fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "tied" / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"has neither model.safetensors nor"):
        family.plan(tmp_path, EngineOptions())
    options = EngineOptions(load_format=LoadFormat.DUMMY, engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4)
    assert ask_launched(family, tmp_path, options, range(41)).finished is not None


def test_options_that_the_model_cannot_do_are_refused(family: ModelFamily, fixtures: Path) -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model"):
        family.plan(fixtures / "tied", EngineOptions(tensor_parallel_size=3))
