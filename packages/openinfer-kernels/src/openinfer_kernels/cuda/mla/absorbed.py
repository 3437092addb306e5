"""Attention over latents in the absorbed form: queries over latents, attention, the sum of its partials, values."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.ops import Array, AttentionBatch, PagedCache

HEADS = 16
"""Query heads that share what is read of the cache."""
_LATENT, _ENTRY, _VALUE = 512, 576, 128
_PARTIAL_FLOATS = HEADS * (_LATENT + 2)
_PAD = 8
_COLUMNS, _QUERY_TOKENS, _QUERY_THREADS = 64, 64, 128
_VALUE_TOKENS, _VALUE_WARPS = 32, 8
_FEW_TOKENS = 8
"""Up to so many, the rows of values are cut finer."""
_MERGE_THREADS, _FEW_TOKENS_WAYS = _LATENT // 4, 8
"""Threads that add the partials of an item; for `_FEW_TOKENS` or fewer, so many times as many."""
_RESERVED_BYTES = 1024
"""Of a multiprocessor's shared memory, for each block beyond the first."""
_LOG2_E = 1.4426950408889634


class _QueryArguments(ctypes.Structure):
    """`struct Arguments` of `latent_queries.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "weight", "out", "items")),
        ("num_tokens", ctypes.c_int),
        ("num_heads", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    """`latent::Arguments` of `latent_scheduler.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "whole", "cache")),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens", "partials", "items")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "num_heads", "block_shift")),
        *((name, ctypes.c_int) for name in ("most_tokens", "early")),
        ("scale", ctypes.c_float),
        ("first_key", ctypes.c_int),
    )


class _MergeArguments(ctypes.Structure):
    """`struct Arguments` of `latent_merge.cu`."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("partials", "items", "whole")), ("num_heads", ctypes.c_int))


class _ValueArguments(ctypes.Structure):
    """`struct Arguments` of `latent_values.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("whole", "items", "weight", "out")),
        ("num_tokens", ctypes.c_int),
        ("num_heads", ctypes.c_int),
    )


MAX_ROWS = 1024
_WARPS = (4, 2)
"""Of a block, the best first: fewer take less shared memory."""


class LatentAbsorbed:
    """The kernels of one device."""

    def __init__(self, device: Device) -> None:
        self._queries = device.kernel("latent_queries", "latent_queries")
        self._values = {rows: _value_kernel(device, rows) for rows in (16, 32)}
        self._merge = device.kernel("latent_merge", "latent_merge")
        self._warps = next(warps for warps in _WARPS if _shared_bytes(warps) <= device.max_shared_bytes)
        self._attend, self._attend_from = (
            device.kernel("latent_attention", f"latent_attention_{kind}", shared_bytes=_shared_bytes(self._warps))
            for kind in (str(self._warps), f"{self._warps}_from")
        )
        # With two blocks on a multiprocessor, one multiplies while the other waits for its maximum.
        two_fit = 2 * _shared_bytes(self._warps) + _RESERVED_BYTES <= device.max_shared_bytes
        self._workers = device.num_multiprocessors * (1 + two_fit)

    def launch(
        self,
        q: Array,
        cache: PagedCache,
        kv_b_proj: Array,
        out: Array,
        *,
        batch: AttentionBatch,
        scale: float,
        most_tokens: int,
        first_key: int = 0,
    ) -> None:
        """Writes what belongs to rows of at most `most_tokens` tokens into `out [T, H, 128]`.

        `first_key`: tokens before it are seen by none.
        """
        num_tokens, num_heads = q.shape[:2]
        tiles = -(-num_heads // HEADS)
        queries = cupy.empty((num_tokens, num_heads, _ENTRY), bfloat16)
        whole = cupy.empty((num_tokens, num_heads, _LATENT), bfloat16)
        items = cupy.empty((num_tokens, tiles, 2), np.int32)
        partials = cupy.empty((self._workers, 2, _PARTIAL_FLOATS), np.float32)
        sizes = ctypes.c_int(num_tokens), ctypes.c_int(num_heads)
        self._queries(
            (num_heads, _LATENT // _COLUMNS, -(-num_tokens // _QUERY_TOKENS)),
            (_QUERY_THREADS, 1, 1),
            [_QueryArguments(*map(address, (q, kv_b_proj, queries, items)), *sizes)],
            overlap=True,
        )
        block_tokens = cache.data.shape[4]
        arguments = _Arguments(
            address(queries),
            address(whole),
            address(cache.data) + cache.layer * block_tokens * _ENTRY * bfloat16.itemsize,
            cache.data.shape[1] * block_tokens * _ENTRY,
            *map(address, (batch.block_tables[cache.table], batch.query_starts, batch.context_lens, partials, items)),
            len(batch.context_lens),
            batch.block_tables[cache.table].shape[1],
            num_heads,
            block_tokens.bit_length() - 1,
            most_tokens,
            # From the second layer on, `batch` is read before the kernels ahead have ended: it was written long before.
            int(not cache.is_first_layer),
            scale * _LOG2_E,
            first_key,
        )
        attend = self._attend_from if first_key else self._attend
        attend((self._workers, 1, 1), (32 * self._warps, 1, 1), [arguments], overlap=True)
        # A kernel of their own reduces the partials: `latent_values`, with several blocks a head, would read them
        # several times.
        merge = _MergeArguments(*map(address, (partials, items, whole)), num_heads)
        threads = _MERGE_THREADS * (_FEW_TOKENS_WAYS if num_tokens <= _FEW_TOKENS else 1)
        self._merge((num_heads, num_tokens, 1), (threads, 1, 1), [merge], overlap=True)
        rows = 16 if num_tokens <= _FEW_TOKENS else 32
        self._values[rows](
            (num_heads, _VALUE // rows, -(-num_tokens // _VALUE_TOKENS)),
            (32 * _VALUE_WARPS, 1, 1),
            [_ValueArguments(*map(address, (whole, items, kv_b_proj, out)), *sizes)],
            overlap=True,
        )


def _shared_bytes(warps: int) -> int:
    """`Shared` of `latent_attention.cu`, and what is known of rows."""
    tile_keys, row_bytes = 8 * warps, 2 * (_ENTRY + _PAD)
    tiles = (2 * tile_keys + HEADS) * row_bytes + 2 * HEADS * (tile_keys + _PAD)
    return tiles + 4 * (2 * warps * HEADS + warps) + 4 * 8 + 4 * (3 * MAX_ROWS + 2)


def _value_kernel(device: Device, rows: int) -> Kernel:
    """`Shared` of `latent_values.cu`."""
    tiles = (rows + _VALUE_TOKENS) * (_LATENT + _PAD) * 2
    shared_bytes = tiles + 4 * (_VALUE_WARPS * _VALUE_TOKENS * rows + _VALUE_TOKENS)
    return device.kernel("latent_values", f"latent_values_{rows}", shared_bytes=shared_bytes)
