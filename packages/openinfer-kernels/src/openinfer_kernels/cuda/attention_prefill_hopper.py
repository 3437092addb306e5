"""Attention of the rows of a step that have several query tokens, with Hopper's warpgroup products."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.arrays import address
from openinfer_kernels.cuda.attention_decode import MAX_ROWS
from openinfer_kernels.cuda.attention_prefill import most_tiles
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.launch import check
from openinfer_kernels.cuda.libraries import bfloat16, cupy, driver
from openinfer_kernels.ops import Array, AttentionBatch

STEM = "attention_prefill_hopper"
_LOG2_E = 1.4426950408889634
_KEYS = {64: 128, 128: 128, 256: 64}
"""By head dimension: tokens of a tile of keys."""
_LINES, _THREADS, _STAGES = 128, 384, 2
_CHUNK_TOKENS = 16
_BOX_VALUES = 64
_OTHER_SHARED_BYTES = 1024 + 256 + 12 * MAX_ROWS
"""To align the tiles, for barriers, and for what is known of rows."""
_MAP_WORDS = 16


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "block_tables", "query_starts", "context_lens", "counters")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "group", "num_kv_heads", "block_shift")),
        *((name, ctypes.c_int) for name in ("block_lines", "layer_line")),
        ("group_reciprocal", ctypes.c_uint),
        ("scale", ctypes.c_float),
    )


class AttentionPrefillHopper:
    """The prefill kernels of one Hopper device."""

    def __init__(self, device: Device) -> None:
        self._kernels = {
            head_dim: device.kernel(
                STEM,
                f"{STEM}_{head_dim}",
                shared_bytes=2 * head_dim * (_LINES + 2 * _STAGES * keys) + _OTHER_SHARED_BYTES,
            )
            for head_dim, keys in _KEYS.items()
        }
        self._counters = cupy.zeros(2, np.int32)
        self._num_multiprocessors = device.num_multiprocessors
        self._map_of: tuple[int, tuple[int, ...]] | None = None
        self._map = (ctypes.c_uint64 * _MAP_WORDS)()

    def launch(self, q: Array, kv_cache: Array, out: Array, *, layer: int, batch: AttentionBatch, scale: float) -> None:
        """Writes what belongs to rows with several query tokens into `out [T, H D]`; arrays as in the contract."""
        num_layers, _, num_kv_heads, block_tokens, head_dim = kv_cache.shape[1:]
        num_rows, group = len(batch.context_lens), q.shape[1] // num_kv_heads
        layer_lines = 2 * num_kv_heads * block_tokens
        arguments = _Arguments(
            *map(address, (q, out, batch.block_tables, batch.query_starts, batch.context_lens, self._counters)),
            num_rows,
            batch.block_tables.shape[1],
            group,
            num_kv_heads,
            block_tokens.bit_length() - 1,
            num_layers * layer_lines,
            layer * layer_lines,
            -(-(1 << 32) // group) & 0xFFFFFFFF,
            scale * _LOG2_E,
        )
        tiles = most_tiles(len(q), num_rows, group, lines=_LINES) * num_kv_heads
        blocks = min(tiles, self._num_multiprocessors)
        self._kernels[head_dim]((blocks, 1, 1), (_THREADS, 1, 1), [self._map_for(kv_cache), arguments], overlap=True)

    def _map_for(self, kv_cache: Array) -> "ctypes.Array[ctypes.c_uint64]":
        """The tensor map of a cache, made when another cache than the last one comes."""
        key = (address(kv_cache), kv_cache.shape)
        if self._map_of != key:
            self._map = _tensor_map(kv_cache)
            self._map_of = key
        return self._map


def _tensor_map(kv_cache: Array) -> "ctypes.Array[ctypes.c_uint64]":
    """Describes the cache as lines of D values, copied 16 lines by 64 values at a time, swizzled by 128 bytes."""
    head_dim = kv_cache.shape[-1]
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address(kv_cache),
            [driver.cuuint64_t(head_dim), driver.cuuint64_t(kv_cache.size // head_dim)],
            [driver.cuuint64_t(head_dim * bfloat16.itemsize)],
            [driver.cuuint32_t(_BOX_VALUES), driver.cuuint32_t(_CHUNK_TOKENS)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    words = (ctypes.c_uint64 * _MAP_WORDS)()
    ctypes.memmove(words, int(encoded.getPtr()), ctypes.sizeof(words))
    return words
