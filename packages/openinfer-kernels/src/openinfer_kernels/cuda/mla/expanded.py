"""Attention over latents in the expanded form, for Hopper: the contexts' latents, their keys and values, attention."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.attention.prefill import most_tiles
from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMaps
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.ops import Array, AttentionBatch, PagedCache

STEM = "latent_prefill_hopper"
_LATENT, _ENTRY, _ROPE, _OWN = 512, 576, 64, 256
_GATHER_TOKENS, _GATHER_THREADS = 64, 256
_QUERY_ROWS, _KEYS, _THREADS, _STAGES = 128, 128, 384, 2
_BOX_VALUES = 64
_SHARED_BYTES = 2 * 192 * _QUERY_ROWS + _STAGES * 2 * _KEYS * (192 + 128) + 2 * 1024
"""`Shared` of the source: queries, keys and values; barriers; and what aligns it."""
_MOST_SCRATCH_BYTES = 1 << 28
"""Of keys and values: where all heads' take more, some heads' are made at a time."""
_LOG2_E = 1.4426950408889634


class _GatherArguments(ctypes.Structure):
    """`struct Arguments` of `latent_gather.cu`."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("latents", "keys", "starts")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "block_shift", "least_tokens")),
    )


class _Arguments(ctypes.Structure):
    """`struct Arguments` of `latent_prefill_hopper.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "query_starts", "context_lens", "starts")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_heads", "least_tokens", "first_head")),
        ("scale", ctypes.c_float),
    )


class LatentExpanded:
    """The kernels of one Hopper device, and the product between them."""

    def __init__(self, device: Device, linear: Linear) -> None:
        self._linear = linear
        self._gather = device.kernel("latent_gather", "latent_gather")
        self._attend = device.kernel(STEM, STEM, shared_bytes=_SHARED_BYTES)
        self._maps = TensorMaps()

    def has_room(self, context_tokens: int) -> bool:
        """Whether contexts of so many tokens in all may be expanded: at least one head at a time."""
        return context_tokens * _OWN * bfloat16.itemsize <= _MOST_SCRATCH_BYTES

    def launch(
        self,
        q: Array,
        cache: PagedCache,
        kv_b_proj: Array,
        out: Array,
        *,
        batch: AttentionBatch,
        scale: float,
        least_tokens: int,
        context_tokens: int,
    ) -> None:
        """Writes what belongs to rows of at least `least_tokens` tokens into `out [T, H, 128]`.

        `context_tokens`: tokens of all contexts of such rows, at least.
        """
        num_rows, (num_tokens, num_heads) = len(batch.context_lens), q.shape[:2]
        latents = cupy.empty((context_tokens, _LATENT), bfloat16)
        keys = cupy.empty((context_tokens, _ROPE), bfloat16)
        starts = cupy.empty(num_rows, np.int32)
        block_tokens = cache.data.shape[4]
        rows = tuple(map(address, (batch.query_starts, batch.context_lens)))
        gather = _GatherArguments(
            address(cache.data) + cache.layer * block_tokens * _ENTRY * bfloat16.itemsize,
            cache.data.shape[1] * block_tokens * _ENTRY,
            address(batch.block_tables[cache.table]),
            *rows,
            *map(address, (latents, keys, starts)),
            num_rows,
            batch.block_tables[cache.table].shape[1],
            block_tokens.bit_length() - 1,
            least_tokens,
        )
        self._gather((-(-context_tokens // _GATHER_TOKENS), 1, 1), (_GATHER_THREADS, 1, 1), [gather], overlap=True)
        tiles, at_once = (
            most_tiles(num_tokens, num_rows, 1, query_rows=_QUERY_ROWS),
            _heads_at_once(context_tokens, num_heads),
        )
        # All heads' keys and values of long contexts do not fit into the scratch: as many heads at a time as do.
        for first_head in range(0, num_heads, at_once):
            weight = kv_b_proj[first_head * _OWN : (first_head + at_once) * _OWN]
            own = self._linear.linear(latents, weight)  # [context_tokens, heads 256]
            arguments = _Arguments(
                address(q),
                address(out),
                *rows,
                address(starts),
                num_rows,
                num_heads,
                least_tokens,
                first_head,
                scale * _LOG2_E,
            )
            grid = (tiles, len(weight) // _OWN, 1)
            self._attend(grid, (_THREADS, 1, 1), [self._map(own), self._map(keys), arguments], overlap=True)

    def _map(self, array: Array) -> ctypes.Structure:
        """Boxes of 128 rows and 64 columns of `array [rows, columns]`."""
        rows, columns = array.shape
        row_bytes = columns * bfloat16.itemsize
        return self._maps.of(TensorBox(address(array), (columns, rows), (row_bytes,), (_BOX_VALUES, _KEYS)))


def _heads_at_once(context_tokens: int, num_heads: int) -> int:
    """As many as their keys and values find room for, in equal shares."""
    most = max(1, _MOST_SCRATCH_BYTES // (context_tokens * _OWN * bfloat16.itemsize))
    return -(-num_heads // -(-num_heads // most))
