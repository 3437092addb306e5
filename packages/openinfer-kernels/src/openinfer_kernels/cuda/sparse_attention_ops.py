"""Windows, compressed entries and hyper-connections on a GPU; their kernels are loaded when the first one is called."""

from functools import cached_property

from openinfer_kernels.cuda.attention.compressor import Compressor
from openinfer_kernels.cuda.attention.indexer import Indexer
from openinfer_kernels.cuda.attention.rope_tail import RopeTail
from openinfer_kernels.cuda.attention.window import WindowAttention
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.norm.hyper_connections import HyperConnections
from openinfer_kernels.ops import (
    Array,
    AttentionBatch,
    CompressedEntries,
    HyperMix,
    HyperWeights,
)


class CudaSparseAttentionOps:
    """The part of `CudaOps` that models without windows and streams never load."""

    device: Device

    @cached_property
    def _rope_tail(self) -> RopeTail:
        return RopeTail(self.device)

    @cached_property
    def _hyper_connections(self) -> HyperConnections:
        return self._make_hyper_connections()

    def _make_hyper_connections(self) -> HyperConnections:
        return HyperConnections(self.device)

    @cached_property
    def _compressor(self) -> Compressor:
        return Compressor(self.device, overlapping=False)

    @cached_property
    def _overlapping_compressor(self) -> Compressor:
        return Compressor(self.device, overlapping=True)

    @cached_property
    def _indexer(self) -> Indexer:
        return Indexer(self.device)

    @cached_property
    def _window_attention(self) -> WindowAttention:
        return self._make_window_attention()

    def _make_window_attention(self) -> WindowAttention:
        return WindowAttention(self.device)

    def norm_rope_tail(
        self, x: Array, weight: Array | None, *, eps: float, rope: Array, batch: AttentionBatch
    ) -> Array:
        """See `openinfer_kernels.cuda.attention.rope_tail`."""
        return self._rope_tail.norm_rope_tail(x, weight, eps=eps, rope=rope, batch=batch)

    def rope_tail(self, x: Array, *, rope: Array, batch: AttentionBatch) -> Array:
        """See `openinfer_kernels.cuda.attention.rope_tail`."""
        return self._rope_tail.rope_tail(x, rope=rope, batch=batch)

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
        """See `openinfer_kernels.cuda.attention.compressor`."""
        self._compressor.compress(
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
        """See `openinfer_kernels.cuda.attention.compressor`."""
        self._overlapping_compressor.compress(
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
        """See `openinfer_kernels.cuda.attention.indexer`."""
        return self._indexer.scores(queries, weights, cache=cache, layer=layer, ratio=ratio, scale=scale, batch=batch)

    def select_entries(self, scores: Array, k: int) -> Array:
        """See `openinfer_kernels.cuda.attention.indexer`."""
        return self._indexer.select(scores, k)

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
        """See `openinfer_kernels.cuda.attention.window`."""
        return self._window_attention.window_attention(
            q, kv, sinks=sinks, window=window, layer=layer, entries=entries, rope=rope, scale=scale, batch=batch
        )

    def hyper_streams(self, x: Array, num_streams: int) -> Array:
        """See `openinfer_kernels.cuda.norm.hyper_connections`."""
        return self._hyper_connections.streams(x, num_streams)

    def hyper_read(
        self, residual: Array, weights: HyperWeights, *, eps: float, mix_eps: float, num_iterations: int
    ) -> tuple[Array, HyperMix]:
        """See `openinfer_kernels.cuda.norm.hyper_connections`."""
        return self._hyper_connections.read(residual, weights, eps=eps, mix_eps=mix_eps, num_iterations=num_iterations)

    def hyper_write(self, y: Array, residual: Array, mix: HyperMix) -> None:
        """See `openinfer_kernels.cuda.norm.hyper_connections`."""
        self._hyper_connections.write(y, residual, mix)

    def hyper_head(self, residual: Array, fn: Array, base: Array, scale: Array, *, eps: float, mix_eps: float) -> Array:
        """See `openinfer_kernels.cuda.norm.hyper_connections`."""
        return self._hyper_connections.head(residual, fn, base, scale, eps=eps, mix_eps=mix_eps)
