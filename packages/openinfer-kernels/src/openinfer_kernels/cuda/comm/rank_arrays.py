"""Sums over ranks and exchanged axes: what NCCL does not do. `csrc/comm/rank_arrays.cu` has the formulas."""

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np

from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address, fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 256
_VECTOR = 8
MAX_NODES = 64


class RankArrays:
    """These kernels on one device. Arrays are contiguous; everything runs on CuPy's current stream."""

    def __init__(self, device: Device) -> None:
        self._sum_vectors = device.kernel("rank_arrays", "sum_over_ranks_bfloat16_vectors")
        self._sum_singles = device.kernel("rank_arrays", "sum_over_ranks_bfloat16_singles")
        self._sum_float32 = device.kernel("rank_arrays", "sum_over_ranks_float32")
        self._sum_nodes_bfloat16 = device.kernel("rank_arrays", "sum_over_nodes_bfloat16")
        self._sum_nodes_float32 = device.kernel("rank_arrays", "sum_over_nodes_float32")
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

    def sum_nodes(self, ranks: Array, out: Array, *, node_counts: Sequence[int]) -> None:
        """`out [...]` of `ranks [size, ...]`, BF16 or float32: sums of each node's ranks, added up in order of nodes.

        Args:
            ranks: those of one node follow each other.
            out: summed in float32, rounded once.
            node_counts: ranks of each node, 64 nodes at most.
        """
        if not 0 < len(node_counts) <= MAX_NODES or sum(node_counts) != len(ranks) or min(node_counts) < 1:
            raise ArrayMismatchError(f"sums over nodes of {list(node_counts)} ranks, and the arrays are {len(ranks)}")
        kernel = {bfloat16: self._sum_nodes_bfloat16, np.dtype(np.float32): self._sum_nodes_float32}.get(ranks.dtype)
        if kernel is None:
            raise ArrayMismatchError(f"sums over nodes are of bfloat16 or float32, not of {ranks.dtype}")
        # Each bit marks a node's first rank: a number goes with the launch, and is kept by a graph.
        ends = list(itertools.accumulate(node_counts))
        starts = sum(1 << begin for begin in (0, *ends[:-1]))
        grid = (max(1, -(-out.size // _THREADS)), 1, 1)
        arguments = [ranks, out, ctypes.c_int64(out.size), ctypes.c_int(len(ranks)), ctypes.c_uint64(starts)]
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
