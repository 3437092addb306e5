"""What a `config.json` may ask for that this family does not compute, each refused by name.

A config has many keys that say nothing about the mathematics, so unknown keys pass. The keys below are those by which
relatives of DeepSeek-V4-Flash change the forward pass; one that asks for anything is refused rather than ignored.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_deepseek_v4.published import MODEL_TYPE, rope_fields
from openinfer_kernels import RopeConfigError, RopeParameters

ARCHITECTURE = "DeepseekV4ForCausalLM"

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "compression_config": "weights compressed by other tools are not served",
        "attention_bias": "biases in the attention are not served",
        "mlp_bias": "biases in the experts are not served",
        "tie_word_embeddings": "a head tied to the embedding is not served",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "final_logit_softcapping": "soft-capped logits are not served",
        "pruned_heads": "pruned heads are not served",
    }
)
"""Key -> why a config in which it is neither absent, null, false, 0 nor empty is refused."""

ONLY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
    }
)
"""Key -> the one value that is served, where it says anything."""

QUANTISATION: Mapping[str, Any] = MappingProxyType(
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
)
"""The same inside of `quantization_config`."""

RATIOS = (0, 4, 128)


def refusal(config: Mapping[str, Any]) -> str | None:
    """None if this family computes the model of this `config.json`, else all the reasons why not, in one sentence."""
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        return f"not a {MODEL_TYPE} model: its model_type is {model_type!r}"
    return "; ".join([*_layout_reasons(config), *_reasons(config), *_rope_reasons(config)]) or None


def _layout_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    architectures = config.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        yield f"architectures is {architectures}: only {ARCHITECTURE} is served"
    auto_map: object = config.get("auto_map") or {}
    names = cast("dict[str, object]", auto_map) if isinstance(auto_map, dict) else {str(auto_map): None}
    if any(name.startswith("AutoModel") for name in names):
        yield "auto_map names code for the model: code of a checkpoint is never run"
    ratios = cast("list[object]", config.get("compress_ratios") or [])
    unknown = sorted({str(ratio) for ratio in ratios if ratio not in RATIOS})
    if unknown:
        yield f"compress_ratios has {', '.join(unknown)}: only {', '.join(map(str, RATIOS))} are served"


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    for key, reason in CHANGES_THE_MODEL.items():
        if config.get(key):
            yield f"{key} is {_short(config[key])}: {reason}"
    for key, served in ONLY.items():
        if config.get(key, served) != served:
            yield f"{key} is {_short(config[key])}: only {served!r} is served"
    quantisation = cast("dict[str, object]", config.get("quantization_config") or {})
    for key, served in QUANTISATION.items():
        if quantisation.get(key, served) != served:
            yield f"{key} of quantization_config is {_short(quantisation[key])}: only {served!r} is served"
    if config.get("expert_dtype") not in (None, "fp4", "fp8"):
        yield f"expert_dtype is {_short(config['expert_dtype'])}: only 'fp4' and 'fp8' are served"


def _rope_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    for label in ("main", "compress"):
        try:
            RopeParameters.from_config(
                {
                    "rope_parameters": rope_fields(config, label),
                    "max_position_embeddings": config.get("max_position_embeddings"),
                }
            )
        except RopeConfigError as error:
            yield f"the rotary embedding of {label}: {error}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
