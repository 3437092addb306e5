"""What the engine asks about Llama before it loads a weight, and the family's entry point."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.family import EngineFamily
from openinfer_engine.model import ModelLimits, WeightSource
from openinfer_kernels import Ops
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor
from openinfer_llama.model import LlamaConfig, LlamaModel, load, tensors

_CHANGES_THE_MODEL = (
    "quantization_config",
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "sliding_window",
    "pruned_heads",
)
"""Keys by which relatives of Llama change the forward pass; a config in which one asks for anything is refused."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """None if this family computes the model of this `config.json`, else why not, in one sentence."""
    if config.get("model_type") != "llama":
        return f"not a llama model: its model_type is {config.get('model_type')!r}"
    reasons = [f"{key} is {config[key]!r}, which is not served" for key in _CHANGES_THE_MODEL if config.get(key)]
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act is {config['hidden_act']!r}: only silu is served")
    return "; ".join(reasons) or None


class LlamaDefinition:
    """Implements `openinfer_engine.model.ModelDefinition`, which describes every method."""

    name = "llama"

    def parse(self, config: Mapping[str, Any]) -> LlamaConfig:
        """The typed config."""
        reason = refusal(config)
        if reason is not None:
            raise Refused(reason)
        try:
            parsed = msgspec.convert(config, LlamaConfig)
            _ = parsed.rope
        except (msgspec.ValidationError, ValueError) as error:
            raise InvalidCheckpoint(f"config.json is no valid llama config: {error}") from error
        return parsed

    def limits(self, config: LlamaConfig) -> ModelLimits:
        """The context that it was trained for."""
        return ModelLimits(max_model_tokens=config.max_position_embeddings, vocab_size=config.vocab_size)

    def tensors(self, config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that `load` reads."""
        return tensors(config)

    def ignorable_tensors(self, config: LlamaConfig) -> Collection[str]:
        """RoPE frequencies, which follow from the config, and the head of a tied model, which is its embedding."""
        layers = range(config.num_hidden_layers)
        names = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers}
        return names | {"lm_head.weight"} if config.tie_word_embeddings else names

    def kv_spec(
        self, config: LlamaConfig, *, model_tag: str, dtype: KvDtype, num_ranks: int, rank_index: int
    ) -> KvSpec:
        """K after RoPE, and V, of this rank's KV heads."""
        heads = config.num_key_value_heads // num_ranks
        group = PagedGroup(
            name="attention",
            num_layers=config.num_hidden_layers,
            tensors=tuple(
                PagedTensor(name=name, num_heads=heads, head_dim=config.head_size, dtype=dtype) for name in "kv"
            ),
            rope_tag=f"half layout: {config.rope}",
        )
        return KvSpec(model_tag=model_tag, paged=(group,), num_ranks=num_ranks, rank_index=rank_index)

    def check_ranks(self, config: LlamaConfig, ranks: int) -> None:
        """Each rank has equally many KV heads, and equal pieces of the MLP's width and the vocabulary."""
        sizes = {name: getattr(config, name) for name in ("num_key_value_heads", "intermediate_size", "vocab_size")}
        for name, size in sizes.items():
            if size % ranks:
                raise Refused(f"{ranks} ranks cannot share the model: {name} is {size}")

    def load(
        self,
        config: LlamaConfig,
        weights: WeightSource,
        *,
        ops: Ops,
        communicator: Communicator,
        max_model_tokens: int,
    ) -> LlamaModel:
        """Uploads this rank's weights."""
        return load(config, weights, ops=ops, communicator=communicator, max_model_tokens=max_model_tokens)


class Llama(EngineFamily):
    """The entry point. It brings a definition; the rest is the engine's."""

    definition = LlamaDefinition()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not."""
        return refusal(config)
