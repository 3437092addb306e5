"""BF16 of float32 on the host: to the nearest, ties to even; what is too large is infinite, as a cast makes it."""

import numpy as np
from numpy.typing import NDArray

_UPPER_HALF = np.uint32(0xFFFF0000)
_BELOW_HALF, _ONE, _BITS = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """To what BF16 has, in float32; numbers are finite."""
    return (_next_upper_half(values) & _UPPER_HALF).view(np.float32)


def rounded_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of BF16; numbers are finite."""
    bits = _next_upper_half(values)
    bits >>= _BITS
    return bits.astype(np.uint16)


def scaled_bits(scale: float) -> NDArray[np.uint16]:
    """`[65536]`: for the bits of each finite BF16 number those of its product with `scale`, rounded once."""
    values = (np.arange(1 << 16, dtype=np.uint32) << _BITS).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return rounded_bits(values * np.float32(scale))


def _next_upper_half(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bits whose upper half is that of the nearest BF16 number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    step = bits >> _BITS
    step &= _ONE
    step += _BELOW_HALF
    step += bits  # one array for all: allocating more of them takes longer than the sums
    return step
