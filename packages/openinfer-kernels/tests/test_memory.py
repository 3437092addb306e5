import math

import numpy as np
import pytest

from openinfer_kernels import WeightDtypeError


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
