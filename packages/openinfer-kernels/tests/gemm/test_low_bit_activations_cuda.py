"""Products with quantised activations and heads in FP8 on a GPU, against the CPU's of the same codes.

Skipped, with the reason, where there is no GPU, or none with these kernels.
"""

from dataclasses import replace

import numpy as np
import pytest

from openinfer_kernels import Code, DeviceUnavailableError, QuantisedPart, WeightFormat
from openinfer_kernels.cpu import LowBitCpuOps
from openinfer_kernels.cubins.sources import HOPPER
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.weights.low_bit_activations import FP8_ROWS, PromptSteps
from openinfer_kernels.weights.quantised import FP8_BLOCK_128

pytestmark = pytest.mark.gpu
INT8 = replace(FP8_ROWS, code=Code.INT8)
BF16_ERROR = 4e-3
"""Of the length of a result."""


@pytest.fixture(scope="module")
def cuda():
    try:
        from openinfer_kernels.cuda import CudaOps, Device

        device = Device.open()
    except DeviceUnavailableError as reason:
        pytest.skip(str(reason))
    if device.architecture != HOPPER:
        pytest.skip(f"{device.architecture} has no such kernels")
    return CudaOps(device, activations=PromptSteps(), fp8_head=True)


def part_of(made: WeightFormat, rows: int, columns: int) -> QuantisedPart:
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    if made.code is Code.E4M3:
        codes = np.where((codes & 0x7F) == 0x7F, 0, codes)
    grid = [size // (group or size) for size, group in zip((rows, columns), made.groups, strict=True)]
    return QuantisedPart(format=made, codes=codes, scales=rng.uniform(1e-4, 1e-3, grid).astype(np.float32))


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def float32_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def assert_near(found: np.ndarray, expected: np.ndarray, error: float) -> None:
    assert np.linalg.norm(found - expected) <= error * np.linalg.norm(expected)


@pytest.mark.parametrize("made", [FP8_BLOCK_128, FP8_ROWS, INT8], ids=["E4M3 blocks", "E4M3 rows", "INT8 rows"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (512, 2688)])
@pytest.mark.parametrize("tokens", [513, 600])
def test_products_are_those_of_the_cpu(cuda, made, rows, columns, tokens):
    cpu, part, batch = LowBitCpuOps(activations=PromptSteps()), part_of(made, rows, columns), make_batch(tokens)
    rng = np.random.default_rng(tokens)
    bits = bf16_bits(rng.normal(size=(tokens, columns)) * np.exp(rng.normal(0, 2, (tokens, 1))))
    x, host = cuda.upload_weight(bits), float32_of(bits)
    on_device, on_host = cuda.upload_quantised(part), cpu.upload_quantised(part)
    found = cuda.download(cuda.linear(x, on_device, batch)).astype(np.float32)
    expected = cpu.linear(host, on_host, batch)
    assert_near(found, expected, BF16_ERROR)
    exact = LowBitCpuOps().linear(host, on_host, batch)
    assert np.linalg.norm(found - exact) > 1.2 * BF16_ERROR * np.linalg.norm(exact)  # activations were rounded
    gated = cuda.download(cuda.linear_swiglu(x, on_device, batch)).astype(np.float32)
    assert_near(gated, cpu.linear_swiglu(host, on_host, batch), 4 * BF16_ERROR)


@pytest.mark.parametrize(("rows", "columns"), [(1000, 96), (4096, 2560)])
def test_heads_and_their_logits_are_those_of_the_cpu(cuda, rows, columns):
    from openinfer_kernels.cuda.gemm.dispatch import MOST_E4M3_TOKENS

    bits = bf16_bits(np.random.default_rng(3).normal(size=(rows, columns)))
    head, expected = cuda.quantise_head(bits[:300], bits[300:]), LowBitCpuOps(fp8_head=True).quantise_head(bits)
    for tokens in (1, 16, 64, 100, 300):
        hidden = bf16_bits(np.random.default_rng(tokens).normal(size=(tokens, columns)))
        found = cuda.download(cuda.logits(cuda.upload_weight(hidden), head))
        assert found.dtype == np.float32
        # Codes of few tokens are multiplied as E4M3, which Hopper's tensor cores add to about 14 bits; beyond 64 tokens
        # weights are scaled, and rounded, before they are multiplied.
        error = 3e-4 if tokens <= MOST_E4M3_TOKENS["fp8"] else 1e-5 if tokens <= 64 else BF16_ERROR
        assert_near(found, LowBitCpuOps().logits(float32_of(hidden), expected), error)
