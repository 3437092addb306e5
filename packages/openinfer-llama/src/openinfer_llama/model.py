"""Llama, dense: the forward pass, and how its published weights become arrays on one rank.

    ids ─► embedding ─► layer × L ─► norm ─► hidden ─► head ─► logits

    layer:  x += o_proj(attention(rope(q), rope(k), v))      q, k, v = qkv_proj(norm(x))
            x += down_proj(silu(gate) * up)                  gate, up = gate_up_proj(norm(x))

Mistral is the same, with attention to a window of the last tokens where its config has one.

Reference: `transformers.models.llama.modeling_llama`; Touvron et al. 2023, "LLaMA", section 2.2; Jiang et al. 2023,
"Mistral 7B", section 2. Read it next to
`openinfer_qwen3/model.py`: same order, same words; that one norms Q and K and cuts odd vocabularies into ranks.

Letters: `T` tokens of a step, `h` hidden size, `H`/`K` query and KV heads, `D` head dimension, `F` width of the MLP,
`V` vocabulary; in the weights and in `forward`, `H`, `K` and `F` are one rank's share. A matrix is `[out, in]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import KvLayers, Shard, WeightSource
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.quantization_config import QuantisedConfig
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Array, AttentionBatch, LinearWeight, Ops, PagedCache
from openinfer_llama.rope import Llama3Scaling, rope_table

MISTRAL = "mistral"

Positive = Annotated[int, msgspec.Meta(ge=1)]
ATTENTION = "attention"
"""The paged group of all layers."""


# --- configuration ------------------------------------------------------------------------------------------


class LlamaConfig(QuantisedConfig, frozen=True, kw_only=True):
    """`config.json`, under its own names: the keys that shape the model."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    max_position_embeddings: Positive
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """transformers 5 writes this, earlier ones the two above."""
    model_type: str = "llama"
    sliding_window: Positive | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rope  # which says what is wrong with it

    @property
    def window(self) -> int | None:
        """How many tokens a token attends to, its own among them; None: all before it."""
        if self.model_type != MISTRAL:
            return None
        # the value that `MistralConfig` of transformers has for a config without the key
        return 4096 if self.sliding_window is msgspec.UNSET else self.sliding_window

    @property
    def head_size(self) -> int:
        """`D`."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> tuple[float, Llama3Scaling | None]:
        """The base of the frequencies, and what slows them down.

        Raises:
            ValueError: another kind of rotary embedding than `default` and `llama3`.
        """
        fields = dict(self.rope_parameters or self.rope_scaling or {})
        theta = fields.pop("rope_theta", None) or self.rope_theta or 10000.0
        kind = fields.pop("rope_type", None) or fields.pop("type", "default")
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise ValueError(f"rope type {kind!r} is not supported; supported are default, llama3")
        return theta, msgspec.convert(fields, Llama3Scaling)


def matrices(config: LlamaConfig, layer: int) -> Mapping[str, StoredMatrix]:
    """The matrices of a layer as they are stored, by the last part of their name."""
    h, f, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}"
    q, kv = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    shapes = {
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
    }
    return {name.partition(".")[2]: config.matrix(f"{prefix}.{name}", *shape) for name, shape in shapes.items()}


_ROW_PARALLEL = ("o_proj", "down_proj")


def adapted_matrices(config: LlamaConfig) -> list[tuple[StoredMatrix, Shard]]:
    """What adapters may change: every matrix of a layer."""
    return [
        (matrix, Shard.ROW_PARALLEL if name in _ROW_PARALLEL else Shard.COLUMN_PARALLEL)
        for layer in range(config.num_hidden_layers)
        for name, matrix in matrices(config, layer).items()
    ]


def tensors(config: LlamaConfig) -> Mapping[str, TensorSpec]:
    """Every tensor of the checkpoint that `load` reads, with its whole shape."""
    h = config.hidden_size
    whole: dict[str, TensorSpec] = {"model.embed_tokens.weight": (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tie_word_embeddings:
        whole["lm_head.weight"] = (config.vocab_size, h)
    for index in range(config.num_hidden_layers):
        norms = ("input_layernorm", "post_attention_layernorm")
        whole |= {f"model.layers.{index}.{name}.weight": (h,) for name in norms}
        stored = matrices(config, index).values()
        whole |= {name: spec for matrix in stored for name, spec in matrix.tensors().items()}
    return whole


# --- weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer on one rank."""

    input_layernorm: Array
    """`[h]`"""
    qkv_proj: LinearWeight
    """`[(H + 2 K) D, h]`: query rows, then key rows, then value rows."""
    o_proj: LinearWeight
    """`[h, H D]`"""
    post_attention_layernorm: Array
    """`[h]`"""
    gate_up_proj: LinearWeight
    """`[2 F, h]`: gate rows, then up rows."""
    down_proj: LinearWeight
    """`[h, F]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of the model on one rank."""

    embed_tokens: Array
    """`[V, h]`, on every rank whole."""
    layers: tuple[LayerWeights, ...]
    norm: Array
    """`[h]`"""
    lm_head: LinearWeight
    """`[V / ranks, h]`; of a tied model a view of `embed_tokens`."""
    rope: Array
    """`[2, positions, D / 2]` float32: cosines, then sines."""


def load(
    config: LlamaConfig, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
) -> "LlamaModel":
    """Uploads this rank's weights, and a RoPE table for positions below `max_model_tokens`."""
    loader = WeightLoader(weights, ops=ops, communicator=communicator)
    head = None if config.tie_word_embeddings else "lm_head.weight"
    embed_tokens, lm_head = loader.vocabulary("model.embed_tokens.weight", head)
    layers = tuple(_load_layer(config, loader, i) for i in range(config.num_hidden_layers))
    norm = loader.plain("model.norm.weight")
    theta, scaling = config.rope
    table = rope_table(theta, scaling, head_dim=config.head_size, positions=max_model_tokens)
    loaded = Weights(embed_tokens=embed_tokens, layers=layers, norm=norm, lm_head=lm_head, rope=ops.upload(table))
    return LlamaModel(config, loaded, ops=ops, communicator=communicator)


def _load_layer(config: LlamaConfig, loader: WeightLoader, index: int) -> LayerWeights:
    prefix, stored = f"model.layers.{index}", matrices(config, index)
    q, k, v, o = (stored[f"{name}_proj"] for name in "qkvo")
    return LayerWeights(
        input_layernorm=loader.plain(f"{prefix}.input_layernorm.weight"),
        qkv_proj=loader.linear(q, k, v, shard=Shard.COLUMN_PARALLEL),
        o_proj=loader.linear(o, shard=Shard.ROW_PARALLEL),
        post_attention_layernorm=loader.plain(f"{prefix}.post_attention_layernorm.weight"),
        gate_up_proj=loader.linear(stored["gate_proj"], stored["up_proj"], shard=Shard.COLUMN_PARALLEL),
        down_proj=loader.linear(stored["down_proj"], shard=Shard.ROW_PARALLEL),
    )


# --- forward pass -------------------------------------------------------------------------------------------


class LlamaModel:
    """The model on one rank; stateless, so that all sequences live in the KV cache that it is handed."""

    def __init__(self, config: LlamaConfig, weights: Weights, *, ops: Ops, communicator: Communicator) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._communicator = communicator

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """Hidden states after the final norm, `[T, h]`, for `token_ids [T]`; the same on every rank.

        Args:
            token_ids: int32, each below `vocab_size`.
            batch: where the tokens stand.
            kv_cache: of each layer, mutated: this step's K and V are appended.
        """
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        residual = ops.residual_embedding(token_ids, weights.embed_tokens)  # [T, h] float32
        x = ops.rms_norm(residual, weights.layers[0].input_layernorm, eps=eps)
        next_norms = (*(layer.input_layernorm for layer in weights.layers[1:]), weights.norm)
        for layer, next_norm, cache in zip(weights.layers, next_norms, kv_cache[ATTENTION], strict=True):
            x = self._attention(x, layer, batch=batch, cache=cache)
            x = ops.add_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
            x = self._mlp(x, layer, batch)
            x = ops.add_rms_norm(x, residual, next_norm, eps=eps)
        return x

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, on every rank."""
        return self._communicator.all_gather(self._ops.logits(hidden, self._weights.lm_head), axis=1)

    def _attention(self, x: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache) -> Array:
        """`[T, h]` of a layer for the normed `x [T, h]`."""
        ops, scale = self._ops, self._config.head_size**-0.5
        qkv = ops.linear(x, layer.qkv_proj, batch)  # [T, (H + 2 K) D]
        q = ops.rope_append(qkv, rope=self._weights.rope, cache=cache, batch=batch)  # [T, H, D]
        attended = ops.paged_attention(q, cache, batch=batch, scale=scale, window=self._config.window)  # [T, H D]
        return self._communicator.all_reduce(ops.linear(attended, layer.o_proj, batch))

    def _mlp(self, x: Array, layer: LayerWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` for the normed `x [T, h]`."""
        gated = self._ops.linear_swiglu(x, layer.gate_up_proj, batch)  # [T, F]
        return self._communicator.all_reduce(self._ops.linear(gated, layer.down_proj, batch))
