"""`Gemma`: the family's entry point, which configs it serves, and what the engine asks before it loads a weight."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from openinfer_engine.family import EngineFamily
from openinfer_engine.model import ModelDefinition, ModelLimits
from openinfer_engine.refusals import (
    PLAIN_WEIGHTS,
    architecture_reasons,
    code_reasons,
    key_reasons,
    shortened,
    value_reasons,
)
from openinfer_gemma import model
from openinfer_gemma.config import GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES, GemmaConfig, text_config
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        GEMMA2: "Gemma2ForCausalLM",
        GEMMA3: "Gemma3ForCausalLM",
        GEMMA3_WITH_IMAGES: "Gemma3ForConditionalGeneration",
    }
)
"""`model_type` -> the one architecture of it that is served."""
_CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_WEIGHTS,
        "attention_bias": "biases in the attention are not served",
        "mlp_bias": "biases in the MLP are not served",
        "pruned_heads": "pruned heads are not served",
        "use_bidirectional_attention": "attention to later tokens is not served",
    }
)
_ONLY: Mapping[str, Any] = MappingProxyType({"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True})


class GemmaDefinition(ModelDefinition[GemmaConfig]):
    """Gemma-2, and the text model of Gemma-3."""

    name = "gemma"
    module = model
    config_type = GemmaConfig
    rank_sizes = ("num_key_value_heads", "intermediate_size", "vocab_size")

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            return f"not a gemma2 or gemma3 model: its model_type is {model_type!r}"
        text = text_config(config)
        if text is None:
            return f"text_config is {shortened(config.get('text_config'))}: it must be a JSON object"
        return "; ".join(_reasons(config, text)) or None

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_config(config) or {}

    def limits(self, config: GemmaConfig) -> ModelLimits:
        """The context that it was trained for."""
        return ModelLimits(max_model_tokens=config.max_position_embeddings, vocab_size=config.vocab_size)

    def ignorable_tensors(self, config: GemmaConfig) -> Collection[str]:
        """What makes tokens of images, and the head, which is the embedding."""
        del config
        return {"lm_head.weight", "language_model.lm_head.weight", "vision_tower.", "multi_modal_projector."}

    def kv_spec(
        self,
        config: GemmaConfig,
        *,
        model_tag: str,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
        num_ranks: int,
        rank_index: int,
    ) -> KvSpec:
        """K after RoPE, and V, of this rank's KV heads: a group for each kind of layers, one of them with a window."""
        del state_dtype
        heads = config.num_key_value_heads // num_ranks
        tensors = tuple(
            PagedTensor(name=name, num_heads=heads, head_dim=config.head_dim, dtype=kv_dtype) for name in "kv"
        )
        groups = tuple(
            PagedGroup(
                name=model.PAGED_GROUPS[kind],
                num_layers=config.layer_kinds.count(kind),
                tensors=tensors,
                rope_tag=f"half layout: {config.rope_parameters[kind]}",
                window_tokens=config.window_of(kind),
            )
            for kind in sorted({*config.layer_kinds})
        )
        return KvSpec(model_tag=model_tag, paged=groups, num_ranks=num_ranks, rank_index=rank_index)


class Gemma(EngineFamily):
    """The entry point. It brings a definition; the rest is the engine's."""

    definition = GemmaDefinition()


def _reasons(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    yield from architecture_reasons(config, ARCHITECTURES[config["model_type"]])
    yield from code_reasons(config)
    if text["qk_norm"] and text.get("model_type") != GEMMA3:
        yield f"the model_type of text_config is {text.get('model_type')!r}: only {GEMMA3} is served"
    yield from key_reasons({**config, **{key: value for key, value in text.items() if value}}, _CHANGES_THE_MODEL)
    yield from value_reasons(text, _ONLY)
    if text["qk_norm"] and text.get("attn_logit_softcapping"):
        # transformers 5 reads the key and caps nothing, earlier ones did.
        yield f"attn_logit_softcapping is {text['attn_logit_softcapping']}: scores of Gemma-3 are not capped"
