"""The layer of DeepSeek-V3 that foretells the token after the next one (multi-token prediction), as a drafter.

    token p ─► embedding ─► enorm ─────────────────┐
    hidden of p - 1, after the final norm ─► hnorm ┴─► eh_proj ─► decoder layer ─► shared_head.norm ─► shared_head.head

The hidden state and the token give the layer's input at position `p`, and its output the token at `p + 1`: a first
draft where `p` is the last known token. Further drafts take the layer's own output, after `shared_head.norm`, for the
hidden state. Of the token at position 1 the embedding is taken to be zero, as published code does.

Its latents of `p` are made of tokens up to `p`, and lie at slot `p` in the model's blocks. The first token has no
hidden state before it and so no key: attention begins at key 1. RoPE counts from that key, as published code does,
where the pair stands at `p - 1`. The hidden states of the last tokens of blocks lie in the blocks (`boundaries`).

Sources: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2; the tensors of published checkpoints (`model.layers.61.*` of 61
layers); vLLM's `deepseek_mtp` for the order of the halves of `eh_proj`, embedding first, the embedding at its position
0, and the hidden states, the model's and the layer's own, both as their logits are computed from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_core import Refused
from openinfer_core.scheduling import SlotStart
from openinfer_deepseek.model import (
    DeepseekConfig,
    DeepseekModel,
    LayerWeights,
    StoredLayer,
    Weights,
    layer_tensors,
    load_layer,
)
from openinfer_engine import DrafterContext
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.expert_group import expert_group
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
from openinfer_engine.model import WeightSource
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Array, AttentionBatch, Ops, PagedCache, rope_table
from openinfer_kv_cache import PagedGroup, PagedTensor

OPENINFER_CONTRACT = 1

ATTENTION = "mtp"
"""The paged group of the layer."""
BOUNDARY = "mtp_boundary"
"""The paged group of hidden states at the ends of blocks."""
_FIRST_KEY = 1
_PARTIALS_BYTES = 1 << 20
"""A row's share of what attention over latents leaves of contexts that several multiprocessors have."""
_NO_LAYER = "it is the drafting layer of DeepSeek-V3 checkpoints (num_nextn_predict_layers: 1), and this model has "


def mtp_tensors(config: DeepseekConfig, names: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Every tensor of the drafting layer; `names` are the checkpoint's, none of random weights.

    Embedding and head are published with the layer; where they are not there they are the model's.
    """
    h, prefix = config.hidden_size, _prefix(config)
    vocabulary = dict.fromkeys(_vocabulary(config), (config.vocab_size, h))
    return {
        f"{prefix}.enorm.weight": (h,),
        f"{prefix}.hnorm.weight": (h,),
        f"{prefix}.eh_proj.weight": (h, 2 * h),
        f"{prefix}.shared_head.norm.weight": (h,),
        **{name: shape for name, shape in vocabulary.items() if not names or name in names},
        **layer_tensors(config, config.num_hidden_layers),
    }


def _prefix(config: DeepseekConfig) -> str:
    return f"{config.tensor_prefix}model.layers.{config.num_hidden_layers}"


def _vocabulary(config: DeepseekConfig) -> tuple[str, str]:
    return f"{_prefix(config)}.embed_tokens.weight", f"{_prefix(config)}.shared_head.head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpWeights:
    """What the drafting layer has next to a decoder layer, on every rank whole."""

    enorm: Array
    """`[h]`, of the embedding."""
    hnorm: Array
    """`[h]`, of the hidden state."""
    eh_proj: Array
    """`[h, 2 h]`: columns of the embedding, then those of the hidden state."""


def _token_bytes(config: DeepseekConfig) -> int:
    """Of what a token's latent and queries are made of, in BF16; its residual stream has float32."""
    queries = config.num_attention_heads * config.qk_head_dim
    entry = config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * (12 * config.hidden_size + 2 * queries + entry + 3 * (config.q_lora_rank or 0))


def _row_bytes(config: DeepseekConfig) -> int:
    """Of a draft's attention in the absorbed form, of its experts, and of its logits and their sampling."""
    entry = config.kv_lora_rank + config.qk_rope_head_dim
    attention = 2 * config.num_attention_heads * (2 * entry + config.v_head_dim)
    widths = 3 * (config.num_experts_per_tok * config.moe_intermediate_size + config.shared_size)
    outputs = (config.num_experts_per_tok + 4) * config.hidden_size
    return attention + 4 * (widths + outputs) + 12 * config.vocab_size + _PARTIALS_BYTES


def load_mtp(
    model: DeepseekModel,
    names: Mapping[str, Any],
    weights: WeightSource,
    *,
    ops: Ops,
    communicator: Communicator,
    max_positions: int,
) -> tuple[MtpWeights, DeepseekModel]:
    """Uploads this rank's share: what is the layer's own, and a model of one layer, its norm and its head."""
    config, loader = model.config, WeightLoader(weights, ops=ops, communicator=communicator)
    embedding, head = _vocabulary(config)
    tables = model.weights.embed_tokens, model.weights.lm_head
    if embedding in names and head in names:
        tables = loader.vocabulary(embedding, head)
    table = rope_table(config.rope, head_dim=config.qk_rope_head_dim, positions=max_positions)
    stored = StoredLayer.of(config, config.num_hidden_layers)
    layer = Weights(
        embed_tokens=tables[0],
        layers=(load_layer(stored, config, loader, expert_group(communicator, ops)),),
        norm=loader.plain(f"{stored.prefix}.shared_head.norm.weight"),
        lm_head=tables[1],
        rope=ops.upload(np.concatenate((table[:, :1], table[:, :-1]), axis=1)),  # the angles of p - 1 at p
    )
    own = MtpWeights(
        enorm=loader.plain(f"{stored.prefix}.enorm.weight"),
        hnorm=loader.plain(f"{stored.prefix}.hnorm.weight"),
        eh_proj=loader.plain(f"{stored.prefix}.eh_proj.weight"),
    )
    return own, DeepseekModel(config, layer, ops=ops, communicator=communicator)


class DeepseekMtpDrafter(ChainedDrafter):
    """Implements `Drafter` and `KvDrafter` for checkpoints of DeepSeek-V3 that have the layer.

    Raises:
        Refused: the model is another family's, or has no such layer.
        InvalidCheckpoint: a tensor has numbers that are not finite.
    """

    def __init__(self, context: DrafterContext) -> None:
        asked = context.requirements
        if not isinstance(context.model, DeepseekModel) or context.weights is None or asked is None:
            raise Refused(f"{_NO_LAYER}none")
        super().__init__(context)
        self._max_num_seqs = context.max_num_seqs
        self._weights, self._layer = load_mtp(
            context.model,
            asked.tensors,
            context.weights,
            ops=context.ops,
            communicator=context.communicator,
            max_positions=context.max_model_tokens + context.max_drafts + 1,
        )

    @staticmethod
    def requirements(setting: DrafterSetting) -> DrafterRequirements:
        """One more layer of latents, and hidden states at the ends of blocks.

        Raises:
            Refused: the model is another family's, or has no such layer, or several.
        """
        config = setting.model_config
        if not isinstance(config, DeepseekConfig):
            raise Refused(f"{_NO_LAYER}none")
        if config.num_nextn_predict_layers != 1:
            raise Refused(f"{_NO_LAYER}{config.num_nextn_predict_layers or 'none'}")
        width = config.kv_lora_rank + config.qk_rope_head_dim
        group = PagedGroup(
            name=ATTENTION,
            num_layers=1,
            tensors=(PagedTensor(name="latent", num_heads=1, head_dim=width, dtype=setting.kv_dtype),),
            rope_tag=f"pairs of the last {config.qk_rope_head_dim} dimensions, one position less: {config.rope}",
        )
        num_layers = math.ceil(config.hidden_size / (width * setting.block_size_tokens))
        return DrafterRequirements(
            tensors=mtp_tensors(config, setting.tensors),
            paged=(group, boundary_group(group, name=BOUNDARY, num_layers=num_layers)),
            span_tokens=setting.max_drafts,
            is_queued=True,
            observes_late=True,
            bytes_per_token=_token_bytes(config),
            bytes_per_sequence=(
                4 * (1 + kept_states(setting.max_drafts)) * config.hidden_size + late_bytes(1, config.hidden_size)
            ),
            bytes_per_row=_token_bytes(config) + _row_bytes(config),
        )

    def attach(self, memory: DraftMemory) -> None:
        last = self._ops.zeros((self._max_num_seqs, self._layer.config.hidden_size))
        boundary = tuple(memory.layers[BOUNDARY])
        self._keep(memory, HiddenBefore(last, max_drafts=self.max_drafts, ops=self._ops, boundary=boundary))

    def start(self, starts: Sequence[SlotStart]) -> None:
        self._attached[1].start(start.slot for start in starts)

    def observe(self, step: ObservedStep) -> None:
        _, states = self._attached
        x, _ = self._inputs(step.token_ids, states.of(step, step.hidden), step.batch)
        self._layer.append(x, self._only_layer, batch=step.batch, cache=self._cache)
        states.take(step, step.hidden)

    def _likeliest(self, normed: Array, drafts: Array, column: int) -> Array:
        return self._ops.draft_ids(self._layer.logits(normed), drafts, column)

    def _forward(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        """`[n, h]` after `shared_head.norm`, twice: logits are made of it, and the next draft."""
        x, residual = self._inputs(token_ids, hidden, batch)
        x = self._layer.forward_layer(
            x,
            residual,
            self._only_layer,
            next_norm=self._layer.weights.norm,
            batch=batch,
            cache=self._cache,
            first_key=_FIRST_KEY,
        )
        return x, x

    def _inputs(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        """The normed input of the layer `[T, h]`, and the residual stream, float32."""
        ops, weights, eps = self._ops, self._weights, self._layer.config.rms_norm_eps
        embedded = ops.embedding(token_ids, self._layer.weights.embed_tokens)
        ops.clear_rows(embedded, batch.positions, _FIRST_KEY)
        both = ops.join_columns(
            ops.rms_norm(embedded, weights.enorm, eps=eps), ops.rms_norm(hidden, weights.hnorm, eps=eps)
        )
        residual = ops.zeros(hidden.shape, np.float32)
        x = ops.linear(both, weights.eh_proj, batch)
        return ops.add_rms_norm(x, residual, self._only_layer.input_layernorm, eps=eps), residual

    @property
    def _only_layer(self) -> LayerWeights:
        return self._layer.weights.layers[0]

    @property
    def _cache(self) -> PagedCache:
        return self._attached[0].layers[ATTENTION][0]
