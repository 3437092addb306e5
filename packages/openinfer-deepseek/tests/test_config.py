"""Configs: what is read, in both spellings, what it bounds, and what is refused, each by name."""

from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused, claim, find_plugin, read_config
from openinfer_core.errors import ContractViolation, UnclaimedModel
from openinfer_core.plugins import MODELS
from openinfer_core.simulated import SimulatedOptions
from openinfer_deepseek import DeepseekV2
from openinfer_deepseek.family import CHANGES_THE_MODEL, DeepseekV2Definition
from openinfer_kernels import GroupScore, Scoring
from openinfer_kv_cache import KvDtype, KvLayout

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
"""The keys of the published `config.json` that say something about the mathematics."""
definition = DeepseekV2Definition()


@pytest.fixture
def groups(fixtures: Path) -> dict[str, Any]:
    return read_config(fixtures / "groups")


def test_recorded_and_published_configs_are_claimed(model_dir: Path) -> None:
    family = DeepseekV2()
    for config in (read_config(model_dir), PUBLISHED):
        assert family.refusal(config) is None
        assert isinstance(claim(config, [find_plugin(MODELS, "deepseek_v2")])[0], DeepseekV2)


def test_published_config_means_what_the_reference_makes_of_it() -> None:
    config = definition.parse(PUBLISHED)
    assert config.softmax_scale == pytest.approx(0.1147213868, rel=1e-9)
    assert config.shared_size == 2816
    assert config.routing.scoring is Scoring.SOFTMAX
    assert (config.routing.num_experts, config.routing.num_experts_per_token, config.routing.num_groups) == (64, 6, 1)
    assert not config.routing.normalised
    assert definition.limits(config).max_model_tokens == 163840
    for ranks in (1, 2, 4, 8, 16):
        definition.check_ranks(config, ranks)


def test_both_spellings_of_rope_are_the_same_model() -> None:
    old = dict(PUBLISHED["rope_scaling"])
    fields = {key: value for key, value in old.items() if key != "type"} | {"rope_type": "yarn", "rope_theta": 10000}
    new = {key: value for key, value in PUBLISHED.items() if not key.startswith("rope_")} | {"rope_parameters": fields}
    assert definition.parse(new).rope == definition.parse(PUBLISHED).rope


def test_groups_are_kept_by_their_largest_score(groups: dict[str, Any]) -> None:
    routing = definition.parse(groups).routing
    assert (routing.num_groups, routing.num_kept_groups, routing.group_score) == (4, 2, GroupScore.MAX)
    assert routing.scale == 16.0
    greedy = definition.parse(groups | {"topk_method": "greedy"}).routing
    assert (greedy.num_groups, greedy.num_kept_groups) == (1, 1)


@pytest.mark.parametrize("key", CHANGES_THE_MODEL)
def test_key_that_changes_the_model_is_refused_by_name(key: str) -> None:
    with pytest.raises(Refused, match=f"{key} is {{'a': 1}}: "):
        definition.parse(PUBLISHED | {key: {"a": 1}})
    for harmless in (None, False, 0, {}):
        definition.parse(PUBLISHED | {key: harmless})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, r"architectures is \['DeepseekV3ForCausalLM'\]"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': only 'softmax' is served"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is served"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: only 1 is served"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4: only num_attention_heads, 16, is served"),
        ({"auto_map": {"AutoModelForCausalLM": "other.Model"}}, "other.Model .*code of a checkpoint is never run"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        definition.parse(PUBLISHED | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd; RoPE rotates pairs"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"num_experts_per_tok": 65}, "65 experts per token cannot be chosen"),
        ({"topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 2}, "64 experts cannot be cut into 7"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
    ],
)
def test_values_out_of_range_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        definition.parse(PUBLISHED | change)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v4", "kimi_k2", None])
def test_other_architectures_are_not_its_business(model_type: str | None) -> None:
    with pytest.raises(UnclaimedModel):
        claim(PUBLISHED | {"model_type": model_type}, [find_plugin(MODELS, "deepseek_v2")])


def test_ranks_that_do_not_divide_the_model_are_refused_with_those_that_do() -> None:
    config = definition.parse(PUBLISHED | {"n_routed_experts": 36, "num_experts_per_tok": 4})
    with pytest.raises(Refused, match=r"8 ranks .* n_routed_experts is 36, .*; possible are 1, 2, 4"):
        definition.check_ranks(config, 8)


def test_every_rank_keeps_all_latents() -> None:
    def layout(ranks: int) -> KvLayout:
        spec = definition.kv_spec(
            definition.parse(PUBLISHED),
            model_tag="a",
            kv_dtype=KvDtype.BFLOAT16,
            state_dtype=KvDtype.BFLOAT16,
            num_ranks=ranks,
            rank_index=0,
        )
        return KvLayout.from_spec(spec, block_size_tokens=16)

    assert layout(1).block_shape() == layout(8).block_shape() == (27, 1, 1, 16, 576)
    assert layout(1).block_bytes == 16 * 31_104


def test_family_refuses_options_of_another_family(fixtures: Path) -> None:
    with pytest.raises(ContractViolation, match="EngineOptions, not SimulatedOptions"):
        DeepseekV2().plan(fixtures / "lite", SimulatedOptions())


def test_public_names_are_sorted_and_there() -> None:
    import openinfer_deepseek

    assert openinfer_deepseek.__all__ == ["DeepseekV2", "DeepseekV3"]
    assert openinfer_deepseek.DeepseekV2 is DeepseekV2
