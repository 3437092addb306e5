import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

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
def test_linear_equals_float64_with_and_without_bias(ops, seed, sizes):
    num_tokens, num_in, num_out = sizes
    rng = np.random.default_rng(seed)
    x, weight, bias = (
        rng.normal(size=shape).astype(np.float32) for shape in ((num_tokens, num_in), (num_out, num_in), (num_out,))
    )
    expected = naive_linear(x, weight)
    arguments = ops.upload(x), ops.upload(weight)
    np.testing.assert_allclose(ops.download(ops.linear(*arguments)), expected, rtol=1e-5, atol=2e-5)
    with_bias = ops.download(ops.linear(*arguments, ops.upload(bias)))
    np.testing.assert_allclose(with_bias, expected + bias, rtol=1e-5, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, sizes=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 17)))
def test_linear_swiglu_equals_float64(ops, seed, sizes):
    num_tokens, num_in, width = sizes
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_tokens, num_in)).astype(np.float32)
    gate_up = rng.normal(size=(2 * width, num_in)).astype(np.float32)
    gates, ups = naive_linear(x, gate_up[:width]), naive_linear(x, gate_up[width:])
    expected = np.vectorize(naive_silu)(gates) * ups
    out = ops.download(ops.linear_swiglu(ops.upload(x), ops.upload(gate_up)))
    assert out.shape == (num_tokens, width)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_linear_swiglu_far_gates_neither_warn_nor_overflow(ops):
    gates = np.array([[-1e4], [-200.0], [-89.0], [-30.0], [0.0], [30.0], [200.0], [1e4]], np.float32)
    x = np.concatenate([gates, np.ones_like(gates)], axis=1)
    out = ops.download(ops.linear_swiglu(ops.upload(x), ops.upload(np.eye(2, dtype=np.float32))))
    np.testing.assert_allclose(out[:, 0], [naive_silu(g) for g in gates[:, 0].tolist()], rtol=1e-5, atol=1e-36)


def test_linear_not_finite_row_stays_alone(ops):
    x = np.array([[1, 2], [np.nan, 1], [np.inf, -np.inf], [3e38, 3e38]], np.float32)
    weight = np.ones((4, 2), np.float32)
    out = ops.download(ops.linear(ops.upload(x), ops.upload(weight)))
    np.testing.assert_array_equal(out[0], [3, 3, 3, 3])
    assert not np.isfinite(out[1:]).any()
    assert np.isfinite(ops.download(ops.linear_swiglu(ops.upload(x), ops.upload(weight)))[0]).all()


def test_embedding_gathers_rows(ops):
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    ids = ops.upload(np.array([3, 0, 3, 1, 2], np.int32))
    out = ops.embedding(ids, ops.upload(table))
    np.testing.assert_array_equal(ops.download(out), table[[3, 0, 3, 1, 2]])


def test_embedding_result_is_a_copy(ops):
    table = ops.upload(np.zeros((4, 3), np.float32))
    out = ops.embedding(ops.upload(np.array([1], np.int32)), table)
    out += 1.0
    assert not ops.download(table).any()
