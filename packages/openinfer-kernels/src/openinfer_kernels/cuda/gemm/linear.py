"""Products with weights stored `[out, in]`, the gates of SwiGLU and GEGLU, and the soft cap of logits.

Our own kernels multiply what they serve (docs/notes/kernels.md says what and why), cuBLASLt everything else.
"""

import ctypes
import math
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.gemm.gemm import Gemm
from openinfer_kernels.cuda.gemm.invariant_products import InvariantProducts
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts
from openinfer_kernels.cuda.gemm.tiles import Epilogue
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 256
_WIDTH = 8
"""Values of a thread."""
_FLOAT32 = np.dtype(np.float32)


class Linear:
    """The products on one device.

    A weight is what was uploaded: the kernels of our own read it while the operators ahead on the stream still run,
    unless `weights_first` says that one of them has made it.
    """

    def __init__(
        self, device: Device, decode_gemm: DecodeGemm, gemm: Gemm | None, library: LibraryProducts | InvariantProducts
    ) -> None:
        """`gemm`, if any, is asked what `decode_gemm` does not serve, and `library` multiplies the rest."""
        self._decode_gemm = decode_gemm
        self._gemm = gemm
        self._swiglu, self._geglu, self._soft_cap = (
            _Kernels(*(device.kernel("linear", f"{name}_{kind}") for kind in ("vectors", "singles")))
            for name in ("swiglu", "geglu", "soft_cap")
        )
        self._library = library

    def linear(self, x: Array, weight: Array, bias: Array | None = None, *, weights_first: bool = True) -> Array:
        """`weights_first`: False for a weight that an operator ahead on the stream has made."""
        _check(x, weight, bias)
        out = cupy.empty((x.shape[0], weight.shape[0]), bfloat16)
        # Our kernels have no epilogue that adds a bias.
        own = self._own(Epilogue.STORE, x, weight) if bias is None else None
        if own is None:
            self._library.multiply(x, weight, bias, out)
        else:
            own.linear(x, weight, out, weights_first=weights_first)
        return out

    def grouped_linear(self, x: Array, weight: Array, *, weights_first: bool = True) -> Array:
        """One launch for all groups."""
        require(x, bfloat16, ndim=2, what="x")
        require(weight, bfloat16, ndim=3, what="the weight")
        groups, rows, columns = weight.shape
        if groups == 1:
            return self.linear(x, weight.reshape(rows, columns), weights_first=weights_first)
        if x.shape[1] != groups * columns:
            raise ArrayMismatchError(f"x {x.shape} has no {groups} pieces of {columns} values for {weight.shape}")
        out = cupy.empty((len(x), groups * rows), bfloat16)
        if out.size:
            self._library.multiply(x, weight, None, out)
        return out

    def logits(self, hidden: Array, head: Array) -> Array:
        _check(hidden, head, None)
        out = cupy.empty((hidden.shape[0], head.shape[0]), np.float32)
        own = self._own(Epilogue.FLOAT32, hidden, head)
        if own is None:
            self._library.multiply(hidden, head, None, out)
        else:
            own.linear_float32(hidden, head, out)
        return out

    def linear_swiglu(self, x: Array, gate_up: Array, *, weights_first: bool = True) -> Array:
        _check(x, gate_up, None)
        num_tokens, width = x.shape[0], gate_up.shape[0] // 2
        out = cupy.empty((num_tokens, width), bfloat16)
        own = self._own(Epilogue.SWIGLU, x, gate_up)
        if own is None:
            _gate(self._swiglu, self.linear(x, gate_up, weights_first=weights_first), out)
        else:
            own.linear_swiglu(x, gate_up, out, weights_first=weights_first)
        return out

    def linear_geglu(self, x: Array, gate_up: Array) -> Array:
        """The product and the gate are two kernels, unlike SwiGLU's."""
        return self.geglu(self.linear(x, gate_up))

    def swiglu(self, gate_up: Array) -> Array:
        """`silu(gate) * up` for `gate_up [T, 2 F]`, gate values, then up values: `[T, F]`, rounded once."""
        require(gate_up, bfloat16, ndim=2, what="gate and up")
        out = cupy.empty((len(gate_up), gate_up.shape[1] // 2), bfloat16)
        if out.size:
            _gate(self._swiglu, gate_up, out)
        return out

    def geglu(self, gate_up: Array) -> Array:
        require(gate_up, bfloat16, ndim=2, what="gate and up")
        out = cupy.empty((len(gate_up), gate_up.shape[1] // 2), bfloat16)
        if out.size:
            _gate(self._geglu, gate_up, out)
        return out

    def soft_cap(self, logits: Array, *, cap: float) -> None:
        require(logits, _FLOAT32, ndim=2, what="the logits")
        if not (0 < cap < math.inf):
            raise ArrayMismatchError(f"a soft cap of {cap} is not possible: a finite number above 0")
        vectors = logits.size % _WIDTH == 0 and fits_vectors(logits)
        blocks = -(-logits.size // (_THREADS * (_WIDTH if vectors else 1)))
        arguments = [logits, ctypes.c_int64(logits.size), ctypes.c_float(cap)]
        if logits.size:
            self._soft_cap.of(vectors=vectors)((blocks, 1, 1), (_THREADS, 1, 1), arguments, overlap=True)

    def tuning(self) -> AbstractContextManager[None]:
        return self._library.tuning()

    def close(self) -> None:
        self._library.close()

    def _own(self, epilogue: Epilogue, x: Array, weight: Array) -> DecodeGemm | Gemm | None:
        if self._decode_gemm.serves(x, weight):
            return self._decode_gemm
        return self._gemm if self._gemm is not None and self._gemm.serves(epilogue, x, weight) else None


class _Kernels(NamedTuple):
    """What runs on 16 bytes at a time, and on single values where sizes or addresses do not allow that."""

    vectors: Kernel
    singles: Kernel

    def of(self, *, vectors: bool) -> Kernel:
        return self.vectors if vectors else self.singles


def _gate(kernels: _Kernels, both: Array, out: Array) -> None:
    num_tokens, width = out.shape
    vectors = width % _WIDTH == 0 and fits_vectors(both)
    accesses = width // _WIDTH if vectors else width
    grid = (num_tokens, -(-accesses // _THREADS), 1)
    kernels.of(vectors=vectors)(grid, (_THREADS, 1, 1), [both, out, ctypes.c_int(width)], overlap=True)


def _check(x: Array, weight: Array, bias: Array | None) -> None:
    require(x, bfloat16, ndim=2, what="x")
    require(weight, bfloat16, ndim=2, what="the weight")
    if x.shape[1] != weight.shape[1]:
        raise ArrayMismatchError(f"x {x.shape} and the weight {weight.shape} do not agree on the inner size")
    if bias is not None:
        require(bias, bfloat16, ndim=1, what="the bias")
        if bias.shape[0] != weight.shape[0]:
            raise ArrayMismatchError(f"the bias {bias.shape} is not as long as the weight {weight.shape} has rows")
