"""Kimi-K2: where its configs and checkpoints differ from DeepSeek-V3's, whose equations it has in other sizes.

`openinfer_deepseek.model` computes it: queries come through a bottleneck, and experts are chosen by sigmoid scores with
a correction bias, from one group. What differs: its config may be the text part of a vision-language model's, under
which the names of tensors have a prefix, and matrices of routed experts may be INT4. Moonshot AI 2025, "Kimi K2",
section 2.3.
"""

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec

from openinfer_deepseek.model import DeepseekConfig
from openinfer_engine.weights.stored_format import StoredFormat
from openinfer_kernels import Code

TEXT = "kimi_k2"
VISION_LANGUAGE = "kimi_k25"
VISION_PARTS = ("vision_tower.", "mm_projector.")
"""What the names of tensors begin with that are not the text model's."""


class KimiK2Config(DeepseekConfig, frozen=True, kw_only=True):
    """The text model's config, under its own names."""

    q_lora_rank: Annotated[int, msgspec.Meta(ge=1)]  # pyright: ignore[reportGeneralTypeIssues]

    def format_of(self, name: str) -> StoredFormat | None:
        """Integers are of routed experts alone, whether the config says it or not: K2-Thinking, K2.5, K2.6."""
        stored = super().format_of(name)
        is_integer = stored is not None and stored.format.code in (Code.INT4, Code.INT8)
        return None if is_integer and ".experts." not in name else stored


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
    # The vision-language config has these keys next to the text model's, which wins where it has them too.
    above = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if config.get(key) is not None}
    return {**above, **cast("dict[str, Any]", text), "tensor_prefix": "language_model."}
