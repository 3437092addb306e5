"""Looking up the rows of tokens in an embedding table."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.arrays import fits_vectors, require
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.libraries import bfloat16, cupy
from openinfer_kernels.ops import Array

_THREADS = 256
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class Embedding:
    """The lookup on one device."""

    def __init__(self, device: Device) -> None:
        self._vectors = device.kernel("embedding", "embedding_vectors")
        self._singles = device.kernel("embedding", "embedding_singles")

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """Rows of `table [V, h]`, BF16 or float32, for `token_ids [T]`, each of 0..V - 1 (not checked): `[T, h]`.

        Raises:
            ArrayMismatchError: another dtype or layout.
        """
        require(token_ids, _INT32, ndim=1, what="token_ids")
        dtype = _FLOAT32 if getattr(table, "dtype", None) == _FLOAT32 else bfloat16
        require(table, dtype, ndim=2, what="the embedding table")
        num_tokens, size = token_ids.shape[0], table.nbytes // max(1, len(table)) // bfloat16.itemsize
        out = cupy.empty((num_tokens, table.shape[1]), dtype)
        vectors = size % 8 == 0 and fits_vectors(table)
        kernel, accesses = (self._vectors, size // 8) if vectors else (self._singles, size)
        grid = (num_tokens, -(-accesses // _THREADS), 1)
        kernel(grid, (_THREADS, 1, 1), [token_ids, table, out, ctypes.c_int(size)], overlap=True)
        return out
