"""`Qwen3`: the family's entry point, which configs it serves, and what the engine asks before it loads a weight."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_engine.family import EngineFamily
from openinfer_engine.model import ModelDefinition
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
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor
from openinfer_qwen3 import model

OPENINFER_CONTRACT = 1

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_WEIGHTS,
        **{key: reason for key, reason in PLAIN_DECODER.items() if key != "attention_bias"},
        "dual_chunk_attention_config": "dual chunk attention is not served, only full attention",
        "attention_chunk_size": "chunked attention is not served, only full attention",
        "query_pre_attn_scalar": "a scale of the scores other than head_dim^-0.5 is not served",
        "num_experts": "mixtures of experts are another family's",
        "no_rope_layers": "layers without rotary embedding are not served",
    }
)


class Qwen3Definition(ModelDefinition[model.Qwen3Config]):
    """Every dense Qwen3."""

    name = "qwen3"
    module = model
    config_type = model.Qwen3Config
    rank_sizes = ("num_key_value_heads", "intermediate_size")

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type != self.name:
            return f"not a {self.name} model: its model_type is {model_type!r}"
        return "; ".join(_reasons(config)) or None

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
        group = PagedGroup(
            name=model.ATTENTION,
            num_layers=config.num_hidden_layers,
            tensors=tuple(
                PagedTensor(name=name, num_heads=heads, head_dim=config.head_dim, dtype=kv_dtype) for name in "kv"
            ),
            rope_tag=f"half layout: {config.rope}",
        )
        return KvSpec(model_tag=model_tag, paged=(group,), num_ranks=num_ranks, rank_index=rank_index)


class Qwen3(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for every dense Qwen3."""

    definition = Qwen3Definition()


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    yield from architecture_reasons(config, "Qwen3ForCausalLM")
    yield from key_reasons(config, CHANGES_THE_MODEL)
    layer_types: object = config.get("layer_types") or []
    kinds = cast("list[object]", layer_types) if isinstance(layer_types, list) else [layer_types]
    if any(kind != "full_attention" for kind in kinds):
        yield f"layer_types is {shortened(config['layer_types'])}: only full_attention is served"
    yield from value_reasons(config, {"hidden_act": "silu"})
    if config.get("partial_rotary_factor") not in (None, 1):
        yield f"partial_rotary_factor is {config['partial_rotary_factor']}: only whole heads are rotated"
    yield from code_reasons(config, prefix="AutoModelForCausalLM")
    yield from rope_reasons(config)
