"""The entry points of Qwen3, dense and mixtures: which configs they serve, what the engine asks before it loads."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

from openinfer_engine.family import EngineFamily
from openinfer_engine.model import ModelDefinition, Shard
from openinfer_engine.refusals import (
    PLAIN_DECODER,
    PLAIN_WEIGHTS,
    architecture_reasons,
    code_reasons,
    key_reasons,
    rope_reasons,
    shortened,
    value_reasons,
)
from openinfer_engine.weights.experts import check_expert_ranks
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.quantization_config import quantisation_reasons
from openinfer_kernels import CacheFormat
from openinfer_kv_cache import KvDtype, KvSpec, attention_group
from openinfer_qwen3 import model

OPENINFER_CONTRACT = 1

_ATTENTION: Mapping[str, str] = MappingProxyType(
    {
        "compression_config": PLAIN_WEIGHTS["compression_config"],
        **{key: reason for key, reason in PLAIN_DECODER.items() if key != "attention_bias"},
        "dual_chunk_attention_config": "dual chunk attention is not served, only full attention",
        "attention_chunk_size": "chunked attention is not served, only full attention",
        "query_pre_attn_scalar": "a scale of the scores other than head_dim^-0.5 is not served",
        "no_rope_layers": "layers without rotary embedding are not served",
    }
)
CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {**_ATTENTION, "num_experts": "mixtures of experts are another family's"}
)
"""Of a dense one."""
CHANGES_THE_MIXTURE: Mapping[str, str] = MappingProxyType(
    {
        **_ATTENTION,
        "shared_expert_intermediate_size": "shared experts are another family's",
        "qkv_bias": "biases of Q, K and V under this name are not served",
    }
)


class Qwen3Definition(ModelDefinition[model.Qwen3Config]):
    """Every dense Qwen3."""

    name = "qwen3"
    module = model
    config_type = model.Qwen3Config
    rank_sizes = ("num_key_value_heads", "intermediate_size")
    cache_formats = frozenset(CacheFormat)
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    changes: ClassVar[Mapping[str, str]] = CHANGES_THE_MODEL

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type != self.name:
            return f"not a {self.name} model: its model_type is {model_type!r}"
        return "; ".join(self._reasons(config)) or None

    def adapted_matrices(self, config: model.Qwen3Config) -> Sequence[tuple[StoredMatrix, Shard]]:
        return model.adapted_matrices(config)

    def kv_spec(
        self,
        config: model.Qwen3Config,
        *,
        model_tag: str,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
        num_ranks: int,
        rank_index: int,
    ) -> KvSpec:
        """K after norm and RoPE, and V, of this rank's KV heads."""
        del state_dtype
        heads = config.num_key_value_heads // num_ranks
        group = attention_group(
            name=model.ATTENTION,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            head_dim=config.head_dim,
            dtype=kv_dtype,
            rope_tag=f"half layout: {config.rope}",
        )
        return KvSpec(model_tag=model_tag, paged=(group,), num_ranks=num_ranks, rank_index=rank_index)

    def _reasons(self, config: Mapping[str, Any]) -> Iterator[str]:
        yield from architecture_reasons(config, self.architecture)
        yield from key_reasons(config, self.changes)
        layer_types: object = config.get("layer_types") or []
        kinds = cast("list[object]", layer_types) if isinstance(layer_types, list) else [layer_types]
        if any(kind != "full_attention" for kind in kinds):
            yield f"layer_types is {shortened(config['layer_types'])}: only full_attention is served"
        yield from value_reasons(config, {"hidden_act": "silu", "use_qk_norm": True})
        if config.get("partial_rotary_factor") not in (None, 1):
            yield f"partial_rotary_factor is {config['partial_rotary_factor']}: only whole heads are rotated"
        yield from code_reasons(config, prefix="AutoModelForCausalLM")
        yield from rope_reasons(config)
        yield from quantisation_reasons(config)
        if config.get("quantization_config") and config.get("attention_bias"):
            yield "attention_bias is True: biases next to quantised weights are not served"


class Qwen3MoeDefinition(Qwen3Definition):
    """Every mixture of Qwen3: 30B-A3B, 235B-A22B, Qwen3-Coder and their relatives."""

    name = "qwen3_moe"
    config_type = model.Qwen3MoeConfig
    rank_sizes = ("num_key_value_heads", "dense_size")
    architecture = "Qwen3MoeForCausalLM"
    changes = CHANGES_THE_MIXTURE

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """`num_local_experts` is how transformers 5 spells `num_experts`."""
        local: object = config.get("num_local_experts")
        return {"num_experts": local, **config} if local is not None else config

    def check_ranks(self, config: model.Qwen3Config, ranks: int) -> None:
        super().check_ranks(config, ranks)
        check_expert_ranks(cast("model.Qwen3MoeConfig", config).num_experts, ranks)


class Qwen3(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for every dense Qwen3."""

    definition = Qwen3Definition()


class Qwen3Moe(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for every mixture of Qwen3."""

    definition = Qwen3MoeDefinition()
