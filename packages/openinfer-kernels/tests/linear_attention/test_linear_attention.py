"""The operators of linear attention against float64 loops that follow their equations token by token."""

import dataclasses

import numpy as np
import pytest

from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.cpu.linear_attention.gated_delta_rule import CHUNK_TOKENS, gated_delta_rule
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.testing.paged import make_state_case

ROWS = ((1, 1), (9, 1), (2 * CHUNK_TOKENS + 3, 2 * CHUNK_TOKENS + 3), (40, 3), (90, CHUNK_TOKENS), (64, 1), (5, 5))
"""Context and query tokens: steps, chunks with a remainder, and sequences that begin."""


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def naive_conv(inputs: np.ndarray, weight: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    history = np.concatenate([before.T, inputs])
    width = weight.shape[1]
    out = np.array([[row @ taps for row, taps in zip(history[t : t + width].T, weight, strict=True)]
                    for t in range(len(inputs))])  # fmt: skip
    return out * sigmoid(out), history[1 - width :].T


def naive_delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, g: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One head of one sequence."""
    out = []
    for t in range(len(q)):
        key = k[t] / np.sqrt((k[t] ** 2).sum() + 1e-6)
        query = q[t] / np.sqrt((q[t] ** 2).sum() + 1e-6) / np.sqrt(len(key))
        state = np.exp(g[t]) * state
        state = state + np.outer(key, beta[t] * (v[t] - state.T @ key))
        out.append(state.T @ query)
    return np.array(out), state


def float64(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


@pytest.mark.parametrize(("channels", "width"), [(1, 2), (7, 4), (30, 3)])
def test_convolution_equals_float64_and_keeps_the_last_inputs(channels, width):
    rng = np.random.default_rng(channels)
    batch, state = make_state_case(rng, ROWS, (channels, width - 1))
    before, x = state.copy(), rng.normal(size=(len(batch.positions), channels)).astype(np.float32)
    weight = rng.normal(size=(channels, width)).astype(np.float32)
    out = CpuOps().causal_conv_silu(x, weight, state=state, layer=1, batch=batch)
    for row, (context, queries) in enumerate(ROWS):
        tokens, slot = slice(*batch.query_starts[row : row + 2]), batch.state_slots[row]
        begun = np.zeros((channels, width - 1)) if context == queries else before[slot, 1]
        expected, last = naive_conv(*float64(x[tokens], weight, begun))
        np.testing.assert_allclose(out[tokens], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[slot, 1], last, rtol=1e-6)
    np.testing.assert_array_equal(state[:, 0], before[:, 0])


@pytest.mark.parametrize("make_ops", [CpuOps, BatchInvariantCpuOps])
@pytest.mark.parametrize(("key_heads", "value_heads", "key_dim", "value_dim"), [(1, 1, 2, 3), (2, 4, 16, 24)])
def test_gated_delta_rule_equals_float64(make_ops, key_heads, value_heads, key_dim, value_dim):
    rng = np.random.default_rng(value_heads)
    batch, state = make_state_case(rng, ROWS, (value_heads, key_dim, value_dim))
    before, num_tokens = state.copy(), len(batch.positions)
    q, k = rng.normal(size=(2, num_tokens, key_heads, key_dim)).astype(np.float32)
    v = rng.normal(size=(num_tokens, value_heads, value_dim)).astype(np.float32)
    b, a = rng.normal(size=(2, num_tokens, value_heads)).astype(np.float32)
    a_log = np.log(rng.uniform(0.05, 3, value_heads)).astype(np.float32)
    dt_bias = rng.normal(size=value_heads).astype(np.float32)
    out = (
        make_ops()
        .gated_delta_rule(
            np.concatenate([x.reshape(num_tokens, -1) for x in (q, k, v)], axis=1),
            np.concatenate([b, a], axis=1),
            a_log=a_log,
            dt_bias=dt_bias,
            state=state,
            layer=1,
            batch=batch,
        )
        .reshape(v.shape)
    )
    beta, g = sigmoid(b.astype(np.float64)), -np.exp(a_log) * np.log1p(np.exp(a.astype(np.float64) + dt_bias))
    for row, (context, queries) in enumerate(ROWS):
        tokens, slot = slice(*batch.query_starts[row : row + 2]), batch.state_slots[row]
        for head in range(value_heads):
            reads = head // (value_heads // key_heads)
            begun = np.zeros((key_dim, value_dim)) if context == queries else before[slot, 1, head]
            inputs = float64(q[tokens, reads], k[tokens, reads], v[tokens, head], beta[tokens, head], g[tokens, head])
            expected, last = naive_delta_rule(*inputs, *float64(begun))
            np.testing.assert_allclose(out[tokens, head], expected, rtol=1e-4, atol=2e-5)
            np.testing.assert_allclose(state[slot, 1, head], last, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(state[:, 0], before[:, 0])


def delta_rule_of_a_prompt(cuts: list[int], **changes: float) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of 150 tokens computed in pieces that end at `cuts`, with constant decays."""
    rng = np.random.default_rng(7)
    qkv, gates = rng.normal(size=(150, 2 * 8 + 2 * 6)).astype(np.float32), rng.normal(size=(150, 4)).astype(np.float32)
    a_log = np.full(2, changes.get("a_log", 0.0), np.float32)
    state = np.full((3, 1, 2, 8, 6), np.nan, np.float32)
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, 150], strict=True):
        batch, _ = make_state_case(rng, ((end, end - start),), (1,))
        batch = dataclasses.replace(batch, state_slots=np.array([2], np.int32))
        one_by_one = {"chunk_tokens": 1} if "steps" in changes else {}
        arguments = {"a_log": a_log, "dt_bias": np.zeros(2, np.float32), "state": state, "layer": 0, "batch": batch}
        pieces.append(gated_delta_rule(qkv[start:end], gates[start:end], **arguments, **one_by_one))
    return np.concatenate(pieces), state[2]


@pytest.mark.parametrize("cuts", [[64], [1, 2, 100], [149], list(range(1, 150))])
def test_delta_rule_does_not_depend_on_how_a_prompt_is_cut(cuts):
    whole, cut = delta_rule_of_a_prompt([]), delta_rule_of_a_prompt(cuts)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_delta_rule_token_by_token_gives_the_same_bits_however_a_prompt_is_cut():
    whole, cut = delta_rule_of_a_prompt([], steps=1), delta_rule_of_a_prompt([5, 6, 70], steps=1)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one, other)


def test_decay_to_nothing_stays_finite():
    """A chunk's decays multiply to e^-50000; their inverses, which a careless form takes, would overflow."""
    out, state = delta_rule_of_a_prompt([], a_log=6.0)
    assert np.isfinite(out).all()
    assert np.isfinite(state).all()
    np.testing.assert_allclose(out, delta_rule_of_a_prompt([], a_log=6.0, steps=1)[0], rtol=1e-4, atol=1e-6)


def test_batch_without_slots_is_refused():
    batch, state = make_state_case(np.random.default_rng(0), ((3, 3),), (2, 3))
    without = dataclasses.replace(batch, state_slots=None)
    with pytest.raises(ArrayMismatchError, match="no state_slots"):
        CpuOps().causal_conv_silu(
            np.zeros((3, 2), np.float32), np.zeros((2, 4), np.float32), state=state, layer=0, batch=without
        )
