"""The weights of the model: the tensors of a checkpoint by name, shape and format, and what they become on one rank.

Published names, of which `stored_name` says how transformers writes them:

    embed                     layers.{l}.attn_norm, ffn_norm, hc_attn_*, hc_ffn_*
    norm, head, hc_head_*     layers.{l}.attn.{wq_a, q_norm, wq_b, wkv, kv_norm, wo_a, wo_b, attn_sink}
                                        attn.compressor.{wkv, wgate, ape, norm}
                                        attn.indexer.{wq_b, weights_proj}, attn.indexer.compressor.*
                              layers.{l}.ffn.{gate.weight, gate.bias or gate.tid2eid}
                                        ffn.experts.{e}.{w1, w2, w3}, ffn.shared_experts.{w1, w2, w3}

Across ranks each has whole query heads, index heads, output groups and routed experts, and a shard of the width of the
shared expert; it has all of the key projections, the compressors and what mixes the streams, so that every rank has the
same window, compressed entries and index keys.

Letters as in `model.py`; in the weights `H`, `Hi`, `G`, `E` and `F` are one rank's share. A matrix is `[out, in]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from openinfer_deepseek_v4.config import DeepseekV4Config, LayerKind, RouterKind, Storage, TensorNames
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_format import StoredFormat
from openinfer_engine.weights.stored_tensor import RandomIds, StoredTensor, TensorSpec
from openinfer_kernels import Array, HyperWeights, LinearWeight, Ops, WeightFormat, WeightPart
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, MXFP4

# --- tensors of a checkpoint --------------------------------------------------------------------------------

MTP_PREFIX = "mtp.0"

_TRANSFORMERS_NAMES = {"embed.weight": "embed_tokens.weight"} | {
    f"hc_head_{name}": f"hc_head.hc_{name}" for name in ("fn", "base", "scale")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One block: where its tensors are, and what it is."""

    prefix: str
    kind: LayerKind
    router: RouterKind


def layer_tensors(config: DeepseekV4Config, layer: int) -> LayerTensors:
    return LayerTensors(prefix=f"layers.{layer}", kind=config.layer_types[layer], router=config.mlp_layer_types[layer])


MTP_LAYER = LayerTensors(prefix=MTP_PREFIX, kind=LayerKind.SLIDING, router=RouterKind.SCORE)
"""The block that drafts tokens."""


def tensors(config: DeepseekV4Config) -> Mapping[str, TensorSpec]:
    """Every tensor that `load` reads, by its name in the checkpoint."""
    v, h = config.vocab_size, config.hidden_size
    found: dict[str, TensorSpec] = {
        "embed.weight": (v, h),
        "norm.weight": (h,),
        "head.weight": (v, h),
        **_hyper_head(config, "hc_head"),
    }
    for layer in range(config.num_hidden_layers):
        found |= _block(config, layer_tensors(config, layer))
    return {stored_name(config, name): spec for name, spec in found.items()}


def mtp_tensors(config: DeepseekV4Config) -> Mapping[str, TensorSpec]:
    """Every tensor that `load_mtp` reads besides those of the model."""
    h = config.hidden_size
    found: dict[str, TensorSpec] = {f"{MTP_PREFIX}.{name}.weight": (h,) for name in ("enorm", "hnorm", "norm")}
    found |= _tensors_of(*mtp_projections(config))
    found |= _hyper_head(config, f"{MTP_PREFIX}.hc_head") | _block(config, MTP_LAYER)
    return {stored_name(config, name): spec for name, spec in found.items()}


def mtp_projections(config: DeepseekV4Config) -> tuple[StoredMatrix, StoredMatrix]:
    """`e_proj` and `h_proj`, `[h, h]`, of the block that drafts tokens."""
    h, stored = config.hidden_size, config.storage.linears
    return _matrix(f"{MTP_PREFIX}.e_proj", (h, h), stored), _matrix(f"{MTP_PREFIX}.h_proj", (h, h), stored)


def stored_name(config: DeepseekV4Config, name: str) -> str:
    if config.storage.names is TensorNames.PUBLISHED or name == "head.weight":
        return name
    name = _TRANSFORMERS_NAMES.get(name, name)
    return f"model.{name}".replace(".attn.kv_norm.", ".attn.norm.")


def as_stored(config: DeepseekV4Config, found: Mapping[str, TensorInfo]) -> DeepseekV4Config:
    """The config with names and formats as a checkpoint has them, which its `config.json` need not say."""
    theirs = f"model.{_TRANSFORMERS_NAMES['embed.weight']}"
    names = TensorNames.TRANSFORMERS if theirs in found else TensorNames.PUBLISHED
    storage = msgspec.structs.replace(config.storage, names=names)
    config = msgspec.structs.replace(config, storage=storage)

    def format_of(name: str) -> WeightFormat | None:
        info = found.get(stored_name(config, f"layers.0.{name}.weight"))
        return None if info is None else _FORMAT_OF_DTYPE.get(info.dtype)

    storage = Storage(
        names=names,
        linears=format_of("attn.wq_b"),
        output_a=format_of("attn.wo_a"),
        experts=format_of("ffn.experts.0.w1"),
    )
    return msgspec.structs.replace(config, storage=storage)


_FORMAT_OF_DTYPE = {
    "F8_E4M3": FP8_BLOCK_128,
    "I8": MXFP4,
    "U8": MXFP4,
    "F4": MXFP4,
}


def _matrix(name: str, shape: tuple[int, int], stored: WeightFormat | None) -> StoredMatrix:
    format_ = None if stored is None else StoredFormat(format=stored, scales="scale")
    return StoredMatrix(name=name, shape=shape, format=format_)


def _tensors_of(*matrices: StoredMatrix) -> dict[str, TensorSpec]:
    return {name: spec for each in matrices for name, spec in each.tensors().items()}


def _block(config: DeepseekV4Config, layer: LayerTensors) -> dict[str, TensorSpec]:
    h, streams = config.hidden_size, config.hc_mult
    mixes = streams * (2 + streams)
    found: dict[str, TensorSpec] = {f"{layer.prefix}.attn_norm.weight": (h,), f"{layer.prefix}.ffn_norm.weight": (h,)}
    for part in ("attn", "ffn"):
        found |= {
            f"{layer.prefix}.hc_{part}_fn": (mixes, streams * h),
            f"{layer.prefix}.hc_{part}_base": (mixes,),
            f"{layer.prefix}.hc_{part}_scale": (3,),
        }
    return found | _attention(config, layer) | _mixture(config, layer)


def _attention_matrices(config: DeepseekV4Config, layer: LayerTensors) -> dict[str, StoredMatrix]:
    h, low, stored = config.hidden_size, config.q_lora_rank, config.storage.linears
    queries, grouped = config.num_attention_heads * config.head_dim, config.o_groups * config.o_lora_rank
    prefix = f"{layer.prefix}.attn"
    found = {
        "wq_a": _matrix(f"{prefix}.wq_a", (low, h), stored),
        "wq_b": _matrix(f"{prefix}.wq_b", (queries, low), stored),
        "wkv": _matrix(f"{prefix}.wkv", (config.head_dim, h), stored),
        "wo_a": _matrix(f"{prefix}.wo_a", (grouped, queries // config.o_groups), config.storage.output_a),
        "wo_b": _matrix(f"{prefix}.wo_b", (h, grouped), stored),
    }
    if layer.kind is LayerKind.SPARSE:
        index = config.index_n_heads * config.index_head_dim
        found["indexer.wq_b"] = _matrix(f"{prefix}.indexer.wq_b", (index, low), stored)
    return found


def _attention(config: DeepseekV4Config, layer: LayerTensors) -> dict[str, TensorSpec]:
    prefix, d = f"{layer.prefix}.attn", config.head_dim
    found: dict[str, TensorSpec] = {
        f"{prefix}.q_norm.weight": (config.q_lora_rank,),
        f"{prefix}.kv_norm.weight": (d,),
        f"{prefix}.attn_sink": (config.num_attention_heads,),
        **_tensors_of(*_attention_matrices(config, layer).values()),
    }
    if layer.kind is LayerKind.HEAVY:
        found |= _compressor(config, f"{prefix}.compressor", config.heavy_ratio, d)
    if layer.kind is LayerKind.SPARSE:
        found |= _compressor(config, f"{prefix}.compressor", config.sparse_ratio, d, halves=2)
        found |= _compressor(
            config, f"{prefix}.indexer.compressor", config.sparse_ratio, config.index_head_dim, halves=2
        )
        found[f"{prefix}.indexer.weights_proj.weight"] = (config.index_n_heads, config.hidden_size)
    return found


def _compressor(
    config: DeepseekV4Config, prefix: str, ratio: int, width: int, *, halves: int = 1
) -> dict[str, TensorSpec]:
    return {
        f"{prefix}.wkv.weight": (halves * width, config.hidden_size),
        f"{prefix}.wgate.weight": (halves * width, config.hidden_size),
        f"{prefix}.ape": (ratio, halves * width),
        f"{prefix}.norm.weight": (width,),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredExpert:
    """The matrices of one expert."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix

    @classmethod
    def of(cls, config: DeepseekV4Config, name: str, stored: WeightFormat | None) -> "_StoredExpert":
        h, width = config.hidden_size, config.moe_intermediate_size
        return cls(
            gate=_matrix(f"{name}.w1", (width, h), stored),
            up=_matrix(f"{name}.w3", (width, h), stored),
            down=_matrix(f"{name}.w2", (h, width), stored),
        )


def _experts(config: DeepseekV4Config, layer: LayerTensors) -> list[_StoredExpert]:
    """The routed ones of a layer, of all ranks."""
    names = (f"{layer.prefix}.ffn.experts.{expert}" for expert in range(config.n_routed_experts))
    return [_StoredExpert.of(config, name, config.storage.experts) for name in names]


def _shared_expert(config: DeepseekV4Config, layer: LayerTensors) -> _StoredExpert:
    return _StoredExpert.of(config, f"{layer.prefix}.ffn.shared_experts", config.storage.linears)


def _mixture(config: DeepseekV4Config, layer: LayerTensors) -> dict[str, TensorSpec]:
    num_experts, prefix = config.n_routed_experts, f"{layer.prefix}.ffn"
    found: dict[str, TensorSpec] = {f"{prefix}.gate.weight": (num_experts, config.hidden_size)}
    if layer.router is RouterKind.SCORE:
        found[f"{prefix}.gate.bias"] = (num_experts,)
    else:
        found[f"{prefix}.gate.tid2eid"] = StoredTensor(
            shape=(config.vocab_size, config.num_experts_per_tok),
            dtypes=("I64", "I32"),
            dummy=RandomIds(bound=num_experts),
        )
    for each in (*_experts(config, layer), _shared_expert(config, layer)):
        found |= _tensors_of(each.gate, each.up, each.down)
    return found


def _hyper_head(config: DeepseekV4Config, prefix: str) -> dict[str, TensorSpec]:
    streams = config.hc_mult
    return {
        f"{prefix}_fn": (streams, streams * config.hidden_size),
        f"{prefix}_base": (streams,),
        f"{prefix}_scale": (1,),
    }


# --- weights of a rank --------------------------------------------------------------------------------------


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

    wq_b: LinearWeight
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
    wq_a: LinearWeight
    """`[q_lora_rank, h]`"""
    q_norm: Array
    """`[q_lora_rank]`"""
    wq_b: LinearWeight
    """`[H D, q_lora_rank]`"""
    wkv: LinearWeight
    """`[D, h]`"""
    kv_norm: Array
    """`[D]`"""
    sinks: Array
    """`[H]` float32."""
    wo_a: LinearWeight
    """`[G, o_lora_rank, H D / G]`"""
    wo_b: LinearWeight
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
    gate_up: LinearWeight
    """`[E, 2 F, h]`"""
    down: LinearWeight
    """`[E, h, F]`"""
    shared_gate_up: LinearWeight
    """`[2 F, h]`"""
    shared_down: LinearWeight
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of the model on one rank."""

    embed: Array
    """`[V', h]`, on every rank whole; `V'` is `V` rounded up to a multiple of the ranks."""
    layers: tuple[LayerWeights, ...]
    hyper_head: HyperHead
    norm: Array
    """`[h]`"""
    head: LinearWeight
    """`[V' / ranks, h]`"""
    main_rope: Array
    """`[2, positions, r / 2]` float32 for the `r` rotated dimensions of sliding layers: cosines, then sines."""
    compress_rope: Array
    """The same of all other layers."""


class _PublishedNames:
    """A `WeightSource` that is asked for tensors by their published names, whatever the checkpoint calls them."""

    def __init__(self, config: DeepseekV4Config, weights: WeightSource) -> None:
        self._config = config
        self._weights = weights

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        return self._weights.read(stored_name(self._config, name), shard)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        return self._weights.read_stored(stored_name(self._config, name), shard)


class WeightReader:
    """Reads the parts of the model; `loader` takes published names."""

    def __init__(
        self, config: DeepseekV4Config, weights: WeightSource, *, ops: Ops, communicator: Communicator
    ) -> None:
        self.loader = WeightLoader(_PublishedNames(config, weights), ops=ops, communicator=communicator)
        self._config = config
        self._rank = communicator.rank
        self._size = communicator.size

    def hyper(self, prefix: str) -> HyperWeights:
        fn, base, scale = (self.loader.float32(f"{prefix}_{name}") for name in ("fn", "base", "scale"))
        return HyperWeights(fn=fn, base=base, scale=scale)

    def hyper_head(self, prefix: str) -> HyperHead:
        fn, base, scale = (self.loader.float32(f"{prefix}_{name}") for name in ("fn", "base", "scale"))
        return HyperHead(fn=fn, base=base, scale=scale)

    def layer(self, layer: LayerTensors, *, window: int, index: int) -> LayerWeights:
        """All of a block; `window` is the index of its window, `index` that among the layers of its kind."""
        return LayerWeights(
            attn_hyper=self.hyper(f"{layer.prefix}.hc_attn"),
            attn_norm=self.loader.plain(f"{layer.prefix}.attn_norm.weight"),
            attention=self._attention(layer, window=window, index=index),
            ffn_hyper=self.hyper(f"{layer.prefix}.hc_ffn"),
            ffn_norm=self.loader.plain(f"{layer.prefix}.ffn_norm.weight"),
            mixture=self._mixture(layer),
        )

    def _attention(self, layer: LayerTensors, *, window: int, index: int) -> AttentionWeights:
        loader, prefix, matrices = self.loader, f"{layer.prefix}.attn", _attention_matrices(self._config, layer)
        return AttentionWeights(
            kind=layer.kind,
            layer=window,
            index=index,
            wq_a=loader.linear(matrices["wq_a"]),
            q_norm=loader.plain(f"{prefix}.q_norm.weight"),
            wq_b=loader.linear(matrices["wq_b"], shard=Shard.COLUMN_PARALLEL),
            wkv=loader.linear(matrices["wkv"]),
            kv_norm=loader.plain(f"{prefix}.kv_norm.weight"),
            sinks=loader.float32(f"{prefix}.attn_sink", Shard.COLUMN_PARALLEL),
            wo_a=loader.stack(
                matrices["wo_a"],
                num_matrices=self._config.o_groups // self._size,
                shard=Shard.COLUMN_PARALLEL,
                grouped=True,
            ),
            wo_b=loader.linear(matrices["wo_b"], shard=Shard.ROW_PARALLEL),
            compressor=None if layer.kind is LayerKind.SLIDING else self._compressor(f"{prefix}.compressor"),
            indexer=self._indexer(f"{prefix}.indexer", matrices) if layer.kind is LayerKind.SPARSE else None,
        )

    def _compressor(self, prefix: str) -> CompressorWeights:
        return CompressorWeights(
            wkv_wgate=self.loader.plain(f"{prefix}.wkv.weight", f"{prefix}.wgate.weight"),
            ape=self.loader.float32(f"{prefix}.ape"),
            norm=self.loader.plain(f"{prefix}.norm.weight"),
        )

    def _indexer(self, prefix: str, matrices: Mapping[str, StoredMatrix]) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.loader.linear(matrices["indexer.wq_b"], shard=Shard.COLUMN_PARALLEL),
            weights_proj=self.loader.plain(f"{prefix}.weights_proj.weight", shard=Shard.COLUMN_PARALLEL),
            compressor=self._compressor(f"{prefix}.compressor"),
        )

    def _mixture(self, layer: LayerTensors) -> MixtureWeights:
        loader, prefix, by_score = self.loader, f"{layer.prefix}.ffn", layer.router is RouterKind.SCORE
        share = self._config.n_routed_experts // self._size
        experts = _experts(self._config, layer)[self._rank * share : (self._rank + 1) * share]
        gate_up = [matrix for expert in experts for matrix in (expert.gate, expert.up)]
        shared = _shared_expert(self._config, layer)
        return MixtureWeights(
            gate=loader.plain(f"{prefix}.gate.weight"),
            bias=loader.float32(f"{prefix}.gate.bias") if by_score else None,
            table=None if by_score else loader.stored(f"{prefix}.gate.tid2eid", np.int32),
            gate_up=loader.stack(*gate_up, num_matrices=share),
            down=loader.stack(*(expert.down for expert in experts), num_matrices=share),
            shared_gate_up=loader.linear(shared.gate, shared.up, shard=Shard.COLUMN_PARALLEL),
            shared_down=loader.linear(shared.down, shard=Shard.ROW_PARALLEL),
        )
