"""Gemma-2 and Gemma-3, the text models: the forward pass, and how published weights become arrays on one rank.

    ids ─► embedding × sqrt(h) ─► layer × L ─► norm ─► hidden ─► head ─► cap ─► logits

    layer:  x += norm(o_proj(attention(rope(q), rope(k), v)))      q, k, v = qkv_proj(norm(x))
            x += norm(down_proj(gelu(gate) * up))                  gate, up = gate_up_proj(norm(x))

What differs from Llama: norms are zero-centred (`1 + weight`) and stand after attention and MLP, too; the MLP is gated
by GELU; most layers attend to a window of the last tokens; the head is the embedding. Gemma-2: scores and logits are
soft-capped, and every other layer has a window. Gemma-3: queries and keys are normed per head instead, five of six
layers have a window, and layers with one rotate by another base than those without.

Reference: `transformers.models.gemma2.modeling_gemma2`, `gemma3.modeling_gemma3`; Gemma Team 2024, "Gemma 2: Improving
Open Language Models at a Practical Size", section 2; Gemma Team 2025, "Gemma 3 Technical Report", section 2.

Letters: `T` tokens of a step, `h` hidden size, `H`/`K` query and KV heads, `D` head dimension, `F` width of the MLP,
`V` vocabulary; in the weights and in `forward`, `H`, `K` and `F` are one rank's share. A matrix is `[out, in]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import KvLayers, Shard, WeightSource
from openinfer_engine.weights.loader import WeightLoader
from openinfer_gemma.config import GemmaConfig, LayerKind
from openinfer_gemma.rope import rope_table
from openinfer_kernels import Array, AttentionBatch, LinearWeight, Ops, PagedCache

PAGED_GROUPS: Mapping[LayerKind, str] = MappingProxyType({LayerKind.FULL: "full", LayerKind.SLIDING: "sliding"})
"""In which paged group the layers of each kind are."""


# --- tensors ------------------------------------------------------------------------------------------------


def tensors(config: GemmaConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor of the checkpoint that `load` reads, with its whole shape."""
    h, f, prefix = config.hidden_size, config.intermediate_size, config.tensor_prefix
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
        "pre_feedforward_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (f, h),
        "mlp.up_proj.weight": (f, h),
        "mlp.down_proj.weight": (h, f),
        "post_feedforward_layernorm.weight": (h,),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    whole: dict[str, tuple[int, ...]] = {
        f"{prefix}.embed_tokens.weight": (config.vocab_size, h),
        f"{prefix}.norm.weight": (h,),
    }
    for index in range(config.num_hidden_layers):
        whole |= {f"{prefix}.layers.{index}.{name}": shape for name, shape in layer.items()}
    return whole


# --- weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer on one rank, and how far it sees."""

    kind: LayerKind
    index: int
    """Among the layers of its kind, hence in the KV cache."""
    input_layernorm: Array
    """`[h]`, zero-centred as all norms here."""
    qkv_proj: LinearWeight
    """`[(H + 2 K) D, h]`: query rows, then key rows, then value rows."""
    qk_norms: tuple[Array, Array] | None
    """`[D]` each, of queries and of keys; None where they are not normed."""
    o_proj: LinearWeight
    """`[h, H D]`"""
    post_attention_layernorm: Array
    """`[h]`"""
    pre_feedforward_layernorm: Array
    """`[h]`"""
    gate_up_proj: LinearWeight
    """`[2 F, h]`: gate rows, then up rows."""
    down_proj: LinearWeight
    """`[h, F]`"""
    post_feedforward_layernorm: Array
    """`[h]`"""
    rope: Array
    """`[2, positions, D / 2]` float32, shared by layers of one kind: cosines, then sines."""
    window: int | None
    """Keys that a token sees; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of the model on one rank."""

    embed_tokens: Array
    """`[V, h]`, on every rank whole."""
    layers: tuple[LayerWeights, ...]
    norm: Array
    """`[h]`"""
    lm_head: LinearWeight
    """`[V / ranks, h]`, a view of `embed_tokens`."""


def load(
    config: GemmaConfig, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
) -> "GemmaModel":
    """Uploads this rank's weights, and RoPE tables for positions below `max_model_tokens`."""
    loader = WeightLoader(weights, ops=ops, communicator=communicator)
    prefix = config.tensor_prefix
    ropes = {
        kind: ops.upload(rope_table(config.rope_parameters[kind], head_dim=config.head_dim, positions=max_model_tokens))
        for kind in sorted({*config.layer_kinds})
    }
    embed_tokens, lm_head = loader.vocabulary(f"{prefix}.embed_tokens.weight", None)
    layers = tuple(
        _load_layer(
            loader,
            f"{prefix}.layers.{layer}",
            qk_norm=config.qk_norm,
            kind=kind,
            index=config.layer_kinds[:layer].count(kind),
            rope=ropes[kind],
            window=config.window_of(kind),
        )
        for layer, kind in enumerate(config.layer_kinds)
    )
    norm = loader.plain(f"{prefix}.norm.weight")
    loaded = Weights(embed_tokens=embed_tokens, layers=layers, norm=norm, lm_head=lm_head)
    return GemmaModel(config, loaded, ops=ops, communicator=communicator)


def _load_layer(
    loader: WeightLoader, prefix: str, *, qk_norm: bool, kind: LayerKind, index: int, rope: Array, window: int | None
) -> LayerWeights:
    q, k, v, o = (f"{prefix}.self_attn.{name}_proj" for name in "qkvo")
    norms = [f"{prefix}.self_attn.{name}_norm.weight" for name in "qk"]
    return LayerWeights(
        kind=kind,
        index=index,
        input_layernorm=loader.plain(f"{prefix}.input_layernorm.weight"),
        qkv_proj=loader.linear(q, k, v, shard=Shard.COLUMN_PARALLEL),
        qk_norms=(loader.plain(norms[0]), loader.plain(norms[1])) if qk_norm else None,
        o_proj=loader.linear(o, shard=Shard.ROW_PARALLEL),
        post_attention_layernorm=loader.plain(f"{prefix}.post_attention_layernorm.weight"),
        pre_feedforward_layernorm=loader.plain(f"{prefix}.pre_feedforward_layernorm.weight"),
        gate_up_proj=loader.linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", shard=Shard.COLUMN_PARALLEL),
        down_proj=loader.linear(f"{prefix}.mlp.down_proj", shard=Shard.ROW_PARALLEL),
        post_feedforward_layernorm=loader.plain(f"{prefix}.post_feedforward_layernorm.weight"),
        rope=rope,
        window=window,
    )


# --- forward pass -------------------------------------------------------------------------------------------


class GemmaModel:
    """The model on one rank; stateless, so that all sequences live in the KV cache that it is handed."""

    def __init__(self, config: GemmaConfig, weights: Weights, *, ops: Ops, communicator: Communicator) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._communicator = communicator

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """Hidden states after the final norm, `[T, h]`, for `token_ids [T]`; the same on every rank.

        Args:
            token_ids: int32, each below `vocab_size`.
            batch: where the tokens stand.
            kv_cache: of the layers of each kind, mutated: this step's K and V are appended.
        """
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        scale = self._config.embedding_scale
        residual = ops.residual_embedding(token_ids, weights.embed_tokens, scale=scale)  # [T, h] float32
        x = ops.zero_centred_rms_norm(residual, weights.layers[0].input_layernorm, eps=eps)
        next_norms = (*(layer.input_layernorm for layer in weights.layers[1:]), weights.norm)
        for layer, next_norm in zip(weights.layers, next_norms, strict=True):
            x = self._attention(x, layer, batch=batch, cache=kv_cache[PAGED_GROUPS[layer.kind]][layer.index])
            x = ops.zero_centred_rms_norm(x, layer.post_attention_layernorm, eps=eps)
            x = ops.add_zero_centred_rms_norm(x, residual, layer.pre_feedforward_layernorm, eps=eps)
            x = self._mlp(x, layer, batch)
            x = ops.zero_centred_rms_norm(x, layer.post_feedforward_layernorm, eps=eps)
            x = ops.add_zero_centred_rms_norm(x, residual, next_norm, eps=eps)
        return x

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, on every rank."""
        logits = self._ops.logits(hidden, self._weights.lm_head)
        if self._config.final_logit_softcapping is not None:
            self._ops.soft_cap(logits, cap=self._config.final_logit_softcapping)
        return self._communicator.all_gather(logits, axis=1)

    def _attention(self, x: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache) -> Array:
        """`[T, h]` of a layer for the normed `x [T, h]`."""
        ops, config = self._ops, self._config
        q = self._queries(ops.linear(x, layer.qkv_proj, batch), layer, batch=batch, cache=cache)  # [T, H, D]
        attended = ops.paged_attention(
            q,
            cache,
            batch=batch,
            scale=config.attention_scale,
            window=layer.window,
            soft_cap=config.attn_logit_softcapping,
        )  # [T, H D]
        return self._communicator.all_reduce(ops.linear(attended, layer.o_proj, batch))

    def _queries(self, qkv: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache) -> Array:
        """`[T, H, D]` of `qkv [T, (H + 2 K) D]`; K and V are appended."""
        if layer.qk_norms is None:
            return self._ops.rope_append(qkv, rope=layer.rope, cache=cache, batch=batch)
        q_norm, k_norm = layer.qk_norms
        return self._ops.zero_centred_qk_norm_rope_append(
            qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self._config.rms_norm_eps,
            rope=layer.rope,
            cache=cache,
            batch=batch,
        )

    def _mlp(self, x: Array, layer: LayerWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` for the normed `x [T, h]`."""
        gated = self._ops.linear_geglu(x, layer.gate_up_proj, batch)  # [T, F]
        return self._communicator.all_reduce(self._ops.linear(gated, layer.down_proj, batch))
