"""`CpuOps`: the operator contract over the NumPy functions beside this file."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.gated import gated_qk_norm_rope_append, output_gate
from openinfer_kernels.cpu.attention.paged import paged_attention
from openinfer_kernels.cpu.attention.qk_norm_rope_append import qk_norm_rope_append, rope_append
from openinfer_kernels.cpu.common.embedding import embedding
from openinfer_kernels.cpu.common.weights import upload_weight
from openinfer_kernels.cpu.expert_ops import CpuExpertOps
from openinfer_kernels.cpu.gemm.linear import linear, linear_swiglu
from openinfer_kernels.cpu.linear_attention.causal_conv import causal_conv_silu
from openinfer_kernels.cpu.linear_attention.gated_delta_rule import gated_delta_rule
from openinfer_kernels.cpu.mla.latent_attention import CpuLatentAttentionOps
from openinfer_kernels.cpu.norm.hyper_connections import CpuHyperConnectionOps
from openinfer_kernels.cpu.norm.rms_norm import (
    add_rms_norm,
    add_zero_centred_rms_norm,
    gated_rms_norm,
    rms_norm,
    zero_centred_rms_norm,
)
from openinfer_kernels.cpu.sampling.logprobs import logprobs
from openinfer_kernels.cpu.sampling.sampling import sample
from openinfer_kernels.cpu.sparse_attention_ops import CpuSparseAttentionOps
from openinfer_kernels.ops import Array, AttentionBatch, HostArray, Logprobs, SamplingBatch
from openinfer_kernels.weights.plain import WeightPart


class CpuOps(CpuLatentAttentionOps, CpuExpertOps, CpuSparseAttentionOps, CpuHyperConnectionOps):
    """`openinfer_kernels.Ops` in host memory. It has no state: threads may share one."""

    @property
    def name(self) -> str:
        """`cpu`."""
        return "cpu"

    def upload(self, host: HostArray) -> Array:
        """A copy, as the contract says, so that the caller may reuse its array."""
        return np.array(host, order="C")

    def upload_weight(self, *parts: WeightPart) -> Array:
        """A float32 copy of the parts below each other."""
        return upload_weight(parts)

    def upload_float32(self, *parts: WeightPart) -> Array:
        """As `upload_weight`: the compute dtype is float32."""
        return upload_weight(parts)

    def loading(self, progress: Callable[[int], None] = lambda num_bytes: None) -> AbstractContextManager[None]:
        """Nothing is put off here, and nothing told."""
        del progress
        return nullcontext()

    def download(self, array: Array) -> HostArray:
        """A copy."""
        return np.array(array, order="C")

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] | None = None) -> Array:
        """Zeros, float32 unless said otherwise."""
        return np.zeros(shape, np.float32 if dtype is None else dtype)

    def copy_rows(self, array: Array, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """At once."""
        array[list(targets)] = array[list(sources)]

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """See `openinfer_kernels.cpu.common.embedding`."""
        return embedding(token_ids, table)

    def residual_embedding(self, token_ids: Array, table: Array) -> Array:
        """The same as `embedding`: the compute dtype is float32."""
        return self.embedding(token_ids, table)

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """See `openinfer_kernels.cpu.gemm.linear`."""
        return linear(x, weight, bias)

    def logits(self, hidden: Array, head: Array) -> Array:
        """The same as `linear`: the compute dtype is float32."""
        return self.linear(hidden, head)

    def linear_swiglu(self, x: Array, gate_up: Array) -> Array:
        """See `openinfer_kernels.cpu.gemm.linear`."""
        return linear_swiglu(x, gate_up)

    def rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cpu.norm.rms_norm`."""
        return rms_norm(x, weight, eps=eps)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cpu.norm.rms_norm`."""
        return add_rms_norm(x, residual, weight, eps=eps)

    def zero_centred_rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cpu.norm.rms_norm`."""
        return zero_centred_rms_norm(x, weight, eps=eps)

    def add_zero_centred_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cpu.norm.rms_norm`."""
        return add_zero_centred_rms_norm(x, residual, weight, eps=eps)

    def gated_rms_norm(self, x: Array, gate: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cpu.norm.rms_norm`."""
        return gated_rms_norm(x, gate, weight, eps=eps)

    def qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """See `openinfer_kernels.cpu.attention.qk_norm_rope_append`."""
        return qk_norm_rope_append(
            qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            rope=rope,
            kv_cache=kv_cache,
            layer=layer,
            batch=batch,
        )

    def rope_append(self, qkv: Array, *, rope: Array, kv_cache: Array, layer: int, batch: AttentionBatch) -> Array:
        """See `openinfer_kernels.cpu.attention.qk_norm_rope_append`."""
        return rope_append(qkv, rope=rope, kv_cache=kv_cache, layer=layer, batch=batch)

    def paged_attention(self, q: Array, kv_cache: Array, *, layer: int, batch: AttentionBatch, scale: float) -> Array:
        """See `openinfer_kernels.cpu.attention.paged`."""
        return paged_attention(q, kv_cache, layer=layer, batch=batch, scale=scale)

    def gated_qk_norm_rope_append(
        self,
        projected: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """See `openinfer_kernels.cpu.attention.gated`."""
        return gated_qk_norm_rope_append(
            projected,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            rope=rope,
            kv_cache=kv_cache,
            layer=layer,
            batch=batch,
        )

    def output_gate(self, attended: Array, projected: Array, *, head_dim: int) -> Array:
        """See `openinfer_kernels.cpu.attention.gated`."""
        return output_gate(attended, projected, head_dim=head_dim)

    def causal_conv_silu(self, x: Array, weight: Array, *, state: Array, layer: int, batch: AttentionBatch) -> Array:
        """See `openinfer_kernels.cpu.linear_attention.causal_conv`."""
        return causal_conv_silu(x, weight, state=state, layer=layer, batch=batch)

    def gated_delta_rule(
        self,
        qkv: Array,
        gates: Array,
        *,
        a_log: Array,
        dt_bias: Array,
        state: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """See `openinfer_kernels.cpu.linear_attention.gated_delta_rule`."""
        return gated_delta_rule(qkv, gates, a_log=a_log, dt_bias=dt_bias, state=state, layer=layer, batch=batch)

    def sample(self, logits: Array, sampling: SamplingBatch) -> NDArray[np.int32]:
        """See `openinfer_kernels.cpu.sampling.sampling`."""
        return sample(logits, sampling)

    def logprobs(self, logits: Array, token_ids: Array, *, top: int) -> Logprobs:
        """See `openinfer_kernels.cpu.sampling.logprobs`."""
        return logprobs(logits, token_ids, top=top)
