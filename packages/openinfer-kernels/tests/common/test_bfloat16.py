"""BF16 of float32 on the host, against rounding in float64."""

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_kernels.weights.bfloat16 import rounded, rounded_bits, times_power_of_two


def nearest(values: np.ndarray) -> np.ndarray:
    """To 8 significant bits, ties to even."""
    fractions, exponents = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(fractions, 8)), exponents - 8).astype(np.float32)


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even():
    rng = np.random.default_rng(0)
    values = (rng.normal(size=5000) * 2.0 ** rng.integers(-40, 40, 5000)).astype(np.float32)
    ties = ((rng.integers(0x0100, 0x7F00, 500).astype(np.uint32) << 16) + 0x8000).view(np.float32)
    both = np.concatenate([values, ties, -ties, [0.0, -0.0, 1.0]]).astype(np.float32)
    np.testing.assert_array_equal(rounded(both), nearest(both))
    np.testing.assert_array_equal(rounded_bits(both), rounded(both).view(np.uint32) >> 16)


def test_any_strides_and_what_is_too_large():
    values = np.arange(24, dtype=np.float32).reshape(4, 6) / 7
    np.testing.assert_array_equal(rounded(values[:, ::2]), nearest(values[:, ::2]))
    assert np.isinf(rounded(np.array([np.finfo(np.float32).max], np.float32))).all()


def finite_bits() -> NDArray[np.uint16]:
    bits = np.arange(1 << 16, dtype=np.uint16)
    return bits[(bits & 0x7FFF) < 0x7F80]


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0, 2.0**-20, 2.0**20, 2.0**-126, 2.0**127])
def test_powers_of_two_change_the_exponent_alone(scale: float) -> None:
    """Of all numbers; where one would be rounded, nothing is written."""
    bits = finite_bits()
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) * scale
    magnitudes = np.abs(values)
    is_exact = (values == 0) & ((bits & 0x7FFF) == 0)
    is_exact |= (magnitudes >= 2.0**-126) & (magnitudes < 2.0**128) & ((bits & 0x7FFF) >= 0x80)
    out = np.zeros(int(is_exact.sum()), np.uint16)
    assert times_power_of_two(bits[is_exact], scale, out)
    assert (out == rounded_bits(values[is_exact].astype(np.float32))).all()
    for number in bits[~is_exact][:: max(1, int((~is_exact).sum()) // 50)]:
        untouched = np.full(3, 7, np.uint16)
        assert not times_power_of_two(np.array([0, number, 0x3F80], np.uint16), scale, untouched)
        assert (untouched == 7).all()


@pytest.mark.parametrize("scale", [3.0, 0.3, -2.0, 0.0, 2.0**-300, 2.0**300])
def test_other_scales_are_left_to_float32(scale: float) -> None:
    out = np.full(1, 7, np.uint16)
    assert not times_power_of_two(np.array([0x3F80], np.uint16), scale, out)
    assert out[0] == 7


def test_powers_of_two_take_zeros_and_nothing() -> None:
    zeros = np.array([0, 0x8000], np.uint16)
    out = np.ones(2, np.uint16)
    assert times_power_of_two(zeros, 8.0, out)
    assert (out == zeros).all()
    assert times_power_of_two(zeros[:0], 8.0, out[:0])
