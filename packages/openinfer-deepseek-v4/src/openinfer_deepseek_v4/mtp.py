"""The block that drafts a token: it foretells the token after the next one (multi-token prediction).

    streams of the last layer ─► norm ─► h_proj ─┐
    next token ─► embedding ─► norm ─► e_proj ───┴─► + ─► sliding layer ─► head mix ─► norm ─► head of the model

DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, for `n` streams. Nothing drafts with it yet: `load` of the model leaves
its tensors alone. It needs one more window of each sequence, the slot group `mtp_window`.
"""

from dataclasses import dataclass

from openinfer_deepseek_v4.config import DeepseekV4Config
from openinfer_deepseek_v4.model import DeepseekV4Model
from openinfer_deepseek_v4.weights import (
    MTP_LAYER,
    MTP_PREFIX,
    HyperHead,
    LayerWeights,
    WeightReader,
    mtp_projections,
)
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import WeightSource
from openinfer_kernels import Array, AttentionBatch, LinearWeight, Ops
from openinfer_kv_cache import KvDtype, StateSlotGroup, StateTensor

WINDOW = "mtp_window"
"""The slot group of its window."""


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


def window_group(config: DeepseekV4Config, dtype: KvDtype) -> StateSlotGroup:
    """What a sequence keeps for it."""
    tensor = StateTensor(name="kv", shape=(config.sliding_window, config.head_dim), dtype=dtype)
    return StateSlotGroup(name=WINDOW, num_layers=1, tensors=(tensor,))


def load_mtp(
    config: DeepseekV4Config, weights: WeightSource, model: DeepseekV4Model, *, ops: Ops, communicator: Communicator
) -> "DeepseekV4Mtp":
    """Uploads this rank's weights of the block (`weights.mtp_tensors`); embedding and head are those of `model`."""
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
    return DeepseekV4Mtp(config, loaded, model, ops=ops)


class DeepseekV4Mtp:
    """The block on one rank."""

    def __init__(self, config: DeepseekV4Config, weights: MtpWeights, model: DeepseekV4Model, *, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._model = model
        self._ops = ops

    def forward(self, next_ids: Array, streams: Array, *, batch: AttentionBatch) -> Array:
        """Hidden states for `DeepseekV4Model.logits`, `[T, h]`, of the tokens after the next ones.

        Args:
            next_ids: `[T]` int32, the token after each of the step.
            streams: `[T, n, h]` of `DeepseekV4Model.streams`; not changed.
            batch: of the step that made them. Its state `mtp_window.kv [slots, 1, W, D]` is mutated.
        """
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        tokens, num_streams, h = streams.shape
        embedded = ops.embedding(next_ids, self._model.weights.embed)
        embedded = ops.linear(ops.rms_norm(embedded, weights.enorm, eps=eps), weights.e_proj, batch)  # [T, h]
        normed = ops.rms_norm(streams.reshape(tokens * num_streams, h), weights.hnorm, eps=eps)
        residual = ops.linear(normed, weights.h_proj, batch).reshape(tokens, num_streams, h)
        residual += embedded[:, None]
        self._model.block.forward(residual, weights.layer, next_ids, batch=batch, window=WINDOW)
        x = self._model.block.read_out(residual, weights.hyper_head)
        return ops.rms_norm(x, weights.norm, eps=eps)
