"""Keys and values as a cache stores them: in the compute dtype, or as codes of E4M3 with a scale per token and head.

    s = max |x| / 448,  code = E4M3(x / s),  x = code * s          over a head of one token

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1: E4M3 has no infinities, 448 is its largest.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.ops import CacheFormat, PagedCache
from openinfer_kernels.weights.code_values import E4M3_VALUES

E4M3_MAX = np.float32(448)
_SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST_CODE, _NAN_CODE = 0x7E, 0x7F
_SMALLEST_NORMAL = np.float32(2.0**-6)
_STEPS_BELOW = np.float32(2.0**9)
"""Below the smallest normal number, codes are 2^-9 apart."""


def e4m3_codes(x: NDArray[Any]) -> NDArray[np.uint8]:
    """The nearest code of each number, of two as near the even one; beyond 448 that of 448."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    sizes = bits & np.uint32(0x7FFFFFFF)
    # Adding just under half of what is cut off, and one more where the last bit that stays is odd, rounds to even.
    rounded = (sizes + np.uint32(0x7FFFF) + (sizes >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)
    normal = np.minimum(rounded, np.uint32(_LARGEST_CODE + (120 << 3))) - np.uint32(120 << 3)
    size = sizes.view(np.float32)
    small = size < _SMALLEST_NORMAL
    codes = np.where(small, np.rint(np.where(small, size, 0) * _STEPS_BELOW).astype(np.uint32), normal)
    codes = np.where(np.isnan(size), np.uint32(_NAN_CODE), codes)
    return (codes | bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)


@np.errstate(invalid="ignore")
def fp8_quantised(x: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes `[..., D]` and scales `[...]` of `x [..., D]`. A number that is not finite leaves no finite value."""
    x = np.ascontiguousarray(x, np.float32)
    most = np.abs(x).max(axis=-1)
    scales = np.where(most == 0, np.float32(1), np.maximum(most / E4M3_MAX, _SMALLEST_SCALE))
    return e4m3_codes(x / scales[..., None]), scales


@np.errstate(invalid="ignore")
def fp8_values(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """What codes `[..., D]` and their scales `[...]` stand for."""
    return E4M3_VALUES[codes] * scales[..., None]


def read_cache(cache: PagedCache, index: Any) -> NDArray[Any]:
    """The layer `[blocks, 2, K, B, D]` of a cache in the compute dtype, at an index of its first three axes."""
    if cache.format is CacheFormat.FP8:
        codes, scales = cache.in_fp8()
        return fp8_values(codes[:, cache.layer][index], scales[:, cache.layer][index])
    return cache.in_compute_dtype()[:, cache.layer][index]


def write_cache(
    cache: PagedCache, kind: int, x: NDArray[Any], blocks: NDArray[np.int64], offsets: NDArray[np.int64]
) -> None:
    """Writes `x [T, K, D]`, keys (`kind` 0) or values (1), to the tokens at `offsets` of `blocks`."""
    at = (blocks, cache.layer, kind, slice(None), offsets)
    if cache.format is CacheFormat.FP8:
        codes, scales = cache.in_fp8()
        codes[at], scales[at] = fp8_quantised(x)
    else:
        cache.in_compute_dtype()[at] = x
