"""`lora_shrink`, `lora_expand` and `lora_expand_swiglu` on one device. `csrc/lora/lora.cu` has the formulas."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, require, require_rows
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

SHRINK_THREADS: Mapping[int, int] = {1: 512, 4: 256}
"""Of a block, by its groups of tokens."""
_EXPAND_THREADS: Mapping[int, int] = {1: 256, 4: 256}
_TILE_ROWS = 16
_BLOCK_ROWS = 256
_VECTOR = 8
_MOST_PIECES = 8
_SPLIT_COLUMNS = 1024
"""Of the inner size, in steps of few tokens: then the device needs more blocks than there are rows of A for."""
_MOST_SPLIT_TOKENS = 128
"""With more, a block goes over all columns, and expand has one sum to read instead of many."""
_GROUPS = (1, 4)
"""Of eight tokens each, that a block has."""
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)


class Shrink(ctypes.Structure):
    """`Shrink` of `csrc/lora/shrink.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "a", "slots", "shrunk")),
        *((name, ctypes.c_int) for name in ("num_tokens", "inner", "rows", "num_slots")),
        *((name, ctypes.c_int) for name in ("row_tiles", "splits", "split_columns", "grid_slots")),
    )


class _Expand(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "gated", "shrunk", "b", "slots")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "row_stride")),
        *((name, ctypes.c_int) for name in ("num_tokens", "outer", "pieces", "rank", "num_slots")),
        *((name, ctypes.c_int) for name in ("row_blocks", "splits")),
        ("starts", ctypes.c_int * (_MOST_PIECES + 1)),
    )


class Lora:
    """The operators."""

    def __init__(self, device: Device, *, divides: bool = True) -> None:
        """`divides`: False to divide the inner size alike, and so to sum in one order, for any number of tokens."""
        self._shrink, self._expand, self._expand_swiglu = (
            {
                groups: device.kernel("lora", f"lora_{name}_{groups}")
                for groups in (_GROUPS if divides else _GROUPS[-1:])
            }
            for name in ("shrink", "expand", "expand_swiglu")
        )
        self._most_split_tokens = _MOST_SPLIT_TOKENS if divides else 0

    def lora_shrink(self, x: Array, a: Array, adapter_slots: Array) -> Array:
        require(x, bfloat16, ndim=2, what="x")
        require(a, bfloat16, ndim=4, what="a")
        require(adapter_slots, _INT32, ndim=1, what="adapter_slots")
        num_slots, pieces, rank, inner = a.shape
        num_tokens, rows = len(x), pieces * rank
        if x.shape[1] != inner or len(adapter_slots) != num_tokens:
            raise ArrayMismatchError(f"x {x.shape}, a {a.shape} and {len(adapter_slots)} slots are of no one product")
        if rank % _VECTOR:
            raise ArrayMismatchError(f"rank {rank} of the slots is no multiple of {_VECTOR}")
        splits = -(-inner // _SPLIT_COLUMNS) if num_tokens <= self._most_split_tokens else 1
        shrunk = cupy.empty((splits, num_tokens, pieces, rank), _FLOAT32)
        if shrunk.size:
            row_tiles = -(-rows // _TILE_ROWS)
            columns = -(-inner // splits // _SPLIT_COLUMNS) * _SPLIT_COLUMNS
            arrays = (address(each) for each in (x, a, adapter_slots, shrunk))
            given = Shrink(*arrays, num_tokens, inner, rows, num_slots, row_tiles, splits, columns, num_slots)
            _launch(self._shrink, given, num_tokens, row_tiles * splits * num_slots, threads=SHRINK_THREADS)
        return shrunk

    def lora_expand(self, y: Array, shrunk: Array, b: Array, adapter_slots: Array, *, starts: Sequence[int]) -> None:
        _check(y, shrunk, b, adapter_slots, starts)
        if y.size:
            _launch_expand(self._expand, [y, None, shrunk, b, adapter_slots], starts)

    def lora_expand_swiglu(
        self, gate_up: Array, shrunk: Array, b: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array:
        _check(gate_up, shrunk, b, adapter_slots, starts)
        num_tokens, outer = gate_up.shape
        if outer % 2 or tuple(starts) != (0, outer // 2, outer):
            raise ArrayMismatchError(f"starts {list(starts)} are not those of gate and up of {outer} values together")
        gated = cupy.empty((num_tokens, outer // 2), bfloat16)
        if gated.size:
            _launch_expand(self._expand_swiglu, [gate_up, gated, shrunk, b, adapter_slots], starts)
        return gated


def _launch(
    kernels: dict[int, Kernel],
    given: ctypes.Structure,
    num_tokens: int,
    blocks: int,
    *,
    threads: Mapping[int, int] = _EXPAND_THREADS,
) -> None:
    """`blocks` for each tile of tokens."""
    groups = next((each for each in kernels if num_tokens <= each * _VECTOR), _GROUPS[-1])
    tiles = -(-num_tokens // (groups * _VECTOR))
    kernels[groups]((tiles * blocks, 1, 1), (threads[groups], 1, 1), [given], overlap=True)


def _launch_expand(kernels: dict[int, Kernel], arrays: list[Array | None], starts: Sequence[int]) -> None:
    """`arrays`: those of `_Expand`, in its order."""
    _, _, shrunk, b, _ = cast("list[Any]", arrays)
    splits, num_tokens, pieces, rank = shrunk.shape
    num_slots, outer = b.shape[:2]
    blocks = -(-outer // _BLOCK_ROWS)
    padded = (*starts, *([0] * (_MOST_PIECES + 1 - len(starts))))
    addresses: list[Any] = [None if each is None else address(each) for each in arrays]
    sizes = (num_tokens, outer, pieces, rank, num_slots, blocks, splits)
    strides = (each // b.dtype.itemsize for each in b.strides[:2])
    given = _Expand(*addresses, *strides, *sizes, (ctypes.c_int * len(padded))(*padded))
    _launch(kernels, given, num_tokens, blocks * num_slots)


def _check(y: Array, shrunk: Array, b: Array, adapter_slots: Array, starts: Sequence[int]) -> None:
    require(y, bfloat16, ndim=2, what="y")
    require(shrunk, _FLOAT32, ndim=4, what="shrunk")
    require(adapter_slots, _INT32, ndim=1, what="adapter_slots")
    require_rows(b[0], bfloat16, what="b of a slot")
    pieces, rank = shrunk.shape[2:]
    if y.shape[1] != b.shape[1] or shrunk.shape[1] != len(y) or b.shape[2] != rank or len(adapter_slots) != len(y):
        raise ArrayMismatchError(
            f"y {y.shape}, shrunk {shrunk.shape}, b {b.shape} and {len(adapter_slots)} slots are of no one product"
        )
    if rank % _VECTOR or pieces > _MOST_PIECES:
        raise ArrayMismatchError(
            f"{pieces} pieces of rank {rank} are not possible: at most {_MOST_PIECES}, ranks in multiples of {_VECTOR}"
        )
    if len(starts) != pieces + 1 or list(starts) != sorted(starts) or starts[0] < 0 or starts[-1] > y.shape[1]:
        raise ArrayMismatchError(f"starts {list(starts)} are not those of {pieces} pieces of {y.shape[1]} values")
