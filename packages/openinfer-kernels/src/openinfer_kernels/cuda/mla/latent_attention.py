"""Attention over a paged cache of latents: the forms that its kernels have, and which rows go to which."""

import math
from functools import partial

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.mla.absorbed import MAX_ROWS, LatentAbsorbed
from openinfer_kernels.cuda.mla.expanded import STEM as EXPANDED_STEM
from openinfer_kernels.cuda.mla.expanded import LatentExpanded
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.gpu_requirements import require_latents
from openinfer_kernels.latent_forms import LatentShape
from openinfer_kernels.ops import Array, AttentionBatch, PagedCache

_INT32 = np.dtype(np.int32)
_ANY_NUMBER = (1 << 31) - 1
_DIMS = (128, 64, 128)
"""`dn`, `dr` and `dv`, for which kernels are compiled."""


class LatentAttention:
    """The operator on one device."""

    def __init__(self, device: Device, linear: Linear) -> None:
        self._absorbed = LatentAbsorbed(device)
        self._expanded = LatentExpanded(device, linear) if device.has(EXPANDED_STEM) else None

    def latent_attention(
        self,
        q: Array,
        cache: PagedCache,
        *,
        kv_b_proj: Array,
        batch: AttentionBatch,
        scale: float,
        first_key: int = 0,
    ) -> Array:
        """Sizes are those of every published model (`require_latents`); padding of a captured step gets no result."""
        if not 0 <= first_key <= _ANY_NUMBER:
            raise ArrayMismatchError(f"first_key {first_key}: at least 0")
        shape = _check(q, cache, kv_b_proj, batch)
        out = cupy.empty((len(q), shape.num_heads * shape.value_dim), bfloat16)
        absorbed = partial(self._absorbed.launch, q, cache, kv_b_proj, out, batch=batch, scale=scale)
        least, context_tokens = math.ceil(shape.least_expanded_tokens), batch.chunk_context_tokens
        # Rows of drafts, which alone begin at another key, have few tokens.
        expanded = self._expanded if batch.max_query_tokens >= least and not first_key else None
        # Expanding needs memory for the contexts, so the host must know them: a captured step is absorbed as a whole.
        if expanded is None or context_tokens is None or not expanded.has_room(context_tokens):
            absorbed(most_tokens=_ANY_NUMBER, first_key=first_key)
            return out
        if len(q) < len(batch.context_lens) * batch.max_query_tokens:  # else every row is as long as the longest
            absorbed(most_tokens=least - 1)
        expanded.launch(
            q,
            cache,
            kv_b_proj,
            out,
            batch=batch,
            scale=scale,
            least_tokens=least,
            context_tokens=context_tokens,
        )
        return out


def _check(q: Array, cache: PagedCache, kv_b_proj: Array, batch: AttentionBatch) -> LatentShape:
    data = cache.in_compute_dtype()
    require(q, bfloat16, ndim=3, what="q")
    require(data, bfloat16, ndim=6, what="the cache")
    require(kv_b_proj, bfloat16, ndim=2, what="kv_b_proj")
    require(batch.query_starts, _INT32, ndim=1, what="batch.query_starts")
    require(batch.context_lens, _INT32, ndim=1, what="batch.context_lens")
    block_tables = batch.block_tables[cache.table]
    require(block_tables, _INT32, ndim=2, what="batch.block_tables")
    shape = LatentShape.of(q.shape, data.shape, kv_b_proj.shape)
    require_latents(entry_dim=data.shape[5], block_tokens=data.shape[4])
    if (shape.nope_dim, shape.rope_dim, shape.value_dim) != _DIMS:
        raise ArrayMismatchError(
            f"latent attention with dn, dr, dv of {shape.nope_dim}, {shape.rope_dim}, {shape.value_dim} is not "
            f"possible: {_DIMS}"
        )
    if not fits_vectors(q, data, kv_b_proj):
        raise ArrayMismatchError("q, the cache and kv_b_proj must begin at multiples of 16 bytes")
    if len(batch.context_lens) > MAX_ROWS:
        raise ArrayMismatchError(f"attention over {len(batch.context_lens)} rows: at most {MAX_ROWS}")
    if not len(batch.query_starts) - 1 == len(batch.context_lens) == len(block_tables):
        raise ArrayMismatchError(
            f"the batch names {len(batch.query_starts) - 1} rows by query_starts, {len(batch.context_lens)} by "
            f"context_lens, {len(block_tables)} by block_tables"
        )
    return shape
