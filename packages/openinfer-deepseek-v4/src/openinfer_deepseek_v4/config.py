"""`DeepseekV4Config`: what shapes the model, read from either published layout, and what a checkpoint stores it as."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, cast

import msgspec

from openinfer_kernels import RopeParameters, Routing, Scoring, WeightFormat
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, MXFP4

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

_KIND_OF_RATIO = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


class LayerKind(StrEnum):
    """What a layer attends to besides its window."""

    SLIDING = "sliding_attention"
    """Nothing."""
    SPARSE = "compressed_sparse_attention"
    """The compressed entries that an indexer selects; windows overlap."""
    HEAVY = "heavily_compressed_attention"
    """All compressed entries."""


class RouterKind(StrEnum):
    """How a layer chooses its experts."""

    TABLE = "hash_moe"
    """By the id of the token, from a table."""
    SCORE = "moe"


class TensorNames(StrEnum):
    """Who named the tensors."""

    PUBLISHED = "published"
    TRANSFORMERS = "transformers"
    """`save_pretrained`, which changes some of them."""


class Storage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint stores the model as; None is a matrix that is not quantised."""

    names: TensorNames = TensorNames.PUBLISHED
    linears: WeightFormat | None = None
    """Projections of attention, and shared experts."""
    output_a: WeightFormat | None = None
    """The first output projection, which some layouts have dequantised already."""
    experts: WeightFormat | None = None
    """Routed experts."""


class DeepseekV4Config(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json` under its own names, where both layouts of it (`normalised`) are brought to one."""

    vocab_size: Positive
    hidden_size: Positive
    moe_intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    head_dim: Positive
    q_lora_rank: Positive
    qk_rope_head_dim: Positive
    o_groups: Positive
    o_lora_rank: Positive
    sliding_window: Positive
    index_n_heads: Positive
    index_head_dim: Positive
    index_topk: Positive
    n_routed_experts: Positive
    num_experts_per_tok: Positive
    routed_scaling_factor: PositiveFloat
    swiglu_limit: PositiveFloat
    clamp_shared_experts: bool = True
    """Whether `swiglu_limit` holds in the shared expert: transformers and vLLM say so, the published code does not."""
    hc_mult: Positive
    hc_sinkhorn_iters: Positive
    hc_eps: PositiveFloat
    rms_norm_eps: PositiveFloat
    max_position_embeddings: Positive
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Blocks that draft tokens, after the layers: `mtp.py`. transformers keeps the number and not their tensors."""
    layer_types: tuple[LayerKind, ...]
    mlp_layer_types: tuple[RouterKind, ...]
    sparse_ratio: Positive
    """Tokens per compressed entry of sparse layers."""
    heavy_ratio: Positive
    main_rope: dict[str, Any]
    """Of sliding layers."""
    compress_rope: dict[str, Any]
    """Of all other layers: queries, keys, compressed entries and index keys."""
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        for name, kinds in (("layer_types", self.layer_types), ("mlp_layer_types", self.mlp_layer_types)):
            if len(kinds) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(kinds)} entries for {self.num_hidden_layers} layers")
        if {*self.layer_types} <= {LayerKind.SLIDING}:
            raise ValueError("layer_types has no layer with compressed entries; there must be one")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups {self.o_groups} does not divide num_attention_heads {self.num_attention_heads}")
        for name in ("head_dim", "index_head_dim"):
            if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > getattr(self, name):
                raise ValueError(
                    f"qk_rope_head_dim {self.qk_rope_head_dim} must be even and at most {name}, {getattr(self, name)}"
                )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {self.n_routed_experts} experts")

    def num_layers_of(self, kind: LayerKind) -> int:
        return self.layer_types.count(kind)

    def ratio(self, kind: LayerKind) -> int | None:
        """Tokens per compressed entry; None where there is none."""
        return {LayerKind.SPARSE: self.sparse_ratio, LayerKind.HEAVY: self.heavy_ratio}.get(kind)

    @property
    def routing(self) -> Routing:
        return Routing(
            scoring=Scoring.SQRT_SOFTPLUS,
            num_experts=self.n_routed_experts,
            num_experts_per_token=self.num_experts_per_tok,
            normalised=True,
            scale=self.routed_scaling_factor,
        )

    @property
    def shared_limit(self) -> float | None:
        return self.swiglu_limit if self.clamp_shared_experts else None

    @property
    def ropes(self) -> tuple[RopeParameters, RopeParameters]:
        """Of sliding layers, and of all others."""
        return RopeParameters.from_config(self._rope(self.main_rope)), RopeParameters.from_config(
            self._rope(self.compress_rope)
        )

    def _rope(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"rope_parameters": fields, "max_position_embeddings": self.max_position_embeddings}


def normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """One layout of both, the authors' and transformers'.

    It has kinds of layers by name, ratios and rotary embeddings one by one, and what is stored.

    Raises:
        KeyError: a ratio of tokens per entry that no layer has.
    """
    layers = config.get("num_hidden_layers", 0)
    rates = cast("dict[str, Any]", config.get("compress_rates") or {})
    return dict(config) | {
        "layer_types": _layer_types(config)[:layers],
        "mlp_layer_types": _mlp_layer_types(config, layers)[:layers],
        "sparse_ratio": rates.get("compressed_sparse_attention", _RATIOS["compressed_sparse_attention"]),
        "heavy_ratio": rates.get("heavily_compressed_attention", _RATIOS["heavily_compressed_attention"]),
        "main_rope": rope_fields(config, "main"),
        "compress_rope": rope_fields(config, "compress"),
        "storage": _storage(config),
    }


def rope_fields(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The rotary embedding of sliding layers (`main`) or of all others (`compress`), for `RopeParameters`.

    YaRN's magnitude is 1 whatever its factor: the model is trained so.
    """
    given = cast("dict[str, Any]", config.get("rope_parameters") or {})
    scaling = cast("dict[str, Any]", config.get("rope_scaling") or {})
    fields: dict[str, Any]
    if label in given:
        fields = dict(given[label])
    elif label == "main":
        fields = {"rope_theta": config.get("rope_theta")}
    else:
        fields = {**given, **scaling, "rope_theta": config.get("compress_rope_theta")}
    fields.pop("partial_rotary_factor", None)
    if fields.get("rope_type", fields.get("type")) == "yarn":
        fields["attention_factor"] = 1.0
    return fields


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    if "layer_types" in config:
        return list(config["layer_types"])
    ratios = cast("list[int]", config.get("compress_ratios") or [])
    return [_KIND_OF_RATIO[ratio] for ratio in ratios]


def _mlp_layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    if "mlp_layer_types" in config:
        return list(config["mlp_layer_types"])
    by_table = config.get("num_hash_layers", 0)
    return ["hash_moe"] * by_table + ["moe"] * (layers - by_table)


def _storage(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config says of quantisation; the tensors have the last word (`weights.as_stored`)."""
    if not config.get("quantization_config"):
        return {}
    fp4 = config.get("expert_dtype") == "fp4"
    return {
        "linears": FP8_BLOCK_128,
        "output_a": FP8_BLOCK_128,
        "experts": MXFP4 if fp4 else FP8_BLOCK_128,
    }
