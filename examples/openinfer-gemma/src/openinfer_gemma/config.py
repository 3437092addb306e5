"""What a `config.json` of Gemma says, as one type for both generations and both layouts."""

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES = "gemma2", "gemma3_text", "gemma3"
"""Values of `model_type`; the last is the text model beside a vision tower."""

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }
)
_DEFAULTS_OF: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        GEMMA2: {
            **_DEFAULTS,
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        GEMMA3: {
            **_DEFAULTS,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    }
)
"""What transformers takes where a config leaves a key out, as published ones with images do."""
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


class LayerKind(StrEnum):
    """How far a layer's attention reaches."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind's `rope_parameters`, under their own names."""

    rope_theta: Annotated[float, msgspec.Meta(gt=1)]
    rope_type: Literal["default", "linear"] = "default"
    factor: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """Of `linear`: positions are divided by it."""


class GemmaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that shape the model, under their own names, as `text_config` brings them together."""

    tensor_prefix: str
    """What the names of its tensors begin with."""
    qk_norm: bool
    """Whether queries and keys are normed: Gemma-3."""
    dtype: str
    """Of the checkpoint."""
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    rms_norm_eps: PositiveFloat
    max_position_embeddings: Positive
    query_pre_attn_scalar: PositiveFloat
    sliding_window: Positive
    layer_types: tuple[LayerKind, ...] | None = None
    sliding_window_pattern: Positive
    """Where `layer_types` is absent, every so-many-th layer is full attention."""
    rope_parameters: dict[LayerKind, Rope]
    attn_logit_softcapping: PositiveFloat | None
    final_logit_softcapping: PositiveFloat | None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE rotates pairs")
        if len(self.layer_kinds) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_kinds)} entries for {self.num_hidden_layers} layers")
        if missing := {*self.layer_kinds} - {*self.rope_parameters}:
            raise ValueError(f"rope_parameters lacks {', '.join(sorted(missing))}")
        if self.dtype not in _SIGNIFICANT_BITS:
            raise ValueError(f"dtype is {self.dtype!r}; possible are {', '.join(_SIGNIFICANT_BITS)}")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        is_full = ((index + 1) % self.sliding_window_pattern == 0 for index in range(self.num_hidden_layers))
        return tuple(LayerKind.FULL if full else LayerKind.SLIDING for full in is_full)

    def window_of(self, kind: LayerKind) -> int | None:
        """Keys that a token of such a layer sees, its own among them; None: all."""
        return self.sliding_window if kind is LayerKind.SLIDING else None

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return self.query_pre_attn_scalar**-0.5

    @property
    def embedding_scale(self) -> float:
        """`sqrt(hidden_size)` as the checkpoint's dtype holds it, with which Gemma was trained: 55.5 for 3072."""
        bits = _SIGNIFICANT_BITS[self.dtype]
        fraction, exponent = math.frexp(math.sqrt(self.hidden_size))
        return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What `GemmaConfig` is read from: one spelling of what has several, defaults filled in.

    Args:
        config: with one of the three values of `model_type`.

    Returns:
        None where a config with images has no text model's.
    """
    with_images = config["model_type"] == GEMMA3_WITH_IMAGES
    text: object = config.get("text_config") if with_images else config
    if not isinstance(text, dict):
        return None
    said = cast("dict[str, Any]", text)
    generation = GEMMA3 if with_images else str(config["model_type"])
    return {
        **_DEFAULTS_OF[generation],
        **said,
        "tensor_prefix": "language_model.model" if with_images else "model",
        "qk_norm": generation == GEMMA3,
        "dtype": _dtype(said) or _dtype(config) or "bfloat16",
        "rope_parameters": _rope_parameters(said, generation),
    }


def _rope_parameters(text: Mapping[str, Any], generation: str) -> Any:
    """Those of each kind of layer: `rope_parameters` of transformers 5, or the older keys below."""
    given: Any = text.get("rope_parameters")
    if generation == GEMMA2:
        both = given or {"rope_theta": text.get("rope_theta", _LOCAL_THETA), **_typed(text.get("rope_scaling"))}
        return dict.fromkeys(LayerKind, both)
    if given:
        return given
    return {
        LayerKind.FULL: {
            "rope_theta": text.get("rope_theta", _GLOBAL_THETA),
            **_typed(text.get("rope_scaling")),
        },
        LayerKind.SLIDING: {"rope_theta": text.get("rope_local_base_freq", _LOCAL_THETA)},
    }


def _dtype(config: Mapping[str, Any]) -> Any:
    """`dtype` of transformers 5, or `torch_dtype` of earlier ones."""
    return config.get("dtype") or config.get("torch_dtype")


def _typed(scaling: Any) -> dict[str, Any]:
    """`rope_scaling` with the name that its type has today."""
    fields = dict(scaling or {})
    return {"rope_type": fields.pop("type"), **fields} if "type" in fields else fields
