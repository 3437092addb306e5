import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_kernels.testing.paged import make_batch

BATCH = make_batch(1)
"""Products do not look at it."""

SEEDS = st.integers(0, 2**32 - 1)


def naive_linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), len(weight)), np.float64)
    for t, row in enumerate(x.tolist()):
        for o, column in enumerate(weight.tolist()):
            out[t, o] = math.fsum(a * b for a, b in zip(row, column, strict=True))
    return out


def naive_silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, sizes=st.tuples(st.integers(1, 11), st.integers(1, 70), st.integers(1, 23)))
def test_linear_equals_float64_with_and_without_bias(ops, activation, host, close, seed, sizes):
    num_tokens, num_in, num_out = sizes
    rng = np.random.default_rng(seed)
    x, weight, bias = (
        activation(rng.normal(size=shape).astype(np.float32))
        for shape in ((num_tokens, num_in), (num_out, num_in), (num_out,))
    )
    expected = naive_linear(host(x), host(weight))
    close(host(ops.linear(x, weight, BATCH)), expected, rtol=1e-5, atol=2e-5)
    close(host(ops.linear(x, weight, BATCH, bias)), expected + host(bias), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 16, 33, 64, 65, 100, 128, 200, 257, 384, 1000])
def test_linear_of_a_models_shape_is_right_for_any_number_of_tokens(ops, activation, host, num_tokens):
    rng = np.random.default_rng(num_tokens)
    x, weight = (activation(rng.normal(size=(rows, 512)).astype(np.float32)) for rows in (num_tokens, 384))
    expected = host(x).astype(np.float64) @ host(weight).astype(np.float64).T
    out = host(ops.linear(x, weight, BATCH))
    assert np.linalg.norm(out - expected) < (3e-3 if ops.name == "cuda" else 1e-6) * np.linalg.norm(expected)


@pytest.mark.parametrize("num_tokens", [1, 8, 17, 32, 33, 65, 130])
@pytest.mark.parametrize(("num_in", "num_out"), [(256, 192), (40, 72)])
def test_logits_are_the_sums_unrounded(ops, activation, num_tokens, num_in, num_out):
    rng = np.random.default_rng(num_tokens)
    x, head = (  # eighths, whose products and sums are exact in float32, and mostly not in BF16
        (rng.integers(-64, 65, size=(rows, num_in)) / 8).astype(np.float32) for rows in (num_tokens, num_out)
    )
    logits = ops.download(ops.logits(activation(x), activation(head)))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, x.astype(np.float64) @ head.T.astype(np.float64))


def test_linear_twice_is_bit_identical(ops, activation, host):
    rng = np.random.default_rng(0)
    x, weight = (activation(rng.normal(size=(rows, 2048)).astype(np.float32)) for rows in (48, 640))
    first = host(ops.linear(x, weight, BATCH))
    assert all(np.array_equal(host(ops.linear(x, weight, BATCH)), first) for _ in range(5))


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, sizes=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 17)))
def test_linear_swiglu_equals_float64(ops, activation, host, close, rounded, seed, sizes):
    num_tokens, num_in, width = sizes
    rng = np.random.default_rng(seed)
    x, gate_up = (  # eighths, whose products and sums are exact: gates are rounded alike here and there
        (rng.integers(-16, 17, size=(rows, num_in)) / 8).astype(np.float32) for rows in (num_tokens, 2 * width)
    )
    both = rounded(naive_linear(x, gate_up))
    expected = np.vectorize(naive_silu)(both[:, :width]) * both[:, width:]
    out = host(ops.linear_swiglu(activation(x), activation(gate_up), BATCH))
    assert out.shape == (num_tokens, width)
    close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [8, 256, 9728])
def test_linear_swiglu_of_wide_gates_is_rounded_once_behind_its_products(
    ops, activation, host, rounded, rounded_once, width
):
    rng = np.random.default_rng(width)
    x, gate_up = ((rng.integers(-16, 17, size=(rows, 16)) / 8).astype(np.float32) for rows in (5, 2 * width))
    both = rounded(x.astype(np.float64) @ gate_up.T)
    expected = both[:, :width] / (1 + np.exp(-both[:, :width].astype(np.float64))) * both[:, width:]
    rounded_once(host(ops.linear_swiglu(activation(x), activation(gate_up), BATCH)), expected)


def test_linear_swiglu_far_gates_neither_warn_nor_overflow(ops, activation, host, close):
    gates = np.array([[-9984.0], [-200.0], [-89.0], [-30.0], [0.0], [30.0], [200.0], [9984.0]], np.float32)
    x = np.concatenate([gates, np.ones_like(gates)], axis=1)
    out = host(ops.linear_swiglu(activation(x), activation(np.eye(2, dtype=np.float32)), BATCH))
    close(out[:, 0], [naive_silu(g) for g in gates[:, 0].tolist()], rtol=1e-5, atol=1e-36)


def naive_gelu(value: float) -> float:
    return 0.5 * value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, sizes=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 17)))
def test_linear_geglu_equals_float64(ops, activation, host, close, rounded, seed, sizes):
    num_tokens, num_in, width = sizes
    rng = np.random.default_rng(seed)
    x, gate_up = (  # eighths: gates are rounded alike here and there
        (rng.integers(-16, 17, size=(rows, num_in)) / 8).astype(np.float32) for rows in (num_tokens, 2 * width)
    )
    both = rounded(naive_linear(x, gate_up))
    expected = np.vectorize(naive_gelu)(both[:, :width].astype(np.float64)) * both[:, width:]
    out = host(ops.linear_geglu(activation(x), activation(gate_up), BATCH))
    assert out.shape == (num_tokens, width)
    close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 8, 33, 1032])
def test_geglu_equals_float64_rounded_once(ops, activation, host, rounded_once, width):
    both = activation((3 * np.random.default_rng(width).normal(size=(7, 2 * width))).astype(np.float32))
    values = host(both).astype(np.float64)
    expected = np.vectorize(naive_gelu)(values[:, :width]) * values[:, width:]
    rounded_once(host(ops.geglu(both)), expected)


def test_geglu_far_gates_neither_warn_nor_overflow(ops, activation, host, close):
    gates = np.array([[-1e30], [-9984.0], [-30.0], [-4.0], [0.0], [30.0], [9984.0], [1e30]], np.float32)
    both = activation(np.concatenate([gates, np.ones_like(gates)], axis=1))
    far = [0.0, 0.0, 0.0, naive_gelu(-4.0), 0.0, *gates[5:, 0].tolist()]
    close(host(ops.geglu(both))[:, 0], far, rtol=1e-4, atol=1e-36)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap_bounds_logits_in_place(ops, upload, host, cap):
    values = (50 * np.random.default_rng(3).normal(size=(5, 37))).astype(np.float32)
    values[3] = np.nan
    values[4, :2] = np.inf, -np.inf
    logits = upload(values)
    assert ops.soft_cap(logits, cap=cap) is None
    assert ops.download(logits).dtype == np.float32
    np.testing.assert_allclose(host(logits), cap * np.tanh(values.astype(np.float64) / cap), rtol=1e-5, atol=1e-6)


def test_linear_not_finite_row_stays_alone(ops, activation, host):
    x = activation(np.array([[1, 2], [np.nan, 1], [np.inf, -np.inf], [3e38, 3e38]], np.float32))
    weight = activation(np.ones((4, 2), np.float32))
    out = host(ops.linear(x, weight, BATCH))
    np.testing.assert_array_equal(out[0], [3, 3, 3, 3])
    assert not np.isfinite(out[1:]).any()
    assert np.isfinite(host(ops.linear_swiglu(x, weight, BATCH))[0]).all()


@pytest.mark.parametrize("size", [3, 8, 250, 2560])
def test_residual_embedding_is_scaled_in_float32(ops, activation, host, size):
    table = activation(np.random.default_rng(size).normal(size=(40, size)).astype(np.float32))
    ids = np.array([3, 0, 3, 39, 2], np.int32)
    residual = ops.residual_embedding(ops.upload(ids), table, scale=59.75)
    assert ops.download(residual).dtype == np.float32
    np.testing.assert_array_equal(host(residual), host(table)[ids] * np.float32(59.75))


@pytest.mark.parametrize("size", [3, 8, 250, 2560, 2561])
def test_embedding_gathers_rows(ops, activation, host, size):
    table = activation(np.random.default_rng(size).normal(size=(40, size)).astype(np.float32))
    ids = np.array([3, 0, 3, 39, 2], np.int32)
    np.testing.assert_array_equal(host(ops.embedding(ops.upload(ids), table)), host(table)[ids])


@pytest.mark.parametrize("size", [3, 8, 250, 2560, 2561])
def test_residual_embedding_gathers_rows_in_float32(ops, activation, host, size):
    table = activation(np.random.default_rng(size).normal(size=(40, size)).astype(np.float32))
    residual = ops.residual_embedding(ops.upload(np.array([3, 0, 3, 39, 2], np.int32)), table)
    assert residual.dtype == np.float32
    np.testing.assert_array_equal(host(residual), host(table)[[3, 0, 3, 39, 2]])


@pytest.mark.parametrize("size", [3, 8, 250])
def test_embedding_gathers_rows_of_float32(ops, size):
    table = np.random.default_rng(size).normal(size=(9, size)).astype(np.float32)
    ids = np.array([8, 0, 8, 3], np.int32)
    np.testing.assert_array_equal(ops.download(ops.embedding(ops.upload(ids), ops.upload(table))), table[ids])


def test_embedding_result_is_a_copy(ops, activation, host):
    table = activation(np.zeros((4, 3), np.float32))
    out = ops.embedding(ops.upload(np.array([1], np.int32)), table)
    out[:] = 1
    assert not host(table).any()
