"""DeepSeek-V2-Lite: the forward pass, and how its published weights become arrays on one rank.

    ids ─► embedding ─► layer × L ─► norm ─► hidden ─► head ─► logits

    layer:  x += o_proj(latent_attention(rope(q), latents))            q, latent = input_proj(norm(x))
            x += down_proj(silu(gate) * up)                            gate, up = gate_up_proj(norm(x))
       or:  x += sum of s_j expert_j(y) + shared(y)                    y = norm(x), s = top(softmax(router(y)))

What differs from Qwen3: a token's keys and values are kept as one latent, which all heads share, with one rotated key
beside it (multi-head latent attention); pairs of neighbours are rotated; and from layer `first_k_dense_replace` on the
MLP is a mixture of experts, whose router's scores are softmax probabilities that are not renormalised. Reference:
`transformers.models.deepseek_v2.modeling_deepseek_v2`; DeepSeek-AI 2024, "DeepSeek-V2", section 2.

Across ranks the layers are cut as in Shoeybi et al. 2019, "Megatron-LM", section 3: each rank has whole heads, whole
routed experts, and a piece of the width of every other MLP, and sums its share of the outputs with the other ranks.
Each has all latents. Each embeds all ids, and computes the logits of its piece of the vocabulary.

Letters: `T` tokens of a step, `h` hidden size, `H` heads, `r` latent dimensions, `dr` rotated ones, `dn` and `dv`
dimensions of a head's unrotated key and of its value, `F` width of the MLP, `S` of the shared expert, `E` routed
experts of width `M`, `V` vocabulary; in the weights and in `forward`, `H`, `F`, `S` and `E` are one rank's share. A
matrix is `[out, in]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import Cut, WeightSource
from openinfer_engine.wanted_tokens import WantedTokens
from openinfer_engine.weights.fused import pad_rows, rows_of_rank
from openinfer_kernels import (
    Array,
    AttentionBatch,
    GroupScore,
    Ops,
    RopeParameters,
    Routing,
    Scoring,
    rope_table,
    softmax_factor,
)

Positive = Annotated[int, msgspec.Meta(ge=1)]

LATENT_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever `rms_norm_eps` says."""


# --- configuration ------------------------------------------------------------------------------------------


class TopkMethod(StrEnum):
    """How the router chooses."""

    GREEDY = "greedy"
    """The largest scores of all."""
    GROUP_LIMITED_GREEDY = "group_limited_greedy"
    """The largest scores in the groups with the largest maxima: DeepSeek-V2, section 2.2.2."""


class DeepseekV2LiteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json`, under its own names: the keys that shape the model. What else it may not say: `refusals.py`."""

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
    topk_method: TopkMethod = TopkMethod.GREEDY
    n_group: Positive | None = None
    topk_group: Positive | None = None
    routed_scaling_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    max_position_embeddings: Positive
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    """transformers 5 writes this, earlier ones the next two."""
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; RoPE rotates pairs")
        _ = self.routing  # which says what is wrong with it

    @property
    def rope(self) -> RopeParameters:
        """The rotary embedding, from either spelling."""
        return RopeParameters.from_config(msgspec.structs.asdict(self))

    @property
    def qk_head_dim(self) -> int:
        """Of a query."""
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
    def routing(self) -> Routing:
        """How a token's experts are chosen and weighed."""
        grouped = self.topk_method is TopkMethod.GROUP_LIMITED_GREEDY
        return Routing(
            scoring=Scoring.SOFTMAX,
            num_experts=self.n_routed_experts,
            num_experts_per_token=self.num_experts_per_tok,
            num_groups=(self.n_group or 1) if grouped else 1,
            num_kept_groups=(self.topk_group or 1) if grouped else 1,
            group_score=GroupScore.MAX,
            scale=self.routed_scaling_factor,
        )


def tensors(config: DeepseekV2LiteConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor of the checkpoint that `load` reads, with its whole shape."""
    h = config.hidden_size
    whole: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tie_word_embeddings:
        whole["lm_head.weight"] = (config.vocab_size, h)
    dense = _attention_tensors(config) | _mlp_tensors("mlp", config.intermediate_size, h)
    sparse = _attention_tensors(config) | _expert_tensors(config)
    for index in range(config.num_hidden_layers):
        layer = dense if index < config.first_k_dense_replace else sparse
        whole |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return whole


def _attention_tensors(config: DeepseekV2LiteConfig) -> dict[str, tuple[int, ...]]:
    h, r, rq, heads = config.hidden_size, config.kv_lora_rank, config.q_lora_rank, config.num_attention_heads
    q = heads * config.qk_head_dim
    queries: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (q, h)}
    if rq is not None:
        queries = {
            "self_attn.q_a_proj.weight": (rq, h),
            "self_attn.q_a_layernorm.weight": (rq,),
            "self_attn.q_b_proj.weight": (q, rq),
        }
    return queries | {
        "input_layernorm.weight": (h,),
        "self_attn.kv_a_proj_with_mqa.weight": (r + config.qk_rope_head_dim, h),
        "self_attn.kv_a_layernorm.weight": (r,),
        "self_attn.kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), r),
        "self_attn.o_proj.weight": (h, heads * config.v_head_dim),
        "post_attention_layernorm.weight": (h,),
    }


def _mlp_tensors(prefix: str, width: int, h: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, h),
        f"{prefix}.up_proj.weight": (width, h),
        f"{prefix}.down_proj.weight": (h, width),
    }


def _expert_tensors(config: DeepseekV2LiteConfig) -> dict[str, tuple[int, ...]]:
    h = config.hidden_size
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (config.n_routed_experts, h)}
    for expert in range(config.n_routed_experts):
        found |= _mlp_tensors(f"mlp.experts.{expert}", config.moe_intermediate_size, h)
    return found | _mlp_tensors("mlp.shared_experts", config.shared_size, h)


# --- weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLora:
    """Queries through a bottleneck of `rq` dimensions, where the config has a `q_lora_rank`."""

    a_proj: Array
    """`[rq, h]`"""
    a_layernorm: Array
    """`[rq]`"""
    b_proj: Array
    """`[H (dn + dr), rq]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """A plain MLP, or the shared experts, on one rank; `F` is the width of either."""

    gate_up_proj: Array
    """`[2 F, h]`: gate rows, then up rows."""
    down_proj: Array
    """`[h, F]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """A mixture of experts on one rank."""

    router: Array
    """`[all experts, h]`, on every rank whole."""
    gate_up_proj: Array
    """`[E, 2 M, h]`: of each routed expert gate rows, then up rows."""
    down_proj: Array
    """`[E, h, M]`"""
    shared: MlpWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer on one rank."""

    input_layernorm: Array
    """`[h]`"""
    query_lora: QueryLora | None
    input_proj: Array
    """`[H (dn + dr) + r + dr, h]`: query rows, of each head the rotated ones last; then latent rows, then those of the
    rotated key. With `query_lora` the query rows are not here."""
    kv_a_layernorm: Array
    """`[r]`"""
    kv_b_proj: Array
    """`[H (dn + dv), r]`: of each head key rows, then value rows."""
    o_proj: Array
    """`[h, H dv]`"""
    post_attention_layernorm: Array
    """`[h]`"""
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of the model on one rank."""

    embed_tokens: Array
    """`[V', h]`, on every rank whole; `V'` is `V` rounded up to a multiple of the ranks."""
    layers: tuple[LayerWeights, ...]
    norm: Array
    """`[h]`"""
    lm_head: Array
    """`[V' / ranks, h]`; of a tied model a view of `embed_tokens`."""
    rope: Array
    """`[2, positions, dr / 2]` float32: cosines, then sines."""


def load(
    config: DeepseekV2LiteConfig, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
) -> "DeepseekV2LiteModel":
    """Uploads this rank's weights, and a RoPE table for positions below `max_model_tokens`."""
    embed_tokens = ops.upload_weight(*pad_rows(weights.read("model.embed_tokens.weight"), communicator.size))
    if config.tie_word_embeddings:
        lm_head = _vocabulary_piece(embed_tokens, communicator)
    else:
        head = weights.read("lm_head.weight")
        lm_head = ops.upload_weight(*rows_of_rank(head, rank=communicator.rank, size=communicator.size))
    layers = tuple(
        _load_layer(config, weights, index, ops=ops, communicator=communicator)
        for index in range(config.num_hidden_layers)
    )
    norm = ops.upload_weight(weights.read("model.norm.weight"))
    table = rope_table(config.rope, head_dim=config.qk_rope_head_dim, positions=max_model_tokens)
    loaded = Weights(embed_tokens=embed_tokens, layers=layers, norm=norm, lm_head=lm_head, rope=ops.upload(table))
    return DeepseekV2LiteModel(config, loaded, ops=ops, communicator=communicator)


def _load_layer(
    config: DeepseekV2LiteConfig, weights: WeightSource, index: int, *, ops: Ops, communicator: Communicator
) -> LayerWeights:
    prefix = f"model.layers.{index}"

    def read(name: str, cut: Cut = Cut.WHOLE) -> Array:
        return ops.upload_weight(weights.read(f"{prefix}.{name}.weight", cut))

    latent_rows = weights.read(f"{prefix}.self_attn.kv_a_proj_with_mqa.weight")
    query_lora, query_rows = None, ()
    if config.q_lora_rank is None:
        query_rows = (weights.read(f"{prefix}.self_attn.q_proj.weight", Cut.ROWS),)
    else:
        query_lora = QueryLora(
            a_proj=read("self_attn.q_a_proj"),
            a_layernorm=read("self_attn.q_a_layernorm"),
            b_proj=read("self_attn.q_b_proj", Cut.ROWS),
        )
    is_dense = index < config.first_k_dense_replace
    return LayerWeights(
        input_layernorm=read("input_layernorm"),
        query_lora=query_lora,
        input_proj=ops.upload_weight(*query_rows, latent_rows),
        kv_a_layernorm=read("self_attn.kv_a_layernorm"),
        kv_b_proj=read("self_attn.kv_b_proj", Cut.ROWS),
        o_proj=read("self_attn.o_proj", Cut.COLUMNS),
        post_attention_layernorm=read("post_attention_layernorm"),
        mlp=_load_mlp(weights, f"{prefix}.mlp", ops=ops)
        if is_dense
        else _load_experts(config, weights, f"{prefix}.mlp", ops=ops, communicator=communicator),
    )


def _load_mlp(weights: WeightSource, prefix: str, *, ops: Ops) -> MlpWeights:
    gate, up = (weights.read(f"{prefix}.{name}_proj.weight", Cut.ROWS) for name in ("gate", "up"))
    down = weights.read(f"{prefix}.down_proj.weight", Cut.COLUMNS)
    return MlpWeights(gate_up_proj=ops.upload_weight(gate, up), down_proj=ops.upload_weight(down))


def _load_experts(
    config: DeepseekV2LiteConfig, weights: WeightSource, prefix: str, *, ops: Ops, communicator: Communicator
) -> ExpertWeights:
    """This rank's experts: an equal share of them, one after the other."""
    h, width = config.hidden_size, config.moe_intermediate_size
    count = config.n_routed_experts // communicator.size
    experts = range(communicator.rank * count, (communicator.rank + 1) * count)
    names = [f"{prefix}.experts.{expert}" for expert in experts]
    gate_up = [weights.read(f"{name}.{part}_proj.weight") for name in names for part in ("gate", "up")]
    down = [weights.read(f"{name}.down_proj.weight") for name in names]
    return ExpertWeights(
        router=ops.upload_weight(weights.read(f"{prefix}.gate.weight")),
        gate_up_proj=ops.upload_weight(*gate_up).reshape(count, 2 * width, h),
        down_proj=ops.upload_weight(*down).reshape(count, h, width),
        shared=_load_mlp(weights, f"{prefix}.shared_experts", ops=ops),
    )


def _vocabulary_piece(table: Array, communicator: Communicator) -> Array:
    """This rank's rows of a table `[V', h]`, a view."""
    rows = len(table) // communicator.size
    return table[communicator.rank * rows : (communicator.rank + 1) * rows]


# --- forward pass -------------------------------------------------------------------------------------------


class DeepseekV2LiteModel:
    """The model on one rank; stateless, so that all sequences live in the KV cache that it is handed."""

    def __init__(self, config: DeepseekV2LiteConfig, weights: Weights, *, ops: Ops, communicator: Communicator) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._communicator = communicator
        self._scale = config.softmax_scale
        self._routing = config.routing

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: Array) -> Array:
        """Hidden states after the final norm, `[T, h]`, for `token_ids [T]`; the same on every rank.

        Args:
            token_ids: int32, each below `vocab_size`.
            batch: where the tokens stand.
            kv_cache: `[blocks, L, 1, 1, block tokens, r + dr]`, mutated: this step's latents and keys are appended.
        """
        return self._forward(token_ids, batch=batch, kv_cache=kv_cache, wanted=None)

    def forward_wanted(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: Array, wanted: WantedTokens
    ) -> Array:
        """As `forward`, for the wanted tokens alone, `[n, h]`; of the last layer, others have latents made only."""
        return self._forward(token_ids, batch=batch, kv_cache=kv_cache, wanted=wanted)

    def _forward(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: Array, wanted: WantedTokens | None
    ) -> Array:
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        residual = ops.residual_embedding(token_ids, weights.embed_tokens)  # [T, h] float32
        x = ops.rms_norm(residual, weights.layers[0].input_layernorm, eps=eps)
        next_norms = (*(layer.input_layernorm for layer in weights.layers[1:]), weights.norm)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            q = self._queries(x, layer, index, batch=batch, kv_cache=kv_cache)
            if wanted is not None and index + 1 == len(weights.layers):
                if not len(wanted.tokens):
                    return x[:0]
                batch, residual, q = wanted.batch, ops.embedding(wanted.tokens, residual), self._rows(wanted.tokens, q)
            x = self._attention(q, layer, index, batch=batch, kv_cache=kv_cache)
            x = ops.add_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
            x = self._mlp(x, layer.mlp) if isinstance(layer.mlp, MlpWeights) else self._experts(x, layer.mlp, batch)
            x = ops.add_rms_norm(x, residual, next_norm, eps=eps)
        return x

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, on every rank."""
        piece = self._ops.logits(hidden, self._weights.lm_head)
        return self._communicator.all_gather(piece, axis=1)[:, : self._config.vocab_size]

    def _queries(self, x: Array, layer: LayerWeights, index: int, *, batch: AttentionBatch, kv_cache: Array) -> Array:
        """`[T, H, dn + dr]` of layer `index` for the normed `x [T, h]`; latents and keys are appended."""
        config, (q, latent) = self._config, self._projections(x, layer)
        return self._ops.latent_norm_rope_append(
            q,
            latent,
            head_dim=config.qk_head_dim,
            norm=layer.kv_a_layernorm,
            eps=LATENT_NORM_EPS,
            rope=self._weights.rope,
            kv_cache=kv_cache,
            layer=index,
            batch=batch,
        )

    def _projections(self, x: Array, layer: LayerWeights) -> tuple[Array, Array]:
        """`[T, H (dn + dr)]` and `[T, r + dr]` for the normed `x [T, h]`."""
        ops, lora = self._ops, layer.query_lora
        projected = ops.linear(x, layer.input_proj)
        if lora is None:
            rows = len(layer.input_proj) - self._config.kv_lora_rank - self._config.qk_rope_head_dim
            return projected[:, :rows], projected[:, rows:]
        narrow = ops.rms_norm(ops.linear(x, lora.a_proj), lora.a_layernorm, eps=LATENT_NORM_EPS)  # [T, rq]
        return ops.linear(narrow, lora.b_proj), projected

    def _rows(self, tokens: Array, q: Array) -> Array:
        """`q[tokens]`, `[n, H, dn + dr]`."""
        return self._ops.embedding(tokens, q.reshape(len(q), -1)).reshape(len(tokens), *q.shape[1:])

    def _attention(self, q: Array, layer: LayerWeights, index: int, *, batch: AttentionBatch, kv_cache: Array) -> Array:
        """`[T, h]` of layer `index` for the queries `q [T, H, dn + dr]`."""
        attended = self._ops.latent_attention(  # [T, H dv]
            q, kv_cache, kv_b_proj=layer.kv_b_proj, layer=index, batch=batch, scale=self._scale
        )
        return self._communicator.all_reduce(self._ops.linear(attended, layer.o_proj))

    def _mlp(self, x: Array, mlp: MlpWeights) -> Array:
        """`[T, h]` for the normed `x [T, h]`."""
        gated = self._ops.linear_swiglu(x, mlp.gate_up_proj)  # [T, F]
        return self._communicator.all_reduce(self._ops.linear(gated, mlp.down_proj))

    def _experts(self, x: Array, mlp: ExpertWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` float32 for the normed `x [T, h]`: what the experts of all ranks and the shared ones add."""
        ops, first_expert = self._ops, self._communicator.rank * len(mlp.gate_up_proj)
        scores = ops.logits(x, mlp.router)  # [T, all experts]
        choice = ops.top_experts(scores, routing=self._routing, cache_slots=batch.cache_slots)
        shared = ops.linear(ops.linear_swiglu(x, mlp.shared.gate_up_proj), mlp.shared.down_proj)  # [T, h]
        summed = ops.experts(
            x, choice, mlp.gate_up_proj, mlp.down_proj, first_expert=first_expert, shared=shared
        )  # [T, h]
        return self._communicator.all_reduce(summed)
