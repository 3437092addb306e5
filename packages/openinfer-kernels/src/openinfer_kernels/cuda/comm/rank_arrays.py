"""Sums over ranks and exchanged axes: what NCCL does not do. `csrc/comm/rank_arrays.cu` has the formulas."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address, fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 256
_VECTOR = 8


class RankArrays:
    """These kernels on one device. Arrays are contiguous; everything runs on CuPy's current stream."""

    def __init__(self, device: Device) -> None:
        self._sum_vectors = device.kernel("rank_arrays", "sum_over_ranks_bfloat16_vectors")
        self._sum_singles = device.kernel("rank_arrays", "sum_over_ranks_bfloat16_singles")
        self._sum_float32 = device.kernel("rank_arrays", "sum_over_ranks_float32")
        self._exchange = {width: device.kernel("rank_arrays", f"exchange_axes_{width}") for width in (16, 4, 1)}

    def sum(self, ranks: Array, out: Array) -> None:
        """`out [...]` of `ranks [size, ...]`, BF16 or float32: summed in float32 in order of ranks, rounded once."""
        kernel, width = self._sum_float32, 1
        if ranks.dtype == bfloat16:
            is_wide = out.size % _VECTOR == 0 and fits_vectors(ranks, out)
            kernel, width = (self._sum_vectors, _VECTOR) if is_wide else (self._sum_singles, 1)
        elif ranks.dtype != np.float32:
            raise ArrayMismatchError(f"sums over ranks are of bfloat16 or float32, not of {ranks.dtype}")
        grid = (max(1, -(-out.size // width // _THREADS)), 1, 1)
        arguments = [ranks, out, ctypes.c_int64(out.size), ctypes.c_int(len(ranks))]
        kernel(grid, (_THREADS, 1, 1), arguments, overlap=True)

    def exchange_axes(self, array: Array) -> Array:
        """`[b, a, ...]` of `array [a, b, ...]`, a new array."""
        first, second, *rest = array.shape
        out = cupy.empty((second, first, *rest), array.dtype)
        if not array.size:
            return out
        piece_bytes = array.nbytes // (first * second)
        # The widest access that divides the size of a piece and both addresses.
        where = piece_bytes | address(array) | address(out)
        width = next(each for each in (VECTOR_BYTES, 4, 1) if where % each == 0)
        units = piece_bytes // width
        grid = (first * second, -(-units // _THREADS), 1)
        arguments = [array, out, ctypes.c_int(first), ctypes.c_int(second), ctypes.c_int(units)]
        self._exchange[width](grid, (_THREADS, 1, 1), arguments, overlap=True)
        return out
