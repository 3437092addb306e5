"""`BlockDrafter`: a few layers that draft a block of tokens at once, as folders of DFlash and DSpark for Qwen3 have.

    after layers a, b, …, of each token ─► fc ─► norm ─► K and V of each layer, once
    [last token, mask, mask, …] ─► embedding ─► layer × N, all of which see the context and each other ─► norm ─► head

Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding"; keys and tensors of the folders as in vLLM's
`qwen3_dflash` and `qwen3_dspark`. Each mask stands where the token is that it drafts; what stands at the last token's
place is dropped, or, with `sample_from_anchor`, drafts the token after it, as each mask drafts the one after its own
place then. As many places are computed as drafts are asked for. Embedding and head are the model's, if the folder has
none.

Keys and values of the context at `p` are made of the model's hidden states at `p`, and lie at slot `p`; those of the
block lie where no other step sees them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.scheduling import SlotStart
from openinfer_engine import DrafterContext
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafters.contract import (
    DrafterRequirements,
    DrafterSetting,
    DraftMemory,
    ObservedStep,
    late_bytes,
)
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.refusals import shortened
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import (
    Array,
    AttentionBatch,
    LinearWeight,
    Ops,
    PagedCache,
    RopeConfigError,
    RopeParameters,
    rope_table,
)
from openinfer_kv_cache import attention_group
from openinfer_qwen3.drafter_folders import check_same_shape, key_reasons_of_folder
from openinfer_qwen3.model import Qwen3Config, Qwen3Model

_NOT_SERVED: Mapping[str, str] = {
    "attention_bias": "biases in the attention are not served",
    "use_sliding_window": "windows are not served",
    "use_swa": "windows are not served",
    "causal": "a causal block is not served",
    "is_causal": "a causal block is not served",
    "attention_sink_bias": "sinks are not served",
    "add_swa_attention_sink_bias": "sinks are not served",
}

Positive = Annotated[int, msgspec.Meta(ge=1)]
_EMBEDDING = -1  # the layer id of what the first layer is given


class BlockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What shapes the layers, from a folder's `config.json`, under its own names."""

    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    vocab_size: Positive
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    block_size: Annotated[int, msgspec.Meta(ge=2)]
    hidden_act: str = "silu"
    target_layer_ids: tuple[Annotated[int, msgspec.Meta(ge=_EMBEDDING)], ...]
    mask_token_id: Annotated[int, msgspec.Meta(ge=0)]
    sample_from_anchor: bool = False
    """Whether the last token's place drafts, too."""
    rope: RopeParameters

    @property
    def taps(self) -> tuple[int, ...]:
        """What a layer gives is what the next one is given."""
        return tuple(layer + 1 for layer in self.target_layer_ids)

    @property
    def first_place(self) -> int:
        """Of a block that drafts."""
        return 0 if self.sample_from_anchor else 1

    def num_drafts(self, asked: int) -> int:
        """How many of so many drafts a block has."""
        return min(asked, self.block_size - self.first_place)


Config = TypeVar("Config", bound=BlockConfig)


def check_served(said: Mapping[str, Any], *, reasons: Sequence[str] = ()) -> None:
    """Raises `Refused` for layers that are no others than these; `reasons` are a folder's own."""
    found = [*key_reasons_of_folder(said, _NOT_SERVED), *reasons]
    if any(kind != "full_attention" for kind in said.get("layer_types") or ()):
        found.append(f"layer_types is {shortened(said['layer_types'])}: only full attention is served")
    other_ropes = [key for key in ("is_neox_style", "rope_is_neox_style") if said.get(key) is False]
    found += [f"{key} is false: only RoPE of halves is served" for key in other_ropes]
    if found:
        raise Refused("; ".join(found))


def parse_block_config(
    kind: type[Config], said: Mapping[str, Any], *, folder: Path, model: Qwen3Config, name: str
) -> Config:
    """The typed config, held against the model's.

    Raises:
        InvalidCheckpoint: a value is missing or of another type.
        Refused: the folder is another model's; the message names what differs.
    """
    try:
        fields = {key: said[key] for key in kind.__struct_fields__ if key in said}
        config = msgspec.convert(fields | {"rope": RopeParameters.from_config(said)}, kind)
    except (msgspec.ValidationError, RopeConfigError) as error:
        raise InvalidCheckpoint(f"{folder}: config.json is no valid {name} config: {error}") from error
    problems = [*_problems(config, model)]
    if problems:
        raise Refused(f"the drafter is another model's: {'; '.join(problems)}")
    return config


def _problems(config: BlockConfig, model: Qwen3Config) -> Sequence[str]:
    problems = [
        f"{name} is {getattr(config, name)}, and the model's {getattr(model, name)}"
        for name in ("vocab_size", "hidden_size")
        if getattr(config, name) != getattr(model, name)
    ]
    layers = list(config.target_layer_ids)
    if not layers or layers != sorted({*layers}) or max(layers) >= model.num_hidden_layers:
        problems.append(f"it reads after layers {layers}: ascending ones below {model.num_hidden_layers} are needed")
    if config.mask_token_id >= model.vocab_size:
        problems.append(f"mask_token_id is {config.mask_token_id} of {model.vocab_size}")
    if config.hidden_act != "silu":
        problems.append(f"hidden_act is {config.hidden_act!r}: only silu is served")
    return problems


def block_tensors(config: BlockConfig) -> dict[str, TensorSpec]:
    """The tensors of the layers."""
    h, d, f = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    tensors: dict[str, TensorSpec] = {
        "fc.weight": (h, len(config.taps) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for index in range(config.num_hidden_layers):
        of_layer: dict[str, TensorSpec] = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (f, h),
            "mlp.up_proj": (f, h),
            "mlp.down_proj": (h, f),
        }
        tensors |= {f"layers.{index}.{name}.weight": shape for name, shape in of_layer.items()}
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayer:
    """One layer on one rank."""

    input_layernorm: Array
    """`[h]`"""
    qkv_proj: LinearWeight
    """`[(H + 2 K) D, h]`"""
    kv_proj: LinearWeight
    """`[2 K D, h]`: its last rows once more, for the context."""
    q_norm: Array
    """`[D]`"""
    k_norm: Array
    """`[D]`"""
    o_proj: LinearWeight
    """`[h, H D]`"""
    post_attention_layernorm: Array
    """`[h]`"""
    gate_up_proj: LinearWeight
    """`[2 F, h]`"""
    down_proj: LinearWeight
    """`[h, F]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """The layers on one rank."""

    fc: Array
    """`[h, taps h]`"""
    hidden_norm: Array
    """`[h]`"""
    layers: tuple[BlockLayer, ...]
    norm: Array
    """`[h]`"""
    rope: Array
    """`[2, positions, D / 2]` float32"""


def load_blocks(
    config: BlockConfig, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_positions: int
) -> BlockWeights:
    """Uploads this rank's share: layers are cut as the model's are, `fc` is whole."""
    loader = WeightLoader(weights, ops=ops, communicator=communicator)
    table = rope_table(config.rope, head_dim=config.head_dim, positions=max_positions)
    return BlockWeights(
        fc=loader.plain("fc.weight"),
        hidden_norm=loader.plain("hidden_norm.weight"),
        layers=tuple(_load_layer(loader, f"layers.{index}") for index in range(config.num_hidden_layers)),
        norm=loader.plain("norm.weight"),
        rope=ops.upload(table),
    )


def _load_layer(loader: WeightLoader, prefix: str) -> BlockLayer:
    q, k, v, o = (f"{prefix}.self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down"))
    return BlockLayer(
        input_layernorm=loader.plain(f"{prefix}.input_layernorm.weight"),
        qkv_proj=loader.linear(q, k, v, shard=Shard.COLUMN_PARALLEL),
        kv_proj=loader.linear(k, v, shard=Shard.COLUMN_PARALLEL),
        q_norm=loader.plain(f"{prefix}.self_attn.q_norm.weight"),
        k_norm=loader.plain(f"{prefix}.self_attn.k_norm.weight"),
        o_proj=loader.linear(o, shard=Shard.ROW_PARALLEL),
        post_attention_layernorm=loader.plain(f"{prefix}.post_attention_layernorm.weight"),
        gate_up_proj=loader.linear(gate, up, shard=Shard.COLUMN_PARALLEL),
        down_proj=loader.linear(down, shard=Shard.ROW_PARALLEL),
    )


def block_requirements(
    config: BlockConfig,
    setting: DrafterSetting,
    *,
    name: str,
    tensors: Mapping[str, TensorSpec],
    other_tensors: Sequence[str] | None = None,
    logits_per_draft: int,
    logits_per_row: int = 0,
) -> DrafterRequirements:
    """Layers of KV, and a tap after each layer that is read.

    Args:
        config: of the folder.
        setting: what it is to draft for.
        name: of the paged group.
        tensors: all that are read.
        other_tensors: as in `DrafterRequirements`.
        logits_per_draft: float32 numbers for each draft.
        logits_per_row: the same for each row, next to these.

    Raises:
        Refused: its KV cannot lie in the model's blocks.
    """
    model: Qwen3Config = setting.model_config
    check_same_shape(config.num_key_value_heads, config.head_dim, model=model)
    heads = config.num_key_value_heads // setting.num_ranks
    size = config.first_place + config.num_drafts(setting.max_drafts)
    group = attention_group(
        name=name,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        head_dim=config.head_dim,
        dtype=setting.kv_dtype,
        rope_tag=f"half layout: {config.rope}",
    )
    activations = size * (32 * config.hidden_size + 8 * config.intermediate_size)
    return DrafterRequirements(
        tensors=tensors,
        other_tensors=other_tensors,
        paged=(group,),
        taps=config.taps,
        span_tokens=size,
        is_queued=True,
        observes_late=True,
        reads_hidden=False,
        # of a token: taps twice, two vectors, K and V of a layer; of a row: logits, scratch of finding the likeliest,
        # and its layers' activations
        bytes_per_token=2 * (2 * len(config.taps) + 2) * model.hidden_size + 8 * heads * config.head_dim,
        bytes_per_sequence=late_bytes(len(config.taps), model.hidden_size),
        bytes_per_row=8 * (size * logits_per_draft + logits_per_row) + activations,
    )


class BlockDrafter(ABC):
    """Implements `Drafter` and `KvDrafter`, but for which token is drafted at each place.

    Args:
        context: of the drafter, with weights.
        config: of its folder.
        model: that it drafts for.
        group: the paged group of its layers.
    """

    def __init__(self, context: DrafterContext, config: BlockConfig, model: Qwen3Model, *, group: str) -> None:
        if context.weights is None:
            raise RuntimeError("a drafter of blocks is made with its weights")
        self.max_drafts = config.num_drafts(context.max_drafts)
        self._config = config
        self._model = model
        self._group = group
        self._ops = context.ops
        self._communicator = context.communicator
        self._weights = load_blocks(
            config,
            context.weights,
            ops=context.ops,
            communicator=context.communicator,
            max_positions=context.max_model_tokens + config.block_size,
        )
        self._memory: DraftMemory | None = None
        self._ids: Array = self._ops.zeros((0, 1), np.int32)  # of a block: all masks but the first
        self._drafted: Array = self._ops.zeros((0,), np.int32)  # places that draft in the tokens of blocks

    @abstractmethod
    def _choose(self, hidden: Array, last_ids: Array, drafts: Array) -> None:
        """Writes `drafts [n, max_drafts]`, given `hidden [n max_drafts, h]` of the places and `last_ids [n]`."""

    @property
    def _embed_tokens(self) -> Array:
        """`[V, h]`"""
        return self._model.weights.embed_tokens

    def attach(self, memory: DraftMemory) -> None:
        size, upload = self._size, self._ops.upload
        places = np.arange(memory.max_rows * size, dtype=np.int32)
        self._memory = memory
        self._ids = upload(np.full((memory.max_rows, size), self._config.mask_token_id, np.int32))
        self._drafted = upload(places[places % size >= self._config.first_place])

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Nothing: all that it keeps of a sequence lies in its blocks."""
        del starts

    def observe(self, step: ObservedStep) -> None:
        ops, weights = self._ops, self._weights
        hidden = ops.linear(ops.join_columns(*step.taps), weights.fc, step.batch)
        context = ops.rms_norm(hidden, weights.hidden_norm, eps=self._config.rms_norm_eps)
        for layer, cache in zip(weights.layers, self._caches, strict=True):
            self._append(ops.linear(context, layer.kv_proj, step.batch), layer, cache, step.batch)

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        del hidden  # it reads others
        drafts = self._ops.zeros((len(slots), self.max_drafts), np.int32)
        rows = self._attached.max_rows
        for first in range(0, len(slots), rows):
            some = slice(first, first + rows)
            self._block(slots[some], last_ids[some], lengths[some], drafts[some])
        return drafts

    def settle(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> None:
        """Implements `SettlingDrafter`; nothing: what it goes on from lies in its blocks."""
        del slots, last_ids, hidden, lengths

    def _block(self, slots: Array, last_ids: Array, lengths: Array, drafts: Array) -> None:
        """Writes `drafts [n, max_drafts]`."""
        size, ops = self._size, self._ops
        span = self._attached.span(slots, lengths)
        ids = self._ids[: len(slots)]
        ops.put_ids(last_ids, ids, 0)
        x = self._forward(ids.reshape(-1), span.rows(0, size), span.whole(size))
        self._choose(ops.embedding(self._drafted[: len(slots) * self.max_drafts], x), last_ids, drafts)

    def _forward(self, token_ids: Array, rows: AttentionBatch, whole: AttentionBatch) -> Array:
        """`[T, h]` after the last norm; K and V are appended by `rows`, and all of a row are seen by `whole`."""
        ops, weights, eps, config = self._ops, self._weights, self._config.rms_norm_eps, self._config
        residual = ops.residual_embedding(token_ids, self._embed_tokens)
        x = ops.rms_norm(residual, weights.layers[0].input_layernorm, eps=eps)
        next_norms = (*(layer.input_layernorm for layer in weights.layers[1:]), weights.norm)
        for layer, next_norm, cache in zip(weights.layers, next_norms, self._caches, strict=True):
            q = self._append(ops.linear(x, layer.qkv_proj, rows), layer, cache, rows)
            x = ops.paged_attention(q, cache, batch=whole, scale=config.head_dim**-0.5)
            x = self._communicator.all_reduce(ops.linear(x, layer.o_proj, rows))
            x = ops.add_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
            x = ops.linear(ops.linear_swiglu(x, layer.gate_up_proj, rows), layer.down_proj, rows)
            x = ops.add_rms_norm(self._communicator.all_reduce(x), residual, next_norm, eps=eps)
        return x

    def _append(self, projected: Array, layer: BlockLayer, cache: PagedCache, batch: AttentionBatch) -> Array:
        return self._ops.qk_norm_rope_append(
            projected,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self._config.rms_norm_eps,
            rope=self._weights.rope,
            cache=cache,
            batch=batch,
        )

    @property
    def _size(self) -> int:
        """Places of a block."""
        return self._config.first_place + self.max_drafts

    @property
    def _attached(self) -> DraftMemory:
        if self._memory is None:
            raise RuntimeError("the drafter was attached to no memory")
        return self._memory

    @property
    def _caches(self) -> Sequence[PagedCache]:
        return self._attached.layers[self._group]
