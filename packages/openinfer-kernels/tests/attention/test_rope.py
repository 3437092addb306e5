import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from openinfer_kernels import (
    RopeConfigError,
    RopeParameters,
    YarnScaling,
    attention_factor,
    partial_rope_order,
    partial_rope_table,
    rope_table,
    softmax_factor,
)

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 1024}
INVERSE_FREQUENCIES_OF_TRANSFORMERS = [
    # (head_dim, rope parameters, inverse frequencies, attention factor) as `ROPE_INIT_FUNCTIONS["yarn"]` of
    # transformers 5.17.0 returns them for a Qwen3Config, in float32.
    (
        32,
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
        [
            float(number)
            for number in (
                "1.0 0.31627238 0.08891397 0.018747354 0.0079056947 0.0033338037 0.0014058533 0.00059284345 "
                "0.00025000001 0.00010542412 4.4456985e-05 1.8747356e-05 7.9056936e-06 3.3338035e-06 1.4058534e-06 "
                "5.9284343e-07"
            ).split()
        ],
        1.138629436111989,
    ),
    (
        16,
        YARN | {"factor": 4.0, "original_max_position_embeddings": 32768},
        [1.0, 0.31622776, 0.1, 0.031622779, 0.0099999998, 0.0025693509, 0.00062500004, 0.00013834966],
        1.138629436111989,
    ),
    (
        16,
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        [1.0, 0.31622776, 0.1, 0.016548309, 0.00125, 0.00039528473, 0.00012500001, 3.9528473e-05],
        1.2079441541679836,
    ),
    (
        16,
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
        [1.0, 0.31622776, 0.078125, 0.017787812, 0.0034375, 0.00039528473, 0.00012500001, 3.9528473e-05],
        0.9495608824621653,
    ),
    (
        16,
        YARN | {"attention_factor": 1.5},
        [1.0, 0.31622776, 0.078125, 0.017787812, 0.0034375, 0.00039528473, 0.00012500001, 3.9528473e-05],
        1.5,
    ),
    (
        8,
        YARN | {"factor": 4.0, "original_max_position_embeddings": 4},
        [1.0, 0.025, 0.0024999999, 0.00025000001],
        1.138629436111989,
    ),
]


def yarn_frequency(pair: int, head_dim: int, theta: float, factor: float, original: int) -> float:
    """Peng et al. 2023, written from the paper: by how often a pair turns over the original context."""

    def pair_of(turns: float) -> float:
        return head_dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), head_dim - 1)
    slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
    frequency = theta ** (-2 * pair / head_dim)
    return (1 - slowed) * frequency + slowed * frequency / factor


def angles_of(table: np.ndarray, position: int) -> np.ndarray:
    return np.arctan2(table[1, position].astype(np.float64), table[0, position].astype(np.float64))


def test_rope_table_default_equals_the_formula():
    table = rope_table(RopeParameters(theta=1e6), head_dim=12, positions=50)
    assert table.shape == (2, 50, 6)
    assert table.dtype == np.float32
    for position in range(50):
        for pair in range(6):
            angle = position * 1e6 ** (-2 * pair / 12)
            assert table[0, position, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            assert table[1, position, pair] == pytest.approx(math.sin(angle), abs=1e-7)


def test_rope_table_far_position_keeps_its_precision():
    table = rope_table(RopeParameters(theta=5e6), head_dim=128, positions=262_144)
    position, pair = 262_143, 3
    assert table[0, position, pair] == pytest.approx(math.cos(position * 5e6 ** (-6 / 128)), abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    head_dim=st.integers(2, 64).map(lambda half: 2 * half),
    theta=st.sampled_from([1e4, 5e5, 1e6, 5e6]),
    factor=st.floats(1.5, 40.0),
    original=st.sampled_from([256, 2048, 4096, 32768]),
)
def test_rope_table_yarn_equals_the_formula(head_dim, theta, factor, original):
    yarn = YarnScaling(factor=factor, original_max_position_embeddings=original)
    table = rope_table(RopeParameters(theta=theta, yarn=yarn), head_dim=head_dim, positions=9)
    scale = 0.1 * math.log(factor) + 1
    for position in (0, 1, 8):
        for pair in range(head_dim // 2):
            angle = position * yarn_frequency(pair, head_dim, theta, factor, original)
            assert table[0, position, pair] == pytest.approx(scale * math.cos(angle), abs=1e-6)
            assert table[1, position, pair] == pytest.approx(scale * math.sin(angle), abs=1e-6)


@pytest.mark.parametrize(("head_dim", "fields", "expected", "factor"), INVERSE_FREQUENCIES_OF_TRANSFORMERS)
def test_rope_table_yarn_equals_transformers(head_dim, fields, expected, factor):
    parameters = RopeParameters.from_config({"rope_parameters": fields})
    assert parameters.yarn is not None
    assert attention_factor(parameters.yarn) == pytest.approx(factor, rel=1e-12)
    table = rope_table(parameters, head_dim=head_dim, positions=2)
    np.testing.assert_allclose(angles_of(table, 1), expected, rtol=3e-7)
    np.testing.assert_allclose(np.hypot(*table.astype(np.float64)), factor, rtol=2e-7)


def test_rope_table_of_the_published_long_context_setting_scales_by_1_138629():
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=32768)
    table = rope_table(RopeParameters(theta=1e6, yarn=yarn), head_dim=128, positions=1)
    np.testing.assert_allclose(table[0, 0], 1.138629, atol=1e-6)
    assert not table[1].any()


@pytest.mark.parametrize("head_dim", [0, -2, 7])
def test_rope_table_head_dim_without_pairs_refuses(head_dim):
    with pytest.raises(RopeConfigError, match=str(head_dim)):
        rope_table(RopeParameters(theta=1e4), head_dim=head_dim, positions=4)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1_000_000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default", "rope_theta": None}},
    ],
)
def test_from_config_default_in_every_spelling(config):
    assert RopeParameters.from_config(config) == RopeParameters(theta=1e6)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_from_config_yarn_in_every_spelling(type_key, where):
    fields = {type_key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": None}
    parameters = RopeParameters.from_config({"rope_theta": 1e6, where: fields})
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=32768)
    assert parameters == RopeParameters(theta=1e6, yarn=yarn)


def test_from_config_yarn_takes_what_it_leaves_out_from_the_lengths():
    config = {"max_position_embeddings": 4096, "rope_theta": 1e4}
    yarn = RopeParameters.from_config(config | {"rope_scaling": {"type": "yarn", "factor": 2}}).yarn
    assert yarn == YarnScaling(factor=2.0, original_max_position_embeddings=4096)
    fields = {"type": "yarn", "original_max_position_embeddings": 1024}
    assert RopeParameters.from_config(config | {"rope_scaling": fields}).yarn == YarnScaling(
        factor=4.0, original_max_position_embeddings=1024
    )
    outside = config | {"original_max_position_embeddings": 512, "rope_scaling": fields | {"factor": 3}}
    assert RopeParameters.from_config(outside).yarn == YarnScaling(factor=3.0, original_max_position_embeddings=512)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'.*default, yarn"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3"}}, "'llama3'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": 3}}, "3"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": [1]}, r"\[1\]"),
        ({}, "rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_parameters": YARN | {"factor": 0.5}}, "factor 0.5"),
        ({"rope_parameters": {k: v for k, v in YARN.items() if k != "factor"}}, "factor"),
        ({"rope_parameters": {k: v for k, v in YARN.items() if "original" not in k}}, "original_max_position"),
        ({"rope_parameters": YARN | {"beta_fast": "x"}}, "beta_fast"),
        ({"rope_parameters": YARN | {"beta_slow": 0}}, "beta_slow"),
        ({"rope_parameters": YARN | {"attention_factor": -1.0}}, "attention_factor"),
        ({"rope_parameters": YARN | {"mscale": "1"}}, "mscale"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "truncate"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}, "different rope_scaling"),
    ],
)
def test_from_config_what_is_unknown_or_impossible_is_refused_by_name(config, names):
    with pytest.raises(RopeConfigError, match=names):
        RopeParameters.from_config(config)


@pytest.mark.parametrize(
    ("factor", "mscale_all_dim", "head_dim", "scale"),
    [(40.0, 0.707, 192, 0.1147213868), (32.0, 1.0, 192, 0.1308607999), (64.0, 1.0, 192, 0.1446796258)],
)
def test_softmax_factor_of_the_published_settings(factor, mscale_all_dim, head_dim, scale):
    """DeepSeek-V2-Lite's, and Kimi-K2's with either factor."""
    yarn = YarnScaling(factor=factor, original_max_position_embeddings=4096, mscale_all_dim=mscale_all_dim)
    assert softmax_factor(yarn) * head_dim**-0.5 == pytest.approx(scale, rel=1e-9)


def test_softmax_factor_without_magnitude_is_one():
    assert softmax_factor(None) == 1.0
    assert softmax_factor(YarnScaling(factor=4.0, original_max_position_embeddings=64)) == 1.0


def test_attn_factor_multiplies_what_yarn_derives() -> None:
    # DeepSeek-R1-0528-Qwen3-8B, whose cosines and sines are meant to keep their size
    fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = {**fields, "attn_factor": 0.8782488562869419}
    yarn = RopeParameters.from_config({"rope_theta": 1e6, "rope_scaling": scaled}).yarn
    assert yarn is not None
    assert attention_factor(yarn) == pytest.approx(1.0, rel=1e-12)
    with pytest.raises(RopeConfigError, match="attention_factor and attn_factor contradict each other"):
        RopeParameters.from_config({"rope_theta": 1e6, "rope_scaling": {**scaled, "attention_factor": 1.0}})


def turned(x: NDArray[np.float64], table: NDArray[np.float32]) -> NDArray[np.float64]:
    """Turns pairs `(i, i + r / 2)` of the first dimensions of `x [positions, D]` by a table `[2, positions, r / 2]`."""
    half = table.shape[2]
    first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    cos, sin = table.astype(np.float64)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)


@pytest.mark.parametrize(("head_dim", "num_rotated"), [(16, 4), (80, 20), (6, 2), (8, 6), (8, 8), (4, 2)])
@pytest.mark.parametrize("parameters", [{"rope_theta": 1e4}, {"rope_parameters": YARN}])
def test_partial_rotation_in_the_order_of_whole_heads_has_the_published_scores(
    head_dim: int, num_rotated: int, parameters: dict[str, Any]
) -> None:
    rope = RopeParameters.from_config(parameters)
    order = partial_rope_order(head_dim=head_dim, num_rotated=num_rotated)
    assert sorted(order.tolist()) == list(range(head_dim))
    sizes = {"head_dim": head_dim, "num_rotated": num_rotated, "positions": 50}
    whole, part = partial_rope_table(rope, **sizes), rope_table(rope, head_dim=num_rotated, positions=50)
    assert (whole.shape, whole.dtype) == ((2, 50, head_dim // 2), np.float32)
    q, k = np.random.default_rng(0).normal(size=(2, 50, head_dim))
    published = turned(q, part) @ turned(k, part).T
    np.testing.assert_allclose(turned(q[:, order], whole) @ turned(k[:, order], whole).T, published, atol=1e-12)


@pytest.mark.parametrize(("head_dim", "num_rotated"), [(16, 5), (15, 4), (16, 18), (16, 0)])
def test_partial_rotation_of_impossible_sizes_is_refused(head_dim: int, num_rotated: int) -> None:
    with pytest.raises(RopeConfigError, match=f"{num_rotated} of {head_dim} dimensions"):
        partial_rope_order(head_dim=head_dim, num_rotated=num_rotated)
    with pytest.raises(RopeConfigError, match=f"{num_rotated} of {head_dim} dimensions"):
        partial_rope_table(RopeParameters(theta=1e4), head_dim=head_dim, num_rotated=num_rotated, positions=2)
