"""Products of quantised matrices on Hopper, in each way to scale them, against float64."""

from dataclasses import replace

import numpy as np
import pytest

from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.cpu.gemm.quantised import dequantised
from openinfer_kernels.testing.expert_cases import random_part
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.weights.quantised import Code, ScaleType, WeightFormat

FORMATS = (
    WeightFormat(code=Code.E4M3, group_rows=128, group_columns=128, scales=ScaleType.F32),
    WeightFormat(code=Code.E4M3, group_rows=1, group_columns=None, scales=ScaleType.BF16),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=128, scales=ScaleType.F16, zero_points=True),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=128, scales=ScaleType.BF16),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=64, scales=ScaleType.F16, zero_points=True),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=32, scales=ScaleType.BF16),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=32, scales=ScaleType.F16, minimums=True),
    WeightFormat(code=Code.E2M1, group_rows=1, group_columns=32, scales=ScaleType.E8M0),
    WeightFormat(code=Code.E2M1, group_rows=1, group_columns=16, scales=ScaleType.E4M3, global_scale=True),
)
NVFP4 = FORMATS[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("described", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16])
def test_every_scaling_multiplies_alike(ops, activation, host, described, tokens):
    """Also a token with an outlier, one that is a millionth of others, and zeros; twice the same bits."""
    if ops.name == "cpu" or ops.device.architecture != "sm_90a":
        pytest.skip("these kernels are Hopper's")
    from openinfer_kernels.cuda.gemm.tiles import Epilogue
    from openinfer_kernels.cuda.lowbit.lowbit_gemm import LowbitGemm, Scaling

    part = random_part(np.random.default_rng(tokens), described, 576, 1280)
    values = dequantised(CpuOps().upload_quantised(part)).astype(np.float64)
    given = np.random.default_rng(1).normal(size=(tokens, 1280)).astype(np.float32)
    given[0, 100] = 1000
    given[1:2] *= 1e-6
    given[2:3] = 0
    x = activation(given)
    expected = host(x).astype(np.float64) @ values.T
    weight, gemm = ops.upload_quantised(part), LowbitGemm(ops.device)
    gemm.load(weight.kernels)
    partition = gemm.partition_of(tokens, weight)
    scalings = gemm.scalings_of(weight, partition.size)
    assert {Scaling.E4M3, Scaling.E4M3_GROUPS} & set(scalings)
    for scaling in scalings:
        found = []
        for _ in range(2):
            out = activation(np.full((tokens, 576), np.nan, np.float32))
            gemm.multiply(x, weight, out, epilogue=Epilogue.STORE, scaling=scaling)
            found.append(host(out))
        np.testing.assert_array_equal(*found)
        assert not found[0][2:3].any()
        lengths = np.linalg.norm(expected, axis=1)
        error = np.linalg.norm(found[0] - expected, axis=1)
        assert (error <= 5e-3 * lengths).all(), (scaling, error / lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 60, 100, 192, 256, 700, 1500])
@pytest.mark.parametrize("gates", [False, True])
def test_matrices_of_nvfp4_that_are_multiplied_as_one_keep_their_scales(ops, activation, host, tokens, gates):
    """In registers, and dequantised to memory where there are more tokens."""
    parts = tuple(
        replace(random_part(np.random.default_rng(seed), NVFP4, 320, 416), global_scale=scale)
        for seed, scale in ((0, 3e-2), (1, 7e-4))
    )
    values = dequantised(CpuOps().upload_quantised(*parts)).astype(np.float64)
    x = activation(np.random.default_rng(1).normal(size=(tokens, 416)).astype(np.float32))
    weight, batch = ops.upload_quantised(*parts), make_batch(tokens)
    y = host(x).astype(np.float64) @ values.T
    if gates:
        gate, up = y[:, :320], y[:, 320:]
        found, expected = host(ops.linear_swiglu(x, weight, batch)), gate / (1 + np.exp(-gate)) * up
    else:
        found, expected = host(ops.linear(x, weight, batch)), y
    for some in (slice(0, 320),) if gates else (slice(0, 320), slice(320, 640)):
        error = np.linalg.norm(found[:, some] - expected[:, some]) / np.linalg.norm(expected[:, some])
        assert error < (1.5e-2 if gates else 5e-3), error
