"""The layer of Qwen3.5 and Qwen3.6 that foretells the token after the next one (multi-token prediction), as a drafter.

    hidden of p - 1, after the final norm ─► norm ─┐
    token p ─► embedding ─► norm ──────────────────┴─► fc ─► full-attention layer ─► norm ─► hidden ─► the model's head

The hidden state and the token give the layer's input at position `p`, and its output the token at `p + 1`: a first
draft where `p` is the last known token. Further drafts take the layer's own output, normed, for the hidden state.

Its keys and values of `p` are made of tokens up to `p`, and lie at slot `p` in the model's blocks. The first token has
no hidden state before it and so no key: attention begins at key 1. RoPE counts from that key, as published code does,
where the pair stands at `p - 1`. The hidden state of the last token computed lies among the recurrent states of the
sequence, so that a copy of these has it: a sequence that begins with a cached prefix drafts as one that computed it.

Sources: the tensors of published checkpoints (`mtp.*`); vLLM's `qwen3_5_mtp` (9a4f2b9f) and SGLang's `qwen3_next_mtp`
(bd998a2c) for the order of the halves of `fc`, embedding first. Both are handed what their logits are computed from:
the hidden state after the final norm, not before it, and of further drafts the layer's output after `mtp.norm`.
DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, for the idea.

Most of a draft's time is the model's head. With the option `vocabulary=N` drafts are among the first N token ids: a
tokenizer's ids are in the order in which its merges were found, those of frequent texts first. Zhao et al. 2025,
"FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling", by counted ranks.
With `head=fp8` a copy of the head in E4M3 is read instead (`openinfer_engine.drafters.draft_head`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import msgspec
import numpy as np

from openinfer_core import Refused
from openinfer_core.scheduling import SlotStart
from openinfer_engine import DrafterContext
from openinfer_engine.distributed.communicator import Communicator
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
from openinfer_engine.speculation.setting import read_integer
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Array, AttentionBatch, LinearWeight, Ops, PagedCache, QuantisedWeight, rope_table
from openinfer_kv_cache import StateSlotGroup, StateTensor, attention_group
from openinfer_qwen35.model import (
    AttentionWeights,
    LayerKind,
    LayerReader,
    LayerWeights,
    Qwen35Config,
    Qwen35Model,
    Qwen35MoeConfig,
    layer_tensors,
    matrices,
)

OPENINFER_CONTRACT = 1

ATTENTION = "mtp"
"""The paged group of the layer."""
STATE = "mtp_hidden"
"""The slot group of the last hidden state; its tensor is `hidden`."""
VOCABULARY = "vocabulary"
"""The option: how many token ids drafts are among, from the first."""
_PREFIX = "mtp."
_FIRST_KEY = 1


def mtp_config(config: Qwen35Config, names: Mapping[str, Any]) -> Qwen35Config:
    """A model whose layer 0 is the drafting layer; `names` are the checkpoint's tensors, none of random weights."""
    changes: dict[str, Any] = {
        "tensor_prefix": _PREFIX,
        "num_hidden_layers": 2,  # the kinds of a model are both there; the second one is not read
        "layer_types": (LayerKind.FULL, LayerKind.LINEAR),
    }
    if isinstance(config, Qwen35MoeConfig):
        changes["experts_are_stacked"] = f"{_PREFIX}layers.0.mlp.experts.0.gate_proj.weight" not in names
    return msgspec.structs.replace(config, **changes)


def mtp_tensors(config: Qwen35Config) -> dict[str, TensorSpec]:
    """Every tensor of the drafting layer, of a `mtp_config`."""
    h = config.hidden_size
    own: dict[str, TensorSpec] = {
        "mtp.fc.weight": (h, 2 * h),
        "mtp.pre_fc_norm_embedding.weight": (h,),
        "mtp.pre_fc_norm_hidden.weight": (h,),
        "mtp.norm.weight": (h,),
    }
    return own | layer_tensors(config, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpWeights:
    """The drafting layer on one rank; embedding and head are the model's."""

    norm_embedding: Array
    """`[h]`"""
    norm_hidden: Array
    """`[h]`"""
    fc: Array
    """`[h, 2 h]`: columns of the embedding, then those of the hidden state."""
    layer: LayerWeights
    kv_proj: LinearWeight
    """`[2 K D, h]`: the last rows of the layer's `qkv_proj` once more, for tokens that only need these."""
    norm: Array
    """`[h]`"""
    rope: Array
    """`[2, positions, r / 2]` float32: the angles of position `p - 1` at `p`."""


def load_mtp(
    config: Qwen35Config, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_positions: int
) -> MtpWeights:
    """Uploads this rank's share of the drafting layer of a `mtp_config`."""
    loader = WeightLoader(weights, ops=ops, communicator=communicator)
    stored = matrices(config, 0)
    table = rope_table(config.rope, head_dim=config.rotary_dim, positions=max_positions)
    return MtpWeights(
        norm_embedding=loader.plain("mtp.pre_fc_norm_embedding.weight"),
        norm_hidden=loader.plain("mtp.pre_fc_norm_hidden.weight"),
        fc=loader.plain("mtp.fc.weight"),
        layer=LayerReader(config, loader, communicator, 0).read_layer(),
        kv_proj=loader.linear(stored["k_proj"], stored["v_proj"], shard=Shard.COLUMN_PARALLEL),
        norm=loader.plain("mtp.norm.weight"),
        rope=ops.upload(np.concatenate((table[:, :1], table[:, :-1]), axis=1)),
    )


class MtpDrafter(ChainedDrafter):
    """Implements `Drafter` and `KvDrafter` for checkpoints of Qwen3.5 that have the layer.

    Raises:
        Refused: the model is another family's, or the head cannot be cut to the option `vocabulary`.
        InvalidCheckpoint: a tensor has numbers that are not finite.
    """

    options: ClassVar[tuple[str, ...]] = (VOCABULARY, HEAD)
    """Of `--speculative`: token ids that drafts are among, and what their head is in."""

    def __init__(self, context: DrafterContext) -> None:
        if not isinstance(context.model, Qwen35Model) or context.weights is None:
            raise Refused("mtp is the drafting layer of Qwen3.5 checkpoints; this model is none")
        super().__init__(context)
        self._model = context.model
        self._communicator = context.communicator
        num_ranks = context.communicator.size
        self._head: LinearWeight | None = _cut_head(context.model, context.options.get(VOCABULARY), num_ranks=num_ranks)
        if asks_for_fp8(context.options, num_ranks=num_ranks):
            whole = context.model.weights.lm_head if self._head is None else self._head
            self._head = fp8_head(whole, ops=context.ops)
        asked = context.requirements or DrafterRequirements()
        self._config = mtp_config(context.model.config, asked.tensors)
        self._weights = load_mtp(
            self._config,
            context.weights,
            ops=context.ops,
            communicator=context.communicator,
            max_positions=context.max_model_tokens + context.max_drafts + 1,
        )

    @staticmethod
    def requirements(setting: DrafterSetting) -> DrafterRequirements:
        """One more layer of KV, and one hidden state with the states of a sequence.

        Raises:
            Refused: the model is another family's.
        """
        config = setting.model_config
        if not isinstance(config, Qwen35Config):
            raise Refused("it is the drafting layer of Qwen3.5 checkpoints, and this model is none")
        group = attention_group(
            name=ATTENTION,
            num_layers=1,
            num_heads=config.num_key_value_heads // setting.num_ranks,
            head_dim=config.head_dim,
            dtype=setting.kv_dtype,
            rope_tag=f"half layout of the first {config.rotary_dim} dimensions, one position less: {config.rope}",
        )
        hidden = StateTensor(name="hidden", shape=(config.hidden_size,), dtype=setting.state_dtype)
        return DrafterRequirements(
            tensors=mtp_tensors(mtp_config(config, setting.tensors)),
            paged=(group,),
            slots=(StateSlotGroup(name=STATE, num_layers=1, tensors=(hidden,)),),
            span_tokens=setting.max_drafts,
            is_queued=True,
            observes_late=True,
            made_bytes=made_bytes(setting.options, config.vocab_size, config.hidden_size),
            bytes_per_token=2 * 10 * config.hidden_size,
            bytes_per_sequence=(
                2 * kept_states(setting.max_drafts) * config.hidden_size + late_bytes(1, config.hidden_size)
            ),
            bytes_per_row=12 * config.vocab_size + 256 * config.hidden_size,
        )

    def attach(self, memory: DraftMemory) -> None:
        last = memory.states[f"{STATE}.hidden"][:, 0]
        self._keep(memory, HiddenBefore(last, max_drafts=self.max_drafts, ops=self._ops))

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Nothing: the last hidden state comes with the recurrent states, or the sequence begins at its first token."""
        del starts

    def observe(self, step: ObservedStep) -> None:
        _, states = self._attached
        x, _ = self._inputs(step.token_ids, states.of(step, step.hidden), step.batch)
        self._append(x, step.batch)
        states.take(step, step.hidden)

    def _likeliest(self, normed: Array, drafts: Array, column: int) -> Array:
        head = self._head
        logits = self._model.logits(normed) if head is None else draft_logits(normed, head, ops=self._ops)
        return self._ops.draft_ids(logits, drafts, column)

    def _forward(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        """`[n, h]` after `mtp.norm`, twice, for tokens and the hidden states before them; K and V are appended."""
        weights, layer, eps = self._weights, self._weights.layer, self._config.rms_norm_eps
        x, residual = self._inputs(token_ids, hidden, batch)
        x = self._attention(x, cast("AttentionWeights", layer.mixer), batch)
        x = self._ops.add_zero_centred_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
        x = self._model.feed_forward(x, layer.mlp, residual, next_norm=weights.norm, batch=batch)
        x = self._ops.add_zero_centred_rms_norm(x, residual, weights.norm, eps=eps)
        return x, x

    def _inputs(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        """The normed input of the layer `[T, h]`, and the residual stream, float32."""
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        embedded = ops.embedding(token_ids, self._model.weights.embed_tokens)
        both = ops.join_columns(
            ops.zero_centred_rms_norm(embedded, weights.norm_embedding, eps=eps),
            ops.zero_centred_rms_norm(hidden, weights.norm_hidden, eps=eps),
        )
        residual = ops.zeros(hidden.shape, np.float32)
        x = ops.linear(both, weights.fc, batch)
        return ops.add_zero_centred_rms_norm(x, residual, weights.layer.input_layernorm, eps=eps), residual

    def _append(self, x: Array, batch: AttentionBatch) -> None:
        """Keys and values of the normed `x [T, h]` alone."""
        self._queries(self._ops.linear(x, self._weights.kv_proj, batch), batch)

    def _attention(self, x: Array, mixer: AttentionWeights, batch: AttentionBatch) -> Array:
        ops, config = self._ops, self._config
        projected = ops.linear(x, mixer.qkv_proj, batch)
        attended = ops.paged_attention(
            self._queries(projected, batch),
            self._cache,
            batch=batch,
            scale=config.head_dim**-0.5,
            first_key=_FIRST_KEY,
        )
        gated = ops.output_gate(attended, projected, head_dim=config.head_dim)
        return self._communicator.all_reduce(ops.linear(gated, mixer.o_proj, batch))

    def _queries(self, projected: Array, batch: AttentionBatch) -> Array:
        mixer = cast("AttentionWeights", self._weights.layer.mixer)
        return self._ops.gated_qk_norm_rope_append(
            projected,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            eps=self._config.rms_norm_eps,
            rope=self._weights.rope,
            cache=self._cache,
            batch=batch,
        )

    @property
    def _cache(self) -> PagedCache:
        return self._attached[0].layers[ATTENTION][0]


def _cut_head(model: Qwen35Model, option: str | None, *, num_ranks: int) -> Array | None:
    """The first rows of the model's head; None for all of them."""
    if option is None:
        return None
    try:
        num_ids = read_integer(option, VOCABULARY, 1, model.config.vocab_size)
    except ValueError as error:
        raise Refused(f"--speculative mtp: {error}") from error
    head = model.weights.lm_head
    if isinstance(head, QuantisedWeight) or num_ranks > 1:
        why = "its head is cut by ranks" if num_ranks > 1 else "its head is quantised"
        raise Refused(f"--speculative mtp,{VOCABULARY}={num_ids}: {why}; leave the option out")
    return head[:num_ids]
