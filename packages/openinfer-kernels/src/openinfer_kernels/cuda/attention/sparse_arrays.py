"""Arguments shared by the kernels over windows and compressed entries: structures of `csrc/attention/sparse.cuh`."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)


class Entries(ctypes.Structure):
    """`struct Entries`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cache", "block_tables")),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("max_blocks", "block_tokens", "ratio", "size")),
    )


class Rope(ctypes.Structure):
    """`struct Rope`."""

    _fields_ = (("table", ctypes.c_void_p), ("positions", ctypes.c_int), ("pairs", ctypes.c_int))


def entries_of(cache: Array, layer: int, *, ratio: int, batch: AttentionBatch) -> Entries:
    """One layer of a cache `[blocks, layers, 1, rows, d]`, a view whose blocks may lie further apart."""
    rows, size = -(-batch.block_tokens // ratio), cache.shape[4]
    layer_bytes = rows * size * cache.dtype.itemsize
    is_dense = cache[0].flags.c_contiguous if len(cache) else True
    if cache.dtype != bfloat16 or cache.shape[2:4] != (1, rows) or not is_dense:
        raise ArrayMismatchError(
            f"a cache of one entry per {ratio} tokens must be bfloat16 [blocks, layers, 1, {rows}, d] for blocks of "
            f"{batch.block_tokens} tokens, each contiguous, not {cache.dtype} {cache.shape} of strides {cache.strides}"
        )
    (block_tables,) = batch.block_tables
    require(block_tables, INT32, ndim=2, what="batch.block_tables")
    return Entries(
        address(cache) + layer * layer_bytes,
        address(block_tables),
        cache.strides[0] // cache.dtype.itemsize,
        block_tables.shape[1],
        batch.block_tokens,
        ratio,
        size,
    )


def rope_of(rope: Array) -> Rope:
    """A table `[2, positions, pairs]`; its pairs come in fours, as accesses do."""
    require(rope, FLOAT32, ndim=3, what="the RoPE table")
    if rope.shape[2] % 4:
        raise ArrayMismatchError(f"{2 * rope.shape[2]} rotated dimensions are not supported: they must divide by 8")
    return Rope(address(rope), rope.shape[1], rope.shape[2])


def empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    return cupy.empty(shape, dtype)
