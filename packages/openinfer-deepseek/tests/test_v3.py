"""DeepSeek-V3, R1 and Moonlight: logits against transformers' `DeepseekV3ForCausalLM`, and which configs are served.

`tools/golden/deepseek_v3.py` recorded them in float32.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_core import Refused, claim, find_plugin, read_config
from openinfer_core.plugins import MODELS
from openinfer_deepseek import DeepseekV3
from openinfer_engine.options import EngineOptions, LoopHost
from openinfer_engine.testing import FamilyHarness, ask_launched, check_family
from openinfer_engine.weights.stored_tensor import StoredTensor
from openinfer_kernels import GroupScore
from openinfer_kernels.cpu import CpuOps

FIXTURES = Path(__file__).parent / "fixtures_v3"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
TOLERANCE = 1e-4

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The keys of the published `config.json` that say something about the mathematics."""
definition = DeepseekV3.definition


class WithoutBias(CpuOps):
    """A router that forgets the correction bias."""

    def top_experts(self, logits, *, routing, cache_slots=None, bias=None):
        assert bias is not None
        return CpuOps.top_experts(logits, routing=routing, cache_slots=cache_slots)


class GroupsByMaximum(CpuOps):
    """A router that judges groups as DeepSeek-V2 does."""

    def top_experts(self, logits, *, routing, cache_slots=None, bias=None):
        by_maximum = replace(routing, group_score=GroupScore.MAX)
        return CpuOps.top_experts(logits, routing=by_maximum, cache_slots=cache_slots, bias=bias)


def recorded(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(FIXTURES / name / "logits.npz", allow_pickle=False) as arrays:
        return arrays["token_ids"].tolist(), arrays["logits"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references_however_the_sequence_is_computed(name: str) -> None:
    token_ids, logits = recorded(name)
    assert logits.std() > 0.5
    check_family(definition, FIXTURES / name, token_ids, logits, tolerance=TOLERANCE, ranks=(2, 8))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fp8_groups", {"topk_group": 3}),
        ("fp8_groups", {"n_group": 1, "topk_group": 1}),
        ("fp8_groups", {"rms_norm_eps": 1e-3}),
        ("moonlight", {"rope_theta": 20000.0}),
        ("moonlight", {"routed_scaling_factor": 2.4}),
        ("moonlight", {"norm_topk_prob": False}),
    ],
)
def test_recorded_logits_notice_a_config_that_is_slightly_off(name: str, change: dict[str, Any]) -> None:
    token_ids, logits = recorded(name)
    harness = FamilyHarness(definition, FIXTURES / name, change=change)
    assert np.abs(harness.step({"0": token_ids})["0"] - logits).max() > 10 * TOLERANCE


@pytest.mark.parametrize(("name", "ops"), [("fp8_groups", GroupsByMaximum()), *((n, WithoutBias()) for n in NAMES)])
def test_recorded_logits_notice_a_wrong_group_score_and_a_forgotten_bias(name: str, ops: CpuOps) -> None:
    token_ids, logits = recorded(name)
    harness = FamilyHarness(definition, FIXTURES / name, ops=ops)
    assert np.abs(harness.step({"0": token_ids})["0"] - logits).max() > 10 * TOLERANCE


def test_launched_engine_says_the_token_that_the_reference_finds_likeliest() -> None:
    family = find_plugin(MODELS, "deepseek_v3").load()()
    options = EngineOptions(engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4, max_model_tokens=512)
    token_ids, logits = recorded("fp8_groups")
    assert ask_launched(family, FIXTURES / "fp8_groups", options, token_ids).token_ids == [int(logits[-1].argmax())]


def test_published_checkpoint_has_these_parameters_without_its_drafting_layer() -> None:
    config = definition.parse(V3 | {"quantization_config": None})
    shapes = (each.shape if isinstance(each, StoredTensor) else each for each in definition.tensors(config).values())
    assert sum(map(math.prod, shapes)) == 671_026_419_200
    assert "model.layers.61." in definition.ignorable_tensors(config)
    assert definition.limits(config).max_model_tokens == 163840
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_each_architecture_is_one_familys() -> None:
    families = [find_plugin(MODELS, name) for name in ("deepseek_v2", "deepseek_v3")]
    assert isinstance(claim(V3, families)[0], DeepseekV3)
    for name in NAMES:
        assert isinstance(claim(read_config(FIXTURES / name), families)[0], DeepseekV3)
    assert (DeepseekV3().refusal({"model_type": "deepseek_v32"}) or "").startswith("not ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sigmoid' is served"),
        ({"topk_method": "greedy"}, "only 'noaux_tc' is served"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"auto_map": {"AutoModelForCausalLM": "other.Model"}}, "code of a checkpoint is never run"),
        ({"quantization_config": {"quant_method": "quark"}}, "quant_method is 'quark'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "format of quantised weights is None"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        definition.parse(V3 | change)
