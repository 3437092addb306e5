"""The weights of the model on one rank, and how they are read.

Across ranks each has whole query heads, index heads, output groups and routed experts, and a piece of the width of the
shared expert; it has all of the key projections, the compressors and what mixes the streams, so that every rank has the
same window, compressed entries and index keys.

Letters as in `model.py`; `H`, `Hi`, `G`, `E` and `F` are one rank's share. A matrix is `[out, in]`.
"""

from dataclasses import dataclass

import numpy as np

from openinfer_deepseek_v4.config import DeepseekV4Config, LayerKind, RouterKind
from openinfer_deepseek_v4.tensors import LayerTensors, stored_name
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import Cut, WeightSource
from openinfer_engine.weights.quantised import QuantisedMatrix, read_quantised
from openinfer_kernels import Array, HyperWeights, Ops, QuantisedPart, Weight, WeightFormat, WeightPart


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """One compressor; `w` is `d`, or `2 d` where windows overlap."""

    wkv_wgate: Array
    """`[2 w, h]`: value rows, then weight rows."""
    ape: Array
    """`[m, w]` float32."""
    norm: Array
    """`[d]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """What selects compressed entries."""

    wq_b: Weight
    """`[Hi di, q_lora_rank]`"""
    weights_proj: Array
    """`[Hi, h]`"""
    compressor: CompressorWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Attention of one layer."""

    kind: LayerKind
    layer: int
    """Index of its window."""
    index: int
    """Among the layers of its kind, hence in the compressed entries."""
    wq_a: Weight
    """`[q_lora_rank, h]`"""
    q_norm: Array
    """`[q_lora_rank]`"""
    wq_b: Weight
    """`[H D, q_lora_rank]`"""
    wkv: Weight
    """`[D, h]`"""
    kv_norm: Array
    """`[D]`"""
    sinks: Array
    """`[H]` float32."""
    wo_a: Weight
    """`[G, o_lora_rank, H D / G]`"""
    wo_b: Weight
    """`[h, G o_lora_rank]`"""
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """The experts of one layer."""

    gate: Array
    """`[experts, h]`, of all ranks."""
    bias: Array | None
    """`[experts]` float32; None in a layer that chooses by table."""
    table: Array | None
    """`[V, experts per token]` int32."""
    gate_up: Weight
    """`[E, 2 F, h]`"""
    down: Weight
    """`[E, h, F]`"""
    shared_gate_up: Weight
    """`[2 F, h]`"""
    shared_down: Weight
    """`[h, F]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block."""

    attn_hyper: HyperWeights
    attn_norm: Array
    """`[h]`"""
    attention: AttentionWeights
    ffn_hyper: HyperWeights
    ffn_norm: Array
    """`[h]`"""
    mixture: MixtureWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperHead:
    """What reads all streams into one vector; float32."""

    fn: Array
    """`[n, n h]`"""
    base: Array
    """`[n]`"""
    scale: Array
    """`[1]`"""


class WeightReader:
    """Reads weights by their published names."""

    def __init__(
        self, config: DeepseekV4Config, weights: WeightSource, *, ops: Ops, communicator: Communicator
    ) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._communicator = communicator

    def stored(self, name: str, cut: Cut = Cut.WHOLE) -> WeightPart:
        """This rank's piece of a plain tensor."""
        return self._weights.read(stored_name(self._config, name), cut)

    def plain(self, *names: str, cut: Cut = Cut.WHOLE) -> Array:
        """Tensors below each other, in the compute dtype."""
        return self._ops.upload_weight(*(self.stored(name, cut) for name in names))

    def exact(self, name: str, cut: Cut = Cut.WHOLE) -> Array:
        """One tensor in float32."""
        return self._ops.upload_float32(self.stored(name, cut))

    def matrix(self, *names: str, shape: tuple[int, int], cut: Cut = Cut.WHOLE, fmt: WeightFormat | None) -> Weight:
        """Matrices of one whole shape below each other."""
        if fmt is None:
            return self.plain(*(f"{name}.weight" for name in names), cut=cut)
        return self._ops.upload_quantised(*(self._part(name, shape, cut, fmt) for name in names))

    def matrices(
        self, *names: str, shape: tuple[int, int], num_matrices: int, fmt: WeightFormat | None, cut: Cut = Cut.WHOLE
    ) -> Weight:
        """As many matrices of equal height, one after the other."""
        if fmt is None:
            stacked = self.plain(*(f"{name}.weight" for name in names), cut=cut)
            return stacked.reshape(num_matrices, -1, stacked.shape[1])
        parts = (self._part(name, shape, cut, fmt) for name in names)
        return self._ops.upload_quantised(*parts, num_matrices=num_matrices)

    def hyper(self, prefix: str) -> HyperWeights:
        """What one sublayer's mix is computed with."""
        return HyperWeights(
            fn=self.exact(f"{prefix}_fn"), base=self.exact(f"{prefix}_base"), scale=self.exact(f"{prefix}_scale")
        )

    def hyper_head(self, prefix: str) -> HyperHead:
        """What reads all streams into one vector."""
        return HyperHead(
            fn=self.exact(f"{prefix}_fn"), base=self.exact(f"{prefix}_base"), scale=self.exact(f"{prefix}_scale")
        )

    def layer(self, layer: LayerTensors, *, window: int, index: int) -> LayerWeights:
        """All of a block.

        Args:
            layer: which.
            window: index of its window.
            index: among the layers of its kind.
        """
        return LayerWeights(
            attn_hyper=self.hyper(f"{layer.prefix}.hc_attn"),
            attn_norm=self.plain(f"{layer.prefix}.attn_norm.weight"),
            attention=self._attention(layer, window=window, index=index),
            ffn_hyper=self.hyper(f"{layer.prefix}.hc_ffn"),
            ffn_norm=self.plain(f"{layer.prefix}.ffn_norm.weight"),
            mixture=self._mixture(layer),
        )

    def _attention(self, layer: LayerTensors, *, window: int, index: int) -> AttentionWeights:
        config, prefix, fmt = self._config, f"{layer.prefix}.attn", self._config.storage.linears
        h, low, heads_width = config.hidden_size, config.q_lora_rank, config.num_attention_heads * config.head_dim
        grouped = config.o_groups * config.o_lora_rank
        return AttentionWeights(
            kind=layer.kind,
            layer=window,
            index=index,
            wq_a=self.matrix(f"{prefix}.wq_a", shape=(low, h), fmt=fmt),
            q_norm=self.plain(f"{prefix}.q_norm.weight"),
            wq_b=self.matrix(f"{prefix}.wq_b", shape=(heads_width, low), cut=Cut.ROWS, fmt=fmt),
            wkv=self.matrix(f"{prefix}.wkv", shape=(config.head_dim, h), fmt=fmt),
            kv_norm=self.plain(f"{prefix}.kv_norm.weight"),
            sinks=self.exact(f"{prefix}.attn_sink", Cut.ROWS),
            wo_a=self.matrices(
                f"{prefix}.wo_a",
                shape=(grouped, heads_width // config.o_groups),
                num_matrices=config.o_groups // self._communicator.size,
                cut=Cut.ROWS,
                fmt=config.storage.output_a,
            ),
            wo_b=self.matrix(f"{prefix}.wo_b", shape=(h, grouped), cut=Cut.COLUMNS, fmt=fmt),
            compressor=None if layer.kind is LayerKind.SLIDING else self._compressor(f"{prefix}.compressor"),
            indexer=self._indexer(f"{prefix}.indexer") if layer.kind is LayerKind.SPARSE else None,
        )

    def _compressor(self, prefix: str) -> CompressorWeights:
        return CompressorWeights(
            wkv_wgate=self.plain(f"{prefix}.wkv.weight", f"{prefix}.wgate.weight"),
            ape=self.exact(f"{prefix}.ape"),
            norm=self.plain(f"{prefix}.norm.weight"),
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        config = self._config
        shape = config.index_n_heads * config.index_head_dim, config.q_lora_rank
        return IndexerWeights(
            wq_b=self.matrix(f"{prefix}.wq_b", shape=shape, cut=Cut.ROWS, fmt=config.storage.linears),
            weights_proj=self.plain(f"{prefix}.weights_proj.weight", cut=Cut.ROWS),
            compressor=self._compressor(f"{prefix}.compressor"),
        )

    def _mixture(self, layer: LayerTensors) -> MixtureWeights:
        config, prefix = self._config, f"{layer.prefix}.ffn"
        up, down = (
            (config.moe_intermediate_size, config.hidden_size),
            (config.hidden_size, config.moe_intermediate_size),
        )
        by_score = layer.router is RouterKind.SCORE
        share = config.n_routed_experts // self._communicator.size
        experts = [
            f"{prefix}.experts.{expert}"
            for expert in range(self._communicator.rank * share, (self._communicator.rank + 1) * share)
        ]
        gate_up = [f"{expert}.{part}" for expert in experts for part in ("w1", "w3")]
        shared, fmt = f"{prefix}.shared_experts", config.storage.linears
        return MixtureWeights(
            gate=self.plain(f"{prefix}.gate.weight"),
            bias=self.exact(f"{prefix}.gate.bias") if by_score else None,
            table=None if by_score else self._table(f"{prefix}.gate.tid2eid"),
            gate_up=self.matrices(*gate_up, shape=up, num_matrices=share, fmt=config.storage.experts),
            down=self.matrices(
                *(f"{expert}.w2" for expert in experts), shape=down, num_matrices=share, fmt=config.storage.experts
            ),
            shared_gate_up=self.matrix(f"{shared}.w1", f"{shared}.w3", shape=up, cut=Cut.ROWS, fmt=fmt),
            shared_down=self.matrix(f"{shared}.w2", shape=down, cut=Cut.COLUMNS, fmt=fmt),
        )

    def _table(self, name: str) -> Array:
        table = self._weights.read_stored(stored_name(self._config, name))
        return self._ops.upload(np.ascontiguousarray(table, np.int32))

    def _part(self, name: str, shape: tuple[int, int], cut: Cut, fmt: WeightFormat) -> QuantisedPart:
        codes, scales = (stored_name(self._config, f"{name}.{part}") for part in ("weight", "scale"))
        matrix = QuantisedMatrix(format=fmt, shape=shape, codes=codes, scales=scales)
        return read_quantised(self._weights, matrix, cut, self._communicator)
