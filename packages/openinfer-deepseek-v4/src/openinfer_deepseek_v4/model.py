"""DeepSeek-V4-Flash: the forward pass, and how its published weights become arrays on one rank.

    ids ─► embedding ─► n equal streams ─► layer × L ─► head mix ─► norm ─► hidden ─► head ─► logits

    layer:  streams = write(attention(norm(read(streams))), streams)
            streams = write(experts(norm(read(streams))), streams)        read, write: hyper-connections

    attention:  q = rope(norm(wq_b(norm(wq_a x)))) per head               kv = rope(norm(wkv x)), for all heads
                a query sees the last W tokens and compressed entries: none (sliding), those that its indexer
                selects of one per 4 tokens (sparse), or all of one per 128 tokens (heavy)
                wo_b(wo_a per group(unrope(attended)))

    experts:    sum of s_j expert_j(x) + shared(x)                        s = sqrt(softplus(gate x)), chosen by
                                                                          score + bias, or by a table of token ids

What differs from Qwen3: `n` residual streams take the place of one; one vector per token is key and value; what lies
before the window is kept in compressed entries; outputs are rotated back; the first output projection is one per group
of heads. Reference: `transformers.models.deepseek_v4.modeling_deepseek_v4`; DeepSeek-AI 2026, "DeepSeek-V4", section 2.

How it is cut across ranks: `weights.py`. Each rank sums its share of attention and experts with the others, in float32
where experts give it, and of the index scores, so that all select the same entries. Each embeds all ids, and computes
the logits of its shard of the vocabulary.

Letters: `T` tokens of a step, `h` hidden size, `n` streams, `H` query heads of `D`, `Hi` index heads of `di`, `W`
tokens of the window, `m` tokens per compressed entry, `G` output groups, `E` routed experts of width `F`, `V`
vocabulary; in the weights and in `forward`, `H`, `Hi`, `G`, `E` and `F` are one rank's share. A matrix is `[out, in]`.
"""

from collections.abc import Sequence
from typing import Any

from openinfer_deepseek_v4.config import DeepseekV4Config, LayerKind
from openinfer_deepseek_v4.weights import (
    AttentionWeights,
    CompressorWeights,
    HyperHead,
    IndexerWeights,
    LayerWeights,
    MixtureWeights,
    WeightReader,
    Weights,
    layer_tensors,
)
from openinfer_deepseek_v4.weights import tensors as tensors  # noqa: PLC0414 - of `ModelDefinition.module`
from openinfer_engine.distributed.communicator import Communicator, gather_columns
from openinfer_engine.model import KvLayers, WeightSource
from openinfer_kernels import Array, AttentionBatch, CompressedEntries, HyperMix, HyperWeights, Ops, rope_table


def load(
    config: DeepseekV4Config, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
) -> "DeepseekV4Model":
    """Uploads this rank's weights, and RoPE tables for positions below `max_model_tokens`."""
    reader = WeightReader(config, weights, ops=ops, communicator=communicator)
    embed, head = reader.loader.vocabulary("embed.weight", "head.weight")
    kinds = config.layer_types
    layers = tuple(
        reader.layer(layer_tensors(config, layer), window=layer, index=kinds[:layer].count(kinds[layer]))
        for layer in range(config.num_hidden_layers)
    )
    main_rope, compress_rope = (
        ops.upload(rope_table(rope, head_dim=config.qk_rope_head_dim, positions=max_model_tokens))
        for rope in config.ropes
    )
    loaded = Weights(
        embed=embed,
        layers=layers,
        hyper_head=reader.hyper_head("hc_head"),
        norm=reader.loader.plain("norm.weight"),
        head=head,
        main_rope=main_rope,
        compress_rope=compress_rope,
    )
    return DeepseekV4Model(config, loaded, ops=ops, communicator=communicator)


# --- forward pass -------------------------------------------------------------------------------------------


class DeepseekV4Model:
    """The model on one rank; stateless, so that all sequences live in the caches and states it is handed."""

    def __init__(self, config: DeepseekV4Config, weights: Weights, *, ops: Ops, communicator: Communicator) -> None:
        self._config = config
        self._ops = ops
        self._communicator = communicator
        self.weights = weights
        """Of this rank."""
        self.block = Block(config, weights, ops=ops, communicator=communicator)
        """The equations of a layer."""

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """Hidden states after the final norm, `[T, h]`, for `token_ids [T]`; the same on every rank.

        Args:
            token_ids: int32, each below `vocab_size`.
            batch: where the tokens stand. Its caches (compressed entries and index keys) and states (windows and open
                windows of compressors; `family.py` names both) are mutated: this step's tokens are consumed.
            kv_cache: empty.
        """
        del kv_cache
        return self.read_out(self._streams(token_ids, batch=batch, taps=(), tapped={}))

    def forward_tapped(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, taps: Sequence[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `forward`, and of each tap `i` the streams before layer `i`, one after the other: `[T, n h]`."""
        del kv_cache
        tapped: dict[int, Array] = {}
        hidden = self.read_out(self._streams(token_ids, batch=batch, taps=taps, tapped=tapped))
        return hidden, tuple(tapped[tap] for tap in taps)

    def _streams(
        self, token_ids: Array, *, batch: AttentionBatch, taps: Sequence[int], tapped: dict[int, Array]
    ) -> Array:
        """The residual streams after the last layer, `[T, n, h]`; `tapped` gets those before the layers of `taps`."""
        ops, weights = self._ops, self.weights
        residual = ops.hyper_streams(ops.embedding(token_ids, weights.embed), self._config.hc_mult)
        flat = residual.reshape(len(token_ids), self._config.hc_mult * self._config.hidden_size)  # a view
        for index, layer in enumerate(weights.layers):
            if index in taps:
                tapped[index] = ops.join_columns(flat)
            self.block.forward(residual, layer, token_ids, batch=batch)
        if len(weights.layers) in taps:
            tapped[len(weights.layers)] = flat
        return residual

    def read_out(self, residual: Array) -> Array:
        """Hidden states, `[T, h]`, of streams `[T, n, h]`."""
        x = self.block.read_out(residual, self.weights.hyper_head)
        return self._ops.rms_norm(x, self.weights.norm, eps=self._config.rms_norm_eps)

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, on every rank."""
        piece = self._ops.logits(hidden, self.weights.head)
        return gather_columns(self._communicator, piece, num_columns=self._config.vocab_size)


class Block:
    """The equations of one layer; that which drafts tokens has the same.

    Args:
        config: of the model.
        weights: whose RoPE tables are read.
        ops: of the device.
        communicator: of the ranks.
        first_key: as in `Ops.window_attention`; for a layer whose window has room for drafts.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: Weights,
        *,
        ops: Ops,
        communicator: Communicator,
        first_key: int = 0,
    ) -> None:
        self._config = config
        self._ropes = {LayerKind.SLIDING: weights.main_rope}
        self._compress_rope = weights.compress_rope
        self._ops = ops
        self._communicator = communicator
        # Operators of other packages need not know of what only a drafter asks for.
        self._seen: dict[str, Any] = {"num_seen": config.sliding_window, "first_key": first_key} if first_key else {}

    def forward(
        self, residual: Array, layer: LayerWeights, token_ids: Array, *, batch: AttentionBatch, window: str = "window"
    ) -> None:
        """Changes the streams `residual [T, n, h]`; `window` names the group of its window."""
        ops, eps = self._ops, self._config.rms_norm_eps
        x, mix = self._read(residual, layer.attn_hyper)
        x = self._attention(ops.rms_norm(x, layer.attn_norm, eps=eps), layer.attention, batch=batch, window=window)
        ops.hyper_write(x, residual, mix)
        x, mix = self._read(residual, layer.ffn_hyper)
        x = self._mixture(ops.rms_norm(x, layer.ffn_norm, eps=eps), layer.mixture, token_ids, batch=batch)
        ops.hyper_write(x, residual, mix)

    def append(self, residual: Array, layer: LayerWeights, *, batch: AttentionBatch, window: str) -> None:
        """Of a sliding layer what later tokens see alone: its keys, for the streams `residual [T, n, h]` before it."""
        x, _ = self._read(residual, layer.attn_hyper)
        x = self._ops.rms_norm(x, layer.attn_norm, eps=self._config.rms_norm_eps)
        kv = self._keys(x, layer.attention, batch=batch)
        state = batch.states[f"{window}.kv"]
        self._ops.append_window(kv, window=state, layer=layer.attention.layer, batch=batch)

    def _read(self, residual: Array, weights: HyperWeights) -> tuple[Array, HyperMix]:
        config = self._config
        return self._ops.hyper_read(
            residual,
            weights,
            eps=config.rms_norm_eps,
            mix_eps=config.hc_eps,
            num_iterations=config.hc_sinkhorn_iters,
        )

    def read_out(self, residual: Array, head: HyperHead) -> Array:
        """`[T, h]` of streams `[T, n, h]`, before the last norm."""
        config = self._config
        return self._ops.hyper_head(
            residual, head.fn, head.base, head.scale, eps=config.rms_norm_eps, mix_eps=config.hc_eps
        )

    def _attention(self, x: Array, weights: AttentionWeights, *, batch: AttentionBatch, window: str) -> Array:
        """`[T, h]` for the normed `x [T, h]`."""
        ops, d, eps = self._ops, self._config.head_dim, self._config.rms_norm_eps
        rope = self._rope_of(weights)
        low = ops.rms_norm(ops.linear(x, weights.wq_a, batch), weights.q_norm, eps=eps)  # [T, q_lora_rank]
        kv = self._keys(x, weights, batch=batch)
        attended = ops.window_attention(  # [T, H D]
            self._queries(low, weights, rope, batch=batch),
            kv,
            sinks=weights.sinks,
            window=batch.states[f"{window}.kv"],
            layer=weights.layer,
            entries=self._entries(x, low, weights, batch=batch),
            rope=rope,
            scale=d**-0.5,
            batch=batch,
            **self._seen,
        )
        grouped = ops.grouped_linear(attended, weights.wo_a)  # [T, G o_lora_rank]
        return self._communicator.all_reduce(ops.linear(grouped, weights.wo_b, batch))

    def _rope_of(self, weights: AttentionWeights) -> Array:
        return self._ropes.get(weights.kind, self._compress_rope)

    def _keys(self, x: Array, weights: AttentionWeights, *, batch: AttentionBatch) -> Array:
        """`[T, D]`, which are values, too."""
        ops, config = self._ops, self._config
        kv = ops.linear(x, weights.wkv, batch).reshape(len(x), 1, config.head_dim)
        rope = self._rope_of(weights)
        return ops.norm_rope_tail(kv, weights.kv_norm, eps=config.rms_norm_eps, rope=rope, batch=batch).reshape(
            len(x), config.head_dim
        )

    def _queries(self, low: Array, weights: AttentionWeights, rope: Array, *, batch: AttentionBatch) -> Array:
        """`[T, H, D]`; the attention alone holds them, as they are the largest array of a step."""
        q = self._ops.linear(low, weights.wq_b, batch).reshape(len(low), -1, self._config.head_dim)
        return self._ops.norm_rope_tail(q, None, eps=self._config.rms_norm_eps, rope=rope, batch=batch)

    def _entries(
        self, x: Array, low: Array, weights: AttentionWeights, *, batch: AttentionBatch
    ) -> CompressedEntries | None:
        """The compressed entries that the tokens see, those among them that this step's tokens complete."""
        ratio = self._config.ratio(weights.kind)
        if ratio is None or weights.compressor is None:
            return None
        group = ENTRIES[weights.kind]
        # First, as the tokens see the entries that they complete.
        self._compress(x, weights.compressor, weights, group, batch=batch)
        selected = None
        if weights.indexer is not None:
            selected = self._select(x, low, weights.indexer, weights, ratio, batch=batch)
        return CompressedEntries(cache=batch.caches[f"{group}.kv"], layer=weights.index, ratio=ratio, selected=selected)

    def _compress(
        self, x: Array, compressor: CompressorWeights, weights: AttentionWeights, group: str, *, batch: AttentionBatch
    ) -> None:
        """Appends to the cache and the state of one group."""
        overlapping = weights.kind is LayerKind.SPARSE
        compress = self._ops.compress_overlapping_windows if overlapping else self._ops.compress_windows
        compress(
            self._ops.logits(x, compressor.wkv_wgate),  # [T, 2 w] float32
            ape=compressor.ape,
            norm=compressor.norm,
            eps=self._config.rms_norm_eps,
            rope=self._compress_rope,
            state=batch.states[f"open_{group}.tokens"],
            cache=batch.caches[f"{group}.kv"],
            layer=weights.index,
            batch=batch,
        )

    def _select(
        self,
        x: Array,
        low: Array,
        indexer: IndexerWeights,
        weights: AttentionWeights,
        ratio: int,
        *,
        batch: AttentionBatch,
    ) -> Array:
        """`[T, index_topk]`: the entries that each token sees."""
        ops, config = self._ops, self._config
        # First, as the tokens choose among the entries that they complete.
        self._compress(x, indexer.compressor, weights, INDEX, batch=batch)
        q = ops.linear(low, indexer.wq_b, batch).reshape(len(x), -1, config.index_head_dim)  # [T, Hi, di]
        scores = ops.index_scores(
            ops.rope_tail(q, rope=self._compress_rope, batch=batch),
            ops.logits(x, indexer.weights_proj),
            cache=batch.caches[f"{INDEX}.kv"],
            layer=weights.index,
            ratio=ratio,
            scale=(config.index_head_dim * config.index_n_heads) ** -0.5,
            batch=batch,
        )
        # Each rank has some of the index heads, so scores are summed before entries are chosen: all ranks choose alike.
        return ops.select_entries(self._communicator.all_reduce(scores), config.index_topk)

    def _mixture(self, x: Array, weights: MixtureWeights, token_ids: Array, *, batch: AttentionBatch) -> Array:
        """`[T, h]` float32 for the normed `x [T, h]`."""
        ops, config, slots = self._ops, self._config, batch.cache_slots[0]
        logits = ops.logits(x, weights.gate)  # [T, experts]
        if weights.table is None:
            choice = ops.top_experts(logits, routing=config.routing, cache_slots=slots, bias=weights.bias)
        else:
            choice = ops.table_experts(logits, token_ids, weights.table, routing=config.routing, cache_slots=slots)
        shared = ops.swiglu(ops.linear(x, weights.shared_gate_up, batch), limit=config.shared_limit)  # [T, F]
        # Experts are split among the ranks in equal ranges; choices of another rank's experts add nothing here.
        first = self._communicator.rank * (config.n_routed_experts // self._communicator.size)
        mixed = ops.experts(
            x,
            choice,
            weights.gate_up,
            weights.down,
            first_expert=first,
            limit=config.swiglu_limit,
            shared=ops.linear(shared, weights.shared_down, batch),
        )
        return self._communicator.all_reduce(mixed)


ENTRIES = {LayerKind.SPARSE: "sparse_entries", LayerKind.HEAVY: "heavy_entries"}
"""Paged groups of compressed entries; the state of group `X` is the slot group `open_X`."""
INDEX = "sparse_index"
"""The paged group of index keys."""
