"""BF16 of float32 on the host: to the nearest, ties to even; what is too large is infinite, as a cast makes it."""

import math

import numpy as np
from numpy.typing import NDArray

_UPPER_HALF = np.uint32(0xFFFF0000)
_MAGNITUDE, _EXPONENT_BITS, _EXPONENTS = np.uint16(0x7FFF), 7, 255
_BELOW_HALF, _ONE, _BITS = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """To what BF16 has, in float32; numbers are finite."""
    return (_next_upper_half(values) & _UPPER_HALF).view(np.float32)


def rounded_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of BF16; numbers are finite."""
    bits = _next_upper_half(values)
    bits >>= _BITS
    return bits.astype(np.uint16)


def times_power_of_two(bits: NDArray[np.uint16], scale: float, out: NDArray[np.uint16]) -> bool:
    """Writes BF16 numbers times `scale`, as their bits, if that takes no rounding and the exponent alone changes.

    Most scales of adapters are such, and this takes a third of the time of the way through float32.
    """
    mantissa, exponent = math.frexp(scale)
    power = exponent - 1
    if mantissa != 0.5 or abs(power) >= _EXPONENTS:  # `frexp` gives 0.5 of a power of two
        return False
    magnitudes = bits & _MAGNITUDE
    least, most = max(1, 1 - power) << _EXPONENT_BITS, min(_EXPONENTS, _EXPONENTS - power) << _EXPONENT_BITS
    # Of zeros less one is the largest number there is, so that they do not count as small.
    if magnitudes.size and not ((magnitudes - np.uint16(1)).min() >= least - 1 and magnitudes.max() < most):
        return False
    step = (magnitudes != 0).astype(np.uint16)
    step *= np.uint16((power << _EXPONENT_BITS) & 0xFFFF)
    np.add(bits, step, out=out)
    return True


def _next_upper_half(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bits whose upper half is that of the nearest BF16 number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    step = bits >> _BITS
    step &= _ONE
    step += _BELOW_HALF
    step += bits  # one array for all: allocating more of them takes longer than the sums
    return step
