"""Attention of the rows of a step that have one query token: the keys and values of their contexts, streamed once.

The work is divided on the device from `context_lens`, so that a captured launch serves any contexts.
"""

import ctypes

import numpy as np

from openinfer_kernels.cuda.arrays import address
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.launch import Kernel
from openinfer_kernels.cuda.layer_cache import LayerCache, layer_cache
from openinfer_kernels.cuda.libraries import cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch

MAX_ROWS = 1024
_MAX_ITEMS = 1 << 17
"""Rows times KV heads times tiles of query heads."""
_WARPS = 4
_PADDING = 8
_HEADS_OF_TILE = 8
_LOG2_E = 1.4426950408889634
_BLOCKS_PER_MULTIPROCESSOR = {(64, 1): 3, (64, 2): 3, (128, 1): 2, (128, 2): 2, (256, 1): 2}
"""By head dimension and tiles of query heads: the variants that are compiled, and how many blocks fit at once."""


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("cache", LayerCache),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens", "parts", "arrivals")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "group", "early")),
        ("scale", ctypes.c_float),
    )


class AttentionDecode:
    """The decode kernels of one device and their workspace: one stream at a time."""

    def __init__(self, device: Device) -> None:
        self._kernels = {variant: _kernel(device, *variant) for variant in _BLOCKS_PER_MULTIPROCESSOR}
        self._num_multiprocessors = device.num_multiprocessors
        self._arrivals = cupy.zeros(_MAX_ITEMS, np.int32)

    def launch(self, q: Array, kv_cache: Array, out: Array, *, layer: int, batch: AttentionBatch, scale: float) -> None:
        """Writes the rows of `out [T, H D]` that belong to rows with one query token; arrays as in the contract.

        From the second layer on it is launched to overlap with the previous kernel, and reads `batch` and all tokens
        but each row's newest before that one has ended: the step's inputs have long been written by then.

        Raises:
            ArrayMismatchError: more rows and heads than the workspace is for.
        """
        num_rows, (num_kv_heads, _, head_dim) = len(batch.context_lens), kv_cache.shape[3:]
        group = q.shape[1] // num_kv_heads
        tiles = 1 if group <= _HEADS_OF_TILE or (head_dim, 2) not in self._kernels else 2
        passes = -(-group // (_HEADS_OF_TILE * tiles))
        if num_rows * num_kv_heads * passes > _MAX_ITEMS:
            raise ArrayMismatchError(
                f"attention over {num_rows} rows of {num_kv_heads} KV heads: at most {_MAX_ITEMS} of both multiplied"
            )
        blocks = self._num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR[head_dim, tiles]
        parts = cupy.empty(blocks * 2 * _HEADS_OF_TILE * tiles * (head_dim + 2), np.float32)
        arguments = _Arguments(
            address(q),
            address(out),
            layer_cache(kv_cache, layer),
            *map(address, (batch.block_tables, batch.query_starts, batch.context_lens, parts, self._arrivals)),
            num_rows,
            batch.block_tables.shape[1],
            group,
            int(layer > 0),
            scale * _LOG2_E,
        )
        self._kernels[head_dim, tiles]((blocks, 1, 1), (_WARPS * 32, 1, 1), [arguments], overlap=True)


def _kernel(device: Device, head_dim: int, tiles: int) -> Kernel:
    heads = _HEADS_OF_TILE * tiles
    sums = _WARPS * heads * (head_dim + _PADDING)
    shared_bytes = 4 * (2 * _WARPS * heads + 2 * _WARPS + 8 + sums) + 4 * (2 * MAX_ROWS + 1)
    return device.kernel("attention_decode", f"attention_decode_{head_dim}_{tiles}", shared_bytes=shared_bytes)
