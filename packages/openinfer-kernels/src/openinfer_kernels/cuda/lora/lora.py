"""`lora_shrink` and `lora_expand` on one device. `csrc/lora/lora.cu` has the formulas."""

import ctypes
from collections.abc import Sequence

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 256
_WARPS = _THREADS // 32
_VECTOR = 8
_MOST_PIECES = 8
_MOST_SHRUNK = 4096
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)


class _Shrink(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "a", "slots", "shrunk")),
        *((name, ctypes.c_int) for name in ("inner", "rows", "num_slots", "blocks_of_token")),
    )


class _Expand(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "shrunk", "b", "slots")),
        *((name, ctypes.c_int) for name in ("outer", "pieces", "rank", "num_slots", "blocks_of_token")),
        ("starts", ctypes.c_int * (_MOST_PIECES + 1)),
    )


class Lora:
    """The operators. A token is computed by itself, so they are batch-invariant as they are."""

    def __init__(self, device: Device) -> None:
        self._shrink = device.kernel("lora", "lora_shrink")
        self._expand = device.kernel("lora", "lora_expand")

    def lora_shrink(self, x: Array, a: Array, adapter_slots: Array) -> Array:
        require(x, bfloat16, ndim=2, what="x")
        require(a, bfloat16, ndim=4, what="a")
        require(adapter_slots, _INT32, ndim=1, what="adapter_slots")
        num_slots, pieces, rank, inner = a.shape
        if x.shape[1] != inner or len(adapter_slots) != len(x):
            raise ArrayMismatchError(f"x {x.shape}, a {a.shape} and {len(adapter_slots)} slots are of no one product")
        shrunk = cupy.empty((len(x), pieces, rank), _FLOAT32)
        if shrunk.size:
            rows = pieces * rank
            blocks = -(-rows // _WARPS)
            arrays = (address(each) for each in (x, a, adapter_slots, shrunk))
            given = _Shrink(*arrays, inner, rows, num_slots, blocks)
            self._shrink((len(x) * blocks, 1, 1), (_THREADS, 1, 1), [given], overlap=True)
        return shrunk

    def lora_expand(self, y: Array, shrunk: Array, b: Array, adapter_slots: Array, *, starts: Sequence[int]) -> None:
        require(y, bfloat16, ndim=2, what="y")
        require(shrunk, _FLOAT32, ndim=3, what="shrunk")
        require(b, bfloat16, ndim=3, what="b")
        require(adapter_slots, _INT32, ndim=1, what="adapter_slots")
        num_slots, outer, rank = b.shape
        pieces = shrunk.shape[1]
        _check(y, shrunk, b, starts)
        if len(adapter_slots) != len(y):
            raise ArrayMismatchError(f"{len(adapter_slots)} slots are not those of the tokens of y {y.shape}")
        if y.size:
            blocks = -(-outer // _THREADS)
            arrays = (address(each) for each in (y, shrunk, b, adapter_slots))
            padded = (*starts, *([0] * (_MOST_PIECES + 1 - len(starts))))
            given = _Expand(*arrays, outer, pieces, rank, num_slots, blocks, (ctypes.c_int * len(padded))(*padded))
            self._expand((len(y) * blocks, 1, 1), (_THREADS, 1, 1), [given], overlap=True)


def _check(y: Array, shrunk: Array, b: Array, starts: Sequence[int]) -> None:
    pieces, rank = shrunk.shape[1:]
    if y.shape[1] != b.shape[1] or len(shrunk) != len(y) or b.shape[2] != rank:
        raise ArrayMismatchError(f"y {y.shape}, shrunk {shrunk.shape} and b {b.shape} are of no one product")
    if rank % _VECTOR or pieces > _MOST_PIECES or pieces * rank > _MOST_SHRUNK:
        raise ArrayMismatchError(
            f"{pieces} pieces of rank {rank} are not possible: at most {_MOST_PIECES}, ranks in multiples of "
            f"{_VECTOR}, and {_MOST_SHRUNK} values together"
        )
    if len(starts) != pieces + 1 or list(starts) != sorted(starts) or starts[0] < 0 or starts[-1] > y.shape[1]:
        raise ArrayMismatchError(f"starts {list(starts)} are not those of {pieces} pieces of {y.shape[1]} values")
