"""The entry points of Qwen3.5, dense and mixtures: which configs they serve, what the engine asks before it loads."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import msgspec

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
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_kernels import CacheFormat, RopeConfigError, RopeParameters
from openinfer_kv_cache import KvDtype, KvSpec, StateSlotGroup, StateTensor, attention_group
from openinfer_qwen35 import model
from openinfer_qwen35.model import TEXT, TEXT_MOE, TEXT_OF, VISION_LANGUAGE, VISION_LANGUAGE_MOE

OPENINFER_CONTRACT = 1

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {VISION_LANGUAGE: "Qwen3_5ForConditionalGeneration", TEXT: "Qwen3_5ForCausalLM"}
)
"""`model_type` -> the one architecture of it that is served."""
MOE_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {VISION_LANGUAGE_MOE: "Qwen3_5MoeForConditionalGeneration", TEXT_MOE: "Qwen3_5MoeForCausalLM"}
)
_LAYERS: Mapping[str, str] = MappingProxyType(
    {**PLAIN_DECODER, "compression_config": PLAIN_WEIGHTS["compression_config"]}
)
CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {**_LAYERS, "num_experts": "mixtures of experts are another family's"}
)
"""Of a dense one."""
CHANGES_THE_MIXTURE: Mapping[str, str] = MappingProxyType(
    {**_LAYERS, "mlp_only_layers": "layers with a plain MLP among mixtures are not served"}
)
ONLY: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
)


class Qwen35Definition(ModelDefinition[model.Qwen35Config]):
    """Every dense Qwen3.5, its text model alone."""

    name = "qwen35"
    module = model
    config_type = model.Qwen35Config
    architectures: ClassVar[Mapping[str, str]] = ARCHITECTURES
    changes: ClassVar[Mapping[str, str]] = CHANGES_THE_MODEL
    rank_sizes = ("num_key_value_heads", "linear_num_key_heads", "intermediate_size")
    cache_formats = frozenset(CacheFormat)

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type not in self.architectures:
            return f"not a {' or '.join(self.architectures)} model: its model_type is {model_type!r}"
        text = model.text_config(config)
        if text is None:
            return f"text_config is {shortened(config.get('text_config'))}: it must be a JSON object"
        return "; ".join(self.reasons(config, text)) or None

    def reasons(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
        """Why a model of the family's types is not served."""
        model_type = str(config.get("model_type"))
        yield from architecture_reasons(config, self.architectures[model_type])
        yield from code_reasons(config)
        text_type = TEXT_OF.get(model_type, model_type)
        if text.get("model_type") != text_type:
            yield f"the model_type of text_config is {text.get('model_type')!r}: only {text_type} is served"
        said = {**config, **{key: value for key, value in text.items() if value}}
        yield from key_reasons(said, self.changes)
        yield from value_reasons(text, ONLY)
        yield from rope_reasons(text)
        yield from quantisation_reasons(said)
        if _is_yarn(text):
            yield "rope_type is 'yarn': only the plain rotary embedding is served"

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return model.text_config(config) or {}

    def ignorable_tensors(self, config: model.Qwen35Config) -> Collection[str]:
        """The vision tower, the layer that drafts tokens, and the head of a tied model, which is its embedding."""
        names = {"model.visual.", "mtp."}
        return names | {"lm_head.weight"} if config.tie_word_embeddings else names

    def adapted_matrices(self, config: model.Qwen35Config) -> Sequence[tuple[StoredMatrix, Shard]]:
        return model.adapted_matrices(config)

    def kv_spec(
        self,
        config: model.Qwen35Config,
        *,
        model_tag: str,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
        num_ranks: int,
        rank_index: int,
    ) -> KvSpec:
        """K after norm and RoPE, and V, of full attention; states and convolution inputs of linear attention."""
        heads = config.num_key_value_heads // num_ranks
        attention = attention_group(
            name=model.ATTENTION,
            num_layers=config.num_layers_of(model.LayerKind.FULL),
            num_heads=heads,
            head_dim=config.head_dim,
            dtype=kv_dtype,
            rope_tag=f"half layout of the first {config.rotary_dim} dimensions: {config.rope}",
        )
        channels = sum(config.linear_heights) // num_ranks
        value_heads = config.linear_num_value_heads // num_ranks
        linear_attention = StateSlotGroup(
            name=model.LINEAR_ATTENTION,
            num_layers=config.num_layers_of(model.LayerKind.LINEAR),
            tensors=(
                StateTensor(name="conv", shape=(channels, config.linear_conv_kernel_dim - 1), dtype=state_dtype),
                StateTensor(
                    name="state",
                    shape=(value_heads, config.linear_key_head_dim, config.linear_value_head_dim),
                    dtype=KvDtype.FLOAT32,
                ),
            ),
        )
        return KvSpec(
            model_tag=model_tag,
            paged=(attention,),
            slots=(linear_attention,),
            num_ranks=num_ranks,
            rank_index=rank_index,
        )


class Qwen35MoeDefinition(Qwen35Definition):
    """Every mixture of Qwen3.5, Qwen3.6 and their relatives, its text model alone."""

    name = "qwen35_moe"
    config_type = model.Qwen35MoeConfig
    architectures = MOE_ARCHITECTURES
    changes = CHANGES_THE_MIXTURE
    rank_sizes = ("num_key_value_heads", "linear_num_key_heads")

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """`num_local_experts` is how transformers 5 spells `num_experts` of its mixtures."""
        text = model.text_config(config) or {}
        local: object = text.get("num_local_experts")
        return text if local is None else {"num_experts": local, **text}

    def as_stored(self, config: model.Qwen35MoeConfig, tensors: Mapping[str, TensorInfo]) -> model.Qwen35MoeConfig:
        """With experts one by one where the checkpoint has them so."""
        first = f"{config.tensor_prefix}layers.0.mlp.experts.0.gate_proj."
        is_stacked = not any(name.startswith(first) for name in tensors)
        return msgspec.structs.replace(config, experts_are_stacked=is_stacked)

    def check_ranks(self, config: model.Qwen35Config, ranks: int) -> None:
        super().check_ranks(config, ranks)
        check_expert_ranks(cast("model.Qwen35MoeConfig", config).num_experts, ranks)

    def reasons(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
        yield from super().reasons(config, text)
        yield from value_reasons(text, {"decoder_sparse_step": 1})
        shared, routed = text.get("shared_expert_intermediate_size"), text.get("moe_intermediate_size")
        if shared != routed:
            yield (
                f"shared_expert_intermediate_size is {shared}: only a shared expert as wide as the others is served, "
                f"moe_intermediate_size {routed}"
            )


class Qwen35(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for the text model of every dense Qwen3.5."""

    definition = Qwen35Definition()


class Qwen35Moe(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for the text model of every mixture of Qwen3.5."""

    definition = Qwen35MoeDefinition()


def _is_yarn(text: Mapping[str, Any]) -> bool:
    try:
        return RopeParameters.from_config(text).yarn is not None
    except RopeConfigError:
        return False
