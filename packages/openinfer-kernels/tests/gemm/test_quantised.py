"""Quantised weights: bit layouts against packers of another make, cuts at every place, and what is refused."""

import contextlib
import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from openinfer_kernels import (
    Code,
    QuantisedPart,
    RandomCodes,
    ScaleType,
    WeightDtypeError,
    WeightFormat,
    WeightValueError,
)
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.cpu.gemm.quantised import dequantised
from openinfer_kernels.ops import QuantisedWeight
from openinfer_kernels.testing.expert_cases import FORMATS, random_part
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.weights.gpu_kernels import Way, rows_kernels, tiles_kernels, way_of
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32, MXFP4
from openinfer_kernels.weights.scale_blocks import common_block

BATCH = make_batch(1)
"""Products do not look at it."""

FP8, INT4, FP4 = FP8_BLOCK_128, INT4_GROUP_32, MXFP4


def expand(scales: np.ndarray, rows: int, columns: int, block: tuple[int, int]) -> np.ndarray:
    """The scale of every value, looked up one by one."""
    return np.array([[scales[o // block[0], i // block[1]] for i in range(columns)] for o in range(rows)])


def pack_nibbles(nibbles: np.ndarray) -> np.ndarray:
    """int32 `[out, in / 8]` by arithmetic over Python integers, column 8 j + n times 16^n."""
    words = [[sum(int(row[8 * j + n]) * 16**n for n in range(8)) for j in range(len(row) // 8)] for row in nibbles]
    return np.array(words, np.uint32).view(np.int32)


def pack_pairs(nibbles: np.ndarray) -> np.ndarray:
    return (nibbles[:, 0::2] + 16 * nibbles[:, 1::2]).astype(np.uint8)


def make_part(weight_format: WeightFormat, rows: int, columns: int) -> tuple[QuantisedPart, np.ndarray]:
    """A part and its values, by ml_dtypes and loops."""
    rng = np.random.default_rng(rows * columns)
    if weight_format is FP8:
        codes = rng.normal(0, 50, (rows, columns)).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.1, 2, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
        part = QuantisedPart(format=FP8, codes=codes.view(np.uint8), scales=scales)
        return part, codes.astype(np.float32) * expand(scales, rows, columns, (128, 128))
    nibbles = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    if weight_format is INT4:
        scales = rng.normal(size=(rows, columns // 32)).astype(ml_dtypes.bfloat16)
        part = QuantisedPart(format=INT4, codes=pack_nibbles(nibbles), scales=scales.view(np.uint16))
        values = nibbles.astype(np.float32) - 8
    else:
        scales = rng.uniform(0.01, 3, (rows, columns // 32)).astype(ml_dtypes.float8_e8m0fnu)
        part = QuantisedPart(format=FP4, codes=pack_pairs(nibbles), scales=scales.view(np.uint8))
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return part, values * expand(scales.astype(np.float32), rows, columns, (1, 32))


def cut(part: QuantisedPart, rows: slice, columns: slice, *, keep_scales: bool = True) -> QuantisedPart:
    per_entry = {FP8: 1, INT4: 8, FP4: 2}[part.format]
    entries = slice(columns.start // per_entry, columns.stop // per_entry)
    block = {FP8: (128, 128)}.get(part.format, (1, 32))
    first = [place if keep_scales else place % size for place, size in zip((rows.start, columns.start), block,
                                                                          strict=True)]  # fmt: skip
    scales = part.scales if keep_scales else part.scales[rows.start // block[0] :, columns.start // block[1] :]
    return QuantisedPart(
        format=part.format,
        codes=part.codes[rows, entries],
        scales=scales,
        first_row=first[0],
        first_column=first[1],
    )


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (64, 96), (576, 256), (130, 160)])
def test_values_equal_those_of_other_packers(weight_format, rows, columns):
    part, values = make_part(weight_format, rows, columns)
    weight = CpuOps().upload_quantised(part)
    assert weight.shape == (rows, columns)
    np.testing.assert_array_equal(dequantised(weight), values.astype(np.float32))


def test_every_code_has_its_value():
    codes = np.arange(256, dtype=np.uint8)
    numbers = np.delete(codes, [0x7F, 0xFF])
    one = np.ones((1, 2), np.float32)
    fp8 = CpuOps().upload_quantised(QuantisedPart(format=FP8, codes=numbers[None], scales=one))
    np.testing.assert_array_equal(dequantised(fp8)[0], numbers.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    powers = QuantisedPart(
        format=replace(FP8, scales=ScaleType.E8M0),
        codes=np.full((256 * 128, 1), 0x38, np.uint8),
        scales=codes[:, None],
    )
    found = dequantised(CpuOps().upload_quantised(powers))[::128, 0]
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    low_first = QuantisedPart(format=FP4, codes=np.repeat(np.array([[0x21]], np.uint8), 16, axis=1),
                              scales=np.array([[127]], np.uint8))  # fmt: skip
    assert dequantised(CpuOps().upload_quantised(low_first))[0, :2].tolist() == [0.5, 1.0]


def of_code(code: Code, nibble_pairs: np.ndarray, columns: int) -> np.ndarray:
    """The integer or float of every code, in float64, by arithmetic over bytes."""
    if code is Code.E4M3:
        return nibble_pairs.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if code is Code.INT8:
        return nibble_pairs.astype(np.float64)
    halves = np.empty((len(nibble_pairs), columns), np.uint8)
    halves[:, 0::2], halves[:, 1::2] = nibble_pairs % 16, nibble_pairs // 16
    return halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64) if code is Code.E2M1 else halves.astype(np.float64)


DESCRIBED = [
    WeightFormat(code=Code.E4M3, group_rows=1, group_columns=None, scales=ScaleType.BF16),
    WeightFormat(code=Code.E4M3, group_rows=None, group_columns=None, scales=ScaleType.F32),
    WeightFormat(code=Code.E4M3, group_rows=128, group_columns=128, scales=ScaleType.F16),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=128, scales=ScaleType.F16),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=64, scales=ScaleType.F16, zero_points=True),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=32, scales=ScaleType.F16, minimums=True),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=128, scales=ScaleType.BF16, zero_points=True),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=None, scales=ScaleType.F16),
    WeightFormat(code=Code.INT8, group_rows=1, group_columns=None, scales=ScaleType.BF16),
    WeightFormat(code=Code.INT8, group_rows=1, group_columns=128, scales=ScaleType.F16, zero_points=True),
    WeightFormat(code=Code.INT8, group_rows=1, group_columns=32, scales=ScaleType.F32, zero_points=True),
    WeightFormat(code=Code.E2M1, group_rows=1, group_columns=16, scales=ScaleType.E4M3, global_scale=True),
]


def described_values(part: QuantisedPart) -> np.ndarray:
    """By the definition in `WeightFormat`, value by value in float64, with float32 scales."""
    made, (rows, columns) = part.format, part.shape
    dtype = {
        ScaleType.BF16: ml_dtypes.bfloat16,
        ScaleType.E4M3: ml_dtypes.float8_e4m3fn,
        ScaleType.E8M0: ml_dtypes.float8_e8m0fnu,
    }.get(made.scales)
    scales = (part.scales if dtype is None else part.scales.view(dtype)).astype(np.float64)
    if made.global_scale:
        scales = (scales * part.global_scale).astype(np.float32).astype(np.float64)
    block = (made.group_rows or rows, made.group_columns or columns)
    q = of_code(made.code, part.codes, columns)
    if part.minimums is not None:
        product = (q * expand(scales, rows, columns, block)).astype(np.float32)
        return product + expand(part.minimums, rows, columns, block)
    zeros = {Code.INT4: 8.0, Code.INT8: 128.0}.get(made.code, 0.0)
    q = q - (zeros if part.zero_points is None else expand(part.zero_points.astype(float), rows, columns, block))
    return q * expand(scales, rows, columns, block)


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_code_of_nan_is_refused_wherever_it_is(nan):
    part, _ = make_part(FP8, 64, 96)
    for row, column in ((0, 0), (63, 95), (17, 40)):
        codes = part.codes.copy()
        codes[row, column] = nan
        with pytest.raises(WeightValueError, match="E4M3 code is no number"):
            CpuOps().upload_quantised(replace(part, codes=codes))
    within = replace(part, codes=np.where(np.arange(96) % 2, 0x7E, 0xFE).astype(np.uint8)[None].repeat(64, 0))
    assert np.abs(dequantised(CpuOps().upload_quantised(within))).max() > 0  # 448 is one


@pytest.mark.parametrize("described", DESCRIBED, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (130, 384)])
def test_values_of_a_described_format_are_those_of_its_definition(described, rows, columns):
    part = random_part(np.random.default_rng(rows), described, rows, columns)
    expected = described_values(part).astype(np.float32)
    np.testing.assert_array_equal(dequantised(CpuOps().upload_quantised(part)), expected)
    assert 0.3 < expected.std() * columns**0.5 < 3
    np.testing.assert_array_equal(CpuOps().upload_dequantised(part, part)[rows:], expected)


def test_parts_of_one_scale_each_keep_their_own():
    whole = WeightFormat(code=Code.E4M3, group_rows=None, group_columns=None, scales=ScaleType.F32)
    one, other = (random_part(np.random.default_rng(seed), whole, rows, 64) for seed, rows in ((0, 48), (1, 16)))
    stacked = np.concatenate([described_values(one), described_values(other)]).astype(np.float32)
    np.testing.assert_array_equal(dequantised(CpuOps().upload_quantised(one, other)), stacked)
    share = replace(one, codes=one.codes[24:], first_row=24)  # a rank's rows
    np.testing.assert_array_equal(dequantised(CpuOps().upload_quantised(share)), stacked[24:48])


SERVED = [*DESCRIBED, *FORMATS]


def way_on(ops, described: WeightFormat, part: QuantisedPart) -> Way:
    shape = part.shape
    has_lowbit = ops.device.architecture == "sm_90a"
    return way_of(described, common_block([part], shape), shape, has_lowbit=has_lowbit)


@pytest.mark.gpu
@pytest.mark.parametrize("described", SERVED, ids=str)
def test_a_gpu_holds_a_format_as_its_kernels_take_it(ops, described):
    """Small where a kernel or tiles have it; a plain weight otherwise."""
    if ops.name == "cpu":
        pytest.skip("a CPU holds all formats as they are")
    part = random_part(np.random.default_rng(5), described, 64, 128)
    weight, way = ops.upload_quantised(part), way_on(ops, described, part)
    assert isinstance(weight, QuantisedWeight) == (way is not Way.BF16)
    stack = ops.upload_quantised(part, part, num_matrices=2)
    assert stack.shape == (2, 64, 128)
    assert isinstance(stack, QuantisedWeight) == (rows_kernels(described) is not None)


INT4_ZEROS = WeightFormat(code=Code.INT4, group_rows=1, group_columns=128, scales=ScaleType.F16, zero_points=True)
NVFP4 = DESCRIBED[-1]


def test_ways_are_told_by_format_cut_and_gpu():
    def way(described: WeightFormat, columns: int = 128, *shape: int, has_lowbit: bool = True, **more: bool) -> Way:
        return way_of(described, (1, columns), shape or (64, 256), has_lowbit=has_lowbit, **more)

    assert [way(each) for each in (FP8, INT4_ZEROS, DESCRIBED[5])] == [Way.TILES] * 3
    assert [way(each, has_lowbit=False) for each in (FP8, INT4_ZEROS)] == [Way.ROWS, Way.TILES_DEQUANTISED]
    assert way(FP8, 128, 4, 64, 256) is Way.ROWS
    assert way(INT4_ZEROS, 128, 4, 64, 256) is Way.BF16
    assert [way(each, 128, 4, 128, 256) for each in (FP8, INT4_ZEROS)] == [Way.EXPERT_TILES] * 2
    assert way(FP8, 128, 4, 128, 256, grouped=True) is Way.ROWS
    assert way(FP8, 64, 4, 128, 256) is Way.ROWS  # of E4M3 the sums of 128 columns alone are scaled
    assert way(INT4_ZEROS, 32, 4, 128, 256) is Way.EXPERT_TILES
    assert [way(INT4_GROUP_32, each, 4, 128, 256) for each in (32, 128)] == [Way.EXPERT_TILES] * 2
    assert way(MXFP4, 32, 4, 128, 256) is Way.EXPERT_TILES
    assert way(FP8, 128, 4, 128, 256, has_lowbit=False) is Way.ROWS
    assert way(FP8, 16) is Way.BF16  # a rank's cut inside a group
    assert [way(NVFP4, 16), way(NVFP4, 8)] == [Way.TILES, Way.BF16]
    assert way(NVFP4, 16, has_lowbit=False) is Way.TILES_DEQUANTISED
    assert way(NVFP4, 16, 4, 128, 256) is Way.BF16
    assert tiles_kernels(NVFP4) == "nvfp4"
    assert way(replace(INT4_ZEROS, group_columns=16), 16) is Way.BF16
    assert way(replace(INT4_ZEROS, scales=ScaleType.F32)) is Way.BF16
    assert tiles_kernels(DESCRIBED[5]) == "int4_min"


@pytest.mark.gpu
@pytest.mark.parametrize("in_loading", [False, True])
def test_code_of_nan_ends_the_load_on_a_gpu(ops, in_loading):
    if ops.name == "cpu":
        pytest.skip("another test is the CPU's")
    part, _ = make_part(FP8, 64, 96)
    for nan, shape in itertools.product((0x7F, 0xFF), (None, 1)):
        codes = part.codes.copy()
        codes[63, 95] = nan
        damaged = replace(part, codes=codes, name="layers.0.q_proj")
        within = ops.loading() if in_loading else contextlib.nullcontext()
        with pytest.raises(WeightValueError, match=r"layers\.0\.q_proj: an E4M3 code is no number"), within:
            ops.upload_quantised(damaged, num_matrices=shape)
    ops.upload_quantised(part)


@pytest.mark.parametrize("described", SERVED, ids=str)
@pytest.mark.parametrize("rows_columns", [(192, 416), (328, 1152)], ids=str)
def test_products_of_every_number_of_tokens_equal_float64(ops, activation, host, described, rows_columns):
    """All sizes of tiles, their tails, and K divided."""
    part = random_part(np.random.default_rng(7), described, *rows_columns)
    weight, values = ops.upload_quantised(part), described_values(part)
    for tokens in (1, 8, 15, 31, 64, 65, 129, 257, 300, 1100) if ops.name == "cuda" else (1, 15):
        x = activation(np.random.default_rng(tokens).normal(size=(tokens, rows_columns[1])).astype(np.float32))
        expected = host(x).astype(np.float64) @ values.T
        got = host(ops.linear(x, weight, BATCH))
        error = np.abs(got - expected).max() / np.sqrt((expected**2).mean())
        assert error < (1e-5 if ops.name == "cpu" else 2.0**-5), tokens


@pytest.mark.parametrize("described", SERVED, ids=str)
@pytest.mark.parametrize("height", [128, 96])
def test_gated_products_equal_the_gate_after_the_product(ops, activation, host, described, height):
    """By one kernel, and where gate and up are no whole tiles."""
    parts = [random_part(np.random.default_rng(seed), described, height, 256) for seed in (1, 2)]
    weight = ops.upload_quantised(*parts)
    for tokens in (3, 30, 100):
        x = activation(np.random.default_rng(tokens).normal(size=(tokens, 256)).astype(np.float32))
        got, expected = host(ops.linear_swiglu(x, weight, BATCH)), host(ops.swiglu(ops.linear(x, weight, BATCH)))
        np.testing.assert_allclose(got, expected, atol=1e-5 if ops.name == "cpu" else 2.0**-6)


@pytest.mark.parametrize("described", SERVED, ids=str)
def test_dequantised_matrices_hold_the_values_rounded_once(ops, host, described):
    part = random_part(np.random.default_rng(9), described, 72, 160)
    got, expected = host(ops.upload_dequantised(part)), described_values(part)
    # What a minimum adds is rounded before the sum, and the weights of a group may be smaller than it.
    atol = 2.0**-8 * np.abs(expected).max() if described.minimums and ops.name == "cuda" else 1e-30
    np.testing.assert_allclose(got, expected, rtol=1e-6 if ops.name == "cpu" else 2.0**-8 * 1.01, atol=atol)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("keep_scales", [True, False])
def test_pieces_equal_the_same_piece_of_the_whole(ops, activation, host, weight_format, keep_scales):
    """Rows and columns as ranks cut them, also inside a block."""
    part, values = make_part(weight_format, 320, 256)
    corner = slice(160, 320), slice(160, 256)
    for rows, columns in ((slice(64, 128), slice(0, 256)), (slice(0, 320), slice(64, 192)), corner):
        weight = ops.upload_quantised(cut(part, rows, columns, keep_scales=keep_scales))
        x = activation(np.random.default_rng(2).normal(size=(5, columns.stop - columns.start)).astype(np.float32))
        expected = host(x).astype(np.float64) @ values[rows, columns].astype(np.float64).T
        got = host(ops.linear(x, weight, BATCH))
        error = np.abs(got - expected).max() / np.sqrt((expected**2).mean())
        assert error < (1e-5 if ops.name == "cpu" else 2.0**-5), (rows, columns)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 70, 200])
def test_product_equals_float64(ops, activation, host, weight_format, tokens):
    part, values = make_part(weight_format, 192, 512)
    x = activation(np.random.default_rng(tokens).normal(size=(tokens, 512)).astype(np.float32))
    expected = host(x).astype(np.float64) @ values.astype(np.float64).T
    got = host(ops.linear(x, ops.upload_quantised(part), BATCH))
    error = np.abs(got - expected).max() / np.sqrt((expected**2).mean())
    assert error < (1e-5 if ops.name == "cpu" else 2.0**-5)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_parts_lie_below_each_other_and_make_matrices(weight_format):
    (one, first), (other, second) = make_part(weight_format, 64, 96), make_part(weight_format, 32, 96)
    stacked = np.concatenate([first, second, first, second]).astype(np.float32)
    weight = CpuOps().upload_quantised(one, other, one, other)
    np.testing.assert_array_equal(dequantised(weight), stacked)
    matrices = CpuOps().upload_quantised(one, other, one, other, num_matrices=2)
    assert matrices.shape == (2, 96, 96)
    np.testing.assert_array_equal(dequantised(matrices, 1), stacked[96:])


def test_random_codes_of_a_piece_are_those_of_the_whole_in_its_place():
    for itemsize, weight_format in ((1, FP8), (4, INT4)):
        whole = RandomCodes.whole((16, 24), seed=5, mask=0xBF, itemsize=itemsize)
        scales = np.ones((1, 1), np.float32) if weight_format is FP8 else np.full((16, 6), 0x3F80, np.uint16)
        weight = CpuOps().upload_quantised(QuantisedPart(format=weight_format, codes=whole, scales=scales))
        piece = whole.rows(4, 12).columns(8, 16)
        scales = scales if weight_format is FP8 else scales[4:12, 2:4]
        some = CpuOps().upload_quantised(QuantisedPart(format=weight_format, codes=piece, scales=scales))
        np.testing.assert_array_equal(some.codes, weight.codes[4:12, 8 * itemsize : 16 * itemsize])
        assert len(np.unique(weight.codes)) > 64
        assert (weight.codes & 0x40 == 0).all()


def test_parts_that_do_not_fit_are_refused(ops):
    part, _ = make_part(FP8, 64, 96)
    other, _ = make_part(FP8, 64, 128)
    with pytest.raises(WeightDtypeError, match=r"codes of dtype float32 .* possible are codes of integers"):
        ops.upload_quantised(QuantisedPart(format=FP8, codes=np.zeros((4, 4), np.float32), scales=part.scales))
    with pytest.raises(WeightDtypeError, match="scales of dtype float64"):
        ops.upload_quantised(QuantisedPart(format=FP8, codes=part.codes, scales=part.scales.astype(np.float64)))
    with pytest.raises(ValueError, match=r"given was e4m3 in groups of 128 x 128 .*: \[64, 96\], e4m3 .*: \[64, 128\]"):
        ops.upload_quantised(part, other)
    described = WeightFormat(code=Code.INT4, group_rows=1, group_columns=64, scales=ScaleType.F16, zero_points=True)
    with_zeros = random_part(np.random.default_rng(0), described, 64, 128)
    with pytest.raises(ValueError, match="takes zero points as its scales; given was none"):
        CpuOps().upload_quantised(replace(with_zeros, zero_points=None))
    with pytest.raises(ValueError, match=r"given was \[64, 1\]"):
        CpuOps().upload_quantised(replace(with_zeros, zero_points=with_zeros.zero_points[:, :1]))
    with pytest.raises(ValueError, match="takes zero points never"):
        CpuOps().upload_quantised(replace(with_zeros, format=replace(described, zero_points=False)))
    with pytest.raises(ValueError, match="given was nothing"):
        ops.upload_quantised()
    with pytest.raises(ValueError, match="64 rows cannot be 3 matrices"):
        ops.upload_quantised(part, num_matrices=3)
    with pytest.raises(ValueError, match=r"scales \[1, 1\] do not cover .* \[2, 1\] are needed"):
        ops.upload_quantised(QuantisedPart(format=FP8, codes=part.codes, scales=part.scales, first_row=128))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("tile_tokens", [8, 32, 128])
def test_every_tile_multiplies_alike(ops, activation, host, weight_format, tile_tokens):
    """Tiles of any size for any number of tokens, which the operators choose by what is faster."""
    if ops.name == "cpu":
        pytest.skip("tiles are the GPU's")
    from openinfer_kernels.cuda.gemm.grouped_gemm import Epilogue, GroupedGemm

    part, values = make_part(weight_format, 200, 640)
    x = activation(np.random.default_rng(tile_tokens).normal(size=(45, 640)).astype(np.float32))
    out = activation(np.zeros((45, 200), np.float32))
    gemm = GroupedGemm(ops.device, tile_tokens=tile_tokens)
    gemm.multiply(x, ops.upload_quantised(part, num_matrices=1), out, epilogue=Epilogue.STORE)
    expected = host(x).astype(np.float64) @ values.astype(np.float64).T
    assert np.abs(host(out) - expected).max() / np.sqrt((expected**2).mean()) < 2.0**-5


@pytest.mark.parametrize("weight_format", [None, *FORMATS], ids=str)
@pytest.mark.parametrize(("tokens", "groups"), [(1, 3), (9, 2), (32, 8), (70, 3), (5, 1), (70, 1)])
def test_products_of_groups_equal_float64(ops, activation, host, weight_format, tokens, groups):
    rng = np.random.default_rng(tokens)
    x = activation(rng.normal(size=(tokens, groups * 160)).astype(np.float32))
    if weight_format is None:
        weight = activation(rng.normal(size=(groups, 72, 160)).astype(np.float32))
        values = host(weight)
    else:
        part, values = make_part(weight_format, groups * 72, 160)
        weight = ops.upload_quantised(part, num_matrices=groups, grouped=True)
    values = values.astype(np.float64).reshape(groups, 72, 160)
    expected = np.einsum("tgi,goi->tgo", host(x).astype(np.float64).reshape(tokens, groups, 160), values)
    got = host(ops.grouped_linear(x, weight))
    assert got.shape == (tokens, groups * 72)
    error = np.abs(got - expected.reshape(got.shape)).max() / np.sqrt((expected**2).mean())
    assert error < (1e-5 if ops.name == "cpu" else 2.0**-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "rows"), [(20, 1024), (64, 4096), (1024, 16384)])
def test_products_wait_for_the_dequantised_copies_that_they_multiply(ops, activation, tokens, rows):
    """In one place in memory, one after the other, without a gap: kernels of our own read weights before they wait."""
    if ops.name == "cpu":
        pytest.skip("kernels overlap on a GPU")
    from openinfer_kernels.cuda.common.libraries import cupy
    from openinfer_kernels.cuda.common.memory import Memory
    from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
    from openinfer_kernels.cuda.gemm.gemm import Gemm
    from openinfer_kernels.cuda.gemm.grouped_gemm import GroupedGemm
    from openinfer_kernels.cuda.gemm.library_products import LibraryProducts
    from openinfer_kernels.cuda.gemm.linear import Linear
    from openinfer_kernels.cuda.gemm.quantised import Quantised

    device, columns, count = ops.device, 1024, 3
    linear = Linear(device, DecodeGemm(device), Gemm(device), LibraryProducts(device))
    quantised = Quantised(device, GroupedGemm(device), Memory(device), linear)
    scales = np.full((rows // 128, columns // 128), 0.01, np.float32)
    codes = [RandomCodes.whole((rows, columns), seed=seed, mask=0xBF, itemsize=1) for seed in range(count)]
    weights = [quantised.upload_quantised(QuantisedPart(format=FP8, codes=each, scales=scales)) for each in codes]
    x = activation(np.random.default_rng(0).normal(size=(tokens, columns)).astype(np.float32))
    expected = []
    for weight in weights:
        dense = quantised.dequantised(weight)
        device.synchronize()
        expected.append(ops.download(linear.linear(x, dense)).view(np.uint16))

    def run():
        return [
            linear.linear(x, quantised.dequantised(each), weights_first=False) for _ in range(5) for each in weights
        ]

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.begin_capture()
        results = run()
        graph = stream.end_capture()
        for _ in range(5):
            graph.launch(stream)
        stream.synchronize()
    for index, result in enumerate(results):
        np.testing.assert_array_equal(ops.download(result).view(np.uint16), expected[index % count])
    linear.close()


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [33, 600])
def test_many_tokens_multiply_a_dequantised_copy(ops, activation, host, weight_format, tokens):
    part, values = make_part(weight_format, 72, 96)
    x = activation(np.random.default_rng(1).normal(size=(tokens, 96)).astype(np.float32))
    expected = host(x).astype(np.float64) @ values.astype(np.float64).T
    got = host(ops.linear(x, ops.upload_quantised(part), BATCH))
    assert np.abs(got - expected).max() / np.sqrt((expected**2).mean()) < 2.0**-5


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_codes_that_are_loaded_beside_each_other_are_those_loaded_alone(ops, activation, host, weight_format):
    """By threads on a GPU; a matrix and a piece of it that is not contiguous."""
    part, _ = make_part(weight_format, 256, 256)
    piece = cut(part, slice(0, 256), slice(128, 256))
    x = activation(np.random.default_rng(3).normal(size=(4, 256)).astype(np.float32))
    told: list[int] = []
    with ops.loading(told.append):
        weights = [ops.upload_quantised(each) for each in (part, piece)]
    for weight, given in zip(weights, (part, piece), strict=True):
        tokens = activation(host(x)[:, : weight.shape[1]].copy())
        alone = ops.linear(tokens, ops.upload_quantised(given), BATCH)
        np.testing.assert_array_equal(host(ops.linear(tokens, weight, BATCH)), host(alone))
    if ops.name == "cuda":
        assert sum(told) >= sum(np.asarray(each.codes).nbytes for each in (part, piece))


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_dequantised_weight_may_be_read_while_others_are_loaded(ops, rounded, host, weight_format):
    (part, values), (other, _) = make_part(weight_format, 40, 96), make_part(weight_format, 24, 96)
    with ops.loading():
        ops.upload_quantised(part)
        weight = ops.upload_dequantised(part, other)
        found = host(weight)
    assert weight.shape == (64, 96)
    np.testing.assert_array_equal(found[:40], rounded(values.astype(np.float32)))
