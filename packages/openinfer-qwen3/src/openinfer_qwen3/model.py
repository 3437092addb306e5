"""Qwen3, dense and mixtures of experts: the forward pass, and how published weights become arrays on one rank.

    ids ─► embedding ─► layer × L ─► norm ─► hidden ─► head ─► logits

    layer:  x += o_proj(attention(rope(norm(q)), rope(norm(k)), v))    q, k, v = qkv_proj(norm(x))
            x += down_proj(silu(gate) * up)                            gate, up = gate_up_proj(norm(x))
       or:  x += sum of s_j expert_j(y)                                y = norm(x), s = top(softmax(router(y)))

What differs from its nearest neighbour, Qwen2: an RMSNorm over each head of Q and K before RoPE, no biases in the
attention unless the config asks, and a `head_dim` that is not `hidden_size / num_attention_heads`. In a mixture
(`qwen3_moe`) the MLP of most layers is many experts, of which a router chooses a few for each token: those with the
largest probabilities, by which they are weighed, renormalised if the config says so. References:
`transformers.models.qwen3.modeling_qwen3`, `qwen3_moe.modeling_qwen3_moe`; "Qwen3 Technical Report", 2025, section 2.

Across ranks the layers are cut as in Shoeybi et al. 2019, "Megatron-LM", section 3: each rank has whole heads and a
shard of the MLP's width, and sums its share of both outputs with the other ranks. Experts are whole, and each rank has
a share of them. Each rank embeds all ids, and computes the logits of its shard of the vocabulary.

Letters: `T` tokens of a step, `h` hidden size, `H`/`K` query and KV heads, `D` head dimension, `F` width of the MLP,
`E` experts of width `M`, `V` vocabulary; in the weights and in `forward`, `H`, `K`, `F` and `E` are one rank's share. A
matrix is `[out, in]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from openinfer_engine.distributed.communicator import Communicator, gather_columns
from openinfer_engine.model import KvLayers, LogitsIndices, Shard, WeightSource
from openinfer_engine.weights.experts import ExpertWeights, StoredExperts, StoredMlp
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.quantization_config import QuantisedConfig
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import (
    Array,
    AttentionBatch,
    LinearWeight,
    Ops,
    PagedCache,
    RopeParameters,
    Routing,
    Scoring,
    rope_table,
)
from openinfer_kernels.ops.lora import AddedBy, DeltaOperator

Positive = Annotated[int, msgspec.Meta(ge=1)]
ATTENTION = "attention"
"""The paged group of all layers."""
_BY_NORM = AddedBy(DeltaOperator.ADD_RMS_NORM)
"""What O and down are handed to."""


# --- configuration ------------------------------------------------------------------------------------------


class Qwen3Config(QuantisedConfig, frozen=True, kw_only=True):
    """`config.json`, under its own names: the keys that shape the model. What else it may not say: `family.py`."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    """Never derived: 128 in every size, also where `hidden_size / num_attention_heads` is 80."""
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    max_position_embeddings: Positive
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_parameters: dict[str, Any] | None = None
    """transformers 5 writes this, earlier ones the next two."""
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")

    @property
    def rope(self) -> RopeParameters:
        return RopeParameters.from_config(msgspec.structs.asdict(self))

    def experts(self, layer: int) -> StoredExperts | None:
        """Those of a layer; None where its MLP is none of experts."""
        del layer
        return None


class Qwen3MoeConfig(Qwen3Config, frozen=True, kw_only=True):
    """`config.json` of a mixture; `intermediate_size` is the width of MLPs that are none."""

    num_experts: Positive
    num_experts_per_tok: Positive
    moe_intermediate_size: Positive
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts are divided by their sum; published sizes say true."""
    decoder_sparse_step: Positive = 1
    """Every so-many-th layer is a mixture, ..."""
    mlp_only_layers: tuple[int, ...] | None = None
    """... but for these."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.routing  # which says what is wrong with it

    @property
    def dense_size(self) -> int:
        """`intermediate_size`, 0 where every layer is a mixture."""
        return 0 if all(map(self.experts, range(self.num_hidden_layers))) else self.intermediate_size

    @property
    def routing(self) -> Routing:
        return Routing(
            scoring=Scoring.SOFTMAX,
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_tok,
            normalised=self.norm_topk_prob,
        )

    def experts(self, layer: int) -> StoredExperts | None:
        if layer in (self.mlp_only_layers or ()) or (layer + 1) % self.decoder_sparse_step:
            return None
        return StoredExperts(
            prefix=f"model.layers.{layer}.mlp.experts",
            routing=self.routing,
            hidden_size=self.hidden_size,
            width=self.moe_intermediate_size,
            format_of=self.format_of,
        )


def attention_matrices(
    config: Qwen3Config, layer: int
) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix, StoredMatrix]:
    """Q, K, V and O of a layer as they are stored."""
    h, d, prefix = config.hidden_size, config.head_dim, f"model.layers.{layer}.self_attn"
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    return (
        config.matrix(f"{prefix}.q_proj", q, h),
        config.matrix(f"{prefix}.k_proj", kv, h),
        config.matrix(f"{prefix}.v_proj", kv, h),
        config.matrix(f"{prefix}.o_proj", h, q),
    )


def mlp_matrices(config: Qwen3Config, layer: int) -> StoredMlp:
    """The plain MLP of a layer."""
    sizes = {"width": config.intermediate_size, "h": config.hidden_size}
    return StoredMlp.of(f"model.layers.{layer}.mlp", **sizes, format_of=config.format_of)


def adapted_matrices(config: Qwen3Config) -> list[tuple[StoredMatrix, Shard]]:
    """What adapters may change: the attention, and plain MLPs."""
    found: list[tuple[StoredMatrix, Shard]] = []
    for layer in range(config.num_hidden_layers):
        *qkv, o = attention_matrices(config, layer)
        found += [*((each, Shard.COLUMN_PARALLEL) for each in qkv), (o, Shard.ROW_PARALLEL)]
        if config.experts(layer) is None:
            mlp = mlp_matrices(config, layer)
            found += [(mlp.gate, Shard.COLUMN_PARALLEL), (mlp.up, Shard.COLUMN_PARALLEL)]
            found.append((mlp.down, Shard.ROW_PARALLEL))
    return found


def tensors(config: Qwen3Config) -> Mapping[str, TensorSpec]:
    """Every tensor of the checkpoint that `load` reads, with its whole shape."""
    h = config.hidden_size
    whole: dict[str, TensorSpec] = {"model.embed_tokens.weight": (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tie_word_embeddings:
        whole["lm_head.weight"] = (config.vocab_size, h)
    for index in range(config.num_hidden_layers):
        norms = {"input_layernorm": h, "post_attention_layernorm": h}
        norms |= {f"self_attn.{name}_norm": config.head_dim for name in "qk"}
        whole |= {f"model.layers.{index}.{name}.weight": (size,) for name, size in norms.items()}
        for matrix in attention_matrices(config, index):
            whole |= matrix.tensors()
            if config.attention_bias:
                whole[f"{matrix.name}.bias"] = matrix.shape[:1]
        whole |= _mlp_tensors(config, index)
    return whole


def _mlp_tensors(config: Qwen3Config, layer: int) -> dict[str, TensorSpec]:
    experts = config.experts(layer)
    if experts is None:
        return mlp_matrices(config, layer).tensors()
    router = f"model.layers.{layer}.mlp.gate.weight"
    return {router: (experts.routing.num_experts, config.hidden_size), **experts.tensors()}


# --- weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """The plain MLP of a layer on one rank."""

    gate_up_proj: LinearWeight
    """`[2 F, h]`: gate rows, then up rows."""
    down_proj: LinearWeight
    """`[h, F]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """The mixture of a layer on one rank."""

    router: Array
    """`[all experts, h]`, on every rank whole."""
    routing: Routing
    experts: ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer on one rank."""

    input_layernorm: Array
    """`[h]`"""
    qkv_proj: LinearWeight
    """`[(H + 2 K) D, h]`: query rows, then key rows, then value rows."""
    qkv_bias: Array | None
    """`[(H + 2 K) D]`"""
    q_norm: Array
    """`[D]`, shared by all query heads."""
    k_norm: Array
    """`[D]`, shared by all key heads."""
    o_proj: LinearWeight
    """`[h, H D]`"""
    o_bias: Array | None
    """`[h]`, on rank 0 alone, so that the sum over the ranks has it once."""
    post_attention_layernorm: Array
    """`[h]`"""
    mlp: MlpWeights | MixtureWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of the model on one rank."""

    embed_tokens: Array
    """`[V', h]`, on every rank whole; `V'` is `V` rounded up to a multiple of the ranks."""
    layers: tuple[LayerWeights, ...]
    norm: Array
    """`[h]`"""
    lm_head: LinearWeight
    """`[V' / ranks, h]`; of a tied model a view of `embed_tokens`."""
    rope: Array
    """`[2, positions, D / 2]` float32: cosines, then sines."""


def load(
    config: Qwen3Config, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
) -> "Qwen3Model":
    """Uploads this rank's weights, and a RoPE table for positions below `max_model_tokens`."""
    loader = WeightLoader(weights, ops=ops, communicator=communicator)
    head = None if config.tie_word_embeddings else "lm_head.weight"
    embed_tokens, lm_head = loader.vocabulary("model.embed_tokens.weight", head)
    layers = tuple(_load_layer(config, loader, communicator, index) for index in range(config.num_hidden_layers))
    norm = loader.plain("model.norm.weight")
    table = rope_table(config.rope, head_dim=config.head_dim, positions=max_model_tokens)  # while weights are copied
    loaded = Weights(embed_tokens=embed_tokens, layers=layers, norm=norm, lm_head=lm_head, rope=ops.upload(table))
    return Qwen3Model(config, loaded, ops=ops, communicator=communicator)


def _load_layer(config: Qwen3Config, loader: WeightLoader, communicator: Communicator, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}"
    q, k, v, o = attention_matrices(config, index)
    by_heads = AddedBy(DeltaOperator.QK_NORM_ROPE_APPEND, config.head_dim)
    biased, biases = config.attention_bias, [f"{each.name}.bias" for each in (q, k, v)]
    return LayerWeights(
        input_layernorm=loader.plain(f"{prefix}.input_layernorm.weight"),
        qkv_proj=loader.linear(q, k, v, shard=Shard.COLUMN_PARALLEL, added_by=by_heads),
        qkv_bias=loader.plain(*biases, shard=Shard.COLUMN_PARALLEL) if biased else None,
        q_norm=loader.plain(f"{prefix}.self_attn.q_norm.weight"),
        k_norm=loader.plain(f"{prefix}.self_attn.k_norm.weight"),
        o_proj=loader.linear(o, shard=Shard.ROW_PARALLEL, added_by=_BY_NORM),
        o_bias=loader.plain(f"{o.name}.bias") if biased and communicator.rank == 0 else None,
        post_attention_layernorm=loader.plain(f"{prefix}.post_attention_layernorm.weight"),
        mlp=_load_mlp(config, loader, communicator, index),
    )


def _load_mlp(
    config: Qwen3Config, loader: WeightLoader, communicator: Communicator, layer: int
) -> MlpWeights | MixtureWeights:
    experts = config.experts(layer)
    if experts is None:
        mlp = mlp_matrices(config, layer)
        return MlpWeights(
            gate_up_proj=loader.linear(mlp.gate, mlp.up, shard=Shard.COLUMN_PARALLEL),
            down_proj=loader.linear(mlp.down, shard=Shard.ROW_PARALLEL, added_by=_BY_NORM),
        )
    return MixtureWeights(
        router=loader.plain(f"model.layers.{layer}.mlp.gate.weight"),
        routing=experts.routing,
        experts=experts.load(loader, communicator),
    )


# --- forward pass -------------------------------------------------------------------------------------------


class Qwen3Model:
    """The model on one rank; stateless, so that all sequences live in the KV cache that it is handed."""

    def __init__(self, config: Qwen3Config, weights: Weights, *, ops: Ops, communicator: Communicator) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops
        self._communicator = communicator

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """Hidden states after the final norm, `[T, h]`, for `token_ids [T]`; the same on every rank.

        Args:
            token_ids: int32, each below `vocab_size`.
            batch: where the tokens stand.
            kv_cache: of each layer, mutated: this step's K and V are appended.
        """
        return self._forward(token_ids, batch=batch, kv_cache=kv_cache)

    def forward_last_tokens(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, last: LogitsIndices
    ) -> Array:
        """As `forward`, for the tokens of `last` alone, `[n, h]`; of the last layer, others have K and V made only."""
        return self._forward(token_ids, batch=batch, kv_cache=kv_cache, last=last)

    def forward_tapped(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, taps: Sequence[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `forward`, and of each tap `i` the residual stream before layer `i`, `[T, h]`."""
        tapped: dict[int, Array] = {}
        hidden = self._forward(token_ids, batch=batch, kv_cache=kv_cache, taps=taps, tapped=tapped)
        return hidden, tuple(tapped[tap] for tap in taps)

    def forward_tapped_last_tokens(
        self,
        token_ids: Array,
        *,
        batch: AttentionBatch,
        kv_cache: KvLayers,
        taps: Sequence[int],
        last: LogitsIndices,
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `forward_tapped`, with hidden states as `forward_last_tokens` has them."""
        if taps and taps[-1] == len(self.weights.layers):  # which needs what the last layer leaves out
            hidden, found = self.forward_tapped(token_ids, batch=batch, kv_cache=kv_cache, taps=taps)
            return self._ops.embedding(last.tokens, hidden) if len(last.tokens) else hidden[:0], found
        tapped: dict[int, Array] = {}
        hidden = self._forward(token_ids, batch=batch, kv_cache=kv_cache, last=last, taps=taps, tapped=tapped)
        return hidden, tuple(tapped[tap] for tap in taps)

    def _forward(
        self,
        token_ids: Array,
        *,
        batch: AttentionBatch,
        kv_cache: KvLayers,
        last: LogitsIndices | None = None,
        taps: Sequence[int] = (),
        tapped: dict[int, Array] | None = None,
    ) -> Array:
        ops, weights, eps = self._ops, self.weights, self.config.rms_norm_eps
        residual = ops.residual_embedding(token_ids, weights.embed_tokens)  # [T, h] float32
        x = ops.rms_norm(residual, weights.layers[0].input_layernorm, eps=eps)
        next_norms = (*(layer.input_layernorm for layer in weights.layers[1:]), weights.norm)
        of_layers = zip(weights.layers, next_norms, kv_cache[ATTENTION], strict=True)
        for index, (layer, next_norm, cache) in enumerate(of_layers):
            if tapped is not None and index in taps:
                tapped[index] = ops.join_columns(residual)
            q = self._queries(x, layer, batch=batch, cache=cache)
            if last is not None and layer is weights.layers[-1]:
                if not len(last.tokens):
                    return x[:0]
                batch, residual, q = last.batch, ops.embedding(last.tokens, residual), self._rows(last.tokens, q)
            x = self._attention(q, layer, batch=batch, cache=cache)
            x = ops.add_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
            match layer.mlp:
                case MlpWeights() as mlp:
                    x = self._mlp(x, mlp, batch)
                case MixtureWeights() as mixture:
                    x = self._mixture(x, mixture, batch)
            x = ops.add_rms_norm(x, residual, next_norm, eps=eps)
        if tapped is not None and len(weights.layers) in taps:
            tapped[len(weights.layers)] = ops.join_columns(residual)
        return x

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, on every rank."""
        piece = self._ops.logits(hidden, self.weights.lm_head)
        return gather_columns(self._communicator, piece, num_columns=self.config.vocab_size)

    def _queries(self, x: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache) -> Array:
        """`[T, H, D]` of a layer for the normed `x [T, h]`; K and V are appended."""
        return self._ops.qk_norm_rope_append(
            self._ops.linear(x, layer.qkv_proj, batch, layer.qkv_bias),  # [T, (H + 2 K) D]
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.rms_norm_eps,
            rope=self.weights.rope,
            cache=cache,
            batch=batch,
        )

    def _rows(self, tokens: Array, q: Array) -> Array:
        return self._ops.embedding(tokens, q.reshape(len(q), -1)).reshape(len(tokens), *q.shape[1:])

    def _attention(self, q: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache) -> Array:
        """`[T, h]` of a layer for the queries `q [T, H, D]`."""
        scale = self.config.head_dim**-0.5
        attended = self._ops.paged_attention(q, cache, batch=batch, scale=scale)  # [T, H D]
        return self._communicator.all_reduce(self._ops.linear(attended, layer.o_proj, batch, layer.o_bias))

    def _mlp(self, x: Array, mlp: MlpWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` for the normed `x [T, h]`."""
        gated = self._ops.linear_swiglu(x, mlp.gate_up_proj, batch)  # [T, F]
        return self._communicator.all_reduce(self._ops.linear(gated, mlp.down_proj, batch))

    def _mixture(self, x: Array, mixture: MixtureWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` float32 for the normed `x [T, h]`: what the experts of all ranks add."""
        ops, experts = self._ops, mixture.experts
        scores = ops.logits(x, mixture.router)  # [T, all experts]
        choice = ops.top_experts(scores, routing=mixture.routing, cache_slots=batch.cache_slots[0])
        summed = ops.experts(
            x, choice, experts.gate_up_proj, experts.down_proj, first_expert=experts.first_expert
        )  # [T, h]
        return self._communicator.all_reduce(summed)
