"""Causal attention over a paged cache: rows with one query token by one kernel, chunks of prompts by another."""

from functools import cached_property

import numpy as np

from openinfer_kernels.cuda.attention.decode import MAX_ROWS, AttentionDecode
from openinfer_kernels.cuda.attention.fp8_contexts import Fp8Contexts
from openinfer_kernels.cuda.attention.prefill import AttentionPrefill
from openinfer_kernels.cuda.attention.prefill_hopper import STEM as HOPPER_STEM
from openinfer_kernels.cuda.attention.prefill_hopper import AttentionPrefillHopper
from openinfer_kernels.cuda.attention.variant import Variant, exponent_scale, variant_of
from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.gpu_requirements import require_attention
from openinfer_kernels.ops import Array, AttentionBatch, CacheFormat, PagedCache

_SMALLEST_OF_ALL_KERNELS = 64
"""Smaller heads, of toys, are served by the kernel for prompts of any GPU alone."""
MAX_GROUP = 16
_LEAST_TOKENS = 2
"""Of rows that the kernel for prompts serves."""
_INT32 = np.dtype(np.int32)


class _Kernels:
    """The kernels without a variant, those for variants, or those that read a cache in FP8."""

    def __init__(self, device: Device, *, for_variants: bool = False, for_fp8: bool = False) -> None:
        kind = {"for_variants": for_variants, "for_fp8": for_fp8}
        self.small = AttentionPrefill(device, least_tokens=1, **kind)
        self.decode = AttentionDecode(device, **kind)
        if device.has(HOPPER_STEM):
            self.prefill = AttentionPrefillHopper(device, **kind)
        else:
            self.prefill = AttentionPrefill(device, **kind)


class Attention:
    """The operator on one device; a model without windows, caps and sinks never loads the kernels for them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._plain = _Kernels(device)

    @cached_property
    def _of_variants(self) -> _Kernels:
        return _Kernels(self._device, for_variants=True)

    @cached_property
    def _of_fp8(self) -> _Kernels:
        return _Kernels(self._device, for_fp8=True)

    @cached_property
    def _contexts(self) -> Fp8Contexts | None:
        """Where a kernel for prompts reads BF16 faster than FP8."""
        return Fp8Contexts(self._device) if self._device.has(HOPPER_STEM) else None

    def paged_attention(
        self,
        q: Array,
        cache: PagedCache,
        *,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        first_key: int = 0,
    ) -> Array:
        """H / K is at most 16, `scale` positive; a row without context, padding of captured steps, gets no result."""
        batch = batch.token_rows or batch
        _check(q, cache, batch)
        _refuse_first_key(first_key, cache, batch)
        num_tokens, num_rows, most = q.shape[0], len(batch.context_lens), batch.max_query_tokens
        out = cupy.empty((num_tokens, q.shape[1] * q.shape[2]), bfloat16)
        variant = variant_of(
            num_heads=q.shape[1], scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, first_key=first_key
        )
        if cache.format is CacheFormat.FP8:
            _refuse_variant(variant)
            kernels = self._of_fp8
        else:
            kernels = self._plain if variant is None else self._of_variants
        power = exponent_scale(scale, soft_cap)
        if q.shape[2] < _SMALLEST_OF_ALL_KERNELS:
            kernels.small.launch(q, cache, out, batch=batch, scale=power, variant=variant)
            return out
        # Only sizes are known here: the decode kernel skips rows with more tokens, the prefill kernel those with one.
        if num_tokens < num_rows * most or most == 1:  # else every row is as long as the longest
            kernels.decode.launch(q, cache, out, batch=batch, scale=power, variant=variant)
        if most > 1:
            found = None
            if cache.format is CacheFormat.FP8 and self._contexts is not None:
                found = self._contexts.in_bfloat16(cache, batch, num_tokens=num_tokens, least_tokens=_LEAST_TOKENS)
            if found is not None:
                kernels, (cache, batch) = self._plain, found
            kernels.prefill.launch(q, cache, out, batch=batch, scale=power, variant=variant)
        return out


class _OneKernel:
    """The kernel for prompts, of heads of all sizes."""

    def __init__(self, device: Device, *, for_variants: bool = False, for_fp8: bool = False) -> None:
        kind = {"for_variants": for_variants, "for_fp8": for_fp8}
        self._small = AttentionPrefill(device, least_tokens=1, **kind)
        if device.has(HOPPER_STEM):
            self._others = AttentionPrefillHopper(device, least_tokens=1, divides_contexts=False, **kind)
        else:
            self._others = self._small

    def of(self, head_dim: int) -> AttentionPrefill | AttentionPrefillHopper:
        return self._small if head_dim < _SMALLEST_OF_ALL_KERNELS else self._others


class OneKernelAttention(Attention):
    """The operator by the kernel for prompts alone, whatever a row's number of tokens.

    It walks over keys in tiles that begin at multiples of a fixed number in their sequence, so that a token's sums do
    not depend on the tokens that are computed next to it. Rows with one token take longer.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._one = _OneKernel(device)

    @cached_property
    def _one_of_variants(self) -> _OneKernel:
        return _OneKernel(self._device, for_variants=True)

    @cached_property
    def _of_drafters(self) -> Attention:
        return Attention(self._device)

    @cached_property
    def _one_of_fp8(self) -> _OneKernel:
        return _OneKernel(self._device, for_fp8=True)

    def paged_attention(
        self,
        q: Array,
        cache: PagedCache,
        *,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        first_key: int = 0,
    ) -> Array:
        if first_key:  # of drafters, which change no token
            return self._of_drafters.paged_attention(
                q,
                cache,
                batch=batch,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                sinks=sinks,
                first_key=first_key,
            )
        _check(q, cache, batch)
        out = cupy.empty((q.shape[0], q.shape[1] * q.shape[2]), bfloat16)
        variant = variant_of(num_heads=q.shape[1], scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        if cache.format is CacheFormat.FP8:
            _refuse_variant(variant)
            kernel = self._one_of_fp8.of(q.shape[2])
        else:
            kernel = (self._one if variant is None else self._one_of_variants).of(q.shape[2])
        power = exponent_scale(scale, soft_cap)
        kernel.launch(q, cache, out, batch=batch, scale=power, variant=variant)
        return out


def _refuse_variant(variant: Variant | None) -> None:
    if variant is not None:
        raise ArrayMismatchError(
            "attention with a window, a soft cap or sinks has no kernel that reads a cache in FP8: keep it in BF16"
        )


def _refuse_first_key(first_key: int, cache: PagedCache, batch: AttentionBatch) -> None:
    if first_key and batch.max_query_tokens > 1 and cache.data.shape[5] >= _SMALLEST_OF_ALL_KERNELS:
        raise ArrayMismatchError(
            f"attention from key {first_key} on has a kernel for rows of one token alone, and these have up to "
            f"{batch.max_query_tokens}"
        )


def _check(q: Array, cache: PagedCache, batch: AttentionBatch) -> None:
    require(q, bfloat16, ndim=3, what="q")
    if cache.format is CacheFormat.FP8:
        data, _ = cache.in_fp8()
    else:
        data = cache.in_compute_dtype()
        require(data, bfloat16, ndim=6, what="the cache")
    require(batch.query_starts, _INT32, ndim=1, what="batch.query_starts")
    require(batch.context_lens, _INT32, ndim=1, what="batch.context_lens")
    block_tables = batch.block_tables[cache.table]
    require(block_tables, _INT32, ndim=2, what="batch.block_tables")
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_tokens = data.shape[3:5]
    require_attention(head_dim=head_dim, block_tokens=block_tokens)
    if data.shape[5] != head_dim or not fits_vectors(q, data):
        raise ArrayMismatchError(
            f"q {q.shape} and the cache {data.shape} must have one head dimension and begin at multiples of 16 bytes"
        )
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        raise ArrayMismatchError(
            f"{num_heads} query heads over {num_kv_heads} KV heads: a multiple, at most {MAX_GROUP} times as many"
        )
    if len(batch.context_lens) > MAX_ROWS:
        raise ArrayMismatchError(f"attention over {len(batch.context_lens)} rows: at most {MAX_ROWS}")
    if not len(batch.query_starts) - 1 == len(batch.context_lens) == len(block_tables):
        raise ArrayMismatchError(
            f"the batch names {len(batch.query_starts) - 1} rows by query_starts, {len(batch.context_lens)} by "
            f"context_lens, {len(block_tables)} by block_tables"
        )
