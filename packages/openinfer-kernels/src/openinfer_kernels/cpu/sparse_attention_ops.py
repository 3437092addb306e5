"""`CpuSparseAttentionOps`: attention over windows and compressed entries, over the functions beside this file."""

from typing import Protocol

import numpy as np

from openinfer_kernels.cpu.attention.compressor import compress_overlapping_windows, compress_windows
from openinfer_kernels.cpu.attention.indexer import index_scores, select_entries
from openinfer_kernels.cpu.attention.rope_tail import rotate_tail
from openinfer_kernels.cpu.attention.window import window_attention
from openinfer_kernels.cpu.gemm.quantised import matrix_of
from openinfer_kernels.cpu.norm.rms_norm import inverse_rms
from openinfer_kernels.ops import Array, AttentionBatch, Weight
from openinfer_kernels.ops.sparse_attention import CompressedEntries


class _Products(Protocol):
    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array: ...


class CpuSparseAttentionOps:
    """`openinfer_kernels.ops.SparseAttentionOps` in host memory."""

    @np.errstate(over="ignore", invalid="ignore")
    def norm_rope_tail(
        self, x: Array, weight: Array | None, *, eps: float, rope: Array, batch: AttentionBatch
    ) -> Array:
        """See `openinfer_kernels.cpu.attention.rope_tail`."""
        normed = x * inverse_rms(x, eps=eps)
        if weight is not None:
            normed *= weight
        return rotate_tail(normed, batch.positions, rope)

    def rope_tail(self, x: Array, *, rope: Array, batch: AttentionBatch) -> Array:
        """See `openinfer_kernels.cpu.attention.rope_tail`."""
        return rotate_tail(x, batch.positions, rope)

    def compress_windows(
        self,
        projected: Array,
        *,
        ape: Array,
        norm: Array,
        eps: float,
        rope: Array,
        state: Array,
        cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """See `openinfer_kernels.cpu.attention.compressor`."""
        compress_windows(
            projected, ape=ape, norm=norm, eps=eps, rope=rope, state=state, cache=cache, layer=layer, batch=batch
        )

    def compress_overlapping_windows(
        self,
        projected: Array,
        *,
        ape: Array,
        norm: Array,
        eps: float,
        rope: Array,
        state: Array,
        cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """See `openinfer_kernels.cpu.attention.compressor`."""
        compress_overlapping_windows(
            projected, ape=ape, norm=norm, eps=eps, rope=rope, state=state, cache=cache, layer=layer, batch=batch
        )

    def index_scores(
        self,
        queries: Array,
        weights: Array,
        *,
        cache: Array,
        layer: int,
        ratio: int,
        scale: float,
        batch: AttentionBatch,
    ) -> Array:
        """See `openinfer_kernels.cpu.attention.indexer`."""
        return index_scores(queries, weights, cache=cache, layer=layer, ratio=ratio, scale=scale, batch=batch)

    def select_entries(self, scores: Array, k: int) -> Array:
        """See `openinfer_kernels.cpu.attention.indexer`."""
        return select_entries(scores, k)

    def window_attention(
        self,
        q: Array,
        kv: Array,
        *,
        sinks: Array,
        window: Array,
        layer: int,
        entries: CompressedEntries | None,
        rope: Array,
        scale: float,
        batch: AttentionBatch,
    ) -> Array:
        """See `openinfer_kernels.cpu.attention.window`."""
        return window_attention(
            q, kv, sinks=sinks, window=window, layer=layer, entries=entries, rope=rope, scale=scale, batch=batch
        )

    def grouped_linear(self: _Products, x: Array, weight: Weight) -> Array:
        """One product after the other."""
        pieces = np.split(x, weight.shape[0], axis=1)
        return np.concatenate([self.linear(piece, matrix_of(weight, i)) for i, piece in enumerate(pieces)], axis=1)
