"""What a model changes about scores of attention, as kernels for it are told: window, soft cap, sinks, first key."""

import ctypes
import math

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

LOG2_E = 1.4426950408889634
"""Kernels take powers of two, not of e."""
_ALL_KEYS = (1 << 31) - 1
_FLOAT32 = np.dtype(np.float32)


class Variant(ctypes.Structure):
    """`attention::Variant` of `csrc/attention/attention_variant.cuh`, with which the kernels' arguments begin."""

    _fields_ = (
        ("sinks", ctypes.c_void_p),
        ("window", ctypes.c_int),
        ("first_key", ctypes.c_int),
        ("cap", ctypes.c_float),
        ("slope", ctypes.c_float),
    )


def stem_of_variants(stem: str) -> str:
    """The source of the kernels for variants, by that of the kernels without."""
    return f"{stem}_variant"


def variant_of(
    *,
    num_heads: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
    first_key: int = 0,
) -> Variant | None:
    """None where nothing is changed: the kernels without a variant serve that.

    Raises:
        ArrayMismatchError: a window without keys or with a first key, a cap that is not above 0, sinks that are not
            one of each head.
    """
    if window is None and soft_cap is None and sinks is None and not first_key:
        return None
    if window is not None and window < 1:
        raise ArrayMismatchError(f"a window of {window} keys is not possible: at least 1, a token's own")
    if first_key < 0 or (first_key and window is not None):
        raise ArrayMismatchError(f"first_key {first_key} with a window of {window}: at least 0, and 0 with a window")
    if soft_cap is not None and not (0 < soft_cap < math.inf):
        raise ArrayMismatchError(f"a soft cap of {soft_cap} is not possible: a finite number above 0")
    if sinks is not None:
        require(sinks, _FLOAT32, ndim=1, what="sinks")
        if len(sinks) != num_heads:
            raise ArrayMismatchError(f"{len(sinks)} sinks for {num_heads} query heads: one of each is needed")
    return Variant(
        None if sinks is None else address(sinks),
        _ALL_KEYS if window is None else min(window, _ALL_KEYS),
        first_key,
        0.0 if soft_cap is None else soft_cap * LOG2_E,
        0.0 if soft_cap is None else 2 * LOG2_E * scale / soft_cap,
    )


def exponent_scale(scale: float, soft_cap: float | None) -> float:
    """What scores are multiplied by to be powers of two; those under a cap are such already."""
    return scale * LOG2_E if soft_cap is None else 1.0
