"""EAGLE-3 for Qwen3: a folder with one decoder layer that drafts from hidden states of three layers of the model.

    before layers a, b, c, of p - 1 ─► fc ─► hidden ─► norm ─┐
    token p ─► embedding ─► norm ────────────────────────────┴─► attention, MLP ─► norm ─► head ─► d2t ─► draft

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test". What
the folder's tensors and keys mean is as in vLLM's `llama_eagle3`: the taps are residual streams that enter layers
`(2, L / 2, L - 3)` unless the config names others; the layer's attention reads the normed embedding and, after it, the
normed hidden state; further drafts take the layer's residual stream, before the last norm, for the hidden state
(`norm_output`: after it). The head is over a vocabulary of the folder's own; `d2t[i]` is what is added to its id `i`.
A tree of drafts is not made: each position has one.

Keys and values of `p` are made of tokens up to `p`, and lie at slot `p`; the first token has none. The hidden state of
the last token of each block lies in the block, as further layers of KV: a sequence that begins there with a cached
prefix drafts as one that computed it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import msgspec
import numpy as np

from openinfer_core import InvalidCheckpoint, Refused, read_config
from openinfer_core.scheduling import SlotStart
from openinfer_engine import DrafterContext
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafters.boundaries import boundary_group
from openinfer_engine.drafters.chained import ChainedDrafter
from openinfer_engine.drafters.chains import HiddenBefore, kept_states
from openinfer_engine.drafters.contract import (
    DrafterRequirements,
    DrafterSetting,
    DraftMemory,
    ObservedStep,
    late_bytes,
)
from openinfer_engine.drafters.draft_head import HEAD, asks_for_fp8, draft_logits, fp8_head, made_bytes
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
from openinfer_kv_cache import KvDtype, attention_group
from openinfer_qwen3.drafter_folders import (
    check_same_shape,
    folder_and_model,
    key_reasons_of_folder,
    map_tensors,
    target_ids,
)
from openinfer_qwen3.model import Qwen3Config, Qwen3Model

OPENINFER_CONTRACT = 1

ATTENTION, BOUNDARY = "eagle3", "eagle3_hidden"
"""The paged groups of the layer's KV, and of hidden states at the ends of blocks."""
_FIRST_KEY = 1
_TAPS = 3
_NOT_SERVED: Mapping[str, str] = {
    "norm_before_fc": "a norm before fc is not served",
    "fc_norm": "norms of the pieces before fc are not served",
    "attention_bias": "biases in the attention are not served",
    "qkv_bias": "biases in the attention are not served",
    "mlp_bias": "biases in the MLP are not served",
    "parallel_drafting": "drafts that are made at once are not served",
}

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True):
    """What shapes the layer, from `config.json` of either published layout, under its own names."""

    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    vocab_size: Positive
    draft_vocab_size: Positive
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    num_hidden_layers: int = 1
    head_dim: Positive | None = None
    target_hidden_size: Positive | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    hidden_act: str = "silu"
    taps: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    rope: RopeParameters
    prefix: str
    """Of the layer's tensors."""
    has_embedding: bool
    has_map: bool
    has_mask: bool
    """`t2d`: whether each token of the model is one of the head's, which `d2t` says, too."""

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def read_eagle3(folder: Path, model: Qwen3Config, names: Mapping[str, Any]) -> Eagle3Config:
    """The config of a folder for a model; `names` are its tensors, none of random weights.

    Raises:
        InvalidCheckpoint: the folder or its config is not whole.
        Refused: a variant that is not served, or a drafter of another model; the message names it.
    """
    published = read_config(folder)
    nested: object = published.get("transformer_layer_config")
    layer = cast("dict[str, Any]", nested) if isinstance(nested, dict) else {}
    said = {**layer, **{key: value for key, value in published.items() if value is not None}}
    kinds = f"{published.get('architectures')} {said.get('speculators_model_type')}"
    if "eagle3" not in kinds.lower():
        raise Refused(
            f"{folder} is no EAGLE-3 folder: its architectures are {shortened(published.get('architectures'))}"
        )
    eagle: Any = said.get("eagle_config") or {}
    reasons = list(key_reasons_of_folder(said, _NOT_SERVED))
    if eagle.get("use_aux_hidden_state", True) is not True:
        reasons.append("use_aux_hidden_state is false: only drafters of three layers' hidden states are served")
    if reasons:
        raise Refused("; ".join(reasons))
    depth = model.num_hidden_layers
    ids = said.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    has_midlayer = any(name.startswith("midlayer.") for name in names)
    try:
        config = msgspec.convert(
            {
                **{key: said[key] for key in Eagle3Config.__struct_fields__ if key in said},
                "draft_vocab_size": said.get("draft_vocab_size") or said.get("vocab_size"),
                "taps": ids or (2, depth // 2, depth - 3),
                "rope": RopeParameters.from_config(said),
                "prefix": "midlayer" if has_midlayer or not names else "layers.0",
                "has_embedding": "embed_tokens.weight" in names,
                "has_map": "d2t" in names or not names,
                "has_mask": "t2d" in names,
            },
            Eagle3Config,
        )
    except (msgspec.ValidationError, RopeConfigError) as error:
        raise InvalidCheckpoint(f"{folder}: config.json is no valid EAGLE-3 config: {error}") from error
    _check(config, model)
    return config


def _check(config: Eagle3Config, model: Qwen3Config) -> None:
    problems = [
        f"{name} is {found}, and the model has {wanted}"
        for name, found, wanted in (
            ("vocab_size", config.vocab_size, model.vocab_size),
            ("target_hidden_size", config.target_hidden_size or config.hidden_size, model.hidden_size),
        )
        if found != wanted
    ]
    if not config.has_embedding and config.hidden_size != model.hidden_size:
        problems.append(
            f"hidden_size is {config.hidden_size} without an embedding, and the model's {model.hidden_size}"
        )
    taps, depth = list(config.taps), model.num_hidden_layers
    if len(taps) != _TAPS or taps != sorted({*taps}) or max(taps) > depth:
        problems.append(f"it reads before layers {taps}: three ascending ones up to {depth} are needed")
    if config.num_hidden_layers != 1 or config.hidden_act != "silu":
        problems.append(f"{config.num_hidden_layers} layers with {config.hidden_act}: only one with silu is served")
    if config.draft_vocab_size > config.vocab_size or (
        not config.has_map and config.draft_vocab_size != config.vocab_size
    ):
        problems.append(f"draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size}, and d2t is missing")
    if problems:
        raise Refused(f"the drafter is another model's: {'; '.join(problems)}")


def eagle3_tensors(config: Eagle3Config, model: Qwen3Config) -> dict[str, TensorSpec]:
    """Every tensor of the folder that is read."""
    h, d, f = config.hidden_size, config.dim, config.intermediate_size
    q, kv, layer = config.num_attention_heads * d, config.num_key_value_heads * d, config.prefix
    tensors: dict[str, TensorSpec] = {
        "fc.weight": (h, _TAPS * model.hidden_size),
        "norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
        **{f"{layer}.{name}.weight": (h,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"{layer}.self_attn.{name}_proj.weight": (rows, 2 * h) for name, rows in (("q", q), ("k", kv), ("v", kv))},
        f"{layer}.self_attn.o_proj.weight": (h, q),
        **{f"{layer}.mlp.{name}_proj.weight": (f, h) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (h, f),
    }
    if config.has_embedding:
        tensors["embed_tokens.weight"] = (config.vocab_size, h)
    return tensors | map_tensors(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Weights:
    """The folder on one rank; the layer is cut as the model's are, `fc` and the head are whole."""

    fc: Array
    """`[h, 3 h']`"""
    embed_tokens: Array
    """`[V, h]`, the model's where the folder has none."""
    input_layernorm: Array
    """`[h]`, of the embedding."""
    hidden_norm: Array
    """`[h]`"""
    qkv_proj: LinearWeight
    """`[(H + 2 K) D, 2 h]`"""
    kv_proj: LinearWeight
    """`[2 K D, 2 h]`: its last rows once more, for tokens that only need these."""
    o_proj: LinearWeight
    """`[h, H D]`"""
    post_attention_layernorm: Array
    """`[h]`"""
    gate_up_proj: LinearWeight
    """`[2 F, h]`"""
    down_proj: LinearWeight
    """`[h, F]`"""
    norm: Array
    """`[h]`"""
    lm_head: LinearWeight
    """`[V_d, h]`"""
    target_ids: Array
    """`[V_d]` int32: token id of each id of the head."""
    rope: Array
    """`[2, positions, D / 2]` float32: the angles of position `p - 1` at `p`."""


def load_eagle3(
    config: Eagle3Config,
    weights: WeightSource,
    *,
    model: Qwen3Model,
    ops: Ops,
    communicator: Communicator,
    max_positions: int,
) -> Eagle3Weights:
    """Uploads this rank's share.

    Raises:
        InvalidCheckpoint: the vocabulary map names a token twice, or none of the model's.
    """
    loader, layer = WeightLoader(weights, ops=ops, communicator=communicator), config.prefix
    names = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
    table = rope_table(config.rope, head_dim=config.dim, positions=max_positions)
    embed = loader.plain("embed_tokens.weight") if config.has_embedding else model.weights.embed_tokens
    return Eagle3Weights(
        fc=loader.plain("fc.weight"),
        embed_tokens=embed,
        input_layernorm=loader.plain(f"{layer}.input_layernorm.weight"),
        hidden_norm=loader.plain(f"{layer}.hidden_norm.weight"),
        qkv_proj=loader.linear(*names, shard=Shard.COLUMN_PARALLEL),
        kv_proj=loader.linear(*names[1:], shard=Shard.COLUMN_PARALLEL),
        o_proj=loader.linear(f"{layer}.self_attn.o_proj", shard=Shard.ROW_PARALLEL),
        post_attention_layernorm=loader.plain(f"{layer}.post_attention_layernorm.weight"),
        gate_up_proj=loader.linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj", shard=Shard.COLUMN_PARALLEL),
        down_proj=loader.linear(f"{layer}.mlp.down_proj", shard=Shard.ROW_PARALLEL),
        norm=loader.plain("norm.weight"),
        lm_head=loader.plain("lm_head.weight"),
        target_ids=ops.upload(target_ids(config, weights)),
        rope=ops.upload(np.concatenate((table[:, :1], table[:, :-1]), axis=1)),
    )


class Eagle3Drafter(ChainedDrafter):
    """Implements `Drafter` and `KvDrafter` by an EAGLE-3 folder (its option `model`).

    Raises:
        Refused: the folder is another model's.
        InvalidCheckpoint: its tensors or its vocabulary map are not right.
    """

    options: ClassVar[tuple[str, ...]] = ("model", HEAD)
    """Of `--speculative`: the folder, and what its head is in."""

    def __init__(self, context: DrafterContext) -> None:
        asked = context.requirements
        if (
            not isinstance(context.model, Qwen3Model)
            or asked is None
            or context.drafter_dir is None
            or context.weights is None
        ):
            raise Refused("eagle3 drafts for Qwen3 models, from the folder that its option model names")
        super().__init__(context)
        self._context = context
        self._config = read_eagle3(context.drafter_dir, context.model.config, asked.tensors)
        self._weights = load_eagle3(
            self._config,
            context.weights,
            model=context.model,
            ops=context.ops,
            communicator=context.communicator,
            max_positions=context.max_model_tokens + context.max_drafts + 1,
        )
        if asks_for_fp8(context.options, num_ranks=1):  # every rank has all of the head
            self._weights = replace(self._weights, lm_head=fp8_head(self._weights.lm_head, ops=context.ops))
        self._places: Array = self._ops.zeros((0,), np.int32)

    @staticmethod
    def requirements(setting: DrafterSetting) -> DrafterRequirements:
        """One more layer of KV, hidden states at the ends of blocks, and three taps.

        Raises:
            Refused: no folder, another family's model, or a folder that is another model's or not served.
            InvalidCheckpoint: its config is not valid.
        """
        folder, model = folder_and_model(setting, "eagle3")
        config = read_eagle3(folder, model, setting.tensors)
        check_same_shape(config.num_key_value_heads, config.dim, model=model)
        if setting.kv_dtype is KvDtype.FLOAT8_E4M3:
            raise Refused("it keeps hidden states with KV, and FP8 holds none: leave --kv-cache-dtype at auto")
        heads = config.num_key_value_heads // setting.num_ranks
        group = attention_group(
            name=ATTENTION,
            num_layers=1,
            num_heads=heads,
            head_dim=config.dim,
            dtype=setting.kv_dtype,
            rope_tag=f"half layout, one position less: {config.rope}",
        )
        width = 2 * heads * config.dim * setting.block_size_tokens
        boundary = boundary_group(group, name=BOUNDARY, num_layers=math.ceil(config.hidden_size / width))
        return DrafterRequirements(
            tensors=eagle3_tensors(config, model),
            paged=(group, boundary),
            taps=config.taps,
            span_tokens=setting.max_drafts,
            is_queued=True,
            made_bytes=made_bytes(setting.options, config.draft_vocab_size, config.hidden_size),
            observes_late=True,
            reads_hidden=False,
            # of a token: taps twice, five vectors of the layer, K and V; of a row: logits, scratch of their sampling
            bytes_per_token=2 * (2 * _TAPS * model.hidden_size + 5 * config.hidden_size + width),
            bytes_per_sequence=2 * (1 + kept_states(setting.max_drafts)) * config.hidden_size
            + late_bytes(_TAPS, model.hidden_size),
            bytes_per_row=8 * config.draft_vocab_size + 64 * config.hidden_size + 8 * config.intermediate_size,
        )

    def attach(self, memory: DraftMemory) -> None:
        last = self._ops.zeros((self._context.max_num_seqs, self._config.hidden_size))
        boundary = tuple(memory.layers[BOUNDARY])
        self._places = self._ops.upload(np.arange(memory.max_rows, dtype=np.int32))
        self._keep(memory, HiddenBefore(last, max_drafts=self.max_drafts, ops=self._ops, boundary=boundary))

    def start(self, starts: Sequence[SlotStart]) -> None:
        self._attached[1].start(start.slot for start in starts)

    def observe(self, step: ObservedStep) -> None:
        _, states = self._attached
        hidden = self._ops.linear(self._ops.join_columns(*step.taps), self._weights.fc, step.batch)
        both, _ = self._inputs(step.token_ids, states.of(step, hidden))
        self._queries(self._ops.linear(both, self._weights.kv_proj, step.batch), step.batch)
        states.take(step, hidden)

    def _of_model(self, hidden: Array) -> None:
        """None: it reads taps."""
        del hidden

    def _likeliest(self, normed: Array, drafts: Array, column: int) -> Array:
        logits = draft_logits(normed, self._weights.lm_head, ops=self._ops)
        return self._ops.draft_ids(logits, drafts, column, token_ids=self._weights.target_ids)

    def _forward(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        """`[n, h]` after the last norm, and what the next draft takes; K and V are appended."""
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        sum_of_ranks = self._context.communicator.all_reduce
        both, normed = self._inputs(token_ids, hidden)
        begun = normed if self._config.norm_before_residual else hidden
        residual = ops.residual_embedding(self._places[: len(hidden)], begun)
        q = self._queries(ops.linear(both, weights.qkv_proj, batch), batch)
        scale = self._config.dim**-0.5
        x = ops.paged_attention(q, self._cache, batch=batch, scale=scale, first_key=_FIRST_KEY)
        x = sum_of_ranks(ops.linear(x, weights.o_proj, batch))
        x = ops.add_rms_norm(x, residual, weights.post_attention_layernorm, eps=eps)
        x = sum_of_ranks(ops.linear(ops.linear_swiglu(x, weights.gate_up_proj, batch), weights.down_proj, batch))
        x = ops.add_rms_norm(x, residual, weights.norm, eps=eps)
        return x, x if self._config.norm_output else ops.join_columns(residual)

    def _inputs(self, token_ids: Array, hidden: Array) -> tuple[Array, Array]:
        """What attention reads, `[n, 2 h]`, and its second half."""
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        embedded = ops.rms_norm(ops.embedding(token_ids, weights.embed_tokens), weights.input_layernorm, eps=eps)
        normed = ops.rms_norm(hidden, weights.hidden_norm, eps=eps)
        return ops.join_columns(embedded, normed), normed

    def _queries(self, projected: Array, batch: AttentionBatch) -> Array:
        return self._ops.rope_append(projected, rope=self._weights.rope, cache=self._cache, batch=batch)

    @property
    def _cache(self) -> PagedCache:
        return self._attached[0].layers[ATTENTION][0]
