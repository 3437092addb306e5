"""Mixtures of Qwen3.5: logits against transformers' `Qwen3_5Moe...`, however they are computed, and their configs.

`tools/golden/qwen35_moe.py` recorded them in float32; the largest are about 6. The largest difference seen was 1e-4.
"""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import InvalidCheckpoint, Refused, claim, find_plugin, read_config
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import FamilyHarness, Traffic, ask_launched, check_drafts, check_family
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen35 import Qwen35, Qwen35Moe

FIXTURES = Path(__file__).parent / "fixtures_moe"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
TOLERANCE = 1e-3
definition = Qwen35Moe.definition

A3B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}
"""The keys of the published `config.json` of Qwen3.5-35B-A3B that say something about the mathematics."""


def with_text(**changes: Any) -> dict[str, Any]:
    return A3B | {"text_config": A3B["text_config"] | changes}


def recorded(name: str) -> tuple[list[int], NDArray[Any]]:
    with np.load(FIXTURES / name / "logits.npz", allow_pickle=False) as arrays:
        return arrays["token_ids"].tolist(), arrays["logits"]


def error(name: str, **harness: Any) -> float:
    token_ids, logits = recorded(name)
    found = FamilyHarness(definition, FIXTURES / name, **harness).step({"0": token_ids})["0"]
    return float(np.abs(found - logits).max())


def load_bits(folder: Path) -> dict[str, NDArray[Any]]:
    """The tensors in float32, which NumPy has where it has no BF16."""
    with Checkpoint.open(folder) as checkpoint:
        return {name: CpuOps().upload_weight(checkpoint.read(name)) for name in checkpoint.tensors}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references_however_the_sequence_is_computed(name: str) -> None:
    """7 and 4 routed experts and a shared one: on two ranks 4 and 4, and 3 and 2."""
    token_ids, logits = recorded(name)
    assert logits.std() > 0.5
    check_family(definition, FIXTURES / name, token_ids, logits, tolerance=TOLERANCE, ranks=(2,))


@pytest.mark.parametrize("change", [{"norm_topk_prob": False}, {"num_experts_per_tok": 2}, {"rms_norm_eps": 1e-3}])
def test_recorded_logits_notice_a_config_that_is_slightly_off(change: dict[str, Any]) -> None:
    assert error("text", change=change) > 10 * TOLERANCE


class Routers(CpuOps):
    """A router that is wrong in one way."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def top_experts(self, logits, *, routing, cache_slots=None, bias=None):
        choice = CpuOps.top_experts(logits, routing=routing, cache_slots=cache_slots)
        ids, weights = choice.ids.copy(), choice.weights.copy()
        match self.mistake:
            case "no shared expert":
                ids[:, -1] = -1
            case "shared expert without its gate":
                weights[:, -1] = 1
            case "gate among the scores":
                weights /= weights.sum(axis=1, keepdims=True)
            case "next expert":
                ids[:, :-1] = (ids[:, :-1] + 1) % routing.num_experts
        return replace(choice, ids=ids, weights=weights)


class UpBeforeGate(CpuOps):
    """Experts whose up rows are taken for their gate rows."""

    def experts(self, x, choice, gate_up, down, *, first_expert=0, limit=None, shared=None):
        swapped = np.roll(gate_up, gate_up.shape[1] // 2, axis=1)
        return CpuOps.experts(x, choice, swapped, down, first_expert=first_expert)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "mistake", ["no shared expert", "shared expert without its gate", "gate among the scores", "next expert"]
)
def test_recorded_logits_notice_wrong_routers(name: str, mistake: str) -> None:
    assert error(name, ops=Routers(mistake)) > 10 * TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_recorded_logits_notice_gate_and_up_in_the_wrong_order(name: str) -> None:
    assert error(name, ops=UpBeforeGate()) > 10 * TOLERANCE


def test_experts_stacked_and_one_by_one_are_the_same_model(tmp_path: Path) -> None:
    source = FIXTURES / "text"
    weights = load_bits(source)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in weights
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [weights.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(7)]
            for part in ("gate", "up", "down")
        )
        weights[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate(each) for each in zip(gates, ups, strict=True)])
        weights[f"{prefix}.down_proj"] = np.stack(downs)
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    for ranks in (1, 2):
        stacked, one_by_one = (
            FamilyHarness(definition, folder, ranks=ranks).step({"a": list(range(40))})["a"]
            for folder in (tmp_path, source)
        )
        np.testing.assert_array_equal(stacked, one_by_one)


def test_published_names_of_stacked_experts_have_no_suffix() -> None:
    with Checkpoint.open(FIXTURES / "vision_language") as checkpoint:
        info = checkpoint.tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"]
        assert info.shape == (4, 48, 48)
    shapes = definition.tensors(definition.parse(A3B))
    assert shapes["model.language_model.layers.39.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert shapes["model.language_model.layers.39.mlp.experts.down_proj"] == (256, 2048, 512)


def test_vision_tower_and_drafting_layer_are_left_alone_and_nothing_else(tmp_path: Path) -> None:
    weights = load_bits(FIXTURES / "vision_language")
    assert any(name.startswith("model.visual.") for name in weights)
    weights |= {"mtp.layers.0.mlp.experts.gate_up_proj": np.ones((2, 2, 2), np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(FIXTURES / "vision_language" / "config.json", tmp_path)
    FamilyHarness(definition, tmp_path)
    save_file(weights | {"model.language_model.other": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"model\.language_model\.other is not a tensor of this model"):
        FamilyHarness(definition, tmp_path)


def test_checkpoint_with_half_of_its_experts_stacked_is_refused(tmp_path: Path) -> None:
    weights = load_bits(FIXTURES / "vision_language")
    stacked = weights.pop("model.language_model.layers.0.mlp.experts.down_proj")
    weights["model.language_model.layers.0.mlp.experts.0.down_proj.weight"] = stacked[0]
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(FIXTURES / "vision_language" / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"experts\.down_proj is missing"):
        FamilyHarness(definition, tmp_path)


def test_text_only_export_computes_the_same(tmp_path: Path) -> None:
    source = FIXTURES / "vision_language"
    weights = {name.replace("model.language_model.", "model."): array for name, array in load_bits(source).items()}
    save_file({name: each for name, each in weights.items() if "visual" not in name}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(read_config(source)["text_config"]))
    exported, whole = (
        FamilyHarness(definition, folder).step({"a": list(range(60))})["a"] for folder in (tmp_path, source)
    )
    np.testing.assert_array_equal(exported, whole)


def test_nan_of_one_token_stays_with_its_sequence(tmp_path: Path) -> None:
    """Its router's row is NaN, the shared expert's gate too; other tokens of those experts are as ever."""
    source = FIXTURES / "text"
    weights = load_bits(source)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][5] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    logits = FamilyHarness(definition, tmp_path).step({"nan": [7, 5, 9], "other": [1, 2, 3, 4]})
    assert np.isnan(logits["nan"][1:]).all()
    expected = FamilyHarness(definition, source).step({"other": [1, 2, 3, 4]})["other"]
    np.testing.assert_allclose(logits["other"], expected, atol=1e-4)


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return Traffic(definition, FIXTURES / "text", tolerance=TOLERANCE)


def test_answers_alone_are_long_and_varied(traffic: Traffic) -> None:
    traffic.check_varied()


def test_chunked_prompts_give_the_same_answers(traffic: Traffic) -> None:
    traffic.serve(prefix_cache=False, max_step_tokens=27)


def test_restored_states_of_a_prefix_give_the_same_answers(traffic: Traffic) -> None:
    _, stats = traffic.serve(block_size_tokens=16, num_blocks=200)
    assert stats.cached_tokens > 60
    assert stats.state_snapshots > 5


def test_preempted_requests_on_two_ranks_give_the_same_answers(traffic: Traffic) -> None:
    _, stats = traffic.serve(seed=1, tensor_parallel_size=2, max_step_tokens=24, num_blocks=18)
    assert stats.preemptions >= 1


def test_batch_invariant_operators_give_the_same_bits_alone_and_together(traffic: Traffic) -> None:
    traffic.check_batch_invariant()


def test_answers_with_drafts_are_those_without() -> None:
    check_drafts(definition, FIXTURES / "vision_language")


@pytest.mark.parametrize("host", LoopHost)
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(host: LoopHost) -> None:
    family = find_plugin(MODELS, "qwen35_moe").load()()
    options = EngineOptions(engine_host=host, num_blocks=32, max_num_seqs=4, tensor_parallel_size=2)
    token_ids, logits = recorded("vision_language")
    answer = ask_launched(family, FIXTURES / "vision_language", options, token_ids)
    assert answer.token_ids == [int(logits[-1].argmax())]


class CountingOps(CpuOps):
    """Which experts were chosen, over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: set[int] = set()

    def top_experts(self, logits, *, routing, cache_slots=None, bias=None):
        choice = CpuOps.top_experts(logits, routing=routing, cache_slots=cache_slots)
        self.chosen |= set(choice.ids.ravel().tolist())
        return choice


def test_random_weights_spread_the_tokens_over_the_experts(tmp_path: Path) -> None:
    config = read_config(FIXTURES / "text") | {"num_experts": 64, "num_experts_per_tok": 4}
    ops = CountingOps()
    (tmp_path / "config.json").write_text(json.dumps(config))
    FamilyHarness(definition, tmp_path, ops=ops, dummy=True).step({"a": list(range(96))})
    assert len(ops.chosen - {64}) > 56
    assert 64 in ops.chosen  # the shared one
    options = EngineOptions(load_format=LoadFormat.DUMMY, engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4)
    assert ask_launched(Qwen35Moe(), tmp_path, options, range(41)).finished is not None


# --- configs -------------------------------------------------------------------------------------------------


def test_published_checkpoint_has_these_tensors_and_parameters() -> None:
    config = definition.parse(A3B)
    shapes = definition.tensors(config)
    assert len(shapes) == 693
    assert sum(math.prod(shape) for shape in shapes.values()) == 34_660_610_688
    one_by_one = definition.as_stored(config, {"model.language_model.layers.0.mlp.experts.0.gate_proj.weight": None})
    assert sum(math.prod(shape) for shape in definition.tensors(one_by_one).values()) == 34_660_610_688
    for ranks in (1, 2):
        definition.check_ranks(config, ranks)


def test_each_architecture_is_one_familys() -> None:
    families = [find_plugin(MODELS, name) for name in ("qwen35", "qwen35_moe")]
    assert isinstance(claim(A3B, families)[0], Qwen35Moe)
    for name in NAMES:
        assert isinstance(claim(read_config(FIXTURES / name), families)[0], Qwen35Moe)
    assert (Qwen35().refusal(A3B) or "").startswith("not ")
    assert (Qwen35Moe().refusal({"model_type": "qwen3_5"}) or "").startswith("not ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_expert_intermediate_size": 1024}, "shared_expert_intermediate_size is 1024: only a shared expert as"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"mlp_only_layers": [2]}, r"mlp_only_layers is \[2\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quant_method is 'exl3'"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"model_type": "qwen3_5_text"}, "model_type of text_config is 'qwen3_5_text': only qwen3_5_moe_text"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        definition.parse(with_text(**change))


def test_numbers_that_make_no_model_are_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="257 experts per token cannot be chosen"):
        definition.parse(with_text(num_experts_per_tok=257))
    few = definition.parse(with_text(num_experts=1, num_experts_per_tok=1))
    with pytest.raises(Refused, match="2 ranks cannot share 1 experts"):
        definition.check_ranks(few, 2)


def test_router_weights_are_renormalised_unless_the_config_says_otherwise() -> None:
    assert definition.parse(A3B).routing.normalised
    assert not definition.parse(with_text(norm_topk_prob=False)).routing.normalised
