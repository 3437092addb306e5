import math

import numpy as np
import pytest

from openinfer_kernels import RandomWeight, WeightDtypeError
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.weights.quantised import Code, QuantisedPart, ScaleType, WeightFormat


def bfloat16_value(bits: int) -> float:
    """Sign, 8 bits of exponent, 7 of fraction, after IEEE 754."""
    sign, exponent, fraction = -1.0 if bits >> 15 else 1.0, (bits >> 7) & 0xFF, bits & 0x7F
    if exponent == 0xFF:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0**-133
    return sign * (128 + fraction) * 2.0 ** (exponent - 134)


def test_upload_weight_bfloat16_bits_widens_every_pattern(ops, host):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    weight = host(ops.upload_weight(bits))
    expected = np.array([bfloat16_value(pattern) for pattern in range(1 << 16)]).reshape(256, 256)
    assert weight.shape == (256, 256)
    np.testing.assert_array_equal(weight, expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(weight[~np.isnan(weight)]), np.signbit(expected[~np.isnan(expected)]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_upload_weight_float_copies(ops, host, dtype):
    given = np.arange(-6, 6, dtype=dtype).reshape(3, 4)
    weight = ops.upload_weight(given)
    given[:] = 0
    np.testing.assert_array_equal(host(weight), np.arange(-6, 6).reshape(3, 4))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_upload_weight_rounds_to_the_compute_dtype_once(ops, host, rounded, dtype):
    bits = np.random.default_rng(0).integers(0, 2**16, size=(2, 70_000), dtype=np.uint16)
    given = np.ascontiguousarray(bits.T).view(np.float32).ravel() if dtype == np.float32 else bits[0].view(np.float16)
    weight = host(ops.upload_weight(given))
    np.testing.assert_array_equal(weight, rounded(given.astype(np.float32)))


def test_upload_float32_keeps_what_the_compute_dtype_would_round(ops):
    values = np.array([1 + 2.0**-20, -3.0], np.float32)
    got = ops.download(ops.upload_float32(values, np.array([0x3F80], np.uint16)))
    np.testing.assert_array_equal(got, np.array([*values, 1.0], np.float32))
    assert got.dtype == np.float32


def test_copy_rows_copies_whole_rows_of_any_dtype(ops):
    for dtype in (np.float32, np.int32):
        array = ops.upload(np.arange(24, dtype=dtype).reshape(4, 2, 3))
        ops.copy_rows(array, sources=[3, 0], targets=[1, 2])
        ops.copy_rows(array, sources=[], targets=[])
        np.testing.assert_array_equal(ops.download(array)[:, 0, 0], [0, 18, 0, 18])


def test_upload_weight_stored_transposed_and_empty(ops, host):
    given = np.arange(6, dtype=np.uint16).reshape(2, 3)
    np.testing.assert_array_equal(host(ops.upload_weight(given.T.copy())), host(ops.upload_weight(given)).T)
    assert ops.download(ops.upload_weight(np.zeros((0, 3), np.uint16))).shape == (0, 3)


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.uint8, np.int16, np.bool_])
def test_upload_weight_other_dtype_refuses_by_name(ops, dtype):
    with pytest.raises(WeightDtypeError, match=np.dtype(dtype).name):
        ops.upload_weight(np.zeros(3, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64, np.uint64, np.uint32, np.bool_])
def test_upload_download_round_trip_copies_and_keeps_dtype(ops, dtype):
    host = np.array([[0, 1], [1, 0]], dtype)
    device = ops.upload(host)
    host[:] = 1
    first = ops.download(device)
    np.testing.assert_array_equal(first, [[0, 1], [1, 0]])
    assert first.dtype == dtype
    first[:] = 1
    np.testing.assert_array_equal(ops.download(device), [[0, 1], [1, 0]])


def test_zeros_has_the_dtype_asked_for(ops):
    assert ops.download(ops.zeros((2, 3), np.int64)).dtype == np.int64
    plain = ops.download(ops.zeros((2, 0, 3)))
    assert plain.shape == (2, 0, 3)
    assert not ops.download(ops.zeros((4,))).any()


def test_compute_dtype_is_what_the_contract_says(ops):
    expected = {"cpu": "float32", "cuda": "bfloat16"}[ops.name]
    assert ops.zeros((1,)).dtype.name == expected
    assert ops.upload_weight(np.zeros(1, np.uint16)).dtype.name == expected


def test_upload_weight_puts_parts_below_each_other_whatever_they_are(ops, host, rounded):
    numbers = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    bits = np.full((5, 2), 0x3F80, np.uint16).T  # ones, stored by columns
    weight = host(ops.upload_weight(numbers, bits, np.zeros((1, 5), np.float16)))
    np.testing.assert_array_equal(weight, np.concatenate([rounded(numbers), np.ones((2, 5)), np.zeros((1, 5))]))


def test_upload_weight_refuses_parts_of_other_widths_and_nothing(ops):
    with pytest.raises(ValueError, match=r"given was \[2, 3\], \[2, 4\]"):
        ops.upload_weight(np.zeros((2, 3), np.uint16), np.zeros((2, 4), np.uint16))
    with pytest.raises(ValueError, match="given was nothing"):
        ops.upload_weight()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_loading_fills_every_array_by_its_end(ops, host, dtype):
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 64, size=(rows, 1025)).astype(dtype) for rows in (1, 700, 4096)]
    columns = np.ascontiguousarray(given[2].T).T  # not contiguous by rows
    deep = np.stack([given[2][:2100]] * 2)[:, :, 1:]  # each of the two is longer than a staging buffer
    with ops.loading():
        loaded = [ops.upload_weight(*given), ops.upload_weight(columns), ops.upload_weight(given[1][:, 3:9])]
        loaded.append(ops.upload_weight(deep))
    expected = [np.concatenate(given), given[2], given[1][:, 3:9], deep]
    for found, wanted in zip(loaded, expected, strict=True):
        np.testing.assert_array_equal(host(found), host(ops.upload_weight(wanted.copy())))


@pytest.mark.gpu
def test_loading_does_not_write_where_kernels_of_the_stream_have_yet_to_read(ops, host):
    """A temporary that was freed while the kernel that reads it waits gives its memory to a weight of the same size."""
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    from openinfer_kernels.cuda.common.libraries import cupy

    values = np.random.default_rng(0).integers(0, 1 << 15, size=1 << 20).astype(np.uint16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        halves, kept = cupy.zeros((2, 1 << 29), np.uint8), cupy.zeros(values.shape, np.uint16)
        stream.synchronize()
        with ops.loading():
            temporary = ops.upload(values)
            place = temporary.data.ptr
            for _ in range(100):  # a queue of some 25 ms, in which the copies' threads come to their work
                halves[0] = halves[1]
            kept[:] = temporary
            del temporary
            weight = ops.upload_weight(np.zeros(values.shape, np.uint16))
            assert weight.data.ptr == place
    np.testing.assert_array_equal(kept.get(), values)
    assert not host(weight).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_converted_at_once_by_several_threads_stay_their_own(ops, host, dtype):
    """A format without a kernel is written by the thread that loads, while others convert what it has queued."""
    rng = np.random.default_rng(0)
    nvfp4 = WeightFormat(code=Code.E2M1, group_rows=1, group_columns=16, scales=ScaleType.E4M3, global_scale=True)
    codes = rng.integers(0, 256, size=(16, 32)).astype(np.uint8)
    scales = rng.integers(0x20, 0x50, size=(16, 4)).astype(np.uint8)
    parts = [QuantisedPart(format=nvfp4, codes=codes, scales=scales, global_scale=0.5**n) for n in range(4)]
    expected = [host(ops.upload_dequantised(part)) for part in parts]
    given = [np.full((64, 64), n, dtype) for n in range(64)]
    for _ in range(8):
        with ops.loading():
            loaded = []
            for n, values in enumerate(given):
                loaded.append((ops.upload_weight(*[values] * 4), ops.upload_dequantised(parts[n % 4])))
        for n, (plain, quantised) in enumerate(loaded):
            np.testing.assert_array_equal(host(plain), n)
            np.testing.assert_array_equal(host(quantised), expected[n % 4])


def test_loading_tells_what_came_and_raises_what_failed(ops):
    came = []
    with ops.loading(came.append):
        ops.upload_weight(np.zeros((300, 40_000), np.uint16))
        with pytest.raises(WeightDtypeError):
            ops.upload_weight(np.zeros(3, np.int8))
    assert sum(came) == (0 if ops.name == "cpu" else 24_000_000)
    assert ops.download(ops.upload_weight(np.zeros(3, np.uint16))).shape == (3,)


RANDOM = RandomWeight.whole((40, 51), seed=2**64 - 59, mean=1.0, spread=0.25)


@pytest.mark.parametrize(
    "weight",
    [RANDOM, RANDOM.rows(7, 30), RANDOM.columns(2, 17), RANDOM.rows(3, 9).columns(50, 51), RANDOM.rows(4, 4)],
)
def test_random_weight_is_the_same_on_every_device_up_to_one_rounding(ops, host, rounded, weight):
    expected = rounded(CpuOps().upload_weight(weight))
    np.testing.assert_allclose(host(ops.upload_weight(weight)), expected, rtol=2.0**-7, atol=1e-6)


def test_random_weight_pieces_are_those_of_the_whole(ops, host):
    whole = host(ops.upload_weight(RANDOM))
    np.testing.assert_array_equal(host(ops.upload_weight(RANDOM.rows(0, 13), RANDOM.rows(13, 40))), whole)
    np.testing.assert_array_equal(host(ops.upload_weight(RANDOM.rows(5, 9).columns(3, 20))), whole[5:9, 3:20])


def test_random_weight_has_its_mean_and_spread_and_depends_on_the_seed(ops, host):
    first, second = (
        host(ops.upload_weight(RandomWeight.whole((1 << 17,), seed=seed, mean=1.0, spread=0.25))) for seed in (1, 2)
    )
    assert abs(first.mean() - 1) < 0.005
    assert abs(first.std() - 0.25) < 0.005
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01
    assert abs(np.corrcoef(first[::2], first[1::2])[0, 1]) < 0.01
