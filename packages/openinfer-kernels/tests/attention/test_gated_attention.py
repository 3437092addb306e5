"""Zero-centred and gated norms, and the pieces around gated attention, against float64."""

import numpy as np
import pytest

from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.rope import RopeParameters, rope_table
from openinfer_kernels.testing.paged import make_paged_case

EPS = 1e-6


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_zero_centred_norms_add_one_to_the_weight():
    ops, x, residual, weight = CpuOps(), floats(4, 33), floats(4, 33, seed=1), floats(33, seed=2)
    expected = normed(x, 1 + weight.astype(np.float64))
    np.testing.assert_allclose(ops.zero_centred_rms_norm(x, weight, eps=EPS), expected, rtol=3e-6, atol=1e-6)
    summed = x + residual
    out = ops.add_zero_centred_rms_norm(x, residual, weight, eps=EPS)
    np.testing.assert_array_equal(residual, summed)
    np.testing.assert_allclose(out, normed(summed, 1 + weight.astype(np.float64)), rtol=3e-6, atol=1e-6)


def test_gated_norm_is_of_each_head_with_a_plain_weight():
    x, gate, weight = floats(5, 3 * 8), floats(5, 3 * 8, seed=1), floats(8, seed=2)
    expected = normed(x.reshape(5, 3, 8), weight).reshape(5, 24) * gate * sigmoid(gate)
    np.testing.assert_allclose(CpuOps().gated_rms_norm(x, gate, weight, eps=EPS), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotated", [4, 12, 16])
def test_queries_and_gates_alternate_per_head_and_the_first_dimensions_turn(rotated):
    heads, kv_heads, dim = 4, 2, 16
    case = make_paged_case(
        np.random.default_rng(0), ((9, 1), (20, 7)), num_kv_heads=kv_heads, head_dim=dim, block_tokens=4
    )
    tokens, ops = case.num_tokens, CpuOps()
    projected = floats(tokens, (2 * heads + 2 * kv_heads) * dim)
    q_norm, k_norm = floats(dim, seed=1), floats(dim, seed=2)
    q = ops.gated_qk_norm_rope_append(
        projected,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=EPS,
        rope=rope_table(RopeParameters(theta=100.0), head_dim=rotated, positions=32),
        cache=case.cache(1),
        batch=case.batch,
    )
    pieces = projected.reshape(tokens, -1, dim)
    np.testing.assert_allclose(q, turned(pieces[:, 0:8:2], q_norm, case.batch.positions, rotated), rtol=1e-4, atol=1e-5)
    blocks, offsets = np.divmod(case.batch.cache_slots[0], 4)
    written = case.kv_cache[blocks, 1, :, :, offsets]  # [T, 2, K, D]
    expected = turned(pieces[:, 8:10], k_norm, case.batch.positions, rotated)
    np.testing.assert_allclose(written[:, 0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(written[:, 1], pieces[:, 10:12])
    attended = floats(tokens, heads * dim, seed=3)
    gate = pieces[:, 1:8:2].reshape(tokens, -1)
    gated = ops.output_gate(attended, projected, head_dim=dim)
    np.testing.assert_allclose(gated, attended * sigmoid(gate), rtol=1e-5, atol=1e-6)


def turned(x: np.ndarray, weight: np.ndarray, positions: np.ndarray, rotated: int) -> np.ndarray:
    """Norm, then pairs `(i, i + rotated / 2)` as complex numbers, turned by their angle."""
    out = normed(x, 1 + weight.astype(np.float64))
    half = rotated // 2
    angles = positions[:, None] * 100.0 ** (-2 * np.arange(half) / rotated)
    pairs = (out[..., :half] + 1j * out[..., half:rotated]) * np.exp(1j * angles)[:, None]
    out[..., :half], out[..., half:rotated] = pairs.real, pairs.imag
    return out
