"""The engine finds the family by its name; what a `config.json` may say, in every spelling, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused, find_plugin, read_config
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import ask_launched, check_launched
from openinfer_gemma import Gemma
from openinfer_gemma.config import LayerKind

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
PUBLISHED_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""What shapes gemma-3-4b-it; all else is a default of transformers."""
PUBLISHED_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "torch_dtype": "float32",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}


@pytest.fixture
def gemma2(fixtures: Path) -> dict[str, Any]:
    return json.loads((fixtures / "gemma2" / "config.json").read_text())


@pytest.fixture
def gemma3(fixtures: Path) -> dict[str, Any]:
    return json.loads((fixtures / "gemma3" / "config.json").read_text())


def test_engine_finds_the_family_by_its_name_and_generates(model_dir: Path) -> None:
    family = find_plugin(MODELS, "gemma").load()()
    assert family.refusal(read_config(model_dir)) is None
    options = EngineOptions(engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4)
    check_launched(family, model_dir, options, tolerance=1e-3)


def test_engine_generates_with_random_weights(model_dir: Path) -> None:
    options = EngineOptions(engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4, load_format=LoadFormat.DUMMY)
    assert len(ask_launched(Gemma(), model_dir, options, [5, 6, 7], max_tokens=3).token_ids) == 3


def test_plan_shows_the_engine_without_loading_it(model_dir: Path) -> None:
    plan = Gemma().plan(model_dir, EngineOptions(num_blocks=100))
    assert plan.limits["max_model_tokens"] == 512
    assert "of layers that see the last" in plan.parts["kv_tables"]


def test_published_gemma3_with_images_is_its_text_model_with_defaults_filled_in() -> None:
    config = Gemma.definition.parse(PUBLISHED_4B)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (262_208, 131_072)
    assert config.layer_kinds[:7] == (*[SLIDING] * 5, FULL, SLIDING)
    assert config.layer_kinds.count(FULL) == 5
    ropes = config.rope_parameters
    assert (ropes[FULL].rope_theta, ropes[FULL].factor) == (1e6, 8.0)
    assert (ropes[SLIDING].rope_theta, ropes[SLIDING].factor) == (1e4, 1.0)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (None, None)
    assert config.embedding_scale == 50.5  # sqrt(2560) is 50.6
    names = Gemma.definition.tensors(config)
    assert names["language_model.model.layers.33.self_attn.q_norm.weight"] == (256,)


def test_published_gemma2_has_a_window_in_every_other_layer_beginning_with_the_first() -> None:
    config = Gemma.definition.parse(PUBLISHED_2B)
    assert config.layer_kinds == (SLIDING, FULL) * 13
    assert {each.rope_theta for each in config.rope_parameters.values()} == {1e4}
    assert (config.attention_scale, config.embedding_scale) == (1 / 16, 48.0)
    assert "model.layers.0.self_attn.q_norm.weight" not in Gemma.definition.tensors(config)


def test_keys_that_are_absent_have_the_defaults_of_their_generation_and_null_is_none() -> None:
    short = {key: value for key, value in PUBLISHED_2B.items() if not key.endswith("softcapping")}
    config = Gemma.definition.parse(short)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    config = Gemma.definition.parse(short | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (None, None)


def test_older_spelling_means_the_same(gemma3: dict[str, Any]) -> None:
    old = {key: value for key, value in gemma3.items() if key not in ("layer_types", "rope_parameters", "dtype")}
    old |= {
        "torch_dtype": "bfloat16",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    expected, found = Gemma.definition.parse(gemma3), Gemma.definition.parse(old)
    assert found.layer_kinds == expected.layer_kinds
    assert found.rope_parameters == expected.rope_parameters
    assert found.embedding_scale == expected.embedding_scale


@pytest.mark.parametrize(
    ("hidden_size", "dtype", "scale"),
    [(3072, "bfloat16", 55.5), (3584, "bfloat16", 59.75), (3072, "float16", 55.4375), (1024, "float32", 32.0)],
)
def test_scale_of_the_embedding_is_rounded_to_the_checkpoints_dtype(
    gemma2: dict[str, Any], hidden_size: int, dtype: str, scale: float
) -> None:
    assert Gemma.definition.parse(gemma2 | {"hidden_size": hidden_size, "dtype": dtype}).embedding_scale == scale


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma"}, "^not a gemma2 or gemma3 model"),
        ({"architectures": ["Gemma3TextModel"]}, "only Gemma3ForCausalLM is served"),
        ({"attention_bias": True}, "attention_bias is True: biases"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not served"),
        ({"use_bidirectional_attention": True}, "attention to later tokens is not served"),
        ({"hidden_activation": "gelu"}, "only 'gelu_pytorch_tanh' is served"),
        ({"tie_word_embeddings": False}, "only True is served"),
        ({"attn_logit_softcapping": 50.0}, "scores of Gemma-3 are not capped"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "code of a checkpoint is never run"),
    ],
)
def test_what_it_does_not_compute_is_refused(gemma3: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        Gemma.definition.parse(gemma3 | change)


def test_config_with_images_but_without_a_text_model_is_refused() -> None:
    with pytest.raises(Refused, match="text_config is None: it must be a JSON object"):
        Gemma.definition.parse({key: value for key, value in PUBLISHED_4B.items() if key != "text_config"})
    other = PUBLISHED_4B | {"text_config": {**PUBLISHED_4B["text_config"], "model_type": "gemma4_text"}}
    with pytest.raises(Refused, match="model_type of text_config is 'gemma4_text': only gemma3_text is served"):
        Gemma.definition.parse(other)
    biased = PUBLISHED_4B | {"text_config": {**PUBLISHED_4B["text_config"], "attention_bias": True}}
    with pytest.raises(Refused, match="attention_bias is True"):
        Gemma.definition.parse(biased)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": None}, "sliding_window"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 7 layers"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types"),
        ({"dtype": "float8"}, "dtype is 'float8'; possible are bfloat16, float16, float32"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters lacks sliding_attention"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "yarn"}}},
            "rope_parameters.*rope_type",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(gemma3: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        Gemma.definition.parse(gemma3 | change)


def test_ranks_that_do_not_divide_the_heads_are_refused(gemma3: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model: num_key_value_heads is 2"):
        Gemma.definition.check_ranks(Gemma.definition.parse(gemma3), 3)
