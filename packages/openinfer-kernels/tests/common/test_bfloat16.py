"""BF16 of float32 on the host, against rounding in float64."""

import numpy as np
import pytest

from openinfer_kernels.weights.bfloat16 import rounded, rounded_bits, scaled_bits


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


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 3.0, 0.3, -2.0, 0.0, 2.0**-20, 2.0**-126, 2.0**127, 1e-30, 1e30])
def test_table_of_products_is_that_of_float32_rounded_once(scale: float) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7FFF) < 0x7F80]  # finite
    with np.errstate(over="ignore", under="ignore"):
        values = (bits.astype(np.uint32) << 16).view(np.float32) * np.float32(scale)
    np.testing.assert_array_equal(scaled_bits(scale)[bits], rounded_bits(values))
