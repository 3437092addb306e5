"""Attention of the rows of a step that have several query tokens, with Hopper's warpgroup products."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.attention.decode import MAX_ROWS
from openinfer_kernels.cuda.attention.layer_cache import FP8_SUFFIX, LayerCache, layer_cache
from openinfer_kernels.cuda.attention.prefill import most_tiles
from openinfer_kernels.cuda.attention.variant import Variant, stem_of_variants
from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMaps
from openinfer_kernels.ops import Array, AttentionBatch, CacheFormat, PagedCache

STEM = "attention_prefill_hopper"
_KEYS = {64: 128, 128: 128, 256: 64}
"""By head dimension: tokens of a tile of keys."""
_QUERY_ROWS, _THREADS, _STAGES = 128, 384, 2
_CHUNK_TOKENS = 16
_BOX_VALUES = 64
_OTHER_SHARED_BYTES = 1024 + 256 + 16 * MAX_ROWS
"""To align the tiles, for barriers, and for what is known of rows."""
_LARGEST_HEAD_DIM = 256
_CONSUMERS = 256
"""Threads that hold sums, of a block."""


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "block_tables", "query_starts", "context_lens", "counters")),
        *((name, ctypes.c_void_p) for name in ("partials", "arrivals")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "group", "num_kv_heads", "block_shift")),
        ("least_tokens", ctypes.c_int),
        *((name, ctypes.c_int) for name in ("block_rows", "layer_row")),
        ("group_reciprocal", ctypes.c_uint),
        ("scale", ctypes.c_float),
    )


class _VariantArguments(ctypes.Structure):
    _fields_ = (("variant", Variant), ("others", _Arguments))


class _Fp8Arguments(ctypes.Structure):
    _fields_ = (("cache", LayerCache), ("others", _Arguments))


class AttentionPrefillHopper:
    """The prefill kernels of one Hopper device."""

    def __init__(
        self,
        device: Device,
        *,
        least_tokens: int = 2,
        divides_contexts: bool = True,
        for_variants: bool = False,
        for_fp8: bool = False,
    ) -> None:
        """Rows of a step with fewer query tokens than `least_tokens` are left alone.

        Args:
            device: whose kernels.
            least_tokens: see above.
            divides_contexts: whether several blocks may share a tile's context where tiles are few, and add up their
                partials. It then depends on the other rows of the step in what order a token's sums are made.
            for_variants: the kernels of attention with a window, a soft cap or sinks.
            for_fp8: those that read a cache in FP8.
        """
        self._least_tokens = least_tokens
        self._divides_contexts = divides_contexts
        stem = stem_of_variants(STEM) if for_variants else STEM + FP8_SUFFIX * for_fp8
        self._kernels = {
            head_dim: device.kernel(
                stem,
                f"{stem}_{head_dim}",
                shared_bytes=2 * head_dim * (_QUERY_ROWS + 2 * _STAGES * keys)
                + _OTHER_SHARED_BYTES
                + (_staging_bytes(head_dim) if for_fp8 else 0),
            )
            for head_dim, keys in _KEYS.items()
        }
        # Kernels leave counters and arrivals at zero, so that a captured launch can be repeated without a memset.
        self._counters = cupy.zeros(2, np.int32)
        self._num_multiprocessors = device.num_multiprocessors
        self._arrivals = cupy.zeros(2 * self._most_work_tiles, np.int32)
        self._maps = TensorMaps()

    @property
    def _most_work_tiles(self) -> int:
        """Where tiles are divided: there are fewer of them than blocks, and each block adds one partial at most."""
        return 2 * self._num_multiprocessors

    def launch(
        self,
        q: Array,
        cache: PagedCache,
        out: Array,
        *,
        batch: AttentionBatch,
        scale: float,
        variant: Variant | None = None,
    ) -> None:
        """`scale` is of powers of two."""
        data = cache.data
        num_layers, _, num_kv_heads, block_tokens, head_dim = data.shape[1:]
        num_rows, group = len(batch.context_lens), q.shape[1] // num_kv_heads
        layer_rows = 2 * num_kv_heads * block_tokens
        fewest_tiles = len(q) * group // _QUERY_ROWS * num_kv_heads
        # Only sizes decide: the division itself is made on the device, so that a captured step serves any chunks.
        divides = self._divides_contexts and fewest_tiles < self._num_multiprocessors
        partials = (
            cupy.empty((self._most_work_tiles, head_dim // 8 + 1, _CONSUMERS, 4), np.float32) if divides else None
        )
        arguments = _Arguments(
            *map(
                address,
                (q, out, batch.block_tables[cache.table], batch.query_starts, batch.context_lens, self._counters),
            ),
            address(partials) if divides else None,
            address(self._arrivals),
            num_rows,
            batch.block_tables[cache.table].shape[1],
            group,
            num_kv_heads,
            block_tokens.bit_length() - 1,
            self._least_tokens,
            num_layers * layer_rows,
            cache.layer * layer_rows,
            # The kernel divides by the group with a multiplication; not by a group of 1, which has no such number.
            -(-(1 << 32) // group) & 0xFFFFFFFF,
            scale,
        )
        tiles = most_tiles(len(q), num_rows, group, query_rows=_QUERY_ROWS) * num_kv_heads
        # With few tiles the blocks that have none of their own take a share of another's keys.
        blocks = self._num_multiprocessors if divides else min(tiles, self._num_multiprocessors)
        kernel, grid, block = self._kernels[head_dim], (blocks, 1, 1), (_THREADS, 1, 1)
        if cache.format is CacheFormat.FP8:
            kernel(grid, block, [_Fp8Arguments(layer_cache(cache), arguments)], overlap=True)
            return
        rows_shape = (head_dim, data.size // head_dim)
        row_bytes = head_dim * bfloat16.itemsize
        cache_map = self._maps.of(TensorBox(address(data), rows_shape, (row_bytes,), (_BOX_VALUES, _CHUNK_TOKENS)))
        given = arguments if variant is None else _VariantArguments(variant, arguments)
        kernel(grid, block, [cache_map, given], overlap=True)


def _staging_bytes(head_dim: int) -> int:
    """Where codes of a cache in FP8 wait to be converted: slots of four warps, with a barrier each."""
    slots = 1 if head_dim == _LARGEST_HEAD_DIM else 4
    return 4 * slots * (_CHUNK_TOKENS * (head_dim + 4) + 8)
