"""What is parsed of a config, what is refused, and the names and sizes of published checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_deepseek.model import tensors
from openinfer_engine.weights.stored_format import FP8_BLOCKS, PACKED_INT4, StoredFormat
from openinfer_engine.weights.stored_tensor import StoredTensor
from openinfer_kernels import rope_table
from openinfer_kimi_k2 import KimiK2
from openinfer_kimi_k2.model import KimiK2Config

FIXTURES = Path(__file__).parent / "fixtures"

K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
FP8 = {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GROUP = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": GROUP, "input_activations": None}},
}


def formats(config: KimiK2Config) -> tuple[StoredFormat | None, StoredFormat | None]:
    """Of attention, and of a routed expert."""
    layer = "model.layers.1"
    return config.format_of(f"{layer}.self_attn.o_proj"), config.format_of(f"{layer}.mlp.experts.7.up_proj")


def parse(**change: Any) -> KimiK2Config:
    return KimiK2.definition.parse(K2 | change)


@pytest.mark.parametrize(
    ("quantisation", "num_tensors", "num_bytes"),
    [(FP8, 139_583, 1_029_173_249_888), (INT4, 208_215, 594_206_457_856)],
)
def test_published_checkpoints_have_these_tensors_and_bytes(
    quantisation: dict[str, Any], num_tensors: int, num_bytes: int
) -> None:
    found = tensors(parse(quantization_config=quantisation))
    assert len(found) == num_tensors
    sizes = (each.num_bytes if isinstance(each, StoredTensor) else 2 * math.prod(each) for each in found.values())
    assert sum(sizes) == num_bytes


def test_plain_checkpoint_has_these_parameters() -> None:
    shapes = (each.shape if isinstance(each, StoredTensor) else each for each in tensors(parse()).values())
    assert sum(map(math.prod, shapes)) == 1_026_408_232_448


def test_formats_follow_the_quantisation() -> None:
    assert formats(parse()) == (None, None)
    assert formats(parse(quantization_config=FP8)) == (FP8_BLOCKS, FP8_BLOCKS)
    assert formats(parse(quantization_config=INT4)) == (None, PACKED_INT4)
    ignoring = INT4 | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]}
    assert formats(parse(quantization_config=ignoring)) == (None, PACKED_INT4)


@pytest.mark.parametrize(
    ("factor", "beta_fast", "scale", "frequencies"),
    [
        (32.0, 1.0, 0.1308607999, (1, 6.687403e-2, 4.472136e-3, 9.345930e-6, 8.764414e-7)),
        (64.0, 1.0, 0.1446796258, (1, 6.687403e-2, 4.472136e-3, 4.672965e-6, 4.382207e-7)),
        (64.0, 32.0, 0.1446796258, (1, 6.687403e-2, 1.537297e-3, 4.672965e-6, 4.382207e-7)),
    ],
)
def test_yarn_is_that_of_each_release(
    factor: float, beta_fast: float, scale: float, frequencies: tuple[float, ...]
) -> None:
    config = parse(rope_scaling=K2["rope_scaling"] | {"factor": factor, "beta_fast": beta_fast})
    assert config.softmax_scale == pytest.approx(scale, rel=1e-8)
    sines = rope_table(config.rope, head_dim=64, positions=2)[1, 1]
    assert [math.asin(sines[i]) for i in (8, 16, 24, 31)] == pytest.approx(frequencies[1:], rel=1e-5)
    assert math.asin(sines[0]) == pytest.approx(frequencies[0], rel=1e-5)


def test_context_is_yarns_reach() -> None:
    assert KimiK2.definition.limits(parse()).max_model_tokens == 32 * 4096


def test_text_part_of_a_vision_language_model_is_served_under_its_own_names() -> None:
    text = K2 | {"quantization_config": INT4}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    config = KimiK2.definition.parse(outer)
    assert formats(config) == (None, PACKED_INT4)
    assert "language_model.model.layers.1.mlp.experts.383.down_proj.weight_packed" in tensors(config)
    ignorable = KimiK2.definition.ignorable_tensors(config)
    assert {"vision_tower.", "mm_projector."} <= {*ignorable}
    above = outer | {"text_config": K2, "quantization_config": FP8}
    assert formats(KimiK2.definition.parse(above)) == (FP8_BLOCKS, FP8_BLOCKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "^not a kimi_k2 or kimi_k25 model"),
        ({"architectures": ["KimiLinearForCausalLM"]}, "only DeepseekV3ForCausalLM or KimiK25"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sigmoid' is served"),
        ({"topk_method": "greedy"}, "only 'noaux_tc' is served"),
        ({"attention_bias": True}, "biases in the attention"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method is 'bitsandbytes': only fp8, .*compressed-tensors",
        ),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, r"weight_block_size .* is \[64, 64\]"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt of quantised weights is 'e5m2'"),
        ({"quantization_config": INT4 | {"format": "marlin-24"}}, "format of quantised weights is 'marlin-24'"),
        (
            {"quantization_config": INT4 | {"config_groups": {"g": {"weights": GROUP | {"num_bits": 2}}}}},
            "num_bits of quantised weights is 2: only 4 or 8",
        ),
        (
            {"quantization_config": INT4 | {"config_groups": {"g": {"weights": GROUP, "input_activations": {}}}}},
            "input_activations of quantised weights",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"n_group": 7}, "384 experts cannot be cut into 7 equal groups"),
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_contradictions_are_invalid(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        parse(**change)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 64])
def test_ranks_that_share_the_model(ranks: int) -> None:
    KimiK2.definition.check_ranks(parse(), ranks)


def test_ranks_that_do_not_divide_it_are_refused() -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model: num_attention_heads is 64"):
        KimiK2.definition.check_ranks(parse(), 3)


def test_every_fixture_is_claimed_and_no_other_familys_config() -> None:
    for folder in FIXTURES.iterdir():
        assert KimiK2().refusal(json.loads((folder / "config.json").read_text())) is None
    assert (KimiK2().refusal({"model_type": "deepseek_v2"}) or "").startswith("not ")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([1], "config_groups of quantised weights must be a JSON object"),
        ({"group_0": 1}, "a group of config_groups of quantised weights must be a JSON object"),
        ({"group_0": {"weights": 4}}, "weights of quantised weights must be a JSON object"),
    ],
)
def test_malformed_groups_are_refused(groups: object, message: str) -> None:
    quantisation = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert message in (KimiK2().refusal(K2 | {"quantization_config": quantisation}) or "")
