"""What a `config.json` may say, in both published layouts, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused, UnclaimedModel, claim, find_plugin
from openinfer_core.errors import ContractViolation
from openinfer_core.plugins import MODELS
from openinfer_core.simulated import SimulatedOptions
from openinfer_deepseek_v4 import DeepseekV4
from openinfer_deepseek_v4.config import LayerKind, RouterKind
from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, MXFP4
from openinfer_kv_cache import KvDtype, KvLayout

definition = DeepseekV4Definition()


@pytest.fixture
def tiny(fixtures: Path) -> dict[str, Any]:
    return json.loads((fixtures / "all_kinds" / "config.json").read_text())


def test_published_config_says_what_transformers_says_of_it(published: dict[str, Any], tiny: dict[str, Any]) -> None:
    config = definition.parse(published)
    assert [config.num_layers_of(kind) for kind in LayerKind] == [2, 21, 20]
    assert config.layer_types[:4] == (*[LayerKind.SLIDING] * 2, LayerKind.SPARSE, LayerKind.HEAVY)
    assert config.mlp_layer_types.index(RouterKind.SCORE) == 3
    assert (config.sparse_ratio, config.heavy_ratio) == (4, 128)
    assert (config.storage.linears, config.storage.experts) == (FP8_BLOCK_128, MXFP4)
    main, compress = config.ropes
    assert (main.theta, main.yarn) == (10000.0, None)
    assert compress.theta == 160000.0
    assert compress.yarn is not None
    assert (compress.yarn.factor, compress.yarn.attention_factor) == (16.0, 1.0)
    assert definition.parse(tiny).ropes[1].yarn is not None


def test_memory_of_a_token_and_of_a_sequence_is_that_of_the_published_model(published: dict[str, Any]) -> None:
    """6,880 bytes per token in BF16, and 5.64 MB of windows; of open windows the compressors keep what they need."""
    spec = definition.kv_spec(
        definition.parse(published),
        model_tag="a",
        kv_dtype=KvDtype.BFLOAT16,
        state_dtype=KvDtype.BFLOAT16,
        num_ranks=8,
        rank_index=3,
    )
    assert spec.bytes_per_token == 6880
    sizes = {group.name: group.bytes_per_slot for group in spec.slots}
    assert sizes["window"] == 43 * 128 * 512 * 2
    assert sizes["open_sparse_entries"] + sizes["open_sparse_index"] == 21 * 80 * 1024
    assert sizes["open_heavy_entries"] == 20 * 6 * 1024
    blocks = {tokens: KvLayout.from_spec(spec, block_size_tokens=tokens).block_bytes for tokens in (16, 128)}
    assert blocks[128] == 128 * 6880
    assert blocks[16] / 16 < 1.17 * 6880


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is served"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': only 'sqrtsoftplus'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2: only 1"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"architectures": ["Other"]}, r"architectures is \['Other'\]"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "code of a checkpoint is never run"),
        ({"compress_ratios": [0, 64]}, "compress_ratios has 64: only 0, 4, 128"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method of quantization_config is 'awq'"),
        ({"expert_dtype": "int4"}, "expert_dtype is 'int4'"),
        ({"rope_scaling": {"type": "longrope"}}, "the rotary embedding of compress: rope type 'longrope'"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(
    published: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        definition.parse(published | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"layer_types": ["sliding_attention"] * 4}, "no layer with compressed entries"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 entries for 4 layers"),
        ({"o_groups": 3}, "o_groups 3 does not divide num_attention_heads 16"),
        ({"qk_rope_head_dim": 18}, "qk_rope_head_dim 18 must be even and at most index_head_dim, 16"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8 experts"),
    ],
)
def test_values_out_of_range_are_refused_by_name(tiny: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        definition.parse(tiny | change)


def test_ranks_that_do_not_divide_the_model_are_refused_with_those_that_do(published: dict[str, Any]) -> None:
    config = definition.parse(published)
    for ranks in (1, 2, 4, 8):
        definition.check_ranks(config, ranks)
    with pytest.raises(Refused, match=r"16 ranks .* o_groups is 8, .* possible are 1, 2, 4, 8"):
        definition.check_ranks(config, 16)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2", None])
def test_other_architectures_are_not_its_business(tiny: dict[str, Any], model_type: str | None) -> None:
    reason = DeepseekV4().refusal(tiny | {"model_type": model_type})
    assert reason is not None
    assert reason.startswith("not ")
    with pytest.raises(UnclaimedModel):
        claim(tiny | {"model_type": model_type}, [find_plugin(MODELS, "deepseek_v4")])


def test_both_layouts_are_claimed(published: dict[str, Any], tiny: dict[str, Any]) -> None:
    for config in (tiny, published):
        assert isinstance(claim(config, [find_plugin(MODELS, "deepseek_v4")])[0], DeepseekV4)


def test_family_refuses_options_of_another_family(fixtures: Path) -> None:
    with pytest.raises(ContractViolation, match="EngineOptions, not SimulatedOptions"):
        DeepseekV4().plan(fixtures / "all_kinds", SimulatedOptions())


def test_public_names_are_sorted_and_there() -> None:
    import openinfer_deepseek_v4

    assert openinfer_deepseek_v4.__all__ == ["DeepseekV4"]
    assert openinfer_deepseek_v4.DeepseekV4 is DeepseekV4
