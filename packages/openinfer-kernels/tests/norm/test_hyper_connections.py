"""Hyper-connections against the equations written out per token in float64."""

import numpy as np
import pytest

from openinfer_kernels import HyperWeights
from openinfer_kernels.cpu import CpuOps

STREAMS, H = 4, 40


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def projected(streams: np.ndarray, fn: np.ndarray, eps: float) -> np.ndarray:
    flat = streams.reshape(-1).astype(np.float64)
    return fn.astype(np.float64) @ flat / np.sqrt(np.mean(flat**2) + eps)


@pytest.mark.parametrize("num_iterations", [1, 20])
@pytest.mark.parametrize("mix_eps", [1e-6, 0.1])
def test_sublayer_reads_and_writes_streams_as_the_equations_say(num_iterations: int, mix_eps: float) -> None:
    rng = np.random.default_rng(0)
    residual = rng.normal(size=(7, STREAMS, H)).astype(np.float32)
    y = rng.normal(size=(7, H)).astype(np.float32)
    fn, base = rng.normal(size=(24, STREAMS * H)).astype(np.float32) * 0.1, rng.normal(size=24).astype(np.float32)
    scale = np.array([0.7, 1.3, 2.0], np.float32)
    weights = HyperWeights(fn=fn, base=base, scale=scale)
    x, mix = CpuOps().hyper_read(residual, weights, eps=1e-6, mix_eps=mix_eps, num_iterations=num_iterations)
    after = residual.copy()
    CpuOps().hyper_write(y, after, mix)
    for token in range(7):
        m = projected(residual[token], fn, 1e-6)
        pre = sigmoid(m[:4] * scale[0] + base[:4]) + mix_eps
        post = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
        matrix = np.exp(m[8:].reshape(4, 4) * scale[2] + base[8:].reshape(4, 4))
        matrix = matrix / matrix.sum(axis=1, keepdims=True) + mix_eps
        matrix /= matrix.sum(axis=0) + mix_eps
        for _ in range(num_iterations - 1):
            matrix /= matrix.sum(axis=1, keepdims=True) + mix_eps
            matrix /= matrix.sum(axis=0) + mix_eps
        assert np.abs(x[token] - pre @ residual[token]).max() < 1e-5
        for k in range(STREAMS):
            expected = post[k] * y[token] + sum(matrix[j, k] * residual[token, j] for j in range(STREAMS))
            assert np.abs(after[token, k] - expected).max() < 1e-5


def test_head_reads_all_streams_into_one_vector() -> None:
    rng = np.random.default_rng(1)
    residual = rng.normal(size=(3, STREAMS, H)).astype(np.float32)
    fn, base = rng.normal(size=(4, STREAMS * H)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    got = CpuOps().hyper_head(residual, fn, base, np.array([0.8], np.float32), eps=1e-6, mix_eps=0.01)
    for token in range(3):
        pre = sigmoid(projected(residual[token], fn, 1e-6) * 0.8 + base) + 0.01
        assert np.abs(got[token] - pre @ residual[token]).max() < 1e-5


def test_streams_begin_alike() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(CpuOps().hyper_streams(x, 4), np.stack([x] * 4, axis=1))
