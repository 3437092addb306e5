"""Looking up the rows of tokens in an embedding table, copied or converted to float32."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors, require, require_floats
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.ops import Array

_THREADS = 256
_WIDTH = 8
"""Values of a thread."""
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class Embedding:
    """The lookups on one device."""

    def __init__(self, device: Device) -> None:
        self._copy = _Lookup(device, "embedding")
        self._convert = _Lookup(device, "residual_embedding")

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """`token_ids` are not checked: each is 0..V - 1."""
        require(token_ids, _INT32, ndim=1, what="token_ids")
        dtype = require_floats(table, ndim=2, what="the embedding table")
        out = cupy.empty((token_ids.shape[0], table.shape[1]), dtype)
        self._copy.run(token_ids, table, out, size=table.shape[1] * dtype.itemsize // bfloat16.itemsize)
        return out

    def residual_embedding(self, token_ids: Array, table: Array, *, scale: float = 1.0) -> Array:
        require(token_ids, _INT32, ndim=1, what="token_ids")
        require(table, bfloat16, ndim=2, what="the embedding table")
        out = cupy.empty((token_ids.shape[0], table.shape[1]), _FLOAT32)
        self._convert.run(token_ids, table, out, ctypes.c_float(scale), size=table.shape[1])
        return out


class _Lookup:
    """One kernel for rows that can be read by 16 bytes, and one for others."""

    def __init__(self, device: Device, name: str) -> None:
        self._vectors = device.kernel("embedding", f"{name}_vectors")
        self._singles = device.kernel("embedding", f"{name}_singles")

    def run(self, token_ids: Array, table: Array, out: Array, *scale: ctypes.c_float, size: int) -> None:
        vectors = size % _WIDTH == 0 and fits_vectors(table)
        kernel, accesses = (self._vectors, size // _WIDTH) if vectors else (self._singles, size)
        grid = (token_ids.shape[0], -(-accesses // _THREADS), 1)
        kernel(grid, (_THREADS, 1, 1), [token_ids, table, out, ctypes.c_int(size), *scale], overlap=True)
