"""The entry points of DeepSeek-V2 and V3, which configs they serve, and what the engine asks before it loads."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from openinfer_deepseek import model
from openinfer_engine.family import EngineFamily
from openinfer_engine.model import ModelDefinition
from openinfer_engine.refusals import (
    PLAIN_DECODER,
    PLAIN_WEIGHTS,
    architecture_reasons,
    code_reasons,
    key_reasons,
    rope_reasons,
    value_reasons,
)
from openinfer_engine.weights.quantization_config import quantisation_reasons
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor

OPENINFER_CONTRACT = 1

_V2_ALONE = {
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
    "tensor_prefix": "",
}
"""What a V2 is in the keys of its successors, which mean nothing in its own config."""
V3_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
"""What a V3's config need not say."""

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {**PLAIN_WEIGHTS, **PLAIN_DECODER, "norm_topk_prob": "renormalised router weights are not served"}
)
"""Of a V2."""


class LatentDefinition(ModelDefinition[model.DeepseekConfig]):
    """What all models over latents answer alike; which configs are its own, each family says."""

    module = model
    config_type = model.DeepseekConfig
    rank_sizes = ("num_attention_heads", "n_routed_experts", "intermediate_size", "shared_size")
    dealt_sizes = ("n_routed_experts",)

    def ignorable_tensors(self, config: model.DeepseekConfig) -> Collection[str]:
        """Also layers that draft tokens."""
        prefix, layers = config.tensor_prefix, config.num_hidden_layers
        names = {f"{prefix}{name}" for name in super().ignorable_tensors(config)}
        return names | {f"{prefix}model.layers.{layers + i}." for i in range(config.num_nextn_predict_layers)}

    def kv_spec(
        self,
        config: model.DeepseekConfig,
        *,
        model_tag: str,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
        num_ranks: int,
        rank_index: int,
    ) -> KvSpec:
        """The latent after its norm, then the shared key after RoPE: the same on every rank, as all heads read it."""
        del state_dtype
        group = PagedGroup(
            name=model.ATTENTION,
            num_layers=config.num_hidden_layers,
            tensors=(
                PagedTensor(
                    name="latent", num_heads=1, head_dim=config.kv_lora_rank + config.qk_rope_head_dim, dtype=kv_dtype
                ),
            ),
            rope_tag=f"pairs of the last {config.qk_rope_head_dim} dimensions: {config.rope}",
        )
        return KvSpec(model_tag=model_tag, paged=(group,), num_ranks=num_ranks, rank_index=rank_index)


class DeepseekV2Definition(LatentDefinition):
    """DeepSeek-V2-Lite, and the larger V2."""

    name = "deepseek_v2"

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type != self.name:
            return f"not a {self.name} model: its model_type is {model_type!r}"
        return "; ".join(_v2_reasons(config)) or None

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, **_V2_ALONE}


class DeepseekV3Definition(LatentDefinition):
    """DeepSeek-V3, R1 and Moonlight, in BF16 or quantised."""

    name = "deepseek_v3"

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type != self.name:
            return f"not a {self.name} model: its model_type is {model_type!r}"
        return "; ".join(_v3_reasons(config)) or None

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**V3_ROUTER, **config, "tensor_prefix": ""}


class DeepseekV2(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for DeepSeek-V2-Lite and its relatives with a softmax router."""

    definition = DeepseekV2Definition()


class DeepseekV3(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for DeepSeek-V3 and its relatives."""

    definition = DeepseekV3Definition()


def latent_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """Why no family of latent models serves a config."""
    yield from value_reasons(config, {"hidden_act": "silu", "moe_layer_freq": 1})
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads is {kv_heads}: only num_attention_heads, {heads}, is served"
    yield from rope_reasons(config)


def v3_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """Why no family with V3's router serves a config."""
    only = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
    yield from value_reasons(config, only)
    yield from latent_reasons(config)


def _v3_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    yield from architecture_reasons(config, "DeepseekV3ForCausalLM")
    yield from key_reasons(config, {**PLAIN_DECODER, "compression_config": PLAIN_WEIGHTS["compression_config"]})
    yield from code_reasons(config, prefix="AutoModelForCausalLM", published="modeling_deepseek.DeepseekV3ForCausalLM")
    yield from v3_reasons(config)
    yield from quantisation_reasons(config)


def _v2_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    yield from architecture_reasons(config, "DeepseekV2ForCausalLM")
    yield from key_reasons(config, CHANGES_THE_MODEL)
    yield from value_reasons(config, {"scoring_func": "softmax"})
    yield from code_reasons(config, prefix="AutoModelForCausalLM", published="modeling_deepseek.DeepseekV2ForCausalLM")
    yield from latent_reasons(config)
