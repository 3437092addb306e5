"""What a `config.json` may ask for that this family does not compute, each refused by name.

A config has many keys that say nothing about the mathematics, so unknown keys pass. The keys below are those by which
published relatives of DeepSeek-V2 change the forward pass; one that asks for anything is refused rather than ignored.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_kernels import RopeConfigError, RopeParameters

MODEL_TYPE = "deepseek_v2"
ARCHITECTURE = "DeepseekV2ForCausalLM"
PUBLISHED_CODE = "modeling_deepseek.DeepseekV2ForCausalLM"
"""What `auto_map` names in the published checkpoints: the code that this family stands for, and never runs."""

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "quantised weights are not served; use the BF16 checkpoint",
        "compression_config": "compressed weights are not served; use the BF16 checkpoint",
        "attention_bias": "biases in the attention are not served",
        "mlp_bias": "biases in the MLP are not served",
        "norm_topk_prob": "renormalised router weights are not served",
        "use_sliding_window": "a sliding window in use is not served, only full attention",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "final_logit_softcapping": "soft-capped logits are not served",
        "pruned_heads": "pruned heads are not served",
    }
)
"""Key -> why a config in which it is neither absent, null, false, 0 nor empty is refused."""

ONLY: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu", "scoring_func": "softmax", "moe_layer_freq": 1})
"""Key -> the one value that is served, where it says anything."""


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
    for key, served in ONLY.items():
        if config.get(key, served) != served:
            yield f"{key} is {_short(config[key])}: only {served!r} is served"
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads is {kv_heads}: only num_attention_heads, {heads}, is served"
    auto_map: object = config.get("auto_map")
    named = cast("dict[str, object]", auto_map).get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
    if named not in (None, PUBLISHED_CODE):
        yield f"auto_map names {named} for AutoModelForCausalLM: code of a checkpoint is never run"
    try:
        RopeParameters.from_config(config)
    except RopeConfigError as error:
        yield str(error)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
