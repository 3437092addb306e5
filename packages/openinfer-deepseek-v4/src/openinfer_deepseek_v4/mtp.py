"""The block of DeepSeek-V4 that foretells the token after the next one (multi-token prediction), as a drafter.

    token p ─► embedding ─► norm ─► e_proj ──────────────────────────────┐
    n streams of p - 1 after the last layer ─► norm of each ─► h_proj ───┴─► + ─► sliding layer ─► n streams
                                                          n streams ─► head mix ─► norm ─► head of the model

The streams before a token and the token give the block's input at position `p`, and its output the token at `p + 1`: a
first draft where `p` is the last known token. Further drafts take the block's own streams for those of the model.

Its keys lie in a window of their own, a further state of each sequence, with the streams of the last token computed:
a copy of a sequence's states has both, so that one which begins with a cached prefix drafts as one that computed it.
The first token has no streams before it and so no key: attention begins at key 1. The window has room for as many
tokens more as there are drafts: what is written of drafts, and of tokens that are refused, takes the place of no key
that a later token sees. RoPE is of `p`, where published code counts pairs from 0: attention sees differences alone.

Sources: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, for `n` streams; the published description of DeepSeek-V4's block
(`mtp.0.*`), which takes the embedding of every token as it is; vLLM's `deepseek_v4_mtp` (023da1fc) for the streams that
further drafts go on from: those after the layer, before the head mix. vLLM takes the embedding at position 1 to be
zero, which tells in the first window alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from openinfer_core import Refused
from openinfer_core.scheduling import SlotStart
from openinfer_deepseek_v4.config import DeepseekV4Config
from openinfer_deepseek_v4.model import Block, DeepseekV4Model
from openinfer_deepseek_v4.weights import (
    MTP_LAYER,
    MTP_PREFIX,
    HyperHead,
    LayerWeights,
    WeightReader,
    mtp_projections,
    mtp_tensors,
    stored_name,
)
from openinfer_engine import DrafterContext
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafters.chained import ChainedDrafter
from openinfer_engine.drafters.chains import HiddenBefore, kept_states
from openinfer_engine.drafters.contract import DrafterRequirements, DrafterSetting, DraftMemory, ObservedStep
from openinfer_engine.model import WeightSource
from openinfer_kernels import Array, AttentionBatch, LinearWeight, Ops, rope_table
from openinfer_kv_cache import KvDtype, StateSlotGroup, StateTensor

OPENINFER_CONTRACT = 1

WINDOW = "mtp_window"
"""The slot group of its window; its tensor is `kv`."""
STREAMS = "mtp_streams"
"""The slot group of the last token's streams; its tensor is `streams`."""
_FIRST_KEY = 1
_MOST_SPLITS = 2
"""Of a token's keys, as many of which are in float32 as there are heads."""
_NO_BLOCK = "it is the drafting block of DeepSeek-V4 checkpoints (num_nextn_predict_layers: 1), and this model has "


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpWeights:
    """All of the block on one rank; embedding and head are the model's."""

    enorm: Array
    """`[h]`"""
    hnorm: Array
    """`[h]`"""
    e_proj: LinearWeight
    """`[h, h]`"""
    h_proj: LinearWeight
    """`[h, h]`"""
    layer: LayerWeights
    hyper_head: HyperHead
    norm: Array
    """`[h]`"""


def _token_bytes(config: DeepseekV4Config) -> int:
    """Of what a token's key is made of, in BF16, and of sums that streams are read with."""
    width = config.hc_mult * config.hidden_size
    return 2 * (3 * width + 6 * config.hidden_size + 2 * config.head_dim) + 4 * width


def _row_bytes(config: DeepseekV4Config) -> int:
    """Of a draft's attention, of its experts, and of its logits and their sampling."""
    heads = config.num_attention_heads * config.head_dim
    attention = 2 * (3 * heads + 2 * config.q_lora_rank) + 4 * _MOST_SPLITS * heads
    grouped = 2 * config.o_groups * config.o_lora_rank
    widths = 3 * (config.num_experts_per_tok + 1) * config.moe_intermediate_size
    outputs = (config.num_experts_per_tok + 4) * config.hidden_size
    return attention + grouped + 4 * (widths + outputs) + 12 * config.vocab_size


def state_groups(config: DeepseekV4Config, dtype: KvDtype, *, max_drafts: int) -> tuple[StateSlotGroup, StateSlotGroup]:
    """What a sequence keeps for it: the window, and the streams of its last token."""
    window = StateTensor(name="kv", shape=(config.sliding_window + max_drafts, config.head_dim), dtype=dtype)
    streams = StateTensor(name="streams", shape=(config.hc_mult * config.hidden_size,), dtype=dtype)
    return (
        StateSlotGroup(name=WINDOW, num_layers=1, tensors=(window,)),
        StateSlotGroup(name=STREAMS, num_layers=1, tensors=(streams,)),
    )


def load_mtp(
    config: DeepseekV4Config,
    weights: WeightSource,
    model: DeepseekV4Model,
    *,
    ops: Ops,
    communicator: Communicator,
    max_positions: int,
) -> "DeepseekV4Mtp":
    """Uploads this rank's weights of the block (`weights.mtp_tensors`), and a RoPE table of so many positions."""
    reader = WeightReader(config, weights, ops=ops, communicator=communicator)
    e_proj, h_proj = mtp_projections(config)
    loaded = MtpWeights(
        enorm=reader.loader.plain(f"{MTP_PREFIX}.enorm.weight"),
        hnorm=reader.loader.plain(f"{MTP_PREFIX}.hnorm.weight"),
        e_proj=reader.loader.linear(e_proj),
        h_proj=reader.loader.linear(h_proj),
        layer=reader.layer(MTP_LAYER, window=0, index=0),
        hyper_head=reader.hyper_head(f"{MTP_PREFIX}.hc_head"),
        norm=reader.loader.plain(f"{MTP_PREFIX}.norm.weight"),
    )
    table = rope_table(config.ropes[0], head_dim=config.qk_rope_head_dim, positions=max_positions)
    tables = replace(model.weights, main_rope=ops.upload(table))
    block = Block(config, tables, ops=ops, communicator=communicator, first_key=_FIRST_KEY)
    return DeepseekV4Mtp(config, loaded, model, block, ops=ops)


class DeepseekV4Mtp:
    """The block on one rank."""

    def __init__(
        self, config: DeepseekV4Config, weights: MtpWeights, model: DeepseekV4Model, block: Block, *, ops: Ops
    ) -> None:
        self._config = config
        self._weights = weights
        self._model = model
        self._block = block
        self._ops = ops

    def append(self, token_ids: Array, before: Array, *, batch: AttentionBatch) -> None:
        """Keys of a step alone; arguments are those of `forward`."""
        self._block.append(self._inputs(token_ids, before, batch), self._weights.layer, batch=batch, window=WINDOW)

    def forward(self, token_ids: Array, before: Array, *, batch: AttentionBatch) -> tuple[Array, Array]:
        """What logits of the next tokens are made of, `[T, h]`, and the block's streams, `[T, n h]`.

        Args:
            token_ids: `[T]` int32.
            before: `[T, n h]` the streams before each: of the model after its last layer, or of the block.
            batch: where the tokens stand. Its state `mtp_window.kv [slots, 1, W + drafts, D]` is mutated.
        """
        residual = self._inputs(token_ids, before, batch)
        self._block.forward(residual, self._weights.layer, token_ids, batch=batch, window=WINDOW)
        x = self._block.read_out(residual, self._weights.hyper_head)
        return self._ops.rms_norm(x, self._weights.norm, eps=self._config.rms_norm_eps), residual.reshape(before.shape)

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`."""
        return self._model.logits(hidden)

    def _inputs(self, token_ids: Array, before: Array, batch: AttentionBatch) -> Array:
        """The streams `[T, n, h]` that the layer begins with."""
        ops, weights, config = self._ops, self._weights, self._config
        tokens, num_streams, h = len(token_ids), config.hc_mult, config.hidden_size
        embedded = ops.rms_norm(
            ops.embedding(token_ids, self._model.weights.embed), weights.enorm, eps=config.rms_norm_eps
        )
        normed = ops.rms_norm(before.reshape(tokens * num_streams, h), weights.hnorm, eps=config.rms_norm_eps)
        residual = ops.linear(normed, weights.h_proj, batch).reshape(tokens, num_streams, h)
        ops.hyper_add(ops.linear(embedded, weights.e_proj, batch), residual)
        return residual


class DeepseekV4MtpDrafter(ChainedDrafter):
    """Implements `Drafter` and `KvDrafter` for checkpoints of DeepSeek-V4 that have the block.

    Raises:
        Refused: the model is another family's.
        InvalidCheckpoint: a tensor has numbers that are not finite.
    """

    def __init__(self, context: DrafterContext) -> None:
        if not isinstance(context.model, DeepseekV4Model) or context.weights is None:
            raise Refused(f"{_NO_BLOCK}none")
        super().__init__(context)
        self._max_num_seqs = context.max_num_seqs
        self._mtp = load_mtp(
            context.model_config,
            context.weights,
            context.model,
            ops=context.ops,
            communicator=context.communicator,
            max_positions=context.max_model_tokens + context.max_drafts + 1,
        )

    @staticmethod
    def requirements(setting: DrafterSetting) -> DrafterRequirements:
        """One more window, and the streams of a token, with the states of a sequence.

        Raises:
            Refused: the model is another family's, or has no such block, or several.
        """
        config = setting.model_config
        if not isinstance(config, DeepseekV4Config):
            raise Refused(f"{_NO_BLOCK}none")
        if config.num_nextn_predict_layers != 1:
            raise Refused(f"{_NO_BLOCK}{config.num_nextn_predict_layers or 'none'}")
        own = stored_name(config, f"{MTP_PREFIX}.enorm.weight")
        if setting.tensors and own not in setting.tensors:
            raise Refused(f"{_NO_BLOCK}none of its tensors ({own}): transformers writes none, later releases others")
        longest = setting.options.max_model_tokens or config.max_position_embeddings
        return DrafterRequirements(
            tensors=mtp_tensors(config),
            slots=state_groups(config, setting.state_dtype, max_drafts=setting.max_drafts),
            taps=(config.num_hidden_layers,),
            span_tokens=setting.max_drafts,
            is_queued=True,
            reads_hidden=False,
            made_bytes=4 * config.qk_rope_head_dim * (1 + longest + setting.max_drafts),  # of RoPE's angles
            bytes_per_token=_token_bytes(config),
            bytes_per_sequence=2 * kept_states(setting.max_drafts) * config.hc_mult * config.hidden_size,
            bytes_per_row=_token_bytes(config) + _row_bytes(config),
        )

    def attach(self, memory: DraftMemory) -> None:
        last = memory.states[f"{STREAMS}.streams"][: self._max_num_seqs, 0]
        self._keep(memory, HiddenBefore(last, max_drafts=self.max_drafts, ops=self._ops))

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Nothing: what it keeps comes with the recurrent states, or the sequence begins at its first token."""
        del starts

    def observe(self, step: ObservedStep) -> None:
        _, states = self._attached
        (streams,) = step.taps
        self._mtp.append(step.token_ids, states.of(step, streams), batch=step.batch)
        states.take(step, streams)

    def _of_model(self, hidden: Array) -> Array | None:
        """None: it reads streams, which were observed."""
        del hidden

    def _likeliest(self, normed: Array, drafts: Array, column: int) -> Array:
        return self._ops.draft_ids(self._mtp.logits(normed), drafts, column)

    def _forward(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        return self._mtp.forward(token_ids, hidden, batch=batch)
