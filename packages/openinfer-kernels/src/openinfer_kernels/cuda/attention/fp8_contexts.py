"""Contexts of prompts out of a KV cache in FP8 into BF16, once for all tiles of queries that read them."""

import ctypes
import dataclasses

import numpy as np

from openinfer_kernels.cuda.attention.layer_cache import LayerCache, layer_cache
from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.ops import AttentionBatch, PagedCache

_STEM = "fp8_contexts"
_THREADS = 256
_MOST_BYTES_PER_TOKEN = 1 << 16
"""Of contexts, for each token of a step: a part of what an engine leaves for activations. With longer contexts a token
brings fewer tiles of queries for each tile of keys, so that less is saved as well."""


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        ("cache", LayerCache),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens", "contexts", "tables")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "head_dim", "least_tokens")),
    )


class Fp8Contexts:
    """The kernel of one device."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.kernel(_STEM, _STEM)

    def in_bfloat16(
        self, cache: PagedCache, batch: AttentionBatch, *, num_tokens: int, least_tokens: int
    ) -> tuple[PagedCache, AttentionBatch] | None:
        """A cache of the contexts of rows of at least `least_tokens` tokens, and the batch with its block tables.

        None where the host does not know how long they are, as in a captured step, or they take too much room.
        """
        if batch.chunk_context_tokens is None:
            return None
        _, _, _, num_kv_heads, block_tokens, head_dim = cache.data.shape
        num_rows = len(batch.context_lens)
        num_blocks = batch.chunk_context_tokens // block_tokens + num_rows
        shape = (num_blocks, 1, 2, num_kv_heads, block_tokens, head_dim)
        if int(np.prod(shape)) * bfloat16.itemsize > num_tokens * _MOST_BYTES_PER_TOKEN:
            return None
        contexts, given = cupy.empty(shape, bfloat16), batch.block_tables[cache.table]
        tables = cupy.empty(given.shape, np.int32)
        arguments = _Arguments(
            layer_cache(cache),
            *map(address, (given, batch.query_starts, batch.context_lens, contexts, tables)),
            num_rows,
            given.shape[1],
            head_dim,
            least_tokens,
        )
        self._kernel((num_blocks, 1, 1), (_THREADS, 1, 1), [arguments], overlap=True)
        return PagedCache(data=contexts, layer=0), dataclasses.replace(batch, block_tables=(tables,))
