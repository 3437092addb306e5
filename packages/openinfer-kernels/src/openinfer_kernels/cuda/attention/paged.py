"""Causal attention over a paged cache: rows with one query token by one kernel, chunks of prompts by another."""

import numpy as np

from openinfer_kernels.cuda.attention.decode import MAX_ROWS, AttentionDecode
from openinfer_kernels.cuda.attention.prefill import AttentionPrefill
from openinfer_kernels.cuda.attention.prefill_hopper import STEM as HOPPER_STEM
from openinfer_kernels.cuda.attention.prefill_hopper import AttentionPrefillHopper
from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError, OperatorMissingError
from openinfer_kernels.gpu_requirements import require_attention
from openinfer_kernels.ops import Array, AttentionBatch

_SMALLEST_OF_ALL_KERNELS = 64
"""Smaller heads, of toys, are served by the kernel for prompts of any GPU alone."""
MAX_GROUP = 16
_INT32 = np.dtype(np.int32)


class Attention:
    """The operator on one device."""

    def __init__(self, device: Device) -> None:
        self._small = AttentionPrefill(device, least_tokens=1)
        self._decode = AttentionDecode(device)
        if device.has(HOPPER_STEM):
            self._prefill = AttentionPrefillHopper(device)
        else:
            self._prefill = AttentionPrefill(device)

    def paged_attention(
        self,
        q: Array,
        kv_cache: Array,
        *,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """H / K is at most 16, `scale` positive; a row without context, padding of captured steps, gets no result."""
        _refuse(window=window, soft_cap=soft_cap, sinks=sinks)
        _check(q, kv_cache, batch)
        num_tokens, num_rows, most = q.shape[0], len(batch.context_lens), batch.max_query_tokens
        out = cupy.empty((num_tokens, q.shape[1] * q.shape[2]), bfloat16)
        if q.shape[2] < _SMALLEST_OF_ALL_KERNELS:
            self._small.launch(q, kv_cache, out, layer=layer, batch=batch, scale=scale)
            return out
        # Only sizes are known here: the decode kernel skips rows with more tokens, the prefill kernel those with one.
        if num_tokens < num_rows * most or most == 1:  # else every row is as long as the longest
            self._decode.launch(q, kv_cache, out, layer=layer, batch=batch, scale=scale)
        if most > 1:
            self._prefill.launch(q, kv_cache, out, layer=layer, batch=batch, scale=scale)
        return out


class OneKernelAttention(Attention):
    """The operator by the kernel for prompts alone, whatever a row's number of tokens.

    It walks over keys in tiles that begin at multiples of a fixed number in their sequence, so that a token's sums do
    not depend on the tokens that are computed next to it. Rows with one token take longer.
    """

    def __init__(self, device: Device) -> None:
        self._small = AttentionPrefill(device, least_tokens=1)
        if device.has(HOPPER_STEM):
            self._prefill = AttentionPrefillHopper(device, least_tokens=1, divides_contexts=False)
        else:
            self._prefill = AttentionPrefill(device, least_tokens=1)

    def paged_attention(
        self,
        q: Array,
        kv_cache: Array,
        *,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        _refuse(window=window, soft_cap=soft_cap, sinks=sinks)
        _check(q, kv_cache, batch)
        out = cupy.empty((q.shape[0], q.shape[1] * q.shape[2]), bfloat16)
        kernel = self._small if q.shape[2] < _SMALLEST_OF_ALL_KERNELS else self._prefill
        kernel.launch(q, kv_cache, out, layer=layer, batch=batch, scale=scale)
        return out


def _refuse(**asked: object) -> None:
    """Raises `OperatorMissingError` where scores are asked for that no kernel computes yet."""
    names = [name for name, value in asked.items() if value is not None]
    if names:
        raise OperatorMissingError(
            f"paged_attention has no CUDA kernel yet that takes {', '.join(names)}; serve the model with --device cpu"
        )


def _check(q: Array, kv_cache: Array, batch: AttentionBatch) -> None:
    require(q, bfloat16, ndim=3, what="q")
    require(kv_cache, bfloat16, ndim=6, what="kv_cache")
    require(batch.query_starts, _INT32, ndim=1, what="batch.query_starts")
    require(batch.context_lens, _INT32, ndim=1, what="batch.context_lens")
    require(batch.block_tables, _INT32, ndim=2, what="batch.block_tables")
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_tokens = kv_cache.shape[3:5]
    require_attention(head_dim=head_dim, block_tokens=block_tokens)
    if kv_cache.shape[5] != head_dim or not fits_vectors(q, kv_cache):
        raise ArrayMismatchError(
            f"q {q.shape} and kv_cache {kv_cache.shape} must have one head dimension and begin at multiples of 16 bytes"
        )
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        raise ArrayMismatchError(
            f"{num_heads} query heads over {num_kv_heads} KV heads: a multiple, at most {MAX_GROUP} times as many"
        )
    if len(batch.context_lens) > MAX_ROWS:
        raise ArrayMismatchError(f"attention over {len(batch.context_lens)} rows: at most {MAX_ROWS}")
    if not len(batch.query_starts) - 1 == len(batch.context_lens) == len(batch.block_tables):
        raise ArrayMismatchError(
            f"the batch names {len(batch.query_starts) - 1} rows by query_starts, {len(batch.context_lens)} by "
            f"context_lens, {len(batch.block_tables)} by block_tables"
        )
