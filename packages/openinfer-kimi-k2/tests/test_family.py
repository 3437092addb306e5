"""The family as openinfer finds and starts it, from stored codes and from dummies of them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from openinfer_core import FinishReason, InvalidCheckpoint, ModelFamily, find_plugin
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import ask_launched
from openinfer_kimi_k2 import KimiK2

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def family() -> ModelFamily:
    found = find_plugin(MODELS, "kimi_k2").load()
    assert found is KimiK2
    return found()


@pytest.mark.parametrize(("name", "ranks"), [("plain", 2), ("fp8", 1), ("int4", 8)])
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(
    family: ModelFamily, name: str, ranks: int
) -> None:
    options = EngineOptions(
        engine_host=LoopHost.THREAD, tensor_parallel_size=ranks, num_blocks=32, max_num_seqs=4, max_model_tokens=512
    )
    with np.load(FIXTURES / name / "logits.npz", allow_pickle=False) as recorded:
        prompt, logits = recorded["token_ids"].tolist(), recorded["logits"]
    answer = ask_launched(family, FIXTURES / name, options, prompt)
    assert answer.token_ids == [int(logits[-1].argmax())]
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH


def test_data_parallel_ranks_say_it_too(family: ModelFamily) -> None:
    options = EngineOptions(engine_host=LoopHost.THREAD, data_parallel_size=4, num_blocks=32, max_num_seqs=4)
    with np.load(FIXTURES / "int4" / "logits.npz", allow_pickle=False) as recorded:
        prompt, logits = recorded["token_ids"].tolist(), recorded["logits"]
    assert ask_launched(family, FIXTURES / "int4", options, prompt).token_ids == [int(logits[-1].argmax())]


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_dummy_weights_need_a_config_and_nothing_else(family: ModelFamily, name: str, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    options = EngineOptions(
        engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4, max_model_tokens=512, load_format=LoadFormat.DUMMY
    )
    answer = ask_launched(family, tmp_path, options, [5, 6, 7], max_tokens=4)
    assert answer.finished is not None
    assert answer.finished.completion_tokens == 4


def test_folder_without_weights_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "int4" / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"neither model\.safetensors nor"):
        KimiK2().plan(tmp_path, EngineOptions(num_blocks=10))


def test_checkpoint_of_another_storage_is_refused(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "plain" / "config.json", tmp_path)
    shutil.copy(FIXTURES / "fp8" / "model.safetensors", tmp_path)
    with pytest.raises(InvalidCheckpoint, match="the checkpoint does not fit its config"):
        KimiK2().plan(tmp_path, EngineOptions(num_blocks=10))
