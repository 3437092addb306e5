"""What codes stand for: tables of the values of small floats, and of scales that are stored as such."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.errors import WeightValueError

_E4M3_NAN = 0x7F
_E4M3_BIAS = 7
_E8M0_NAN = 255
_E8M0_BIAS = 127
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _e4m3_values() -> NDArray[np.float32]:
    """All 256 values: sign, 4 bits of exponent, 3 of fraction; no infinities (Micikevicius et al. 2022, table 1)."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, (codes & 7) / 8
    sizes = np.where(
        exponents == 0, np.ldexp(fractions, 1 - _E4M3_BIAS), np.ldexp(1 + fractions, exponents - _E4M3_BIAS)
    )
    sizes[codes & 0x7F == _E4M3_NAN] = np.nan
    return np.where(codes & 0x80, -sizes, sizes).astype(np.float32)


def require_numbers(codes: NDArray[np.uint8]) -> None:
    """Raises `WeightValueError` for E4M3's two NaN, which are the largest signed and the largest unsigned byte."""
    if codes.size and (codes.max() == 0xFF or codes.view(np.int8).max() == _E4M3_NAN):
        raise WeightValueError("an E4M3 code is no number: 0x7F or 0xFF")


def _e8m0_values() -> NDArray[np.float32]:
    codes = np.arange(256)
    powers = np.ldexp(np.float32(1), np.minimum(codes, _E8M0_NAN - 1) - _E8M0_BIAS)
    return np.where(codes == _E8M0_NAN, np.float32(np.nan), powers).astype(np.float32)


def pairs(values: NDArray[Any]) -> NDArray[np.float32]:
    """The two values of each byte `[256, 2]` of 4-bit codes, the low half first."""
    codes = np.arange(256)
    return values[np.stack([codes & 15, codes >> 4], axis=1)].astype(np.float32)


E4M3_VALUES = _e4m3_values()
E8M0_VALUES = _e8m0_values()
E2M1_VALUES = np.concatenate([_E2M1, -_E2M1])
