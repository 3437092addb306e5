"""The family as openinfer finds and starts it: through its entry point, in a thread and in a process of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, ModelFamily, Refused, find_plugin
from openinfer_core.plugins import MODELS
from openinfer_deepseek_v4 import DeepseekV4
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import ask_launched, check_launched


@pytest.fixture
def family() -> ModelFamily:
    found = find_plugin(MODELS, "deepseek_v4").load()
    assert found is DeepseekV4
    return found()


@pytest.mark.parametrize("host", LoopHost)
@pytest.mark.parametrize("ranks", [1, 2])
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(
    family: ModelFamily, fixtures: Path, host: LoopHost, ranks: int
) -> None:
    options = EngineOptions(engine_host=host, tensor_parallel_size=ranks, num_blocks=32, max_num_seqs=4)
    check_launched(family, fixtures / "all_kinds", options, tolerance=1e-3)


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
    """Codes and scales are counted as stored, plain weights in the compute dtype, and the share of each of 8 ranks."""
    (tmp_path / "config.json").write_text(json.dumps(published | {"eos_token_id": 1}))
    options = EngineOptions(load_format=LoadFormat.DUMMY, num_blocks=8, max_num_seqs=1, tensor_parallel_size=8)
    plan = family.plan(tmp_path, options)
    assert 8 * 21.62e9 < plan.memory_bytes["weights"] < 8 * 23.5e9


def test_dummy_weights_need_a_config_and_nothing_else(family: ModelFamily, fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "all_kinds" / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"has neither model.safetensors nor"):
        family.plan(tmp_path, EngineOptions())
    options = EngineOptions(load_format=LoadFormat.DUMMY, engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4)
    assert ask_launched(family, tmp_path, options, range(53)).finished is not None


def test_options_that_the_model_cannot_do_are_refused(family: ModelFamily, fixtures: Path) -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model"):
        family.plan(fixtures / "all_kinds", EngineOptions(tensor_parallel_size=3))
