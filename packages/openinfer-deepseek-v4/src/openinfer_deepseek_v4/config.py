"""`DeepseekV4Config`: what shapes the model, and what a checkpoint stores it as."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from openinfer_kernels import RopeParameters, Routing, Scoring, WeightFormat

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class LayerKind(StrEnum):
    """What a layer attends to beside its window."""

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
    """The first output projection, which some layouts have widened already."""
    experts: WeightFormat | None = None
    """Routed experts."""


class DeepseekV4Config(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json` under its own names, where both layouts of it (`published.py`) are brought to one."""

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
        """How many there are."""
        return self.layer_types.count(kind)

    def ratio(self, kind: LayerKind) -> int | None:
        """Tokens per compressed entry; None where there is none."""
        return {LayerKind.SPARSE: self.sparse_ratio, LayerKind.HEAVY: self.heavy_ratio}.get(kind)

    @property
    def routing(self) -> Routing:
        """Of every layer."""
        return Routing(
            scoring=Scoring.SQRT_SOFTPLUS,
            num_experts=self.n_routed_experts,
            num_experts_per_token=self.num_experts_per_tok,
            normalised=True,
            scale=self.routed_scaling_factor,
        )

    @property
    def shared_limit(self) -> float | None:
        """Of the shared expert."""
        return self.swiglu_limit if self.clamp_shared_experts else None

    @property
    def ropes(self) -> tuple[RopeParameters, RopeParameters]:
        """Of sliding layers, and of all others."""
        return RopeParameters.from_config(self._rope(self.main_rope)), RopeParameters.from_config(
            self._rope(self.compress_rope)
        )

    def _rope(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"rope_parameters": fields, "max_position_embeddings": self.max_position_embeddings}
