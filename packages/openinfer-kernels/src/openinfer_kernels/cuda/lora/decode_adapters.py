"""What a product of few tokens is told of adapters: `csrc/lora/decode_adapters.cuh`."""

import ctypes
from collections.abc import Sequence

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.common.tensor_maps import TensorMap
from openinfer_kernels.ops import Array

MOST_PIECES = 3
TILE_ROWS = 64
"""Of the weight."""
_SHRINK_ROWS = 16
_SPLIT_UNIT = 128
"""Of K: four warps load 32 columns each."""
_SPLIT_COLUMNS = 1280
"""That four warps load at once."""
_MOST_SPLITS = 8
"""Each is a sum that every tile reads."""
_FLOAT32 = np.dtype(np.float32)


class DecodeAdapters(ctypes.Structure):
    """The struct of that name."""

    _fields_ = (
        ("b", TensorMap),
        *((name, ctypes.c_void_p) for name in ("x", "a", "slots", "shrunk")),
        *((name, ctypes.c_int) for name in ("pieces", "rank", "num_slots", "num_columns")),
        *((name, ctypes.c_int) for name in ("row_tiles", "splits", "split_columns", "shrink_blocks")),
        ("starts", ctypes.c_int * MOST_PIECES),
        ("padding", ctypes.c_int * 13),  # to a multiple of its alignment, 128
    )

    @property
    def parts(self) -> int:
        """Blocks that make a part of A x each."""
        return self.row_tiles * self.num_slots * self.splits


def fits_tiles(starts: Sequence[int]) -> bool:
    """Whether no tile has rows of more than two pieces."""
    tiles = [start // TILE_ROWS for start in starts[1:-1]]
    return len(set(tiles)) == len(tiles)


def decode_adapters(
    x: Array, a: Array, columns: Array, slots: Array, starts: Sequence[int]
) -> tuple[DecodeAdapters, Array]:
    """Of `x [T, k]`, but for the map of `columns`; with the memory in which parts of A x are left, to be kept until the
    kernel is launched.
    """
    num_tokens, inner = x.shape
    num_slots, pieces, rank, _ = a.shape
    splits = min(_MOST_SPLITS, -(-inner // _SPLIT_COLUMNS))
    shrunk = cupy.empty((splits, num_tokens, pieces * rank), _FLOAT32)
    given = DecodeAdapters(
        TensorMap(),
        *(address(each) for each in (x, a, slots, shrunk)),
        pieces,
        rank,
        num_slots,
        columns.shape[1],
        row_tiles=-(-pieces * rank // _SHRINK_ROWS),
        splits=splits,
        split_columns=-(-inner // splits // _SPLIT_UNIT) * _SPLIT_UNIT,
        starts=(ctypes.c_int * MOST_PIECES)(*starts[:pieces]),
    )
    return given, shrunk
