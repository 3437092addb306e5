import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)


def naive_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    out = np.empty(x.shape, np.float64)
    for token, row in enumerate(x.tolist()):
        mean = math.fsum(value * value for value in row) / len(row)
        for i, value in enumerate(row):
            out[token, i] = float(weight[i]) * value / math.sqrt(mean + eps)
    return out


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    num_tokens=st.integers(1, 9),
    size=st.integers(1, 200),
    magnitude=st.integers(-6, 6),
    of_residual=st.booleans(),
)
def test_rms_norm_equals_float64(ops, activation, host, close, seed, num_tokens, size, magnitude, of_residual):
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(num_tokens, size)) * 10.0**magnitude).astype(np.float32)
    x = ops.upload(values) if of_residual else activation(values)
    weight = activation(rng.normal(size=size).astype(np.float32))
    out = ops.rms_norm(x, weight, eps=1e-6)
    assert out.dtype == weight.dtype
    close(host(out), naive_rms_norm(host(x), host(weight), 1e-6), rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("of_experts", [False, True])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("size", [8, 2560, 4096, 8192, 8200, 24576, 1025, 8191])
def test_norms_of_wide_rows_round_once_and_leave_the_residual_unrounded(
    ops, activation, host, rounded_once, size, zero_centred, of_experts
):
    rng = np.random.default_rng(size)
    norm, add_norm = (
        (ops.zero_centred_rms_norm, ops.add_zero_centred_rms_norm) if zero_centred else (ops.rms_norm, ops.add_rms_norm)
    )
    added, before = rng.normal(size=(2, 3, size)).astype(np.float32)
    x, residual = ops.upload(added) if of_experts else activation(added), ops.upload(before)
    weight = activation(rng.normal(size=size).astype(np.float32))
    normed = add_norm(x, residual, weight, eps=1e-6)
    summed = host(x) + before
    assert residual.dtype == np.float32
    np.testing.assert_array_equal(host(residual), summed)
    np.testing.assert_array_equal(host(norm(residual, weight, eps=1e-6)), host(normed))
    factors = host(weight).astype(np.float64) + (1 if zero_centred else 0)
    rounded_once(host(normed), naive_rms_norm(summed, factors, 1e-6))
    rounded_once(host(norm(x, weight, eps=1e-6)), naive_rms_norm(host(x), factors, 1e-6))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_rms_norm_of_a_hand_computed_row(ops, activation, host, close, eps):
    x = np.array([[3.0, 4.0, 0.0, 0.0]], np.float32)
    out = host(ops.rms_norm(activation(x), activation(np.array([1, 2, 3, 4], np.float32)), eps=eps))
    close(out, [[3 / math.sqrt(6.25 + eps), 8 / math.sqrt(6.25 + eps), 0, 0]], rtol=1e-6)


def test_rms_norm_of_zeros_is_zero(ops, activation, host):
    out = ops.rms_norm(ops.zeros((2, 5)), activation(np.ones(5, np.float32)), eps=1e-6)
    assert not host(out).any()


def test_rms_norm_leaves_its_input_alone(ops, activation, host):
    x = activation(np.array([[1.0, 2.0]], np.float32))
    ops.rms_norm(x, activation(np.array([3.0, 3.0], np.float32)), eps=1e-6)
    np.testing.assert_array_equal(host(x), [[1.0, 2.0]])


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num_tokens=st.integers(1, 9), size=st.integers(1, 150), of_experts=st.booleans())
def test_add_rms_norm_adds_in_place_and_norms_the_sum(ops, activation, host, close, seed, num_tokens, size, of_experts):
    rng = np.random.default_rng(seed)
    given_x, before = rng.normal(size=(2, num_tokens, size)).astype(np.float32)
    x, residual = ops.upload(given_x) if of_experts else activation(given_x), ops.upload(before)
    weight = activation(rng.normal(size=size).astype(np.float32))
    added = host(x)
    out = ops.add_rms_norm(x, residual, weight, eps=1e-5)
    assert out.dtype == weight.dtype
    np.testing.assert_array_equal(host(x), added)
    np.testing.assert_array_equal(host(residual), before + added)
    close(host(out), naive_rms_norm(host(residual), host(weight), 1e-5), rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("size", [24, 32, 128])
def test_gated_rms_norm_rounds_once(ops, activation, host, rounded_once, size):
    rng = np.random.default_rng(size)
    x, gate = map(activation, rng.normal(size=(2, 7, 3 * size)).astype(np.float32))
    weight = activation(rng.normal(size=size).astype(np.float32))
    out = host(ops.gated_rms_norm(x, gate, weight, eps=1e-6))
    normed = naive_rms_norm(host(x).reshape(-1, size), host(weight), 1e-6).reshape(7, -1)
    gates = host(gate).astype(np.float64)
    rounded_once(out, normed * gates / (1 + np.exp(-gates)))


def test_sums_of_a_long_stream_lose_nothing_that_float32_keeps(ops, activation, host):
    """What layers add is small beside what the stream holds: rounding to BF16 after each would lose it."""
    residual, weight = ops.upload(np.full((2, 64), 256, np.float32)), activation(np.ones(64, np.float32))
    for _ in range(72):
        ops.add_rms_norm(activation(np.full((2, 64), 0.125, np.float32)), residual, weight, eps=1e-6)
    np.testing.assert_array_equal(host(residual), 256 + 72 * 0.125)


def test_rms_norm_nan_stays_in_its_row(ops, activation, host, close):
    x = np.array([[1, 1], [np.nan, 1], [np.inf, 1], [1e30, 1]], np.float32)
    out = host(ops.rms_norm(activation(x), activation(np.ones(2, np.float32)), eps=0.0))
    close(out[0], [1, 1], rtol=1e-6)
    assert np.isnan(out[1]).all()
