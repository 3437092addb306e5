"""Attention of the rows of a step that have one query token: the keys and values of their contexts, streamed once.

The work is divided on the device from `context_lens`, so that a captured launch serves any contexts.
"""

import ctypes
from typing import NamedTuple

import numpy as np

from openinfer_kernels.cuda.attention.layer_cache import FP8_SUFFIX, LayerCache, layer_cache
from openinfer_kernels.cuda.attention.variant import Variant, stem_of_variants
from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, PagedCache

MAX_ROWS = 1024
_STEM, _HOPPER_STEM = "attention_decode", "attention_decode_hopper"
_MAX_ITEMS = 1 << 17
"""Rows times KV heads times tiles of query heads."""
_WARPS, _TILE_TOKENS = 4, 16
_PADDING = 8
_HEADS_OF_TILE = 8


class _Occupancy(NamedTuple):
    """How a compiled kernel uses a multiprocessor."""

    blocks: int
    """Blocks that fit on a multiprocessor at once."""
    kv_tiles: int
    """Tiles of keys and values in shared memory for each warp; 0 where they go straight to registers."""


_Occupancies = dict[tuple[int, int], _Occupancy]
"""By head dimension and tiles of query heads; kernels of variants have one tile."""
_ANY_GPU: _Occupancies = {
    (64, 1): _Occupancy(3, 0),
    (64, 2): _Occupancy(3, 0),
    (128, 1): _Occupancy(2, 0),
    (128, 2): _Occupancy(2, 0),
    (256, 1): _Occupancy(2, 0),
}
_HOPPER_FP8: _Occupancies = {
    (64, 1): _Occupancy(2, 8),
    (64, 2): _Occupancy(2, 8),
    (128, 1): _Occupancy(2, 4),
    (128, 2): _Occupancy(2, 4),
    (256, 1): _Occupancy(1, 4),
}
"""Of a cache in FP8: tiles are half as large, and as many bytes are on their way."""
_HOPPER: _Occupancies = {
    (64, 1): _Occupancy(2, 4),
    (64, 2): _Occupancy(2, 4),
    (128, 1): _Occupancy(2, 2),
    (128, 2): _Occupancy(2, 2),
    (256, 1): _Occupancy(1, 2),
}


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("cache", LayerCache),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens", "partials", "arrivals")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "group", "early")),
        ("scale", ctypes.c_float),
    )


class _VariantArguments(ctypes.Structure):
    _fields_ = (("variant", Variant), ("others", _Arguments))


class AttentionDecode:
    """The decode kernels of one device and their workspace: one stream at a time."""

    def __init__(self, device: Device, *, for_variants: bool = False, for_fp8: bool = False) -> None:
        """Loads the kernels of one kind.

        Args:
            device: whose kernels.
            for_variants: those of attention with a window, a soft cap or sinks.
            for_fp8: those that read a cache in FP8.
        """
        stem, occupancies = (_HOPPER_STEM, _HOPPER) if device.has(_HOPPER_STEM) else (_STEM, _ANY_GPU)
        if for_variants:
            stem, occupancies = stem_of_variants(stem), {key: each for key, each in occupancies.items() if key[1] == 1}
        if for_fp8:
            occupancies = _HOPPER_FP8 if stem == _HOPPER_STEM else occupancies
            stem += FP8_SUFFIX
        self._occupancies = occupancies
        self._kernels = {key: _kernel(device, stem, *key, each, is_fp8=for_fp8) for key, each in occupancies.items()}
        self._num_multiprocessors = device.num_multiprocessors
        # Kernels leave the counters at zero: launches share them, and no memset comes between two layers.
        self._arrivals = cupy.zeros(_MAX_ITEMS, np.int32)

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
        """Writes the rows of `out [T, H D]` that belong to rows with one query token; `scale` is of powers of two."""
        num_rows, (num_kv_heads, _, head_dim) = len(batch.context_lens), cache.data.shape[3:]
        group = q.shape[1] // num_kv_heads
        tiles = 1 if group <= _HEADS_OF_TILE or (head_dim, 2) not in self._kernels else 2
        passes = -(-group // (_HEADS_OF_TILE * tiles))
        if num_rows * num_kv_heads * passes > _MAX_ITEMS:
            raise ArrayMismatchError(
                f"attention over {num_rows} rows of {num_kv_heads} KV heads: at most {_MAX_ITEMS} of both multiplied"
            )
        # As many blocks as run at once: they share the flattened list of work tiles evenly, whatever the contexts are.
        blocks = self._num_multiprocessors * self._occupancies[head_dim, tiles].blocks
        partials = cupy.empty(blocks * 2 * _HEADS_OF_TILE * tiles * (head_dim + 2), np.float32)
        arguments = _Arguments(
            address(q),
            address(out),
            layer_cache(cache),
            *map(
                address,
                (batch.block_tables[cache.table], batch.query_starts, batch.context_lens, partials, self._arrivals),
            ),
            num_rows,
            batch.block_tables[cache.table].shape[1],
            group,
            # From the second layer on, the batch and all tokens but the newest are read before the kernel ahead ends:
            # the step's inputs have long been written by then, and the newest are all that the step appends.
            0 if cache.is_first_layer else batch.newest_tokens,
            scale,
        )
        given = arguments if variant is None else _VariantArguments(variant, arguments)
        self._kernels[head_dim, tiles]((blocks, 1, 1), (_WARPS * 32, 1, 1), [given], overlap=True)


def _kernel(device: Device, stem: str, head_dim: int, tiles: int, occupancy: _Occupancy, *, is_fp8: bool) -> Kernel:
    heads = _HEADS_OF_TILE * tiles
    sums = _WARPS * heads * (head_dim + _PADDING)
    ends = 4 * (2 * _WARPS * heads + 2 * _WARPS + 8 + sums)
    tile_bytes = _TILE_TOKENS * (head_dim + 4 if is_fp8 else head_dim * 2)
    ring = _WARPS * occupancy.kv_tiles * 2 * (tile_bytes + 8)  # keys, values, and a barrier for each
    # Three numbers of each row, by which blocks find their place in the list of work tiles.
    shared_bytes = ring + ends + 4 * (3 * MAX_ROWS + 1)
    return device.kernel(stem, f"{stem}_{head_dim}_{tiles}", shared_bytes=shared_bytes)
