"""The metadata of a GGUF file as a `config.json`, and how an architecture's tensors are called in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_core import InvalidCheckpoint, Refused

_ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"

# What Llama 3.1 and later were trained with; a file has the factors that follow, not these numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How ggml's architecture of a name is called elsewhere."""

    name: str
    model_type: str
    layer_names: Mapping[str, str]
    """Tensor of a block -> its name in a layer of a Hugging Face checkpoint."""
    permuted: Mapping[str, str] = field(default_factory=dict[str, str])
    """End of a tensor's name -> metadata key of its heads, where rows of Q and K are stored in ggml's order."""
    read_elsewhere: frozenset[str] = frozenset()
    products: tuple[frozenset[str], ...] = ()
    """Tensors of a block that models multiply as one, which therefore have one format."""

    def heads_to_unpermute(self, name: str, metadata: Mapping[str, Any]) -> int | None:
        """The heads of a tensor whose rows are in ggml's order; None for others."""
        key = next((key for part, key in self.permuted.items() if f".{part}." in name), None)
        return None if key is None else _whole_number(metadata, f"{self.name}.{key}")


_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRODUCTS = (frozenset({"attn_q", "attn_k", "attn_v"}), frozenset({"ffn_gate", "ffn_up"}))
ARCHITECTURES = {
    "llama": Architecture(
        name="llama",
        model_type="llama",
        layer_names=_DENSE,
        products=_PRODUCTS,
        permuted={"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"},
        read_elsewhere=frozenset({ROPE_FACTORS}),
    ),
    "qwen3": Architecture(
        name="qwen3",
        model_type="qwen3",
        products=_PRODUCTS,
        layer_names=_DENSE | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    ),
}


def architecture_of(metadata: Mapping[str, Any], path: Path) -> Architecture:
    """Raises `Refused` for an architecture that is not read, by its name."""
    name = metadata.get(_ARCHITECTURE)
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise Refused(
            f"{path} is of the architecture {name!r}; of GGUF files {', '.join(ARCHITECTURES)} are read (others as "
            "safetensors, if a family serves them)"
        )
    if metadata.get(f"{found.name}.expert_count"):
        raise Refused(f"{path} is a mixture of experts ({found.name}.expert_count), which is not read from GGUF files")
    return found


def config_of(
    metadata: Mapping[str, Any],
    path: Path,
    *,
    vocab_size: int,
    tied: bool,
    rope_factors: np.ndarray[Any, np.dtype[np.float32]] | None,
    quantisation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `config.json` that this file's model would have.

    Args:
        metadata: the file's.
        path: named in messages.
        vocab_size: rows of the embedding.
        tied: whether the head is the embedding.
        rope_factors: what divides each frequency (`rope_freqs.weight`), if the file has them.
        quantisation: the `quantization_config`, if matrices may stay quantised.

    Raises:
        InvalidCheckpoint: an entry is missing, or not of its type.
        Refused: the frequencies are not slowed as Llama 3.1's are.
    """
    architecture = architecture_of(metadata, path)

    def whole(key: str, default: int | None = None) -> int:
        return _whole_number(metadata, f"{architecture.name}.{key}", default)

    def real(key: str, default: float | None = None) -> float:
        return _real(metadata, f"{architecture.name}.{key}", default)

    heads, hidden = whole("attention.head_count"), whole("embedding_length")
    if heads < 1 or hidden < 1:
        raise InvalidCheckpoint(f"{path} has {heads} heads and an embedding of {hidden}")
    head_dim = whole("attention.key_length", hidden // heads)
    theta = _shortest(real("rope.freq_base", 10000.0))
    context = whole("context_length")
    return {
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(real("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "rope_theta": theta,
        # which kinds are computed, the family says
        "rope_scaling": _scaling_of_kind(metadata, architecture.name)
        or _llama3_scaling(path, rope_factors, theta=theta, head_dim=head_dim),
        **_special_ids(metadata),
        **({} if quantisation is None else {"quantization_config": dict(quantisation)}),
    }


def _scaling_of_kind(metadata: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": str(kind), "factor": _real(metadata, f"{name}.rope.scaling.factor", 1.0)}
    original = _whole_number(metadata, f"{name}.rope.scaling.original_context_length", 0)
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(
    path: Path, factors: np.ndarray[Any, np.dtype[np.float32]] | None, *, theta: float, head_dim: int
) -> dict[str, Any] | None:
    if factors is None:
        return None
    scaling = {"rope_type": "llama3", "factor": float(factors.max(initial=1.0)), **_LLAMA3}
    expected = _llama3_factors(scaling, theta, head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise Refused(f"the factors of {path} ({ROPE_FACTORS}) are not those of Llama 3.1's rotary embedding")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What llama.cpp's converter stores: `generate_extra_tensors` in its `conversion/llama.py`."""
    frequencies = theta ** (-2.0 * np.arange(head_dim // 2, dtype=np.float64) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - kept) / scaling["factor"] + kept)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    if whole := list(dict.fromkeys(each for each in ends if type(each) is int)):
        found["eos_token_id"] = whole
    if type(bos := metadata.get("tokenizer.ggml.bos_token_id")) is int:
        found["bos_token_id"] = bos
    return found


def _whole_number(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidCheckpoint(f"the GGUF file's {key} is {'missing' if value is None else 'no number of 31 bits'}")
    return value


def _real(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if type(value) not in {int, float}:
        raise InvalidCheckpoint(f"the GGUF file's {key} is {'missing' if value is None else 'not a number'}")
    return float(value)  # pyright: ignore[reportArgumentType] - one of the two, or refused


def _shortest(value: float) -> float:
    """The shortest decimal number with the same float32: `1e-05` for the 9.999999747378752e-06 that is stored."""
    return float(str(np.float32(value)))
