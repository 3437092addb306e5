"""What a `config.json` may ask for that this family does not compute, each refused by name.

A config has many keys that say nothing about the mathematics, so unknown keys pass. The keys below are those by which
published relatives of Kimi-K2 change the forward pass; one that asks for anything is refused rather than ignored.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_kernels import RopeConfigError, RopeParameters
from openinfer_kimi_k2.published import TEXT, VISION_LANGUAGE, storage, text_config

ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "compression_config": "compressed weights are served as quantization_config says them",
        "attention_bias": "biases in the attention are not served",
        "mlp_bias": "biases in the MLP are not served",
        "use_sliding_window": "a sliding window in use is not served, only full attention",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "final_logit_softcapping": "soft-capped logits are not served",
        "pruned_heads": "pruned heads are not served",
    }
)
"""Key -> why a config in which it is neither absent, null, false, 0 nor empty is refused."""

ONLY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }
)
"""Key -> the one value that is served, where it says anything."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """None if this family computes the model of this `config.json`, else all the reasons why not, in one sentence."""
    text = text_config(config)
    if text is None:
        return f"not a {TEXT} or {VISION_LANGUAGE} model: its model_type is {config.get('model_type')!r}"
    return "; ".join(_reasons(config, text)) or None


def _reasons(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    named: object = config.get("architectures") or []
    if named and named not in [[each] for each in ARCHITECTURES]:
        yield f"architectures is {_short(named)}: only {' or '.join(ARCHITECTURES)} is served"
    for key, reason in CHANGES_THE_MODEL.items():
        if text.get(key):
            yield f"{key} is {_short(text[key])}: {reason}"
    for key, served in ONLY.items():
        if text.get(key, served) != served:
            yield f"{key} is {_short(text[key])}: only {served!r} is served"
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads is {kv_heads}: only num_attention_heads, {heads}, is served"
    try:
        storage(text)
    except ValueError as error:
        yield str(error)
    try:
        RopeParameters.from_config(cast("dict[str, Any]", text))
    except RopeConfigError as error:
        yield str(error)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
