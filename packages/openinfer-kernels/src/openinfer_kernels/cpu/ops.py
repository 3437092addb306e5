"""`CpuOps`: a table of the functions that serve the operator contract in host memory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from openinfer_kernels.cpu.attention.compressor import compress_overlapping_windows, compress_windows
from openinfer_kernels.cpu.attention.gated import gated_qk_norm_rope_append, output_gate
from openinfer_kernels.cpu.attention.indexer import index_scores, select_entries
from openinfer_kernels.cpu.attention.paged import paged_attention
from openinfer_kernels.cpu.attention.qk_norm_rope_append import (
    qk_norm_rope_append,
    rope_append,
    zero_centred_qk_norm_rope_append,
)
from openinfer_kernels.cpu.attention.rope_tail import norm_rope_tail, rope_tail
from openinfer_kernels.cpu.attention.window import append_window, window_attention
from openinfer_kernels.cpu.common.weights import upload_weight
from openinfer_kernels.cpu.gemm.linear import geglu, soft_cap
from openinfer_kernels.cpu.gemm.lora import lora_expand, lora_expand_swiglu, lora_shrink
from openinfer_kernels.cpu.gemm.quantised import (
    grouped_linear,
    head_logits,
    upload_dequantised,
    upload_quantised,
    weight_linear,
    weight_linear_geglu,
    weight_linear_swiglu,
)
from openinfer_kernels.cpu.linear_attention.causal_conv import causal_conv_silu
from openinfer_kernels.cpu.linear_attention.gated_delta_rule import gated_delta_rule
from openinfer_kernels.cpu.linear_attention.kept_inputs import keep_inputs, replay_inputs
from openinfer_kernels.cpu.mla.latent_attention import latent_attention, latent_norm_rope_append
from openinfer_kernels.cpu.moe.experts import experts, limited_swiglu
from openinfer_kernels.cpu.moe.routing import table_experts, top_experts
from openinfer_kernels.cpu.norm.hyper_connections import (
    hyper_add,
    hyper_head,
    hyper_read,
    hyper_streams,
    hyper_write,
)
from openinfer_kernels.cpu.norm.rms_norm import (
    add_rms_norm,
    add_zero_centred_rms_norm,
    gated_rms_norm,
    rms_norm,
    zero_centred_rms_norm,
)
from openinfer_kernels.cpu.sampling.drafting import (
    add_logits,
    clear_rows,
    draft_head,
    draft_ids,
    draft_logits,
    hidden_before,
    join_columns,
    keep_hidden,
    put_ids,
    settle_hidden,
)
from openinfer_kernels.cpu.sampling.logprobs import logprobs
from openinfer_kernels.cpu.sampling.ngram import ngram_drafts
from openinfer_kernels.cpu.sampling.sampling import sample
from openinfer_kernels.ops import Array, HostArray, QuantisedWeight
from openinfer_kernels.ops.extra import ExtraOperators
from openinfer_kernels.weights.plain import WeightPart


class CpuOps:
    """`openinfer_kernels.Ops` in host memory. It has no state: threads may share one."""

    name = "cpu"
    extra: Mapping[str, Callable[..., Any]] = ExtraOperators()

    upload_weight = staticmethod(upload_weight)
    upload_float32 = upload_weight  # the compute dtype is float32
    upload_quantised = staticmethod(upload_quantised)
    upload_dequantised = staticmethod(upload_dequantised)

    linear = staticmethod(weight_linear)
    logits = staticmethod(head_logits)
    linear_swiglu = staticmethod(weight_linear_swiglu)
    linear_geglu = staticmethod(weight_linear_geglu)
    geglu = staticmethod(geglu)
    soft_cap = staticmethod(soft_cap)
    grouped_linear = staticmethod(grouped_linear)
    fused_adapters = None
    lora_shrink = staticmethod(lora_shrink)
    lora_expand = staticmethod(lora_expand)
    lora_expand_swiglu = staticmethod(lora_expand_swiglu)

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    zero_centred_rms_norm = staticmethod(zero_centred_rms_norm)
    add_zero_centred_rms_norm = staticmethod(add_zero_centred_rms_norm)
    gated_rms_norm = staticmethod(gated_rms_norm)
    hyper_streams = staticmethod(hyper_streams)
    hyper_read = staticmethod(hyper_read)
    hyper_write = staticmethod(hyper_write)
    hyper_head = staticmethod(hyper_head)
    hyper_add = staticmethod(hyper_add)

    qk_norm_rope_append = staticmethod(qk_norm_rope_append)
    zero_centred_qk_norm_rope_append = staticmethod(zero_centred_qk_norm_rope_append)
    rope_append = staticmethod(rope_append)
    paged_attention = staticmethod(paged_attention)
    gated_qk_norm_rope_append = staticmethod(gated_qk_norm_rope_append)
    output_gate = staticmethod(output_gate)
    latent_norm_rope_append = staticmethod(latent_norm_rope_append)
    latent_attention = staticmethod(latent_attention)
    causal_conv_silu = staticmethod(causal_conv_silu)
    gated_delta_rule = staticmethod(gated_delta_rule)
    keep_inputs = staticmethod(keep_inputs)
    replay_inputs = staticmethod(replay_inputs)

    norm_rope_tail = staticmethod(norm_rope_tail)
    rope_tail = staticmethod(rope_tail)
    compress_windows = staticmethod(compress_windows)
    compress_overlapping_windows = staticmethod(compress_overlapping_windows)
    index_scores = staticmethod(index_scores)
    select_entries = staticmethod(select_entries)
    window_attention = staticmethod(window_attention)
    append_window = staticmethod(append_window)

    top_experts = staticmethod(top_experts)
    table_experts = staticmethod(table_experts)
    experts = staticmethod(experts)
    swiglu = staticmethod(limited_swiglu)

    sample = staticmethod(sample)
    logprobs = staticmethod(logprobs)
    ngram_drafts = staticmethod(ngram_drafts)
    hidden_before = staticmethod(hidden_before)
    keep_hidden = staticmethod(keep_hidden)
    settle_hidden = staticmethod(settle_hidden)
    join_columns = staticmethod(join_columns)
    clear_rows = staticmethod(clear_rows)
    draft_ids = staticmethod(draft_ids)
    put_ids = staticmethod(put_ids)
    add_logits = staticmethod(add_logits)
    draft_head = staticmethod(draft_head)
    draft_logits = staticmethod(draft_logits)

    def quantise_head(self, *parts: WeightPart) -> QuantisedWeight | None:
        """It stays as it is; `LowBitCpuOps` quantises it."""
        del parts
        return None

    def upload(self, host: HostArray) -> Array:
        return np.array(host, order="C")

    def loading(self, progress: Callable[[int], None] = lambda num_bytes: None) -> AbstractContextManager[None]:
        """Nothing is put off here, and nothing told."""
        del progress
        return nullcontext()

    def download(self, array: Array) -> HostArray:
        return np.array(array, order="C")

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] | None = None) -> Array:
        return np.zeros(shape, np.float32 if dtype is None else dtype)

    def host_weights(self, num_values: int) -> HostArray:
        return np.empty(num_values, np.float32)

    def copy_weights(
        self, copies: Sequence[tuple[HostArray | None, Array]], *, scales: Sequence[float] | None = None
    ) -> None:
        for (host, array), scale in zip(copies, scales or [1.0] * len(copies), strict=True):
            array[...] = 0 if host is None else host if scale == 1 else host * np.float32(scale)

    def copy_rows(self, array: Array, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        array[list(targets)] = array[list(sources)]

    def embedding(self, token_ids: Array, table: Array) -> Array:
        return np.take(table, token_ids, axis=0)

    def residual_embedding(self, token_ids: Array, table: Array, *, scale: float = 1.0) -> Array:
        rows = self.embedding(token_ids, table)
        if scale != 1.0:
            rows *= np.float32(scale)
        return rows
