"""`Qwen35`: the family's entry point, which configs it serves, and what the engine asks before it loads a weight."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

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
from openinfer_kernels import RopeConfigError, RopeParameters
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor
from openinfer_qwen35 import model
from openinfer_qwen35.model import TEXT, VISION_LANGUAGE

OPENINFER_CONTRACT = 1

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {VISION_LANGUAGE: "Qwen3_5ForConditionalGeneration", TEXT: "Qwen3_5ForCausalLM"}
)
"""`model_type` -> the one architecture of it that is served."""
CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {**PLAIN_WEIGHTS, **PLAIN_DECODER, "num_experts": "mixtures of experts are another family's"}
)
ONLY: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
)


class Qwen35Definition(ModelDefinition[model.Qwen35Config]):
    """Every dense Qwen3.5, its text model alone."""

    name = "qwen35"
    module = model
    config_type = model.Qwen35Config
    rank_sizes = ("num_key_value_heads", "linear_num_key_heads", "intermediate_size")

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            return f"not a {TEXT} model: its model_type is {model_type!r}"
        text = model.text_config(config)
        if text is None:
            return f"text_config is {shortened(config.get('text_config'))}: it must be a JSON object"
        return "; ".join(_reasons(config, text)) or None

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return model.text_config(config) or {}

    def ignorable_tensors(self, config: model.Qwen35Config) -> Collection[str]:
        """The vision tower, the layer that drafts tokens, and the head of a tied model, which is its embedding."""
        names = {"model.visual.", "mtp."}
        return names | {"lm_head.weight"} if config.tie_word_embeddings else names

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
        attention = PagedGroup(
            name=model.ATTENTION,
            num_layers=config.num_layers_of(model.LayerKind.FULL),
            tensors=tuple(
                PagedTensor(name=name, num_heads=heads, head_dim=config.head_dim, dtype=kv_dtype) for name in "kv"
            ),
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


class Qwen35(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for the text model of every dense Qwen3.5."""

    definition = Qwen35Definition()


def _reasons(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    yield from architecture_reasons(config, ARCHITECTURES[str(config.get("model_type"))])
    yield from code_reasons(config)
    if text.get("model_type") != TEXT:
        yield f"the model_type of text_config is {text.get('model_type')!r}: only {TEXT} is served"
    said = {**config, **{key: value for key, value in text.items() if value}}
    yield from key_reasons(said, CHANGES_THE_MODEL)
    yield from value_reasons(text, ONLY)
    yield from rope_reasons(text)
    if _is_yarn(text):
        yield "rope_type is 'yarn': only the plain rotary embedding is served"


def _is_yarn(text: Mapping[str, Any]) -> bool:
    try:
        return RopeParameters.from_config(text).yarn is not None
    except RopeConfigError:
        return False
