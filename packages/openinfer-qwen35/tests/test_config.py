"""What a `config.json` may say, in both published layouts, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused, UnclaimedModel, claim, find_plugin
from openinfer_core.errors import ContractViolation
from openinfer_core.plugins import MODELS
from openinfer_core.simulated import SimulatedOptions
from openinfer_kv_cache import KvDtype, KvLayout
from openinfer_qwen35 import Qwen35
from openinfer_qwen35.family import Qwen35Definition
from openinfer_qwen35.model import LayerKind

definition = Qwen35Definition()


@pytest.fixture
def text(fixtures: Path) -> dict[str, Any]:
    return json.loads((fixtures / "text_tied" / "config.json").read_text())


@pytest.fixture
def both(fixtures: Path) -> dict[str, Any]:
    return json.loads((fixtures / "vision_language" / "config.json").read_text())


def test_text_model_is_found_in_either_layout(text: dict[str, Any], both: dict[str, Any]) -> None:
    alone, part = definition.parse(text), definition.parse(both)
    assert (alone.tensor_prefix, part.tensor_prefix) == ("model.", "model.language_model.")
    assert (alone.hidden_size, part.hidden_size) == (64, 64)
    assert (alone.rotary_dim, part.rotary_dim) == (8, 8)
    assert alone.rope.theta == part.rope.theta == 1e7
    assert part.layer_kinds == (LayerKind.LINEAR, LayerKind.FULL)


def test_older_spelling_means_the_same(text: dict[str, Any]) -> None:
    """One number per idea: the interval for `layer_types`, and theta and factor beside the text model's other keys."""
    old = {key: value for key, value in text.items() if key not in ("layer_types", "rope_parameters")}
    old |= {"full_attention_interval": 4, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    scaled = old | {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    expected = definition.parse(text)
    for config in (old, scaled):
        found = definition.parse(config)
        assert found.layer_kinds == expected.layer_kinds
        assert (found.rope, found.rotary_dim) == (expected.rope, expected.rotary_dim)


def test_published_4b_has_eight_layers_of_full_attention(text: dict[str, Any]) -> None:
    config = definition.parse(
        {key: value for key, value in text.items() if key != "layer_types"} | {"num_hidden_layers": 32}
    )
    full = [index for index, kind in enumerate(config.layer_kinds) if kind is LayerKind.FULL]
    assert full == [3, 7, 11, 15, 19, 23, 27, 31]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "exl3"}}, "quant_method is 'exl3': only fp8, "),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_experts": 128}, "num_experts is 128: mixtures of experts are another family's"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is served"),
        ({"attn_output_gate": False}, "attn_output_gate is False: only True is served"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16': only 'float32'"),
        ({"architectures": ["Other"]}, r"architectures is \['Other'\]"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "code of a checkpoint is never run"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}},
            "rope_type is 'yarn': only the plain",
        ),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, "a different rope_scaling"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e7}}, "rope type 'longrope' is not supported"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(
    text: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        definition.parse(text | change)


def test_what_the_outer_config_of_a_vision_language_model_says_is_not_ignored(both: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="quant_method is 'exl3'"):
        definition.parse(both | {"quantization_config": {"quant_method": "exl3"}})
    with pytest.raises(Refused, match="num_experts"):
        definition.parse(both | {"text_config": both["text_config"] | {"num_experts": 8}})
    with pytest.raises(Refused, match="model_type of text_config is 'qwen3_5_moe_text'"):
        definition.parse(both | {"text_config": both["text_config"] | {"model_type": "qwen3_5_moe_text"}})
    with pytest.raises(Refused, match="text_config is None: it must be a JSON object"):
        definition.parse({key: value for key, value in both.items() if key != "text_config"})


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_next", "qwen3_5_moe", None])
def test_other_architectures_are_not_its_business(text: dict[str, Any], model_type: str | None) -> None:
    reason = Qwen35().refusal(text | {"model_type": model_type})
    assert reason is not None
    assert reason.startswith("not ")
    with pytest.raises(UnclaimedModel):
        claim(text | {"model_type": model_type}, [find_plugin(MODELS, "qwen35")])


def test_both_layouts_are_claimed(text: dict[str, Any], both: dict[str, Any]) -> None:
    for config in (text, both):
        assert isinstance(claim(config, [find_plugin(MODELS, "qwen35")])[0], Qwen35)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide linear_num_value_heads 4"),
        ({"head_dim": 12}, "partial_rotary_factor 0.25 of head_dim 12 is 3; RoPE rotates pairs"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has 4 entries for 4 layers, of the kinds linear"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 2 entries for 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ],
)
def test_values_out_of_range_are_refused_by_name(text: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        definition.parse(text | change)


def test_ranks_that_do_not_divide_the_model_are_refused_with_those_that_do(text: dict[str, Any]) -> None:
    config = definition.parse(text | {"num_attention_heads": 16, "linear_num_key_heads": 4, "num_key_value_heads": 8})
    for ranks in (1, 2, 4):
        definition.check_ranks(config, ranks)
    with pytest.raises(Refused, match=r"8 ranks .* linear_num_key_heads is 4, .* possible are 1, 2, 4"):
        definition.check_ranks(config, 8)


def test_memory_of_each_rank_is_its_heads(text: dict[str, Any]) -> None:
    def layout(ranks: int) -> KvLayout:
        spec = definition.kv_spec(
            definition.parse(text),
            model_tag="a",
            kv_dtype=KvDtype.FLOAT32,
            state_dtype=KvDtype.FLOAT32,
            num_ranks=ranks,
            rank_index=0,
        )
        return KvLayout.from_spec(spec, block_size_tokens=16)

    assert layout(1).block_shape() == (1, 2, 2, 16, 32)
    assert layout(2).block_shape() == (1, 2, 1, 16, 32)
    state, conv = 4 * 16 * 24, (2 * 2 * 16 + 4 * 24) * 3
    assert layout(1).slot_bytes == 2 * layout(2).slot_bytes == 3 * (state + conv) * 4


def test_family_refuses_options_of_another_family(fixtures: Path) -> None:
    with pytest.raises(ContractViolation, match="EngineOptions, not SimulatedOptions"):
        Qwen35().plan(fixtures / "text_tied", SimulatedOptions())


def test_public_names_are_sorted_and_there() -> None:
    import openinfer_qwen35

    assert openinfer_qwen35.__all__ == ["Qwen35", "Qwen35Moe"]
    assert openinfer_qwen35.Qwen35 is Qwen35
