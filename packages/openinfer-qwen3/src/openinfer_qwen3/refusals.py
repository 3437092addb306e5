"""What a `config.json` may ask for that this family does not compute, each refused by name.

A config has many keys that say nothing about the mathematics, so unknown keys pass. The keys below are those by which
published relatives of Qwen3 change the forward pass; one that asks for anything is refused rather than ignored.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_kernels import RopeConfigError, RopeParameters

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "quantised weights are not served; use the BF16 checkpoint",
        "compression_config": "compressed weights are not served; use the BF16 checkpoint",
        "use_sliding_window": "a sliding window in use is not served, only full attention",
        "dual_chunk_attention_config": "dual chunk attention is not served, only full attention",
        "attention_chunk_size": "chunked attention is not served, only full attention",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "final_logit_softcapping": "soft-capped logits are not served",
        "query_pre_attn_scalar": "a scale of the scores other than head_dim^-0.5 is not served",
        "mlp_bias": "biases in the MLP are not served",
        "num_experts": "mixtures of experts are another family's",
        "no_rope_layers": "layers without rotary embedding are not served",
        "pruned_heads": "pruned heads are not served",
    }
)
"""Key -> why a config in which it is neither absent, null, false, 0 nor empty is refused."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """None if this family computes the model of this `config.json`, else all the reasons why not, in one sentence."""
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        return f"not a {MODEL_TYPE} model: its model_type is {model_type!r}"
    return "; ".join(_reasons(config)) or None


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    architectures = config.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        yield f"architectures is {architectures}: only {ARCHITECTURE} is served"
    for key, reason in CHANGES_THE_MODEL.items():
        if config.get(key):
            yield f"{key} is {_short(config[key])}: {reason}"
    layer_types: object = config.get("layer_types") or []
    kinds = cast("list[object]", layer_types) if isinstance(layer_types, list) else [layer_types]
    if any(kind != "full_attention" for kind in kinds):
        yield f"layer_types is {_short(config['layer_types'])}: only full_attention is served"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {config['hidden_act']!r}: only silu is served"
    if config.get("partial_rotary_factor") not in (None, 1):
        yield f"partial_rotary_factor is {config['partial_rotary_factor']}: only whole heads are rotated"
    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map:
        yield "auto_map names code for AutoModelForCausalLM: code of a checkpoint is never run"
    try:
        RopeParameters.from_config(config)
    except RopeConfigError as error:
        yield str(error)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
