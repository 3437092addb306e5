"""RMSNorm, alone or after adding into the residual. `csrc/norm/norm.cu` has the formula and its rounding."""

import ctypes
from functools import cached_property

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors, require, require_floats
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_MAX_THREADS = 1024
_VARIANTS = (("vectors", 8, 1), ("long_vectors", 8, 3), ("singles", 1, 8))
"""Of the kernels: name, values per access, accesses per thread."""
_PLAIN, _ZERO_CENTRED = "", "zero_centred_"
"""Conventions of the weight, as in the names of the kernels."""
_FLOAT32 = np.dtype(np.float32)
_ADAPTED_VALUES = 8
"""Of a thread."""
ADAPTED_NORM_SIZES = range(256, 4096 + 1, 256)
"""Of rows that `add_rms_norm_adapted` takes: all threads of a block have values, and registers for rows of B."""


class Norm:
    """The norms on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels = {
            f"{operator}_{dtype.name}_{name}": device.kernel("norm", f"{operator}_{dtype.name}_{name}")
            for operator in (f"{begin}{each}rms_norm" for begin in ("", "add_") for each in (_PLAIN, _ZERO_CENTRED))
            for dtype in (bfloat16, _FLOAT32)
            for name, _, _ in _VARIANTS
        }

    def rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """`rms_norm(x)` in BF16 for `x [T, n]` of BF16 or float32, n at most 24,576, or 8,192 if no multiple of 8."""
        return self._norm(_PLAIN, x, weight, eps)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        return self._add_norm(_PLAIN, x, residual, weight, eps)

    def add_rms_norm_adapted(
        self, x: Array, residual: Array, weight: Array, delta: ctypes.Structure, *, eps: float
    ) -> Array:
        """`add_rms_norm` of BF16 values, in rows of one of `ADAPTED_NORM_SIZES`, to which a `DeferredDelta` is added.

        Raises:
            ArrayMismatchError: rows of another size, or arrays at addresses that vectors do not fit.
        """
        require(x, bfloat16, ndim=2, what="x")
        require(residual, _FLOAT32, ndim=2, what="the residual")
        require(weight, bfloat16, ndim=1, what="the weight of the norm")
        size = x.shape[1]
        if size not in ADAPTED_NORM_SIZES or len(weight) != size or not fits_vectors(x, residual, weight):
            raise ArrayMismatchError(f"a norm over {size} values adds no adapters: whole 256, at most 4096, aligned")
        out = cupy.empty(x.shape, bfloat16)
        arguments = [x, residual, weight, out, ctypes.c_int(size), ctypes.c_float(eps), delta]
        self._adapted((len(x), 1, 1), (size // _ADAPTED_VALUES, 1, 1), arguments, overlap=True)
        return out

    @cached_property
    def _adapted(self) -> Kernel:
        return self._device.kernel("adapted_norm", "adapted_norm_add_rms_norm")

    def zero_centred_rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        return self._norm(_ZERO_CENTRED, x, weight, eps)

    def add_zero_centred_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        return self._add_norm(_ZERO_CENTRED, x, residual, weight, eps)

    def _norm(self, convention: str, x: Array, weight: Array, eps: float) -> Array:
        dtype = require_floats(x, ndim=2, what="x")
        require(weight, bfloat16, ndim=1, what="the weight of the norm")
        out = cupy.empty(x.shape, bfloat16)
        name, threads = _variant(weight.shape[0], fits_vectors(x, weight))
        arguments = [x, weight, out, ctypes.c_int(x.shape[1]), ctypes.c_float(eps)]
        kernel = self._kernels[f"{convention}rms_norm_{dtype.name}_{name}"]
        kernel((x.shape[0], 1, 1), (threads, 1, 1), arguments, overlap=True)
        return out

    def _add_norm(self, convention: str, x: Array, residual: Array, weight: Array, eps: float) -> Array:
        dtype = require_floats(x, ndim=2, what="x")
        require(residual, _FLOAT32, ndim=2, what="the residual")
        require(weight, bfloat16, ndim=1, what="the weight of the norm")
        out = cupy.empty(x.shape, bfloat16)
        name, threads = _variant(weight.shape[0], fits_vectors(x, residual, weight))
        arguments = [x, residual, weight, out, ctypes.c_int(x.shape[1]), ctypes.c_float(eps)]
        kernel = self._kernels[f"add_{convention}rms_norm_{dtype.name}_{name}"]
        kernel((x.shape[0], 1, 1), (threads, 1, 1), arguments, overlap=True)
        return out


def _variant(size: int, vectors_fit: bool) -> tuple[str, int]:  # noqa: FBT001 - a private fact, not a switch
    """The kernel for rows of `size` values, and its threads: as many as there are accesses in a row."""
    for name, width, held in _VARIANTS:
        if (vectors_fit or width == 1) and size % width == 0 and size <= _MAX_THREADS * width * held:
            return name, min(_MAX_THREADS, -(-size // width // 32) * 32)
    raise ArrayMismatchError(f"a norm over {size} values is not supported: at most 24576, or 8192 if no multiple of 8")
