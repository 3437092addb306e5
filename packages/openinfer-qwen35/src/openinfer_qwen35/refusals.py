"""What a `config.json` may ask for that this family does not compute, each refused by name.

A config has many keys that say nothing about the mathematics, so unknown keys pass. The keys below are those by which
published relatives of Qwen3.5 change the forward pass; one that asks for anything is refused rather than ignored.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_kernels import RopeConfigError, RopeParameters
from openinfer_qwen35.published import TEXT, VISION_LANGUAGE, text_config

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {VISION_LANGUAGE: "Qwen3_5ForConditionalGeneration", TEXT: "Qwen3_5ForCausalLM"}
)
"""`model_type` -> the one architecture of it that is served."""

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "quantised weights are not served; use the BF16 checkpoint",
        "compression_config": "compressed weights are not served; use the BF16 checkpoint",
        "attention_bias": "biases in the attention are not served",
        "use_sliding_window": "a sliding window in use is not served, only full attention",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "final_logit_softcapping": "soft-capped logits are not served",
        "mlp_bias": "biases in the MLP are not served",
        "num_experts": "mixtures of experts are another family's",
        "pruned_heads": "pruned heads are not served",
    }
)
"""Key -> why a config in which it is neither absent, null, false, 0 nor empty is refused."""

ONLY: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
)
"""Key -> the one value that is served, where it says anything."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """None if this family computes the model of this `config.json`, else all the reasons why not, in one sentence."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        return f"not a {TEXT} model: its model_type is {model_type!r}"
    text = text_config(config)
    if text is None:
        return f"text_config is {_short(config.get('text_config'))}: it must be a JSON object"
    return "; ".join([*_layout_reasons(config, ARCHITECTURES[str(model_type)]), *_reasons(config, text)]) or None


def _layout_reasons(config: Mapping[str, Any], architecture: str) -> Iterator[str]:
    architectures = config.get("architectures") or [architecture]
    if architectures != [architecture]:
        yield f"architectures is {architectures}: only {architecture} is served"
    auto_map: object = config.get("auto_map") or {}
    names = cast("dict[str, object]", auto_map) if isinstance(auto_map, dict) else {str(auto_map): None}
    if any(name.startswith("AutoModel") for name in names):
        yield "auto_map names code for the model: code of a checkpoint is never run"


def _reasons(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    if text.get("model_type") != TEXT:
        yield f"the model_type of text_config is {text.get('model_type')!r}: only {TEXT} is served"
    for key, reason in CHANGES_THE_MODEL.items():
        value = text.get(key) or config.get(key)
        if value:
            yield f"{key} is {_short(value)}: {reason}"
    for key, served in ONLY.items():
        if text.get(key, served) != served:
            yield f"{key} is {_short(text[key])}: only {served!r} is served"
    try:
        rope = RopeParameters.from_config(text)
    except RopeConfigError as error:
        yield str(error)
    else:
        if rope.yarn is not None:
            yield "rope_type is 'yarn': only the plain rotary embedding is served"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
