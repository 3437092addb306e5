"""`Llama`: the family's entry point, which configs it serves, and what the engine asks before it loads a weight."""

from collections.abc import Mapping, Sequence
from typing import Any

from openinfer_engine.family import EngineFamily
from openinfer_engine.model import ModelDefinition, ModelLimits, Shard
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.quantization_config import quantisation_reasons
from openinfer_kernels import CacheFormat
from openinfer_kv_cache import KvDtype, KvSpec, attention_group
from openinfer_llama import model

_CHANGES_THE_MODEL = (
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "pruned_heads",
)
"""Keys by which relatives of Llama change the forward pass; a config in which one asks for anything is refused."""


class LlamaDefinition(ModelDefinition[model.LlamaConfig]):
    """Llama 2 and 3, and Mistral."""

    name = "llama"
    module = model
    config_type = model.LlamaConfig
    rank_sizes = ("num_key_value_heads", "intermediate_size", "vocab_size")
    cache_formats = frozenset(CacheFormat)

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        if config.get("model_type") not in {"llama", model.MISTRAL}:
            return f"not a llama model: its model_type is {config.get('model_type')!r}"
        # of Llama itself no window is published
        keys = _CHANGES_THE_MODEL if config["model_type"] == model.MISTRAL else (*_CHANGES_THE_MODEL, "sliding_window")
        reasons = [f"{key} is {config[key]!r}, which is not served" for key in keys if config.get(key)]
        if config.get("hidden_act", "silu") != "silu":
            reasons.append(f"hidden_act is {config['hidden_act']!r}: only silu is served")
        reasons += quantisation_reasons(config)
        return "; ".join(reasons) or None

    def limits(self, config: model.LlamaConfig) -> ModelLimits:
        """The context that it was trained for."""
        return ModelLimits(max_model_tokens=config.max_position_embeddings, vocab_size=config.vocab_size)

    def adapted_matrices(self, config: model.LlamaConfig) -> Sequence[tuple[StoredMatrix, Shard]]:
        return model.adapted_matrices(config)

    def kv_spec(
        self,
        config: model.LlamaConfig,
        *,
        model_tag: str,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
        num_ranks: int,
        rank_index: int,
    ) -> KvSpec:
        """K after RoPE, and V, of this rank's KV heads."""
        del state_dtype
        heads = config.num_key_value_heads // num_ranks
        group = attention_group(
            name=model.ATTENTION,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            head_dim=config.head_size,
            dtype=kv_dtype,
            rope_tag=f"half layout: {config.rope}",
            window_tokens=config.window,
        )
        return KvSpec(model_tag=model_tag, paged=(group,), num_ranks=num_ranks, rank_index=rank_index)


class Llama(EngineFamily):
    """The entry point. It brings a definition; the rest is the engine's."""

    definition = LlamaDefinition()
