"""Configs: what is read, in both spellings, what it bounds, and what is refused, each by name."""

from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, Refused, claim, find_plugin, read_config
from openinfer_core.errors import ContractViolation, UnclaimedModel
from openinfer_core.plugins import MODELS
from openinfer_core.simulated import SimulatedOptions
from openinfer_kernels import YarnScaling
from openinfer_kv_cache import KvDtype, KvLayout
from openinfer_qwen3 import Qwen3
from openinfer_qwen3.family import CHANGES_THE_MODEL, Qwen3Definition

definition = Qwen3Definition()


@pytest.fixture
def config(fixtures: Path) -> dict[str, Any]:
    """A published config that is served."""
    return read_config(fixtures / "tied")


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_recorded_configs_are_claimed(model_dir: Path) -> None:
    family = Qwen3()
    assert family.refusal(read_config(model_dir)) is None
    assert isinstance(claim(read_config(model_dir), [find_plugin(MODELS, "qwen3")])[0], Qwen3)


def test_both_spellings_of_rope_are_the_same_model(fixtures: Path) -> None:
    new = read_config(fixtures / "untied_yarn")
    yarn = dict(new["rope_parameters"])
    theta = yarn.pop("rope_theta")
    old = without(new, "rope_parameters") | {"rope_theta": theta, "rope_scaling": yarn}
    older = without(new, "rope_parameters") | {
        "rope_theta": theta,
        "rope_scaling": {"type": "yarn"} | without(yarn, "rope_type"),
    }
    expected = definition.parse(new).rope
    assert expected.theta == 1e6
    assert expected.yarn == YarnScaling(factor=4.0, original_max_position_embeddings=64)
    assert definition.parse(old).rope == expected
    assert definition.parse(older).rope == expected


def test_plain_rope_is_read_in_both_spellings(fixtures: Path, config: dict[str, Any]) -> None:
    assert "rope_parameters" not in read_config(fixtures / "odd_sizes")
    assert definition.parse(read_config(fixtures / "odd_sizes")).rope.theta == 10000
    assert definition.parse(config).rope.theta == 1e6


@pytest.mark.parametrize(
    ("change", "max_model_tokens"),
    [
        ({}, 256),
        ({"max_position_embeddings": 40960}, 40960),
        (
            {
                "max_position_embeddings": 40960,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
    ],
)
def test_longest_context_follows_from_the_position_encoding(
    config: dict[str, Any], change: dict[str, Any], max_model_tokens: int
) -> None:
    limits = definition.limits(definition.parse(config | change))
    assert limits.max_model_tokens == max_model_tokens
    assert limits.vocab_size == 257


def test_head_dim_is_never_derived(config: dict[str, Any]) -> None:
    assert definition.parse(config).head_dim == 32 != config["hidden_size"] // config["num_attention_heads"]
    with pytest.raises(InvalidCheckpoint, match="head_dim"):
        definition.parse(without(config, "head_dim"))


@pytest.mark.parametrize("key", ["use_cache", "transformers_version", "max_window_layers", "something_new"])
def test_keys_that_say_nothing_about_the_model_pass(config: dict[str, Any], key: str) -> None:
    assert definition.parse(config | {key: 1}) == definition.parse(without(config, key))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantization_config": {"quant_method": "exl3"}}, "quant_method is 'exl3': only fp8, "),
    "sliding window": ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is True: a sliding"),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*sliding_attention"),
    "linear layers": ({"layer_types": ["linear_attention"]}, "layer_types is .*linear_attention"),
    "layer types of no list": ({"layer_types": 3}, "layer_types is 3"),
    "unknown rope": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "rope type 'longrope'"),
    "dynamic rope": (
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 2}},
        "rope type 'dynamic'",
    ),
    "unknown rope field": ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1]}}, "mrope_section"),
    "no rope": ({"rope_parameters": None}, "rope_theta"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial rope inside": (
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5",
    ),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is served"),
    "classifier": ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}, "auto_map names code"),
    "dual chunks": ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_changes_the_mathematics_is_refused_by_name(config: dict[str, Any], case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UnclaimedModel, match=message):
        claim(config | change, [find_plugin(MODELS, "qwen3")])
    with pytest.raises(Refused, match=message):
        definition.parse(config | change)


@pytest.mark.parametrize("key", CHANGES_THE_MODEL)
def test_keys_of_relatives_are_refused_if_they_ask_for_anything(config: dict[str, Any], key: str) -> None:
    family = Qwen3()
    for nothing in (None, False, 0, {}, []):
        assert family.refusal(config | {key: nothing}) is None
    message = family.refusal(config | {key: {"some": "thing"}})
    assert message is not None
    assert message.startswith(f"{key} is ")


def test_all_reasons_are_given_at_once(config: dict[str, Any]) -> None:
    message = Qwen3().refusal(config | {"hidden_act": "relu", "use_sliding_window": True})
    assert message is not None
    assert "hidden_act" in message
    assert "use_sliding_window" in message


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "qwen3_5", None, 3])
def test_another_architecture_is_not_this_familys_business(config: dict[str, Any], model_type: object) -> None:
    message = Qwen3().refusal(config | {"model_type": model_type})
    assert message == f"not a qwen3 model: its model_type is {model_type!r}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "96"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 does not divide num_attention_heads 6"),
        ({"head_dim": 31}, "head_dim 31 is odd"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
    ],
)
def test_values_out_of_range_are_refused_by_name(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        definition.parse(config | change)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_key_value_heads", "max_position_embeddings"])
def test_missing_keys_are_refused_by_name(config: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=key):
        definition.parse(without(config, key))


def test_ranks_that_do_not_divide_the_model_are_refused_with_those_that_do(config: dict[str, Any]) -> None:
    eight_heads = definition.parse(config | {"num_attention_heads": 16, "num_key_value_heads": 8})
    for ranks in (1, 2, 4, 8):
        definition.check_ranks(eight_heads, ranks)
    with pytest.raises(Refused, match=r"3 ranks .* num_key_value_heads is 8, .* possible are 1, 2, 4, 8"):
        definition.check_ranks(eight_heads, 3)
    with pytest.raises(Refused, match="16 ranks"):
        definition.check_ranks(eight_heads, 16)


def test_kv_of_each_rank_is_its_heads_and_its_layout_names_model_rank_and_rope(config: dict[str, Any]) -> None:
    def layout(change: dict[str, Any], *, tag: str = "a", ranks: int = 2, rank: int = 0) -> KvLayout:
        spec = definition.kv_spec(
            definition.parse(config | change),
            model_tag=tag,
            kv_dtype=KvDtype.FLOAT32,
            state_dtype=KvDtype.FLOAT32,
            num_ranks=ranks,
            rank_index=rank,
        )
        return KvLayout.from_spec(spec, block_size_tokens=16)

    assert layout({}).block_shape() == (3, 2, 1, 16, 32)
    assert layout({}, ranks=1).block_shape() == (3, 2, 2, 16, 32)
    other_rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    digests = {layout({}).digest, layout({}, rank=1).digest, layout({}, tag="b").digest, layout(other_rope).digest}
    assert len(digests) == 4


def test_family_refuses_options_of_another_family(fixtures: Path) -> None:
    with pytest.raises(ContractViolation, match="EngineOptions, not SimulatedOptions"):
        Qwen3().plan(fixtures / "tied", SimulatedOptions())


def test_public_names_are_sorted_and_there() -> None:
    import openinfer_qwen3

    assert openinfer_qwen3.__all__ == ["Qwen3", "Qwen3Moe"]
    assert openinfer_qwen3.Qwen3 is Qwen3
