"""DeepSeek's models over latents: the forward pass, and how their published weights become arrays on one rank.

    ids ─► embedding ─► layer × L ─► norm ─► hidden ─► head ─► logits

    layer:  x += o_proj(latent_attention(rope(q), latents))            q, latent = input_proj(norm(x))
            x += down_proj(silu(gate) * up)                            gate, up = gate_up_proj(norm(x))
       or:  x += sum of s_j expert_j(y) + shared(y)                    y = norm(x), s = top(score(router(y)))

What differs from Qwen3: a token's keys and values are kept as one latent, which all heads share, with one rotated key
next to it (multi-head latent attention); pairs of neighbours are rotated; queries may come through a bottleneck; and
from layer `first_k_dense_replace` on the MLP is a mixture of experts. DeepSeek-V2 chooses them by softmax
probabilities that are not renormalised. DeepSeek-V3 chooses by sigmoid scores with a correction bias, and weighs by the
scores without it, renormalised and scaled. References: `transformers.models.deepseek_v2.modeling_deepseek_v2` and
`deepseek_v3.modeling_deepseek_v3`; DeepSeek-AI 2024, "DeepSeek-V2", section 2, and "DeepSeek-V3", section 2.1.

Across ranks the layers are cut as in Shoeybi et al. 2019, "Megatron-LM", section 3: each rank has whole heads, whole
routed experts, and a shard of the width of every other MLP, and sums its share of the outputs with the other ranks.
Each has all latents. Each embeds all ids, and computes the logits of its shard of the vocabulary. With data-parallel
attention a rank has all of that for rows of its own, and shares the routed experts alone (`expert_group.py`).

Letters: `T` tokens of a step, `h` hidden size, `H` heads, `rq` dimensions of the queries' bottleneck, `r` latent
dimensions, `dr` rotated ones, `dn` and `dv` dimensions of a head's unrotated key and of its value, `F` width of the
MLP, `S` of the shared expert, `E` routed experts of width `M`, `V` vocabulary; in the weights and in `forward`, `H`,
`F`, `S` and `E` are one rank's share. A matrix is `[out, in]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import numpy as np

from openinfer_engine.distributed.communicator import Communicator, gather_columns
from openinfer_engine.distributed.expert_group import ExpertGroup, expert_group
from openinfer_engine.model import KvLayers, LogitsIndices, Shard, WeightSource
from openinfer_engine.weights.experts import StoredMlp
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.quantization_config import QuantisedConfig
from openinfer_engine.weights.stored_tensor import Repeated, StoredTensor, TensorSpec
from openinfer_kernels import (
    Array,
    AttentionBatch,
    ExpertChoice,
    GroupScore,
    LinearWeight,
    Ops,
    PagedCache,
    RopeParameters,
    Routing,
    Scoring,
    rope_table,
    softmax_factor,
)

Positive = Annotated[int, msgspec.Meta(ge=1)]

ATTENTION = "attention"
"""The paged group of all layers."""
LATENT_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever `rms_norm_eps` says."""


# --- configuration ------------------------------------------------------------------------------------------


class ScoringFunc(StrEnum):
    """What the router makes of its logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class TopkMethod(StrEnum):
    """How the router chooses."""

    GREEDY = "greedy"
    """The largest scores of all."""
    GROUP_LIMITED_GREEDY = "group_limited_greedy"
    """The largest scores in the groups with the largest maxima: DeepSeek-V2, section 2.2.2."""
    NOAUX_TC = "noaux_tc"
    """The largest scores with their biases, in groups whose two largest add up to most: DeepSeek-V3, section 2.1.2."""


class DeepseekConfig(QuantisedConfig, frozen=True, kw_only=True):
    """`config.json`, under its own names: the keys that shape the model. What else it may not say: `family.py`."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    moe_intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    n_routed_experts: Positive
    num_experts_per_tok: Positive
    n_shared_experts: Positive
    """They are one MLP of so many times their width."""
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Layers before this one have a plain MLP."""
    scoring_func: ScoringFunc = ScoringFunc.SOFTMAX
    topk_method: TopkMethod = TopkMethod.GREEDY
    n_group: Positive | None = None
    topk_group: Positive | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Layers after the model's that draft tokens: `mtp.py`."""
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    max_position_embeddings: Positive
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    """transformers 5 writes this, earlier ones the next two."""
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    tensor_prefix: str = ""
    """What the names of its tensors begin with, where it is a part of another model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; RoPE rotates pairs")
        if (self.scoring_func is ScoringFunc.SIGMOID) is not self.corrects_choice:
            raise ValueError(f"topk_method {self.topk_method} does not choose by scoring_func {self.scoring_func}")
        _ = self.routing  # which says what is wrong with it

    @property
    def rope(self) -> RopeParameters:
        return RopeParameters.from_config(msgspec.structs.asdict(self))

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Of the scores: YaRN's magnitude is in it, squared, and not in cosines and sines."""
        return self.qk_head_dim**-0.5 * softmax_factor(self.rope.yarn)

    @property
    def shared_size(self) -> int:
        """Width of the MLP that is all shared experts."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def corrects_choice(self) -> bool:
        """Whether a bias of each expert takes part in the choice."""
        return self.topk_method is TopkMethod.NOAUX_TC

    @property
    def routing(self) -> Routing:
        grouped = self.topk_method is not TopkMethod.GREEDY
        return Routing(
            scoring=Scoring(self.scoring_func),
            num_experts=self.n_routed_experts,
            num_experts_per_token=self.num_experts_per_tok,
            num_groups=(self.n_group or 1) if grouped else 1,
            num_kept_groups=(self.topk_group or 1) if grouped else 1,
            group_score=GroupScore.TOP_TWO_SUM if self.corrects_choice else GroupScore.MAX,
            normalised=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )


# --- tensors of a checkpoint --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """The matrices of one decoder layer."""

    prefix: str
    q_a_proj: StoredMatrix | None
    """Into the bottleneck, where there is one."""
    q_proj: StoredMatrix
    """Published as `q_b_proj` after a bottleneck."""
    kv_a_proj: StoredMatrix
    kv_b_proj: StoredMatrix
    o_proj: StoredMatrix
    mlp: StoredMlp
    """A plain one, or the shared experts."""
    experts: tuple[StoredMlp, ...]
    """None in a layer with a plain MLP."""

    @classmethod
    def of(cls, config: DeepseekConfig, index: int) -> "StoredLayer":
        h, heads, rq, r = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
        prefix = f"{config.tensor_prefix}model.layers.{index}"

        def attention(name: str, rows: int, columns: int) -> StoredMatrix:
            return config.matrix(f"{prefix}.self_attn.{name}", rows, columns)

        def mlp(name: str, width: int) -> StoredMlp:
            return StoredMlp.of(f"{prefix}.{name}", width=width, h=h, format_of=config.format_of)

        is_dense, width = index < config.first_k_dense_replace, config.moe_intermediate_size
        experts = range(0 if is_dense else config.n_routed_experts)
        queries = heads * config.qk_head_dim
        return cls(
            prefix=prefix,
            q_a_proj=None if rq is None else attention("q_a_proj", rq, h),
            q_proj=attention("q_proj", queries, h) if rq is None else attention("q_b_proj", queries, rq),
            kv_a_proj=attention("kv_a_proj_with_mqa", r + config.qk_rope_head_dim, h),
            kv_b_proj=attention("kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), r),
            o_proj=attention("o_proj", h, heads * config.v_head_dim),
            mlp=mlp("mlp", config.intermediate_size) if is_dense else mlp("mlp.shared_experts", config.shared_size),
            experts=tuple(mlp(f"mlp.experts.{expert}", width) for expert in experts),
        )

    @property
    def matrices(self) -> tuple[StoredMatrix, ...]:
        bottleneck = () if self.q_a_proj is None else (self.q_a_proj,)
        attention = (*bottleneck, self.q_proj, self.kv_a_proj, self.kv_b_proj, self.o_proj)
        return (*attention, *(each for mlp in (self.mlp, *self.experts) for each in mlp.matrices))


def tensors(config: DeepseekConfig) -> Mapping[str, TensorSpec]:
    """Every tensor of the checkpoint that `load` reads, with its whole shape."""
    h, prefix = config.hidden_size, config.tensor_prefix
    whole: dict[str, TensorSpec] = {
        f"{prefix}model.embed_tokens.weight": (config.vocab_size, h),
        f"{prefix}model.norm.weight": (h,),
    }
    if not config.tie_word_embeddings:
        whole[f"{prefix}lm_head.weight"] = (config.vocab_size, h)
    for index in range(config.num_hidden_layers):
        whole |= layer_tensors(config, index)
    return whole


def layer_tensors(config: DeepseekConfig, index: int) -> dict[str, TensorSpec]:
    """Those of one decoder layer."""
    h, layer = config.hidden_size, StoredLayer.of(config, index)
    whole: dict[str, TensorSpec] = {
        f"{layer.prefix}.input_layernorm.weight": (h,),
        f"{layer.prefix}.post_attention_layernorm.weight": (h,),
    }
    if config.q_lora_rank is not None:
        whole[f"{layer.prefix}.self_attn.q_a_layernorm.weight"] = (config.q_lora_rank,)
    whole[f"{layer.prefix}.self_attn.kv_a_layernorm.weight"] = (config.kv_lora_rank,)
    if layer.experts:
        whole[f"{layer.prefix}.mlp.gate.weight"] = (config.n_routed_experts, h)
    if layer.experts and config.corrects_choice:
        whole[f"{layer.prefix}.mlp.gate.e_score_correction_bias"] = StoredTensor(
            shape=(config.n_routed_experts,), dtypes=("F32", "BF16"), dummy=Repeated(values=(0.0, 0.01, -0.01))
        )
    for matrix in layer.matrices:
        whole |= matrix.tensors()
    return whole


# --- weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLora:
    """The bottleneck of the queries."""

    a_proj: LinearWeight
    """`[rq, h]`, on every rank whole."""
    a_layernorm: Array
    """`[rq]`"""
    b_proj: LinearWeight
    """`[H (dn + dr), rq]`: of each head the rotated rows last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """A plain MLP, or the shared experts, on one rank; `F` is the width of either."""

    gate_up_proj: LinearWeight
    """`[2 F, h]`: gate rows, then up rows."""
    down_proj: LinearWeight
    """`[h, F]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The routed experts of a layer on one rank."""

    router: Array
    """`[all experts, h]`, on every rank whole."""
    correction_bias: Array | None
    """`[all experts]` float32, on every rank whole; None: experts are chosen by their scores alone."""
    gate_up_proj: LinearWeight
    """`[E, 2 M, h]`: of each routed expert gate rows, then up rows."""
    down_proj: LinearWeight
    """`[E, h, M]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer on one rank."""

    input_layernorm: Array
    """`[h]`"""
    query_lora: QueryLora | None
    input_proj: LinearWeight
    """`[H (dn + dr) + r + dr, h]`: query rows, of each head the rotated ones last; then latent rows, then those of the
    rotated key. With `query_lora` the query rows are not here."""
    kv_a_layernorm: Array
    """`[r]`"""
    kv_b_proj: Array
    """`[H (dn + dv), r]`: of each head key rows, then value rows; in the compute dtype, however it is stored."""
    o_proj: LinearWeight
    """`[h, H dv]`"""
    post_attention_layernorm: Array
    """`[h]`"""
    mlp: MlpWeights
    """A plain one, or the shared experts."""
    experts: ExpertWeights | None
    """None in a layer with a plain MLP."""


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
    """`[2, positions, dr / 2]` float32: cosines, then sines."""


def load(
    config: DeepseekConfig, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
) -> "DeepseekModel":
    """Uploads this rank's weights, and a RoPE table for positions below `max_model_tokens`."""
    loader, prefix = WeightLoader(weights, ops=ops, communicator=communicator), config.tensor_prefix
    head = None if config.tie_word_embeddings else f"{prefix}lm_head.weight"
    embed_tokens, lm_head = loader.vocabulary(f"{prefix}model.embed_tokens.weight", head)
    group = expert_group(communicator, ops)
    layers = tuple(
        load_layer(StoredLayer.of(config, index), config, loader, group) for index in range(config.num_hidden_layers)
    )
    norm = loader.plain(f"{prefix}model.norm.weight")
    table = rope_table(config.rope, head_dim=config.qk_rope_head_dim, positions=max_model_tokens)
    loaded = Weights(embed_tokens=embed_tokens, layers=layers, norm=norm, lm_head=lm_head, rope=ops.upload(table))
    return DeepseekModel(config, loaded, ops=ops, communicator=communicator)


def load_layer(layer: StoredLayer, config: DeepseekConfig, loader: WeightLoader, group: ExpertGroup) -> LayerWeights:
    """Uploads this rank's share of one decoder layer."""
    query_lora, queries = None, (layer.q_proj,)
    if layer.q_a_proj is not None:
        query_lora, queries = _load_query_lora(layer, layer.q_a_proj, loader), ()
    return LayerWeights(
        input_layernorm=loader.plain(f"{layer.prefix}.input_layernorm.weight"),
        query_lora=query_lora,
        input_proj=loader.linear(*queries, shard=Shard.COLUMN_PARALLEL, whole=(layer.kv_a_proj,)),
        kv_a_layernorm=loader.plain(f"{layer.prefix}.self_attn.kv_a_layernorm.weight"),
        kv_b_proj=loader.dequantised(layer.kv_b_proj, Shard.COLUMN_PARALLEL),
        o_proj=loader.linear(layer.o_proj, shard=Shard.ROW_PARALLEL),
        post_attention_layernorm=loader.plain(f"{layer.prefix}.post_attention_layernorm.weight"),
        mlp=MlpWeights(
            gate_up_proj=loader.linear(layer.mlp.gate, layer.mlp.up, shard=Shard.COLUMN_PARALLEL),
            down_proj=loader.linear(layer.mlp.down, shard=Shard.ROW_PARALLEL),
        ),
        experts=_load_experts(layer, config, loader, group) if layer.experts else None,
    )


def _load_query_lora(layer: StoredLayer, q_a_proj: StoredMatrix, loader: WeightLoader) -> QueryLora:
    return QueryLora(
        a_proj=loader.linear(q_a_proj),
        a_layernorm=loader.plain(f"{layer.prefix}.self_attn.q_a_layernorm.weight"),
        b_proj=loader.linear(layer.q_proj, shard=Shard.COLUMN_PARALLEL),
    )


def _load_experts(
    layer: StoredLayer, config: DeepseekConfig, loader: WeightLoader, group: ExpertGroup
) -> ExpertWeights:
    """This rank's experts: an equal share of them, one after the other."""
    count = len(layer.experts) // group.size
    experts = layer.experts[group.rank * count : (group.rank + 1) * count]
    gate_up = [matrix for expert in experts for matrix in (expert.gate, expert.up)]
    bias = f"{layer.prefix}.mlp.gate.e_score_correction_bias"
    return ExpertWeights(
        router=loader.plain(f"{layer.prefix}.mlp.gate.weight"),
        correction_bias=loader.stored_float32(bias) if config.corrects_choice else None,
        gate_up_proj=loader.stack(*gate_up, num_matrices=count),
        down_proj=loader.stack(*(expert.down for expert in experts), num_matrices=count),
    )


# --- forward pass -------------------------------------------------------------------------------------------


class DeepseekModel:
    """The model on one rank; stateless, so that all sequences live in the KV cache that it is handed."""

    def __init__(self, config: DeepseekConfig, weights: Weights, *, ops: Ops, communicator: Communicator) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops
        self._communicator = communicator
        self._experts = expert_group(communicator, ops)
        self._scale = config.softmax_scale
        self._routing = config.routing

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """Hidden states after the final norm, `[T, h]`, for `token_ids [T]`; the same on every rank.

        Args:
            token_ids: int32, each below `vocab_size`.
            batch: where the tokens stand.
            kv_cache: of each layer, mutated: this step's latents and keys are appended.
        """
        return self._forward(token_ids, batch=batch, kv_cache=kv_cache, last=None)

    def forward_last_tokens(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, last: LogitsIndices
    ) -> Array:
        """As `forward`, for the tokens of `last` alone, `[n, h]`; of the last layer, others have latents made only."""
        return self._forward(token_ids, batch=batch, kv_cache=kv_cache, last=last)

    def _forward(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, last: LogitsIndices | None
    ) -> Array:
        ops, weights, eps = self._ops, self.weights, self.config.rms_norm_eps
        residual = ops.residual_embedding(token_ids, weights.embed_tokens)  # [T, h] float32
        x = ops.rms_norm(residual, weights.layers[0].input_layernorm, eps=eps)
        next_norms = (*(layer.input_layernorm for layer in weights.layers[1:]), weights.norm)
        for layer, next_norm, cache in zip(weights.layers, next_norms, kv_cache[ATTENTION], strict=True):
            q = self._queries(x, layer, batch=batch, cache=cache)
            if last is not None and layer is weights.layers[-1]:
                if not len(last.tokens):
                    return x[:0]
                batch, residual, q = last.batch, ops.embedding(last.tokens, residual), self._rows(last.tokens, q)
            x = self._attention(q, layer, batch=batch, cache=cache)
            x = self._feed_forward(x, residual, layer, next_norm=next_norm, batch=batch)
        return x

    def append(self, x: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache) -> None:
        """Latents and keys of a layer alone, for the normed `x [T, h]`."""
        self._queries(x, layer, batch=batch, cache=cache)

    def forward_layer(
        self,
        x: Array,
        residual: Array,
        layer: LayerWeights,
        *,
        next_norm: Array,
        batch: AttentionBatch,
        cache: PagedCache,
        first_key: int = 0,
    ) -> Array:
        """One layer by itself: `[T, h]` after `next_norm`.

        Args:
            x: `[T, h]`, after the layer's `input_layernorm`.
            residual: `[T, h]` float32, mutated: the stream before that norm.
            layer: its weights.
            next_norm: `[h]`, of what follows.
            batch: where the tokens stand.
            cache: mutated: latents and keys are appended.
            first_key: as in `Ops.latent_attention`.
        """
        q = self._queries(x, layer, batch=batch, cache=cache)
        x = self._attention(q, layer, batch=batch, cache=cache, first_key=first_key)
        return self._feed_forward(x, residual, layer, next_norm=next_norm, batch=batch)

    def _feed_forward(
        self, x: Array, residual: Array, layer: LayerWeights, *, next_norm: Array, batch: AttentionBatch
    ) -> Array:
        """`[T, h]` after `next_norm`, for what the attention of a layer gave, `x [T, h]`."""
        ops, eps = self._ops, self.config.rms_norm_eps
        x = ops.add_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
        if layer.experts is None:
            x = self._communicator.all_reduce(self._gated(x, layer.mlp, batch))
        else:
            x = self._mixture(x, layer, layer.experts, batch)
        return ops.add_rms_norm(x, residual, next_norm, eps=eps)

    def join_step(self) -> None:
        """Of a data-parallel rank without rows in a step: its experts compute those of the other ranks."""
        ops, chosen = self._ops, self._routing.num_experts_per_token
        nothing = self.weights.embed_tokens[:0]  # [0, h] in the compute dtype
        choice = ExpertChoice(
            ids=ops.zeros((0, chosen), np.int32),
            weights=ops.zeros((0, chosen), np.float32),
            num_experts=self._routing.num_experts,
        )
        for layer in self.weights.layers:
            if layer.experts is not None:
                self._routed(nothing, choice, layer.experts, shared=nothing)

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, on every rank."""
        piece = self._ops.logits(hidden, self.weights.lm_head)
        return gather_columns(self._communicator, piece, num_columns=self.config.vocab_size)

    def _queries(self, x: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache) -> Array:
        """`[T, H, dn + dr]` of a layer for the normed `x [T, h]`; latents and keys are appended."""
        config, (q, latent) = self.config, self._projections(x, layer, batch)
        return self._ops.latent_norm_rope_append(
            q,
            latent,
            head_dim=config.qk_head_dim,
            norm=layer.kv_a_layernorm,
            eps=LATENT_NORM_EPS,
            rope=self.weights.rope,
            cache=cache,
            batch=batch,
        )

    def _projections(self, x: Array, layer: LayerWeights, batch: AttentionBatch) -> tuple[Array, Array]:
        """`[T, H (dn + dr)]` and `[T, r + dr]` for the normed `x [T, h]`."""
        ops, lora = self._ops, layer.query_lora
        projected = ops.linear(x, layer.input_proj, batch)
        if lora is None:
            rows = projected.shape[1] - self.config.kv_lora_rank - self.config.qk_rope_head_dim
            return projected[:, :rows], projected[:, rows:]
        narrow = ops.rms_norm(ops.linear(x, lora.a_proj, batch), lora.a_layernorm, eps=LATENT_NORM_EPS)  # [T, rq]
        return ops.linear(narrow, lora.b_proj, batch), projected

    def _rows(self, tokens: Array, q: Array) -> Array:
        return self._ops.embedding(tokens, q.reshape(len(q), -1)).reshape(len(tokens), *q.shape[1:])

    def _attention(
        self, q: Array, layer: LayerWeights, *, batch: AttentionBatch, cache: PagedCache, first_key: int = 0
    ) -> Array:
        """`[T, h]` of a layer for the queries `q [T, H, dn + dr]`."""
        # Operators of other packages need not know of what only a drafter asks for.
        seen: dict[str, int] = {"first_key": first_key} if first_key else {}
        attended = self._ops.latent_attention(  # [T, H dv]
            q, cache, kv_b_proj=layer.kv_b_proj, batch=batch, scale=self._scale, **seen
        )
        return self._communicator.all_reduce(self._ops.linear(attended, layer.o_proj, batch))

    def _gated(self, x: Array, mlp: MlpWeights, batch: AttentionBatch) -> Array:
        """What this rank's shard of an MLP makes of `x [T, h]`: `[T, h]`."""
        gated = self._ops.linear_swiglu(x, mlp.gate_up_proj, batch)  # [T, F]
        return self._ops.linear(gated, mlp.down_proj, batch)

    def _mixture(self, x: Array, layer: LayerWeights, experts: ExpertWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` float32 for the normed `x [T, h]`: what the experts of all ranks and the shared ones add."""
        ops = self._ops
        scores = ops.logits(x, experts.router)  # [T, all experts]
        choice = ops.top_experts(
            scores, routing=self._routing, cache_slots=batch.cache_slots[0], bias=experts.correction_bias
        )
        return self._routed(x, choice, experts, shared=self._gated(x, layer.mlp, batch))

    def _routed(self, x: Array, choice: ExpertChoice, experts: ExpertWeights, *, shared: Array) -> Array:
        """`[T, h]` float32 for `x [T, h]`: what its experts, on whichever rank, and `shared [T, h]` add."""
        group, num_experts = self._experts, experts.gate_up_proj.shape[0]

        def compute(rows: Array, chosen: ExpertChoice, added: Array) -> Array:
            first_expert = group.rank * num_experts
            weights = experts.gate_up_proj, experts.down_proj
            return self._ops.experts(rows, chosen, *weights, first_expert=first_expert, shared=added)

        return group.apply(compute, x, choice, shared=shared, num_experts=num_experts)
