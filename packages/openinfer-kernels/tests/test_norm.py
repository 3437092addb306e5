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
def test_rms_norm_equals_float64(ops, seed, num_tokens, size, magnitude):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(num_tokens, size)) * 10.0**magnitude).astype(np.float32)
    weight = rng.normal(size=size).astype(np.float32)
    out = ops.download(ops.rms_norm(ops.upload(x), ops.upload(weight), eps=1e-6))
    np.testing.assert_allclose(out, naive_rms_norm(x, weight, 1e-6), rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_rms_norm_of_a_hand_computed_row(ops, eps):
    x = np.array([[3.0, 4.0, 0.0, 0.0]], np.float32)
    out = ops.download(ops.rms_norm(ops.upload(x), ops.upload(np.array([1, 2, 3, 4], np.float32)), eps=eps))
    np.testing.assert_allclose(out, [[3 / math.sqrt(6.25 + eps), 8 / math.sqrt(6.25 + eps), 0, 0]], rtol=1e-6)


def test_rms_norm_of_zeros_is_zero(ops):
    out = ops.rms_norm(ops.zeros((2, 5)), ops.upload(np.ones(5, np.float32)), eps=1e-6)
    assert not ops.download(out).any()


def test_rms_norm_leaves_its_input_alone(ops):
    x = ops.upload(np.array([[1.0, 2.0]], np.float32))
    ops.rms_norm(x, ops.upload(np.array([3.0, 3.0], np.float32)), eps=1e-6)
    np.testing.assert_array_equal(ops.download(x), [[1.0, 2.0]])


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num_tokens=st.integers(1, 9), size=st.integers(1, 150))
def test_add_rms_norm_adds_in_place_and_norms_the_sum(ops, seed, num_tokens, size):
    rng = np.random.default_rng(seed)
    x, residual = rng.normal(size=(2, num_tokens, size)).astype(np.float32)
    weight = rng.normal(size=size).astype(np.float32)
    x_device, residual_device = ops.upload(x), ops.upload(residual)
    out = ops.add_rms_norm(x_device, residual_device, ops.upload(weight), eps=1e-5)
    np.testing.assert_array_equal(ops.download(x_device), x)
    np.testing.assert_allclose(ops.download(residual_device), residual.astype(np.float64) + x, rtol=1e-6, atol=1e-6)
    expected = naive_rms_norm(ops.download(residual_device), weight, 1e-5)
    np.testing.assert_allclose(ops.download(out), expected, rtol=3e-6, atol=1e-12)


def test_rms_norm_nan_stays_in_its_row(ops):
    x = np.array([[1, 1], [np.nan, 1], [np.inf, 1], [1e30, 1]], np.float32)
    out = ops.download(ops.rms_norm(ops.upload(x), ops.upload(np.ones(2, np.float32)), eps=0.0))
    np.testing.assert_allclose(out[0], [1, 1], rtol=1e-6)
    assert np.isnan(out[1]).all()
