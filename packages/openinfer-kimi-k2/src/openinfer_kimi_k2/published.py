"""How Kimi publishes a model: the two layouts of `config.json`, and the three ways its matrices are stored."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, cast

TEXT = "kimi_k2"
VISION_LANGUAGE = "kimi_k25"
VISION_PARTS = ("vision_tower.", "mm_projector.")
"""What the names of tensors begin with that are not the text model's."""

_INT4 = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"}


class Storage(StrEnum):
    """How a checkpoint stores its matrices; router, embedding and head are BF16 in all of them."""

    BF16 = "bf16"
    FP8_BLOCKS = "fp8"
    """All others in E4M3 with a scale per block of 128 x 128: K2-Instruct."""
    INT4_EXPERTS = "int4"
    """Those of routed experts in INT4 with a scale per 32 inputs, the others in BF16: K2-Thinking, K2.5, K2.6."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The text model's part of a config, in which `quantization_config` is, wherever it was; None if there is none.

    `tensor_prefix` is added: what the names of its tensors begin with.
    """
    model_type = config.get("model_type")
    if model_type == TEXT:
        return {**config, "tensor_prefix": ""}
    text: object = config.get("text_config")
    if model_type != VISION_LANGUAGE or not isinstance(text, dict):
        return None
    above = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if config.get(key) is not None}
    return {**above, **cast("dict[str, Any]", text), "tensor_prefix": "language_model."}


def storage(text: Mapping[str, Any]) -> Storage:
    """How the matrices of this text model are stored.

    Raises:
        ValueError: in a way that is not served; says which.
    """
    given: object = text.get("quantization_config")
    if not given:
        return Storage.BF16
    if not isinstance(given, dict):
        raise ValueError(f"quantization_config must be a JSON object, not {given!r}")
    fields = cast("dict[str, Any]", given)
    method = fields.get("quant_method")
    if method == "fp8":
        _require(fields, {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})
        return Storage.FP8_BLOCKS
    if method == "compressed-tensors":
        _require(fields, {"format": "pack-quantized"})
        for group in _object(fields, "config_groups").values():
            each = _object({"a group of config_groups": group}, "a group of config_groups")
            _require(_object(each, "weights"), _INT4)
            _require(each, {"input_activations": None, "output_activations": None})
        return Storage.INT4_EXPERTS
    raise ValueError(f"quant_method is {method!r}: only fp8 and compressed-tensors are served")


def _object(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What `key` holds; empty where it is absent or null."""
    value: object = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} of quantised weights must be a JSON object, not {value!r}")
    return cast("dict[str, Any]", value)


def _require(fields: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    for key, value in served.items():
        if fields.get(key, value) != value:
            raise ValueError(f"{key} of quantised weights is {fields[key]!r}: only {value!r} is served")
