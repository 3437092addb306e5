"""Activations in few bits: codes against ml_dtypes, scales and products against loops, and where nothing is rounded."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from openinfer_kernels import Code, QuantisedPart, ScaleType, WeightFormat
from openinfer_kernels.cpu import CpuOps, LowBitCpuOps
from openinfer_kernels.cpu.gemm import low_bit_activations
from openinfer_kernels.cpu.gemm.low_bit_activations import e4m3_codes
from openinfer_kernels.cpu.gemm.quantised import dequantised
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.weights.code_values import E4M3_VALUES
from openinfer_kernels.weights.low_bit_activations import PromptSteps, group_columns, is_served
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32, MXFP4

PER_ROW = WeightFormat(code=Code.E4M3, group_rows=1, group_columns=None, scales=ScaleType.F32)
INT8 = replace(PER_ROW, code=Code.INT8)
ALWAYS = PromptSteps(least_tokens=1, least_query_tokens=1)
LARGEST = {Code.E4M3: 448, Code.INT8: 127}


def weight_of(ops: CpuOps, made: WeightFormat, rows: int, columns: int):
    rng = np.random.default_rng(rows + columns)
    grid = [size // (group or size) for size, group in zip((rows, columns), made.groups, strict=True)]
    codes = rng.normal(0, 60, (rows, columns))
    stored = codes.astype(ml_dtypes.float8_e4m3fn) if made.code is Code.E4M3 else (codes + 128).clip(0, 255)
    scales = rng.uniform(0.1, 2, grid).astype(np.float32)
    bits = stored.view(np.uint8) if made.code is Code.E4M3 else stored.astype(np.uint8)
    return ops.upload_quantised(QuantisedPart(format=made, codes=bits, scales=scales))


def activations(tokens: int, columns: int) -> np.ndarray:
    """Tokens, and columns, of sizes that differ by orders of magnitude, and a token of zeros."""
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, columns)) * np.exp(rng.normal(0, 3, (tokens, 1)))
    x[:, 7] *= 50
    x[1] = 0
    return x.astype(np.float32)


def nearest(value: float, code: Code) -> float:
    if code is Code.INT8:
        return float(np.rint(value))
    return float(np.float32(value).astype(ml_dtypes.float8_e4m3fn))


def product_by_loops(x: np.ndarray, weight, group: int) -> np.ndarray:
    """In float64, of what the codes stand for: one value after the other."""
    rounded = np.empty(x.shape, np.float64)
    for token, row in enumerate(x):
        for first in range(0, x.shape[1], group):
            values = row[first : first + group]
            scale = np.float32(max(np.abs(values).max(), np.float32(1e-12))) / np.float32(LARGEST[weight.format.code])
            rounded[token, first : first + group] = [
                nearest(each / scale, weight.format.code) * scale for each in values
            ]
    return rounded @ dequantised(weight).astype(np.float64).T


def test_codes_are_those_of_ml_dtypes_for_every_number_that_matters():
    """All BF16 numbers up to 448, in which every code, every middle of two and every subnormal number is."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) <= 448)]
    assert (e4m3_codes(values) == values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()


def test_what_is_beyond_the_largest_number_becomes_it():
    assert (E4M3_VALUES[e4m3_codes(np.float32([449, 1e30, -470]))] == [448, 448, -448]).all()
    assert np.isnan(E4M3_VALUES[e4m3_codes(np.float32([np.nan]))]).all()


@pytest.mark.parametrize(
    ("made", "rows", "columns", "group"),
    [(FP8_BLOCK_128, 256, 384, 128), (PER_ROW, 48, 80, 80), (INT8, 48, 80, 80)],
    ids=["E4M3 blocks", "E4M3 rows", "INT8 rows"],
)
def test_product_is_that_of_the_nearest_codes(made: WeightFormat, rows: int, columns: int, group: int):
    ops = LowBitCpuOps(activations=ALWAYS)
    weight, x = weight_of(ops, made, rows, columns), activations(9, columns)
    expected = product_by_loops(x, weight, group)
    size = np.linalg.norm(expected, axis=1, keepdims=True) + 1e-30
    found = ops.linear(x, weight, make_batch(9))
    assert (np.abs(found - expected) / size).max() < 1e-5
    exact = CpuOps().linear(x, weight, make_batch(9))
    assert (np.abs(exact - expected) / size).max() > 1e-3  # the rounding is there
    if group < columns:
        assert (np.abs(product_by_loops(x, weight, columns) - expected) / size).max() > 1e-3  # so are the groups
    gated = ops.linear_swiglu(x, weight, make_batch(9))
    gate, up = np.split(found.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-6 * np.abs(gated).max())


@pytest.mark.parametrize("made", [FP8_BLOCK_128, INT8], ids=["E4M3", "INT8"])
def test_nan_of_a_token_stays_with_it(made: WeightFormat):
    ops = LowBitCpuOps(activations=ALWAYS)
    weight, x = weight_of(ops, made, 128, 256), activations(5, 256)
    clean = ops.linear(x, weight, make_batch(5))
    x[2, 200] = np.nan
    found = ops.linear(x, weight, make_batch(5))
    assert np.isnan(found[2]).all()
    assert (np.delete(found, 2, axis=0) == np.delete(clean, 2, axis=0)).all()


def test_steps_without_much_of_a_prompt_are_multiplied_as_ever():
    ops, plain = LowBitCpuOps(activations=PromptSteps()), CpuOps()
    weight = weight_of(ops, FP8_BLOCK_128, 128, 128)
    x = activations(600, 128)
    decode = replace(make_batch(600), max_query_tokens=1)
    for tokens, batch in ((512, make_batch(512)), (600, decode)):
        assert (ops.linear(x[:tokens], weight, batch) == plain.linear(x[:tokens], weight, batch)).all()
    prompt = make_batch(600)
    assert (ops.linear(x, weight, prompt) != plain.linear(x, weight, prompt)).any()


@pytest.mark.parametrize(
    "made",
    [
        INT4_GROUP_32,
        MXFP4,
        replace(FP8_BLOCK_128, group_rows=64, group_columns=64),
        replace(INT8, zero_points=True),
        replace(INT8, minimums=True),
        replace(INT8, group_columns=128),
    ],
    ids=str,
)
def test_other_formats_have_no_such_product(made: WeightFormat):
    assert not is_served(made)
    assert group_columns(made, (256, 256), (1, 256)) is None


@pytest.mark.parametrize(
    ("made", "shape", "block"),
    [
        (FP8_BLOCK_128, (256, 192), (128, 64)),  # a rank's cut inside a block
        (FP8_BLOCK_128, (256, 200), (128, 8)),
        (PER_ROW, (256, 200), (1, 200)),
        (PER_ROW, (4, 256, 256), (1, 256)),  # experts
    ],
)
def test_matrices_of_odd_sizes_and_experts_have_none_either(made: WeightFormat, shape, block):
    assert is_served(made)
    assert group_columns(made, shape, block) is None


@pytest.mark.parametrize("rows_at_once", [32, 4096])
def test_head_is_quantised_if_its_operators_do_so(monkeypatch: pytest.MonkeyPatch, rows_at_once: int):
    monkeypatch.setattr(low_bit_activations, "_ROWS_AT_ONCE", rows_at_once)
    rng = np.random.default_rng(3)
    head = rng.normal(size=(70, 32)).astype(np.float32) * np.exp(rng.normal(0, 2, (70, 1))).astype(np.float32)
    head[5] = 0
    assert CpuOps().quantise_head(head) is None
    quantised = LowBitCpuOps(fp8_head=True).quantise_head(head[:40], head[40:])
    assert quantised is not None
    scales = np.abs(head).max(axis=1, keepdims=True) / np.float32(448)
    expected = (head / np.where(scales == 0, 1, scales)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    np.testing.assert_array_equal(dequantised(quantised), expected)
    hidden = rng.normal(size=(3, 32)).astype(np.float32)
    np.testing.assert_allclose(LowBitCpuOps().logits(hidden, quantised), hidden @ expected.T, rtol=1e-5, atol=1e-5)
