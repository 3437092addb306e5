"""Qwen3.5, dense and mixtures, text path: the forward pass, and how published weights become arrays on one rank.

    ids ─► embedding ─► layer × L ─► norm ─► hidden ─► head ─► logits

    layer:  x += mixer(norm(x))
            x += down_proj(silu(gate) * up)                            gate, up = gate_up_proj(norm(x))
       or:  x += sum of s_j expert_j(y) + sigmoid(gate(y)) shared(y)   y = norm(x), s = top(softmax(router(y)))

    mixer of a full-attention layer:
            o_proj(attention(rope(norm(q)), rope(norm(k)), v) * sigmoid(gate))
                                                            (q, gate) per head, k, v = qkv_proj(x)
    mixer of a linear-attention layer:
            out_proj(norm(delta_rule(q, k, v, decay(a), sigmoid(b))) * silu(z))
                                                            u, z, b, a = in_proj(x); q, k, v = silu(conv(u))

What differs from Qwen3: three of four layers are linear attention, whose state has one size however long the text is;
attention has a gate per output, and rotates the first quarter of each head. Norms are zero-centred (`1 + weight`), but
for the one inside linear attention. In a mixture (`qwen3_5_moe`) every MLP is many experts, of which a router chooses a
few for each token, and a shared one, which each token has with a weight of its own: it is one more expert here, after
the others. References: `transformers.models.qwen3_5.modeling_qwen3_5`, `qwen3_5_moe.modeling_qwen3_5_moe`; Yang et al.
2024, "Gated Delta Networks".

Across ranks the layers are cut as in Shoeybi et al. 2019, "Megatron-LM", section 3: each rank has whole heads, of both
kinds of layers, and a shard of the MLP's width, and sums its share of both outputs with the other ranks. Experts are
whole, and each rank has a share of them. Each rank embeds all ids, and computes the logits of its shard of the
vocabulary.

Letters: `T` tokens of a step, `h` hidden size, `H`/`K` query and KV heads, `D` head dimension, `F` width of the MLP,
`E` experts of width `M`, the shared one among them, `V` vocabulary; of linear attention `Hk`/`N` key and value heads,
`dk`/`dv` their dimensions, `C = 2 Hk dk + N dv`, `W` taps. In the weights and in `forward`, `H`, `K`, `F`, `E`, `Hk`,
`N` and `C` are one rank's share. A matrix is `[out, in]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, cast

import msgspec

from openinfer_engine.distributed.communicator import Communicator, gather_columns
from openinfer_engine.model import KvLayers, Shard, WeightSource
from openinfer_engine.weights.experts import ExpertWeights, StoredExperts, StoredMlp
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.quantization_config import QuantisedConfig
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import (
    Array,
    AttentionBatch,
    KeptInputs,
    LinearWeight,
    Ops,
    PagedCache,
    RopeParameters,
    Routing,
    Scoring,
    rope_table,
)

Positive = Annotated[int, msgspec.Meta(ge=1)]

VISION_LANGUAGE = "qwen3_5"
TEXT = "qwen3_5_text"
VISION_LANGUAGE_MOE = "qwen3_5_moe"
TEXT_MOE = "qwen3_5_moe_text"
TEXT_OF = {VISION_LANGUAGE: TEXT, VISION_LANGUAGE_MOE: TEXT_MOE}
"""`model_type` of a vision-language model -> that of its text model."""

ATTENTION = "attention"
"""The paged group of the layers of full attention."""
LINEAR_ATTENTION = "linear_attention"
"""The slot group of the states; its tensors are `conv` and `state`."""

_IMAGE_ROPE_FIELDS = frozenset({"mrope_section", "mrope_interleaved"})
"""Which frequencies turn with an image's height and width. A text position is the same in all three axes."""
_DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25
_SHARED_ALONE = Routing(scoring=Scoring.SIGMOID, num_experts=1, num_experts_per_token=1)
"""How a shared expert is chosen that is not one of the others: always, and weighed by its gate."""
_ROUTER_ROWS = 64
"""A router has rows of zeros up to a multiple: products of few tokens are quickest at such sizes."""


# --- configuration ------------------------------------------------------------------------------------------


class LayerKind(StrEnum):
    """What mixes the tokens in a layer."""

    FULL = "full_attention"
    LINEAR = "linear_attention"


class Qwen35Config(QuantisedConfig, frozen=True, kw_only=True):
    """The text model's part of `config.json` (`text_config`), under its own names: the keys that shape the model."""

    tensor_prefix: str
    """What the names of its tensors begin with, `lm_head` apart."""
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    linear_num_key_heads: Positive
    linear_num_value_heads: Positive
    linear_key_head_dim: Positive
    linear_value_head_dim: Positive
    linear_conv_kernel_dim: Annotated[int, msgspec.Meta(ge=2)]
    layer_types: tuple[LayerKind, ...] | None = None
    full_attention_interval: Positive = 4
    """Where `layer_types` is absent, every so-many-th layer is full attention."""
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    max_position_embeddings: Positive
    tie_word_embeddings: bool = False
    partial_rotary_factor: Annotated[float, msgspec.Meta(gt=0, le=1)]
    rope_parameters: dict[str, Any]
    """transformers 5 writes this, earlier ones the next two."""
    rope_theta: float | None = None
    rope_scaling: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        for part, whole in (
            ("num_key_value_heads", "num_attention_heads"),
            ("linear_num_key_heads", "linear_num_value_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{part} {getattr(self, part)} does not divide {whole} {getattr(self, whole)}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} is "
                f"{self.rotary_dim}; RoPE rotates pairs"
            )
        if len(self.layer_kinds) != self.num_hidden_layers or {*self.layer_kinds} != {*LayerKind}:
            raise ValueError(
                f"layer_types has {len(self.layer_kinds)} entries for {self.num_hidden_layers} layers, of the kinds "
                f"{', '.join(sorted({*self.layer_kinds}))}; there must be one for each layer, and some of either kind"
            )

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        if self.layer_types is not None:
            return self.layer_types
        interval = self.full_attention_interval
        return tuple(LayerKind.LINEAR if (i + 1) % interval else LayerKind.FULL for i in range(self.num_hidden_layers))

    def num_layers_of(self, kind: LayerKind) -> int:
        return self.layer_kinds.count(kind)

    @property
    def rope(self) -> RopeParameters:
        return RopeParameters.from_config(msgspec.structs.asdict(self) | {"partial_rotary_factor": None})

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions are rotated, the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def linear_heights(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the checkpoint's `in_proj_qkv`, of all ranks."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return keys, keys, self.linear_num_value_heads * self.linear_value_head_dim

    def experts(self, layer: int) -> StoredExperts | None:
        """Those of a layer; None where its MLP is none of experts."""
        del layer
        return None

    def shared_apart(self, layer: int) -> StoredMlp | None:
        """The shared expert of a layer, if it is stored otherwise than the others, with which it is else multiplied."""
        del layer
        return None


class Qwen35MoeConfig(Qwen35Config, frozen=True, kw_only=True):
    """The same of a mixture."""

    intermediate_size: int = 0
    """No layer has a plain MLP."""
    num_experts: Positive
    num_experts_per_tok: Positive
    moe_intermediate_size: Positive
    norm_topk_prob: bool = True
    """Whether the weights of a token's routed experts are divided by their sum; published configs do not say."""
    experts_are_stacked: bool = True
    """Whether a layer's routed experts are two tensors, as published in BF16; else they are stored one by one, as
    quantised ones are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.routing  # which says what is wrong with it

    @property
    def routing(self) -> Routing:
        return Routing(
            scoring=Scoring.SOFTMAX,
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_tok,
            normalised=self.norm_topk_prob,
        )

    def experts(self, layer: int) -> StoredExperts | None:
        is_apart = self.shared_apart(layer) is not None
        return StoredExperts(
            prefix=f"{self.tensor_prefix}layers.{layer}.mlp.experts",
            routing=replace(self.routing, shared_expert=not is_apart),
            hidden_size=self.hidden_size,
            width=self.moe_intermediate_size,
            format_of=self.format_of,
            is_stacked=self._is_stacked,
            shared=None if is_apart else self._expert(layer, "shared_expert"),
        )

    def shared_apart(self, layer: int) -> StoredMlp | None:
        shared, routed = self._expert(layer, "shared_expert"), self._expert(layer, "experts.0")
        formats = [None if self._is_stacked else each.format for each in routed.matrices]
        return None if formats == [each.format for each in shared.matrices] else shared

    @property
    def _is_stacked(self) -> bool:
        return self.experts_are_stacked and (self.stored is None or self.stored.tensors is not None)

    def _expert(self, layer: int, name: str) -> StoredMlp:
        prefix, sizes = f"{self.tensor_prefix}layers.{layer}.mlp.{name}", (self.moe_intermediate_size, self.hidden_size)
        return StoredMlp.of(prefix, width=sizes[0], h=sizes[1], format_of=self.format_of)


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The text model's part of either published layout, its own or a vision-language model's; None if it is neither.

    `tensor_prefix` is added: what the names of its tensors begin with. So is `partial_rotary_factor`, wherever it was.
    """
    model_type = config.get("model_type")
    text: dict[str, Any]
    if model_type in TEXT_OF.values():
        text, prefix = dict(config), "model."
    elif model_type in TEXT_OF and isinstance(config.get("text_config"), dict):
        text, prefix = dict(config["text_config"]), "model.language_model."
        text |= {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        text["quantization_config"] = text.get("quantization_config") or config.get("quantization_config")
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


def matrices(config: Qwen35Config, layer: int) -> Mapping[str, StoredMatrix]:
    """The matrices of a layer's mixer as they are stored, by the last part of their name."""
    h, prefix = config.hidden_size, f"{config.tensor_prefix}layers.{layer}"
    shapes: dict[str, tuple[int, int]] = {}
    if config.layer_kinds[layer] is LayerKind.FULL:
        q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        shapes |= {f"self_attn.{name}_proj": (rows, h) for name, rows in (("q", 2 * q), ("k", kv), ("v", kv))}
        shapes["self_attn.o_proj"] = (h, q)
    else:
        n, values = config.linear_num_value_heads, config.linear_heights[2]
        rows_of = {"qkv": sum(config.linear_heights), "z": values, "b": n, "a": n}
        shapes |= {f"linear_attn.in_proj_{name}": (rows, h) for name, rows in rows_of.items()}
        shapes["linear_attn.out_proj"] = (h, values)
    return {name.partition(".")[2]: config.matrix(f"{prefix}.{name}", *shape) for name, shape in shapes.items()}


def adapted_matrices(config: Qwen35Config) -> list[tuple[StoredMatrix, Shard]]:
    """What adapters may change: the mixers of both kinds, and plain MLPs."""
    found: list[tuple[StoredMatrix, Shard]] = []
    for layer in range(config.num_hidden_layers):
        for name, matrix in matrices(config, layer).items():
            found.append((matrix, Shard.ROW_PARALLEL if name in ("o_proj", "out_proj") else Shard.COLUMN_PARALLEL))
        if config.experts(layer) is None:
            mlp = _mlp(config, layer)
            found += [(mlp.gate, Shard.COLUMN_PARALLEL), (mlp.up, Shard.COLUMN_PARALLEL)]
            found.append((mlp.down, Shard.ROW_PARALLEL))
    return found


def tensors(config: Qwen35Config) -> Mapping[str, TensorSpec]:
    """Every tensor of the checkpoint that `load` reads, with its whole shape."""
    h, prefix = config.hidden_size, config.tensor_prefix
    whole: dict[str, TensorSpec] = {
        f"{prefix}embed_tokens.weight": (config.vocab_size, h),
        f"{prefix}norm.weight": (h,),
    }
    if not config.tie_word_embeddings:
        whole["lm_head.weight"] = (config.vocab_size, h)
    for index in range(config.num_hidden_layers):
        whole |= layer_tensors(config, index)
    return whole


def layer_tensors(config: Qwen35Config, layer: int) -> dict[str, TensorSpec]:
    """Those of one layer."""
    h, prefix = config.hidden_size, f"{config.tensor_prefix}layers.{layer}"
    is_full = config.layer_kinds[layer] is LayerKind.FULL
    vectors = _attention_vectors(config) if is_full else _linear_attention_vectors(config)
    vectors |= {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    whole: dict[str, TensorSpec] = {f"{prefix}.{name}": shape for name, shape in vectors.items()}
    for matrix in matrices(config, layer).values():
        whole |= matrix.tensors()
    return whole | _mlp_tensors(config, layer)


def _mlp(config: Qwen35Config, layer: int) -> StoredMlp:
    """The plain MLP of a layer."""
    prefix, sizes = f"{config.tensor_prefix}layers.{layer}.mlp", (config.intermediate_size, config.hidden_size)
    return StoredMlp.of(prefix, width=sizes[0], h=sizes[1], format_of=config.format_of)


def _mlp_tensors(config: Qwen35Config, layer: int) -> dict[str, TensorSpec]:
    h, prefix, experts = config.hidden_size, f"{config.tensor_prefix}layers.{layer}.mlp", config.experts(layer)
    if experts is None:
        return _mlp(config, layer).tensors()
    routers: dict[str, TensorSpec] = {
        f"{prefix}.gate.weight": (experts.routing.num_experts, h),
        f"{prefix}.shared_expert_gate.weight": (1, h),
    }
    shared = config.shared_apart(layer)
    return routers | experts.tensors() | ({} if shared is None else shared.tensors())


def _attention_vectors(config: Qwen35Config) -> dict[str, tuple[int, ...]]:
    return {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}


def _linear_attention_vectors(config: Qwen35Config) -> dict[str, tuple[int, ...]]:
    n = config.linear_num_value_heads
    return {
        "linear_attn.conv1d.weight": (sum(config.linear_heights), 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (n,),
        "linear_attn.dt_bias": (n,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
    }


# --- weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The mixer of a full-attention layer on one rank."""

    index: int
    """Among the layers of its kind, hence in the KV cache."""
    qkv_proj: LinearWeight
    """`[(2 H + 2 K) D, h]`: per query head its rows, then those of its gate; then key rows, then value rows."""
    q_norm: Array
    """`[D]`, shared by all query heads."""
    k_norm: Array
    """`[D]`, shared by all key heads."""
    o_proj: LinearWeight
    """`[h, H D]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionWeights:
    """The mixer of a linear-attention layer on one rank."""

    index: int
    """Among the layers of its kind, hence in the states."""
    in_proj: LinearWeight
    """`[C + N dv + 2 N, h]`: query rows, then key rows, then value rows; rows of `z`; rows of `b`, then of `a`."""
    ba_proj: LinearWeight | None
    """`[2 N, h]`: the last of these rows, where they are stored in another format and are not in `in_proj`."""
    conv1d: Array
    """`[C, W]`"""
    a_log: Array
    """`[N]` float32"""
    dt_bias: Array
    """`[N]` float32"""
    norm: Array
    """`[dv]` float32, shared by all value heads; not zero-centred."""
    out_proj: LinearWeight
    """`[h, N dv]`"""


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
    """`[R, h]`, on every rank whole: rows of the routed experts, then that of the shared one's gate, then zeros."""
    routing: Routing
    experts: ExpertWeights
    shared: "MixtureWeights | None"
    """The shared expert alone, where it is stored otherwise than the others; its router is its gate, its width `M` that
    of this rank's shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer on one rank."""

    input_layernorm: Array
    """`[h]`"""
    mixer: AttentionWeights | LinearAttentionWeights
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
    """`[2, positions, r / 2]` float32 for the `r` rotated dimensions: cosines, then sines."""


def load(
    config: Qwen35Config, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
) -> "Qwen35Model":
    """Uploads this rank's weights, and a RoPE table for positions below `max_model_tokens`."""
    loader, prefix = WeightLoader(weights, ops=ops, communicator=communicator), config.tensor_prefix
    head = None if config.tie_word_embeddings else "lm_head.weight"
    embed_tokens, lm_head = loader.vocabulary(f"{prefix}embed_tokens.weight", head)
    layers = tuple(
        LayerReader(config, loader, communicator, index).read_layer() for index in range(config.num_hidden_layers)
    )
    norm = loader.plain(f"{prefix}norm.weight")
    table = rope_table(config.rope, head_dim=config.rotary_dim, positions=max_model_tokens)  # while weights are copied
    loaded = Weights(embed_tokens=embed_tokens, layers=layers, norm=norm, lm_head=lm_head, rope=ops.upload(table))
    return Qwen35Model(config, loaded, ops=ops, communicator=communicator)


class LayerReader:
    """Reads one layer; `config` says under which prefix and of which kind it is."""

    def __init__(self, config: Qwen35Config, loader: WeightLoader, communicator: Communicator, layer: int) -> None:
        self._heights = config.linear_heights
        self._kind = config.layer_kinds[layer]
        self._index = config.layer_kinds[:layer].count(self._kind)
        self._prefix = f"{config.tensor_prefix}layers.{layer}"
        self._experts, self._shared_apart = config.experts(layer), config.shared_apart(layer)
        self._loader = loader
        self._communicator = communicator
        self._stored = matrices(config, layer)
        self._mlp = _mlp(config, layer)

    def read_layer(self) -> LayerWeights:
        return LayerWeights(
            input_layernorm=self._plain("input_layernorm.weight"),
            mixer=self._read_attention() if self._kind is LayerKind.FULL else self._read_linear_attention(),
            post_attention_layernorm=self._plain("post_attention_layernorm.weight"),
            mlp=self._read_mlp() if self._experts is None else self._read_mixture(self._experts),
        )

    def _read_attention(self) -> AttentionWeights:
        return AttentionWeights(
            index=self._index,
            qkv_proj=self._linear(*(f"{name}_proj" for name in "qkv"), shard=Shard.COLUMN_PARALLEL),
            q_norm=self._plain("self_attn.q_norm.weight"),
            k_norm=self._plain("self_attn.k_norm.weight"),
            o_proj=self._linear("o_proj", shard=Shard.ROW_PARALLEL),
        )

    def _read_linear_attention(self) -> LinearAttentionWeights:
        qkv, z, b, a = (self._stored[f"in_proj_{name}"] for name in ("qkv", *"zba"))
        # Published FP8 leaves the few rows of b and a in BF16: these are then a product of their own.
        apart = qkv.format != b.format
        return LinearAttentionWeights(
            index=self._index,
            in_proj=self._loader.stacked_linear(qkv, self._heights, z, *(() if apart else (b, a))),
            ba_proj=self._loader.linear(b, a, shard=Shard.COLUMN_PARALLEL) if apart else None,
            conv1d=self._loader.stacked(f"{self._prefix}.linear_attn.conv1d.weight", self._heights)[:, 0],
            a_log=self._float32("A_log", Shard.COLUMN_PARALLEL),
            dt_bias=self._float32("dt_bias", Shard.COLUMN_PARALLEL),
            norm=self._float32("norm.weight", Shard.WHOLE),
            out_proj=self._linear("out_proj", shard=Shard.ROW_PARALLEL),
        )

    def _read_mlp(self) -> MlpWeights:
        return MlpWeights(
            gate_up_proj=self._loader.linear(self._mlp.gate, self._mlp.up, shard=Shard.COLUMN_PARALLEL),
            down_proj=self._loader.linear(self._mlp.down, shard=Shard.ROW_PARALLEL),
        )

    def _read_mixture(self, experts: StoredExperts) -> MixtureWeights:
        names = ("gate", "shared_expert_gate") if experts.routing.shared_expert else ("gate",)
        return MixtureWeights(
            router=self._router(*names),
            routing=experts.routing,
            experts=experts.load(self._loader, self._communicator),
            shared=None if self._shared_apart is None else self._read_shared(self._shared_apart),
        )

    def _read_shared(self, shared: StoredMlp) -> MixtureWeights:
        stack = self._loader.stack
        return MixtureWeights(
            router=self._router("shared_expert_gate"),
            routing=_SHARED_ALONE,
            experts=ExpertWeights(
                first_expert=0,
                gate_up_proj=stack(shared.gate, shared.up, num_matrices=1, shard=Shard.COLUMN_PARALLEL),
                down_proj=stack(shared.down, num_matrices=1, shard=Shard.ROW_PARALLEL),
            ),
            shared=None,
        )

    def _router(self, *names: str) -> Array:
        whole = (f"{self._prefix}.mlp.{name}.weight" for name in names)
        return self._loader.padded(*whole, multiple=_ROUTER_ROWS)

    def _plain(self, name: str) -> Array:
        return self._loader.plain(f"{self._prefix}.{name}")

    def _linear(self, *names: str, shard: Shard) -> LinearWeight:
        return self._loader.linear(*(self._stored[name] for name in names), shard=shard)

    def _float32(self, name: str, shard: Shard) -> Array:
        return self._loader.float32(f"{self._prefix}.linear_attn.{name}", shard)


# --- forward pass -------------------------------------------------------------------------------------------


class Qwen35Model:
    """The model on one rank; stateless, so that all sequences live in the KV cache and the states it is handed."""

    def __init__(self, config: Qwen35Config, weights: Weights, *, ops: Ops, communicator: Communicator) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops
        self._communicator = communicator

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """Hidden states after the final norm, `[T, h]`, for `token_ids [T]`; the same on every rank.

        Args:
            token_ids: int32, each below `vocab_size`.
            batch: where the tokens stand. Its states `linear_attention.conv [slots, layers, C, W - 1]` and
                `linear_attention.state [slots, layers, N, dk, dv]` are mutated: this step's tokens are consumed.
            kv_cache: of each layer of full attention, mutated: this step's K and V are appended.
        """
        ops, weights, eps = self._ops, self.weights, self.config.rms_norm_eps
        residual = ops.residual_embedding(token_ids, weights.embed_tokens)  # [T, h] float32
        x = ops.zero_centred_rms_norm(residual, weights.layers[0].input_layernorm, eps=eps)
        next_norms = (*(layer.input_layernorm for layer in weights.layers[1:]), weights.norm)
        for layer, next_norm in zip(weights.layers, next_norms, strict=True):
            match layer.mixer:
                case AttentionWeights() as mixer:
                    x = self._attention(x, mixer, batch=batch, cache=kv_cache[ATTENTION][mixer.index])
                case LinearAttentionWeights() as mixer:
                    x = self._linear_attention(x, mixer, batch=batch)
            x = ops.add_zero_centred_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
            x = self.feed_forward(x, layer.mlp, residual, next_norm=next_norm, batch=batch)
            x = ops.add_zero_centred_rms_norm(x, residual, next_norm, eps=eps)
        return x

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, on every rank."""
        piece = self._ops.logits(hidden, self.weights.lm_head)
        return gather_columns(self._communicator, piece, num_columns=self.config.vocab_size)

    def keep_inputs(self, states: Mapping[str, Array], *, most_tokens: int) -> KeptInputs | None:
        """As `openinfer_engine.model.ReplayedModel`."""
        conv, state = (states[f"{LINEAR_ATTENTION}.{name}"] for name in ("conv", "state"))
        return self._ops.keep_inputs(conv=conv, state=state, most_tokens=most_tokens)

    def replay(self, states: Mapping[str, Array], kept: KeptInputs, *, slots: Array, counts: Array) -> None:
        """Likewise."""
        conv, state = (states[f"{LINEAR_ATTENTION}.{name}"] for name in ("conv", "state"))
        self._ops.replay_inputs(kept, conv=conv, state=state, slots=slots, counts=counts)

    def _attention(self, x: Array, mixer: AttentionWeights, *, batch: AttentionBatch, cache: PagedCache) -> Array:
        """`[T, h]` of a full-attention mixer for the normed `x [T, h]`."""
        ops, config = self._ops, self.config
        projected = ops.linear(x, mixer.qkv_proj, batch)  # [T, (2 H + 2 K) D]
        q = ops.gated_qk_norm_rope_append(  # [T, H, D]
            projected,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            eps=config.rms_norm_eps,
            rope=self.weights.rope,
            cache=cache,
            batch=batch,
        )
        scale = config.head_dim**-0.5
        attended = ops.paged_attention(q, cache, batch=batch, scale=scale)  # [T, H D]
        gated = ops.output_gate(attended, projected, head_dim=config.head_dim)
        return self._communicator.all_reduce(ops.linear(gated, mixer.o_proj, batch))

    def _linear_attention(self, x: Array, mixer: LinearAttentionWeights, *, batch: AttentionBatch) -> Array:
        """`[T, h]` of a linear-attention mixer for the normed `x [T, h]`."""
        ops, states = self._ops, batch.states
        channels, values = len(mixer.conv1d), mixer.out_proj.shape[1]
        projected = ops.linear(x, mixer.in_proj, batch)  # [T, C + N dv + 2 N], or without the last 2 N
        ba = projected[:, channels + values :] if mixer.ba_proj is None else ops.linear(x, mixer.ba_proj, batch)
        qkv = ops.causal_conv_silu(  # [T, C]
            projected[:, :channels],
            mixer.conv1d,
            state=states[f"{LINEAR_ATTENTION}.conv"],
            layer=mixer.index,
            batch=batch,
        )
        attended = ops.gated_delta_rule(  # [T, N dv]
            qkv,
            ba,
            a_log=mixer.a_log,
            dt_bias=mixer.dt_bias,
            state=states[f"{LINEAR_ATTENTION}.state"],
            layer=mixer.index,
            batch=batch,
        )
        z = projected[:, channels : channels + values]
        gated = ops.gated_rms_norm(attended, z, mixer.norm, eps=self.config.rms_norm_eps)
        return self._communicator.all_reduce(ops.linear(gated, mixer.out_proj, batch))

    def feed_forward(
        self, x: Array, mlp: MlpWeights | MixtureWeights, residual: Array, *, next_norm: Array, batch: AttentionBatch
    ) -> Array:
        """`[T, h]` of a layer's MLP or mixture for the normed `x [T, h]`; one shared apart goes into `residual`."""
        match mlp:
            case MlpWeights():
                return self._mlp(x, mlp, batch)
            case MixtureWeights():
                if mlp.shared is not None:  # goes into the residual stream by itself; its norm is of no use
                    shared = self._mixture(x, mlp.shared, batch)
                    self._ops.add_zero_centred_rms_norm(shared, residual, next_norm, eps=self.config.rms_norm_eps)
                return self._mixture(x, mlp, batch)

    def _mlp(self, x: Array, mlp: MlpWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` for the normed `x [T, h]`."""
        gated = self._ops.linear_swiglu(x, mlp.gate_up_proj, batch)  # [T, F]
        return self._communicator.all_reduce(self._ops.linear(gated, mlp.down_proj, batch))

    def _mixture(self, x: Array, mixture: MixtureWeights, batch: AttentionBatch) -> Array:
        """`[T, h]` float32 for the normed `x [T, h]`: what the experts of all ranks add."""
        ops, experts = self._ops, mixture.experts
        scores = ops.logits(x, mixture.router)  # [T, R]
        choice = ops.top_experts(scores, routing=mixture.routing, cache_slots=batch.cache_slots[0])
        summed = ops.experts(
            x, choice, experts.gate_up_proj, experts.down_proj, first_expert=experts.first_expert
        )  # [T, h]
        return self._communicator.all_reduce(summed)
