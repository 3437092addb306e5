"""The checkpoint's files agree with each other, with the published layout, and with the size allowed."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from openinfer_tiny_model import model_dir

MAX_BYTES = 8_000_000
CONFIG_KEYS = {
    "architectures",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def read_json(name: str) -> dict[str, Any]:
    return json.loads((model_dir() / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return read_json("config.json")


@pytest.fixture(scope="module")
def tokenizer() -> dict[str, Any]:
    return read_json("tokenizer.json")


def safetensors_file() -> tuple[dict[str, Any], int]:
    """Return the header of the weights and the number of bytes behind it."""
    path = model_dir() / "model.safetensors"
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    return header, path.stat().st_size - 8 - header_bytes


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": [hidden],
            f"{layer}.post_attention_layernorm.weight": [hidden],
            f"{layer}.self_attn.q_proj.weight": [queries, hidden],
            f"{layer}.self_attn.k_proj.weight": [keys, hidden],
            f"{layer}.self_attn.v_proj.weight": [keys, hidden],
            f"{layer}.self_attn.o_proj.weight": [hidden, queries],
            f"{layer}.self_attn.q_norm.weight": [width],
            f"{layer}.self_attn.k_norm.weight": [width],
            f"{layer}.mlp.gate_proj.weight": [inner, hidden],
            f"{layer}.mlp.up_proj.weight": [inner, hidden],
            f"{layer}.mlp.down_proj.weight": [hidden, inner],
        }
    return shapes


def added_tokens(tokenizer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {token["content"]: token for token in tokenizer["added_tokens"]}


def test_folder_holds_the_expected_files_within_its_size() -> None:
    sizes = {path.name: path.stat().st_size for path in model_dir().iterdir()}

    assert set(sizes) == {
        "config.json",
        "evaluation.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert sum(sizes.values()) <= MAX_BYTES


def test_config_has_the_published_keys_of_qwen3(config: dict[str, Any]) -> None:
    assert set(config) == CONFIG_KEYS
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["use_sliding_window"] is False


def test_head_dim_differs_from_hidden_size_per_head_as_in_the_4b_model(config: dict[str, Any]) -> None:
    assert config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_weights_have_the_published_names_shapes_and_dtype(config: dict[str, Any]) -> None:
    header, _ = safetensors_file()
    header.pop("__metadata__", None)

    assert {name: tensor["shape"] for name, tensor in header.items()} == expected_shapes(config)
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}


def test_weights_fill_the_file_without_gaps() -> None:
    header, num_bytes = safetensors_file()
    header.pop("__metadata__", None)
    end = 0
    for tensor in sorted(header.values(), key=lambda tensor: tensor["data_offsets"]):
        start, stop = tensor["data_offsets"]
        assert start == end
        assert stop - start == 2 * math.prod(tensor["shape"])
        end = stop

    assert end == num_bytes


def test_tokenizer_ids_are_dense_and_fewer_than_embedding_rows(
    tokenizer: dict[str, Any], config: dict[str, Any]
) -> None:
    ids = sorted({*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])})

    assert ids == list(range(len(ids)))
    assert len(ids) < config["vocab_size"]


def test_tokenizer_is_byte_level_and_covers_every_byte(tokenizer: dict[str, Any]) -> None:
    assert tokenizer["model"]["type"] == "BPE"
    assert [step["type"] for step in tokenizer["pre_tokenizer"]["pretokenizers"]] == ["Split", "ByteLevel"]
    assert tokenizer["decoder"]["type"] == "ByteLevel"
    assert sum(len(token) == 1 for token in tokenizer["model"]["vocab"]) == 256


def test_added_tokens_are_special_only_where_qwen3_has_them_so(tokenizer: dict[str, Any]) -> None:
    added = added_tokens(tokenizer)

    assert {name for name, token in added.items() if token["special"]} == set(SPECIAL)
    assert {name for name, token in added.items() if not token["special"]} == set(ADDED)
    assert min(token["id"] for token in added.values()) == len(tokenizer["model"]["vocab"])


def test_tokenizer_config_agrees_with_the_tokenizer(tokenizer: dict[str, Any]) -> None:
    described = read_json("tokenizer_config.json")["added_tokens_decoder"]

    assert {(int(token_id), token["content"], token["special"]) for token_id, token in described.items()} == {
        (token["id"], token["content"], token["special"]) for token in tokenizer["added_tokens"]
    }


def test_generation_stops_at_the_end_of_a_turn_and_of_a_text(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    added = added_tokens(tokenizer)
    generation = read_json("generation_config.json")

    assert generation["eos_token_id"] == [added["<|im_end|>"]["id"], added["<|endoftext|>"]["id"]]
    assert generation["pad_token_id"] == added["<|endoftext|>"]["id"]
    assert generation["do_sample"] is False
    assert config["eos_token_id"] == added["<|im_end|>"]["id"]


@pytest.mark.parametrize(
    "mark", ["<|im_start|>", "# Tools", "<tools>", "<tool_call>", "<tool_response>", "enable_thinking", "tojson"]
)
def test_chat_template_speaks_qwen3s_format(mark: str) -> None:
    assert mark in read_json("tokenizer_config.json")["chat_template"]


def test_no_file_of_the_checkpoint_is_executable_code() -> None:
    suffixes = {Path(path.name).suffix for path in model_dir().iterdir()}

    assert suffixes == {".json", ".safetensors"}
