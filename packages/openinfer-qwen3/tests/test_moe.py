"""Mixtures of Qwen3: logits against transformers' `Qwen3MoeForCausalLM`, however they are computed, and their configs.

`tools/golden/qwen3_moe.py` recorded them in float32; the largest are about 6. The largest difference seen was 2e-5.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer_core import InvalidCheckpoint, Refused, claim, find_plugin, read_config
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import FamilyHarness, Traffic, ask_launched, check_drafts, check_family
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.experts import experts_of_rank
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3 import Qwen3, Qwen3Moe

FIXTURES = Path(__file__).parent / "fixtures_moe"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
RANKS = {"mixture": (2,), "one_expert": (2,), "sparse_step": (2, 3, 6)}
"""7, 5 and 8 experts: most cannot be shared equally."""
TOLERANCE = 1e-4
definition = Qwen3Moe.definition

A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The published `config.json` of Qwen3-30B-A3B."""


def recorded(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(FIXTURES / name / "logits.npz", allow_pickle=False) as arrays:
        return arrays["token_ids"].tolist(), arrays["logits"]


def error(name: str, **harness: Any) -> float:
    token_ids, logits = recorded(name)
    return float(
        np.abs(FamilyHarness(definition, FIXTURES / name, **harness).step({"0": token_ids})["0"] - logits).max()
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references_however_the_sequence_is_computed(name: str) -> None:
    token_ids, logits = recorded(name)
    assert logits.std() > 0.5
    check_family(definition, FIXTURES / name, token_ids, logits, tolerance=TOLERANCE, ranks=RANKS[name])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixture", {"norm_topk_prob": False}),
        ("sparse_step", {"norm_topk_prob": True}),
        ("one_expert", {"norm_topk_prob": True}),
        ("mixture", {"num_experts_per_tok": 2}),
        ("mixture", {"rms_norm_eps": 1e-3}),
    ],
)
def test_recorded_logits_notice_a_config_that_is_slightly_off(name: str, change: dict[str, Any]) -> None:
    assert error(name, change=change) > 10 * TOLERANCE


class UpBeforeGate(CpuOps):
    """Experts whose up rows are taken for their gate rows."""

    def experts(self, x, choice, gate_up, down, *, first_expert=0, limit=None, shared=None):
        swapped = np.roll(gate_up, gate_up.shape[1] // 2, axis=1)
        return CpuOps.experts(x, choice, swapped, down, first_expert=first_expert)


class NextExpert(CpuOps):
    """A choice that is off by one expert."""

    def top_experts(self, logits, *, routing, cache_slots=None, bias=None):
        choice = CpuOps.top_experts(logits, routing=routing, cache_slots=cache_slots)
        return replace(choice, ids=(choice.ids + 1) % routing.num_experts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ops", [UpBeforeGate(), NextExpert()], ids=["up_before_gate", "next_expert"])
def test_recorded_logits_notice_wrong_experts(name: str, ops: CpuOps) -> None:
    assert error(name, ops=ops) > 10 * TOLERANCE


class CountingOps(CpuOps):
    """Which experts were chosen, over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: set[int] = set()

    def top_experts(self, logits, *, routing, cache_slots=None, bias=None):
        choice = CpuOps.top_experts(logits, routing=routing, cache_slots=cache_slots)
        self.chosen |= set(choice.ids.ravel().tolist())
        return choice


def test_all_tokens_of_one_expert_are_computed_by_it_on_either_rank() -> None:
    ops = CountingOps()
    assert error("one_expert", ops=ops) < TOLERANCE
    assert ops.chosen == {2}


def test_layers_without_experts_have_the_plain_mlp() -> None:
    config = definition.parse(read_config(FIXTURES / "sparse_step"))
    assert [config.experts(layer) is not None for layer in range(4)] == [False, False, False, True]
    names = definition.tensors(config)
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in names
    assert "model.layers.3.mlp.gate_proj.weight" not in names


def test_nan_of_one_token_stays_with_its_sequence(tmp_path: Path) -> None:
    """Its router's row is NaN, which chooses experts that exist; other tokens of those experts are as ever."""
    source = FIXTURES / "mixture"
    with Checkpoint.open(source) as checkpoint:
        weights = {name: CpuOps().upload_weight(checkpoint.read(name)) for name in checkpoint.tensors}
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][5] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    logits = FamilyHarness(definition, tmp_path).step({"nan": [7, 5, 9], "other": [1, 2, 3, 4]})
    assert np.isnan(logits["nan"][1:]).all()
    expected = FamilyHarness(definition, source).step({"other": [1, 2, 3, 4]})["other"]
    np.testing.assert_allclose(logits["other"], expected, atol=1e-5)


@pytest.fixture(scope="module", params=["mixture", "sparse_step"])
def traffic(request: pytest.FixtureRequest) -> Traffic:
    return Traffic(definition, FIXTURES / request.param, tolerance=1e-4)


def test_answers_alone_are_long_and_varied(traffic: Traffic) -> None:
    traffic.check_varied()


def test_chunked_prompts_give_the_same_answers(traffic: Traffic) -> None:
    traffic.serve(prefix_cache=False, max_step_tokens=27)


def test_cached_prefixes_give_the_same_answers(traffic: Traffic) -> None:
    _, stats = traffic.serve(block_size_tokens=16, num_blocks=200)
    assert stats.cached_tokens > 100


def test_preempted_requests_on_two_ranks_give_the_same_answers(traffic: Traffic) -> None:
    _, stats = traffic.serve(seed=1, tensor_parallel_size=2, max_step_tokens=24, num_blocks=18)
    assert stats.preemptions >= 1


def test_batch_invariant_operators_give_the_same_bits_alone_and_together(traffic: Traffic) -> None:
    traffic.check_batch_invariant()


def test_answers_with_drafts_are_those_without() -> None:
    check_drafts(definition, FIXTURES / "mixture")


@pytest.mark.parametrize("host", LoopHost)
def test_launched_engine_says_the_token_that_the_reference_finds_likeliest(host: LoopHost) -> None:
    family = find_plugin(MODELS, "qwen3_moe").load()()
    options = EngineOptions(engine_host=host, num_blocks=32, max_num_seqs=4, tensor_parallel_size=2)
    token_ids, logits = recorded("mixture")
    answer = ask_launched(family, FIXTURES / "mixture", options, token_ids)
    assert answer.token_ids == [int(logits[-1].argmax())]


def test_random_weights_spread_the_tokens_over_the_experts() -> None:
    """Of 64 experts most are chosen by 96 tokens: a router of zeros would send all to the first four."""
    ops, change = CountingOps(), {"num_local_experts": 64, "num_experts_per_tok": 4, "hidden_size": 64}
    harness = FamilyHarness(definition, FIXTURES / "mixture", ops=ops, dummy=True, change=change)
    harness.step({"a": list(range(96))})
    assert len(ops.chosen) > 56


def test_random_weights_need_a_config_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FIXTURES / "mixture" / "config.json").read_text())
    options = EngineOptions(load_format=LoadFormat.DUMMY, engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4)
    assert ask_launched(Qwen3Moe(), tmp_path, options, range(41)).finished is not None


# --- configs -------------------------------------------------------------------------------------------------


def test_published_checkpoint_has_these_tensors_and_parameters() -> None:
    config = definition.parse(A3B)
    shapes = definition.tensors(config)
    assert len(shapes) == 18_867
    assert sum(math.prod(shape) for shape in shapes.values()) == 30_532_122_624
    assert shapes["model.layers.47.mlp.experts.127.down_proj.weight"] == (2048, 768)
    for ranks in (1, 2, 4):
        definition.check_ranks(config, ranks)


def test_both_spellings_of_the_number_of_experts_are_the_same_model() -> None:
    local = {key: value for key, value in A3B.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert definition.parse(local) == definition.parse(A3B)


def test_router_weights_are_renormalised_where_the_config_says_so_alone() -> None:
    without = {key: value for key, value in A3B.items() if key != "norm_topk_prob"}
    assert definition.parse(A3B).routing.normalised
    assert not definition.parse(without).routing.normalised


def test_each_architecture_is_one_familys() -> None:
    families = [find_plugin(MODELS, name) for name in ("qwen3", "qwen3_moe")]
    assert isinstance(claim(A3B, families)[0], Qwen3Moe)
    for name in NAMES:
        assert isinstance(claim(read_config(FIXTURES / name), families)[0], Qwen3Moe)
    assert (Qwen3().refusal(A3B) or "").startswith("not ")
    assert (Qwen3Moe().refusal({"model_type": "qwen3_next"}) or "").startswith("not ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "only Qwen3MoeForCausalLM is served"),
        (
            {"shared_expert_intermediate_size": 768},
            "shared_expert_intermediate_size is 768: shared experts are another",
        ),
        ({"quantization_config": {"quant_method": "exl3"}}, "quant_method is 'exl3'"),
        ({"use_sliding_window": True}, "a sliding window in use is not served"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        definition.parse(A3B | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": 129}, "129 experts per token cannot be chosen"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers"),
    ],
)
def test_numbers_that_make_no_model_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        definition.parse(A3B | change)


def test_ranks_share_what_the_layers_have() -> None:
    every = definition.parse(A3B | {"intermediate_size": 6145})
    definition.check_ranks(every, 2)  # no layer has an MLP of that width
    some = definition.parse(A3B | {"intermediate_size": 6145, "mlp_only_layers": [3]})
    with pytest.raises(Refused, match="2 ranks cannot share the model: num_key_value_heads is 4, dense_size is 6145"):
        definition.check_ranks(some, 2)
    few = definition.parse(A3B | {"num_experts": 3, "num_experts_per_tok": 1})
    with pytest.raises(Refused, match="4 ranks cannot share 3 experts"):
        definition.check_ranks(few, 4)


@pytest.mark.parametrize(("num_experts", "size"), [(7, 2), (8, 3), (128, 4), (257, 2), (5, 5)])
def test_every_expert_is_on_one_rank_and_the_first_has_the_most(num_experts: int, size: int) -> None:
    shares = [experts_of_rank(num_experts, rank=rank, size=size) for rank in range(size)]
    assert [expert for share in shares for expert in share] == list(range(num_experts))
    assert max(map(len, shares)) == len(shares[0]) <= min(map(len, shares)) + 1
