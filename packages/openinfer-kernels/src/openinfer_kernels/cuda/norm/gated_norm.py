"""RMSNorm of each head, times a gate. `csrc/norm/gated_norm.cu` has the formula and its rounding."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import (
    address,
    fits_vectors,
    require,
    require_floats,
    require_rows,
    row_stride,
    rows_fit_vectors,
)
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 128
_VECTOR_SIZES = (32, 64, 128, 256)
"""Of a head, with a kernel of their own; any other has a slower one."""
_FLOAT32 = np.dtype(np.float32)


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "weight", "weight32", "y")),
        ("gate_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_tokens", "heads", "size")),
        ("eps", ctypes.c_float),
    )


class GatedNorm:
    """The operator on one device."""

    def __init__(self, device: Device) -> None:
        self._vectors = {size: device.kernel("gated_norm", f"gated_rms_norm_{size}") for size in _VECTOR_SIZES}
        self._singles = device.kernel("gated_norm", "gated_rms_norm_singles")

    def gated_rms_norm(self, x: Array, gate: Array, weight: Array, *, eps: float) -> Array:
        require(x, bfloat16, ndim=2, what="x")
        require_rows(gate, bfloat16, what="the gate")
        is_float32 = require_floats(weight, ndim=1, what="the weight of the norm") == _FLOAT32
        (size,) = weight.shape
        if gate.shape != x.shape or not size or x.shape[1] % size:
            raise ArrayMismatchError(f"x {x.shape} and gate {gate.shape} must be alike, of heads of {size} values")
        out = cupy.empty(x.shape, bfloat16)
        num_tokens, heads = x.shape[0], x.shape[1] // size
        arguments = _Arguments(
            address(x),
            address(gate),
            None if is_float32 else address(weight),
            address(weight) if is_float32 else None,
            address(out),
            row_stride(gate),
            num_tokens,
            heads,
            size,
            eps,
        )
        vectors = size in self._vectors and fits_vectors(x) and rows_fit_vectors(gate)
        # A head of a known size is a few lanes of a warp, 8 values each; any other has a warp to itself.
        kernel, lanes = (self._vectors[size], size // 8) if vectors else (self._singles, 32)
        kernel((-(-num_tokens * heads * lanes // _THREADS), 1, 1), (_THREADS, 1, 1), [arguments], overlap=True)
        return out
