"""What an `adapter_config.json` says, and what it may not."""

import json
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.lora.adapter_config import MAX_CONFIG_BYTES, parse_adapter_config, read_adapter_config

LEAST = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def parsed(**keys: Any) -> Any:
    return parse_adapter_config({**LEAST, **keys}, what="config")


def test_scale_is_alpha_over_rank_or_over_its_root() -> None:
    assert parsed().scale_of("layers.0.q_proj") == 2
    assert parsed(use_rslora=True, r=16).scale_of("layers.0.q_proj") == 4
    assert parsed(lora_alpha=0.5, r=1).scale_of("x") == 0.5


def test_patterns_are_ends_of_paths_and_the_first_counts() -> None:
    config = parsed(rank_pattern={"layers.1.q_proj": 4, "q_proj": 2}, alpha_pattern={"k_proj": 24})
    assert config.rank_of("model.layers.1.q_proj") == 4
    assert config.rank_of("model.layers.11.q_proj") == 2
    assert config.rank_of("model.layers.1.xq_proj") == 8
    assert config.scale_of("model.layers.1.q_proj") == 4
    assert config.scale_of("k_proj") == 3


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "DoRA is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "expert tensors"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the weights of the model"),
        ({"init_lora_weights": "OLoRA"}, "changes the weights of the model"),
        ({"init_lora_weights": "lora_ga"}, "changes the weights of the model"),
        ({"corda_config": {"a": 1}}, "CorDA"),
        ({"loftq_config": {"loftq_bits": 4}}, "LoftQ"),
        ({"something_new": 3}, "'something_new' is 3, a key that is not known here"),
        ({"rank_pattern": {"^model.*q_proj$": 4}}, "regular expressions are not served"),
        ({"alpha_pattern": {"(q|k)_proj": 4}}, "regular expressions are not served"),
    ],
)
def test_other_mathematics_are_refused_by_name(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as refusal:
        parsed(**keys)
    assert why in str(refusal.value)


def test_keys_that_say_nothing_are_taken() -> None:
    nothing = {"use_dora": False, "modules_to_save": None, "loftq_config": {}, "something_new": None, "other": []}
    assert parsed(**nothing, init_lora_weights="gaussian", bias="none", target_modules="all-linear").rank == 8


@pytest.mark.parametrize(
    "keys",
    [
        {"r": 0},
        {"r": 513},
        {"r": 10**30},
        {"r": True},
        {"r": "8"},
        {"r": None},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": "16"},
        {"rank_pattern": {"q_proj": -1}},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": 1e300}},
        {"use_rslora": "yes"},
    ],
)
def test_numbers_out_of_range_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint):
        parsed(**keys)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"r": 8, "r": 16}', "{" * 100_000, "\udcff", "x" * (MAX_CONFIG_BYTES + 1)],
    ids=["empty", "list", "twice", "deep", "no UTF-8", "long"],
)
def test_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidCheckpoint):
        read_adapter_config(tmp_path)


def test_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="a folder of PEFT's is needed"):
        read_adapter_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(LEAST))
    assert read_adapter_config(tmp_path).alpha == 16
