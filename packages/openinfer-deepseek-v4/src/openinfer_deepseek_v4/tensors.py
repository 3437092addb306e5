"""Every tensor of a checkpoint by its published name, with its whole shape and what it is stored as.

embed                     layers.{l}.attn_norm, ffn_norm, hc_attn_*, hc_ffn_*
norm, head, hc_head_*     layers.{l}.attn.{wq_a, q_norm, wq_b, wkv, kv_norm, wo_a, wo_b, attn_sink}
                                    attn.compressor.{wkv, wgate, ape, norm}
                                    attn.indexer.{wq_b, weights_proj}, attn.indexer.compressor.*
                          layers.{l}.ffn.{gate.weight, gate.bias or gate.tid2eid}
                                    ffn.experts.{e}.{w1, w2, w3}, ffn.shared_experts.{w1, w2, w3}
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from openinfer_deepseek_v4.config import DeepseekV4Config, LayerKind, RouterKind, Storage, TensorNames
from openinfer_engine.weights.quantised import QuantisedMatrix
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_tensor import RandomIds, StoredTensor, TensorSpec
from openinfer_kernels import WeightFormat

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
    """Of one layer of the model."""
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
    """Every tensor that `load_mtp` reads beside those of the model."""
    h = config.hidden_size
    found: dict[str, TensorSpec] = {f"{MTP_PREFIX}.{name}.weight": (h,) for name in ("enorm", "hnorm", "norm")}
    for name in ("e_proj", "h_proj"):
        found |= matrix(f"{MTP_PREFIX}.{name}", (h, h), config.storage.linears)
    found |= _hyper_head(config, f"{MTP_PREFIX}.hc_head") | _block(config, MTP_LAYER)
    return {stored_name(config, name): spec for name, spec in found.items()}


def stored_name(config: DeepseekV4Config, name: str) -> str:
    """What the checkpoint calls a tensor."""
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
    "F8_E4M3": WeightFormat.FP8_BLOCKS,
    "I8": WeightFormat.FP4_GROUPS,
    "U8": WeightFormat.FP4_GROUPS,
    "F4": WeightFormat.FP4_GROUPS,
}


def matrix(name: str, shape: tuple[int, int], stored: WeightFormat | None) -> Mapping[str, TensorSpec]:
    """The tensors of one matrix, by their published names."""
    if stored is None:
        return {f"{name}.weight": shape}
    return QuantisedMatrix(format=stored, shape=shape, codes=f"{name}.weight", scales=f"{name}.scale").tensors()


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


def _attention(config: DeepseekV4Config, layer: LayerTensors) -> dict[str, TensorSpec]:
    h, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    low, stored, groups = config.q_lora_rank, config.storage.linears, config.o_groups
    prefix = f"{layer.prefix}.attn"
    found: dict[str, TensorSpec] = {
        f"{prefix}.q_norm.weight": (low,),
        f"{prefix}.kv_norm.weight": (d,),
        f"{prefix}.attn_sink": (heads,),
        **matrix(f"{prefix}.wq_a", (low, h), stored),
        **matrix(f"{prefix}.wq_b", (heads * d, low), stored),
        **matrix(f"{prefix}.wkv", (d, h), stored),
        **matrix(
            f"{prefix}.wo_a",
            (groups * config.o_lora_rank, heads * d // groups),
            config.storage.output_a,
        ),
        **matrix(f"{prefix}.wo_b", (h, groups * config.o_lora_rank), stored),
    }
    if layer.kind is LayerKind.HEAVY:
        found |= _compressor(config, f"{prefix}.compressor", config.heavy_ratio, d)
    if layer.kind is LayerKind.SPARSE:
        index = config.index_n_heads * config.index_head_dim
        found |= _compressor(config, f"{prefix}.compressor", config.sparse_ratio, d, halves=2)
        found |= _compressor(
            config, f"{prefix}.indexer.compressor", config.sparse_ratio, config.index_head_dim, halves=2
        )
        found |= matrix(f"{prefix}.indexer.wq_b", (index, low), stored)
        found[f"{prefix}.indexer.weights_proj.weight"] = (config.index_n_heads, h)
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


def _mixture(config: DeepseekV4Config, layer: LayerTensors) -> dict[str, TensorSpec]:
    h, width, num_experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    prefix = f"{layer.prefix}.ffn"
    found: dict[str, TensorSpec] = {f"{prefix}.gate.weight": (num_experts, h)}
    if layer.router is RouterKind.SCORE:
        found[f"{prefix}.gate.bias"] = (num_experts,)
    else:
        found[f"{prefix}.gate.tid2eid"] = StoredTensor(
            shape=(config.vocab_size, config.num_experts_per_tok),
            dtypes=("I64", "I32"),
            dummy=RandomIds(bound=num_experts),
        )
    mlps = {f"experts.{expert}": config.storage.experts for expert in range(num_experts)}
    for name, stored in (mlps | {"shared_experts": config.storage.linears}).items():
        found |= matrix(f"{prefix}.{name}.w1", (width, h), stored)
        found |= matrix(f"{prefix}.{name}.w3", (width, h), stored)
        found |= matrix(f"{prefix}.{name}.w2", (h, width), stored)
    return found


def _hyper_head(config: DeepseekV4Config, prefix: str) -> dict[str, TensorSpec]:
    streams = config.hc_mult
    return {
        f"{prefix}_fn": (streams, streams * config.hidden_size),
        f"{prefix}_base": (streams,),
        f"{prefix}_scale": (1,),
    }
