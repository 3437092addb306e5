"""`DeepseekV4`: the family's entry point, which configs it serves, and what the engine asks before it loads."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_deepseek_v4 import model
from openinfer_deepseek_v4.config import DeepseekV4Config, LayerKind, normalised, rope_fields
from openinfer_deepseek_v4.model import ENTRIES, INDEX
from openinfer_deepseek_v4.weights import MTP_PREFIX, as_stored, stored_name
from openinfer_engine.family import EngineFamily
from openinfer_engine.model import ModelDefinition, ModelLimits
from openinfer_engine.refusals import (
    architecture_reasons,
    code_reasons,
    key_reasons,
    rope_reasons,
    shortened,
    value_reasons,
)
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor

OPENINFER_CONTRACT = 1

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "compression_config": "weights compressed by other tools are not served",
        "attention_bias": "biases in the attention are not served",
        "mlp_bias": "biases in the experts are not served",
        "tie_word_embeddings": "a head tied to the embedding is not served",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "final_logit_softcapping": "soft-capped logits are not served",
        "pruned_heads": "pruned heads are not served",
    }
)

ONLY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
    }
)

QUANTISATION: Mapping[str, Any] = MappingProxyType(
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
)
"""The same inside of `quantization_config`."""

RATIOS = (0, 4, 128)


class DeepseekV4Definition(ModelDefinition[DeepseekV4Config]):
    """DeepSeek-V4-Flash."""

    name = "deepseek_v4"
    module = model
    config_type = DeepseekV4Config
    rank_sizes = ("o_groups", "index_n_heads", "n_routed_experts", "moe_intermediate_size")

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type != self.name:
            return f"not a {self.name} model: its model_type is {model_type!r}"
        return "; ".join(_reasons(config)) or None

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return normalised(config)

    def as_stored(self, config: DeepseekV4Config, tensors: Mapping[str, TensorInfo]) -> DeepseekV4Config:
        """Names and formats are those of the checkpoint."""
        return as_stored(config, tensors)

    def limits(self, config: DeepseekV4Config) -> ModelLimits:
        """The context that it was trained for, and the index scores of a step."""
        is_indexed = config.num_layers_of(LayerKind.SPARSE) > 0
        return ModelLimits(
            max_model_tokens=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            tokens_per_score=config.sparse_ratio if is_indexed else None,
        )

    def ignorable_tensors(self, config: DeepseekV4Config) -> Collection[str]:
        """The block that drafts tokens, which its drafter reads."""
        return {f"{MTP_PREFIX}.", stored_name(config, f"{MTP_PREFIX}.")}

    def kv_spec(
        self,
        config: DeepseekV4Config,
        *,
        model_tag: str,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
        num_ranks: int,
        rank_index: int,
    ) -> KvSpec:
        """Compressed entries and index keys in blocks; windows and open windows of compressors in slots.

        All ranks have all of them: heads share them.
        """
        return KvSpec(
            model_tag=model_tag,
            paged=tuple(_paged(config, kv_dtype)),
            slots=tuple(_slots(config, state_dtype)),
            num_ranks=num_ranks,
            rank_index=rank_index,
        )


class DeepseekV4(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for DeepSeek-V4-Flash."""

    definition = DeepseekV4Definition()


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    yield from architecture_reasons(config, "DeepseekV4ForCausalLM")
    yield from code_reasons(config)
    ratios = cast("list[object]", config.get("compress_ratios") or [])
    unknown = sorted({str(ratio) for ratio in ratios if ratio not in RATIOS})
    if unknown:
        yield f"compress_ratios has {', '.join(unknown)}: only {', '.join(map(str, RATIOS))} are served"
    yield from key_reasons(config, CHANGES_THE_MODEL)
    yield from value_reasons(config, ONLY)
    quantisation = cast("dict[str, object]", config.get("quantization_config") or {})
    for key, served in QUANTISATION.items():
        if quantisation.get(key, served) != served:
            yield f"{key} of quantization_config is {shortened(quantisation[key])}: only {served!r} is served"
    if config.get("expert_dtype") not in (None, "fp4", "fp8"):
        yield f"expert_dtype is {shortened(config['expert_dtype'])}: only 'fp4' and 'fp8' are served"
    yield from _rope_reasons(config)


def _rope_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    for label in ("main", "compress"):
        fields = {"rope_parameters": rope_fields(config, label)}
        for reason in rope_reasons({**fields, "max_position_embeddings": config.get("max_position_embeddings")}):
            yield f"the rotary embedding of {label}: {reason}"


def _paged(config: DeepseekV4Config, dtype: KvDtype) -> Iterator[PagedGroup]:
    for name, kind, dim in _entry_groups(config):
        ratio = config.sparse_ratio if kind is LayerKind.SPARSE else config.heavy_ratio
        tensor = PagedTensor(name="kv", num_heads=1, head_dim=dim, dtype=dtype, tokens_per_row=ratio)
        yield PagedGroup(
            name=name,
            num_layers=config.num_layers_of(kind),
            tensors=(tensor,),
            rope_tag=f"last {config.qk_rope_head_dim} dimensions in pairs, at the window's first token: "
            f"{config.ropes[1]}",
        )


def _slots(config: DeepseekV4Config, dtype: KvDtype) -> Iterator[StateSlotGroup]:
    window = StateTensor(name="kv", shape=(config.sliding_window, config.head_dim), dtype=dtype)
    yield StateSlotGroup(name="window", num_layers=config.num_hidden_layers, tensors=(window,))
    for name, kind, dim in _entry_groups(config):
        shape = (2 * config.sparse_ratio, 4 * dim) if kind is LayerKind.SPARSE else (3, dim)
        tensor = StateTensor(name="tokens", shape=shape, dtype=KvDtype.FLOAT32)
        yield StateSlotGroup(name=f"open_{name}", num_layers=config.num_layers_of(kind), tensors=(tensor,))


def _entry_groups(config: DeepseekV4Config) -> Iterator[tuple[str, LayerKind, int]]:
    """Name, layers and dimension of each paged group."""
    groups = (
        (ENTRIES[LayerKind.SPARSE], LayerKind.SPARSE, config.head_dim),
        (INDEX, LayerKind.SPARSE, config.index_head_dim),
        (ENTRIES[LayerKind.HEAVY], LayerKind.HEAVY, config.head_dim),
    )
    return (group for group in groups if config.num_layers_of(group[1]))
