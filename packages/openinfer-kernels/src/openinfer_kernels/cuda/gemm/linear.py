"""Products with weights stored `[out, in]`, and the gate of SwiGLU.

Our own kernels multiply what they serve (docs/notes/kernels.md says what and why), cuBLASLt everything else.
"""

import ctypes
from contextlib import AbstractContextManager

import numpy as np

from openinfer_kernels.cuda.common.arrays import require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.gemm.gemm import Gemm
from openinfer_kernels.cuda.gemm.invariant_products import InvariantProducts
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts
from openinfer_kernels.cuda.gemm.tiles import Epilogue
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 256


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
        self._gate_vectors = device.kernel("linear", "swiglu_vectors")
        self._gate_singles = device.kernel("linear", "swiglu_singles")
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

    def linear_swiglu(self, x: Array, gate_up: Array) -> Array:
        _check(x, gate_up, None)
        num_tokens, width = x.shape[0], gate_up.shape[0] // 2
        out = cupy.empty((num_tokens, width), bfloat16)
        own = self._own(Epilogue.SWIGLU, x, gate_up)
        if own is None:
            self._gate(self.linear(x, gate_up), out)
        else:
            own.linear_swiglu(x, gate_up, out)
        return out

    def tuning(self) -> AbstractContextManager[None]:
        return self._library.tuning()

    def close(self) -> None:
        self._library.close()

    def _own(self, epilogue: Epilogue, x: Array, weight: Array) -> DecodeGemm | Gemm | None:
        if self._decode_gemm.serves(x, weight):
            return self._decode_gemm
        return self._gemm if self._gemm is not None and self._gemm.serves(epilogue, x, weight) else None

    def _gate(self, both: Array, out: Array) -> None:
        num_tokens, width = out.shape
        vectors = width % 8 == 0
        kernel, accesses = (self._gate_vectors, width // 8) if vectors else (self._gate_singles, width)
        grid = (num_tokens, -(-accesses // _THREADS), 1)
        kernel(grid, (_THREADS, 1, 1), [both, out, ctypes.c_int(width)], overlap=True)


def _check(x: Array, weight: Array, bias: Array | None) -> None:
    require(x, bfloat16, ndim=2, what="x")
    require(weight, bfloat16, ndim=2, what="the weight")
    if x.shape[1] != weight.shape[1]:
        raise ArrayMismatchError(f"x {x.shape} and the weight {weight.shape} do not agree on the inner size")
    if bias is not None:
        require(bias, bfloat16, ndim=1, what="the bias")
        if bias.shape[0] != weight.shape[0]:
            raise ArrayMismatchError(f"the bias {bias.shape} is not as long as the weight {weight.shape} has rows")
