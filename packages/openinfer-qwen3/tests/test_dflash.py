"""DFlash folders: what they draft, that they change no token, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_in_float64 import (
    LAYERS,
    MODEL,
    Blocks64,
    models_embedding,
    recorded,
    save_random_weights,
    wrong_drafts,
)
from safetensors.numpy import load_file, save_file

from openinfer_core import InvalidCheckpoint, Refused, read_config
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import KvCacheDtype
from openinfer_engine.testing import (
    DraftLog,
    check_model_drafter,
    drafts_after_prefixes,
)
from openinfer_qwen3.block_drafter import block_tensors
from openinfer_qwen3.dflash import DFlashDrafter, read_dflash
from openinfer_qwen3.family import Qwen3Definition

CONFIG: dict[str, Any] = LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}
DRAFTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of random weights."""
    target = tmp_path_factory.mktemp("dflash")
    (target / "config.json").write_text(json.dumps(CONFIG))
    model = Qwen3Definition().parse(read_config(MODEL))
    save_random_weights(target, block_tensors(read_dflash(target, model, {})))
    return target


def named(folder: Path) -> dict[str, Any]:
    return {"drafter_options": {"model": str(folder)}}


@pytest.fixture(scope="module")
def log(folder: Path) -> DraftLog:
    return recorded(DFlashDrafter, folder, max_drafts=DRAFTS)


def formula(folder: Path, **mutant: Any) -> Blocks64:
    return Blocks64(load_file(folder / "model.safetensors"), models_embedding(), 7, **mutant)


def test_drafts_are_those_of_the_formulas_in_a_thousand_contexts(folder: Path, log: DraftLog) -> None:
    assert len(log.contexts) >= 1000
    assert wrong_drafts(log, formula(folder)) == 0


MUTANTS = [{"shift": 1}, {"is_causal": True}, {"is_unnormed": True}, {"is_shifted_place": True}]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_drafts_of_mutants_of_the_formulas_differ(folder: Path, log: DraftLog, mutant: dict[str, Any]) -> None:
    assert wrong_drafts(log, formula(folder, **mutant), limit=100) > 20


def test_the_last_tokens_place_drafts_where_a_folder_says_so(folder: Path, tmp_path: Path) -> None:
    config = CONFIG | {"dflash_config": {**CONFIG["dflash_config"], "sample_from_anchor": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    log = recorded(DFlashDrafter, tmp_path, max_drafts=9)
    assert {len(context.drafts) for context in log.contexts} == {CONFIG["block_size"]}
    assert wrong_drafts(log, formula(folder, drafts_at_anchor=True), limit=200) == 0
    assert wrong_drafts(log, formula(folder, drafts_at_anchor=True, is_shifted_place=True), limit=100) > 20


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19}),
        ("tier_tokens", {"num_blocks": 19, "kv_tier": ["host=16MiB"]}),
        ("cached_tokens", {"num_blocks": 40, "tensor_parallel_size": 2}),
        ("cached_tokens", {"num_blocks": 40, "max_drafts": 9}),
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19, "kv_cache_dtype": KvCacheDtype.FP8}),
    ],
)
def test_answers_with_a_folder_are_those_without(folder: Path, happens: str, options: dict[str, Any]) -> None:
    stats = check_model_drafter(Qwen3Definition(), MODEL, DFlashDrafter, **named(folder), **options)
    assert getattr(stats, happens) > 0


def test_drafts_after_a_cached_prefix_are_those_of_a_computed_one(folder: Path) -> None:
    cached, computed = drafts_after_prefixes(Qwen3Definition(), MODEL, DFlashDrafter, vocab_size=257, **named(folder))
    assert cached == computed


def test_plan_shows_the_folders_kv(folder: Path) -> None:
    plan = resolve(
        Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, speculative=f"dflash,k=3,model={folder}")
    ).plan()
    assert plan.parts["drafter"].startswith("dflash (openinfer-qwen3 ")
    assert plan.parts["drafter_kv"] == "2 layers, 1024 bytes of each token's KV"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 300}, {}, "another model's: vocab_size is 300, and the model's 257"),
        ({"hidden_size": 64}, {}, "hidden_size is 64, and the model's 96"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 9]}}, {}, "after layers [0, 9]"),
        ({"dflash_config": {"mask_token_id": 900, "target_layer_ids": [0, 2]}}, {}, "mask_token_id is 900 of 257"),
        ({"dflash_config": {**CONFIG["dflash_config"], "causal": True}}, {}, "a causal block is not served"),
        ({"dflash_config": {**CONFIG["dflash_config"], "use_swa": True}}, {}, "windows are not served"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, "only full attention is served"),
        ({"is_neox_style": False}, {}, "only RoPE of halves is served"),
        ({"architectures": ["Qwen3ForCausalLM"]}, {}, "is no DFlash folder"),
        ({"num_key_value_heads": 4}, {}, "KV has 4 heads of 32"),
        ({"block_size": 1}, {}, "no valid DFlash config"),
        ({}, {"lm_head.weight": np.zeros((257, 96), np.float32)}, "lm_head.weight is a tensor of its own"),
        (
            {},
            {"markov_head.markov_w1.weight": np.zeros((257, 8), np.float32)},
            "markov_head.markov_w1.weight is a tensor",
        ),
        ({}, {"norm.weight": np.full(96, np.nan, np.float32)}, "norm.weight has numbers that are not finite"),
        ({}, {"fc.weight": np.zeros((96, 96), np.float32)}, "fc.weight has shape [96, 96], not [96, 192]"),
    ],
    ids=range(15),
)
def test_other_folders_are_refused_by_name(
    folder: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({**load_file(folder / "model.safetensors"), **tensors}, tmp_path / "model.safetensors")
    with pytest.raises((Refused, InvalidCheckpoint)) as error:
        build_loop(
            resolve(Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, speculative=f"dflash,model={tmp_path}"))
        )
    assert message in str(error.value)
