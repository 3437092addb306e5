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
@given(seed=SEEDS, num_tokens=st.integers(1, 9), size=st.integers(1, 200), magnitude=st.integers(-6, 6))
def test_rms_norm_equals_float64(ops, activation, host, close, seed, num_tokens, size, magnitude):
    rng = np.random.default_rng(seed)
    x = activation((rng.normal(size=(num_tokens, size)) * 10.0**magnitude).astype(np.float32))
    weight = activation(rng.normal(size=size).astype(np.float32))
    out = host(ops.rms_norm(x, weight, eps=1e-6))
    close(out, naive_rms_norm(host(x), host(weight), 1e-6), rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("size", [8, 2560, 4096, 8192, 8200, 24576, 1025, 8191])
def test_rms_norm_of_wide_rows_rounds_before_and_after_the_weight(ops, activation, host, close, rounded, size):
    rng = np.random.default_rng(size)
    x, residual = (activation(rng.normal(size=(3, size)).astype(np.float32)) for _ in range(2))
    weight = activation(rng.normal(size=size).astype(np.float32))
    summed = rounded(host(x) + host(residual))
    normed = ops.add_rms_norm(x, residual, weight, eps=1e-6)
    np.testing.assert_array_equal(host(residual), summed)
    np.testing.assert_array_equal(host(ops.rms_norm(residual, weight, eps=1e-6)), host(normed))
    close(host(normed), naive_rms_norm(summed, host(weight), 1e-6), rtol=1e-5)
    inner = naive_rms_norm(summed, np.ones(size), 1e-6).astype(np.float32)
    expected = rounded(rounded(inner) * host(weight))
    differing = np.count_nonzero(np.abs(host(normed) - expected) > 3e-6 * np.abs(expected))
    assert differing <= 1e-3 * expected.size + 1  # a sum in float32 may cross a rounding boundary, rarely


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
@given(seed=SEEDS, num_tokens=st.integers(1, 9), size=st.integers(1, 150))
def test_add_rms_norm_adds_in_place_and_norms_the_sum(ops, activation, host, close, rounded, seed, num_tokens, size):
    rng = np.random.default_rng(seed)
    x, residual = map(activation, rng.normal(size=(2, num_tokens, size)).astype(np.float32))
    weight = activation(rng.normal(size=size).astype(np.float32))
    before, added = host(residual), host(x)
    out = ops.add_rms_norm(x, residual, weight, eps=1e-5)
    np.testing.assert_array_equal(host(x), added)
    np.testing.assert_array_equal(host(residual), rounded(before + added))
    close(host(out), naive_rms_norm(host(residual), host(weight), 1e-5), rtol=3e-6, atol=1e-12)


def test_rms_norm_nan_stays_in_its_row(ops, activation, host, close):
    x = np.array([[1, 1], [np.nan, 1], [np.inf, 1], [1e30, 1]], np.float32)
    out = host(ops.rms_norm(activation(x), activation(np.ones(2, np.float32)), eps=0.0))
    close(out[0], [1, 1], rtol=1e-6)
    assert np.isnan(out[1]).all()
