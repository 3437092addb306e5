"""The two layouts of a published `config.json`: a text model's own, and one part of a vision-language model's."""

from collections.abc import Mapping
from typing import Any, cast

VISION_LANGUAGE = "qwen3_5"
TEXT = "qwen3_5_text"

_IMAGE_ROPE_FIELDS = frozenset({"mrope_section", "mrope_interleaved"})
"""Which frequencies turn with an image's height and width. A text position is the same in all three axes."""
_DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The text model's part, with everything that its structure follows from; None if this is neither layout.

    `tensor_prefix` is added: what the names of its tensors begin with. So is `partial_rotary_factor`, wherever it was.
    """
    model_type = config.get("model_type")
    text: dict[str, Any]
    if model_type == TEXT:
        text, prefix = dict(config), "model."
    elif model_type == VISION_LANGUAGE and isinstance(config.get("text_config"), dict):
        text, prefix = dict(config["text_config"]), "model.language_model."
        text |= {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    else:
        return None
    new, old = rope_fields(text, "rope_parameters"), rope_fields(text, "rope_scaling")
    factors = [fields.pop("partial_rotary_factor", None) for fields in (new, old)] + [text.get("partial_rotary_factor")]
    return text | {
        "tensor_prefix": prefix,
        "partial_rotary_factor": next((each for each in factors if each is not None), _DEFAULT_PARTIAL_ROTARY_FACTOR),
        "rope_parameters": new,
        "rope_scaling": old,
    }


def rope_fields(text: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The fields of its rotary embedding under one of the two keys, without those that matter for images only."""
    given: object = text.get(key)
    fields = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    return {name: value for name, value in fields.items() if name not in _IMAGE_ROPE_FIELDS}
