"""Operators of linear and gated attention on a GPU; their kernels are loaded when the first one is called."""

from functools import cached_property

from openinfer_kernels.cuda.attention.gated import GatedAttention
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.linear_attention.causal_conv import CausalConv
from openinfer_kernels.cuda.linear_attention.gated_delta_rule import GatedDeltaRule
from openinfer_kernels.cuda.norm.gated_norm import GatedNorm
from openinfer_kernels.ops import Array, AttentionBatch


class CudaLinearAttentionOps:
    """The part of `CudaOps` that models without linear attention never load."""

    device: Device

    @cached_property
    def _gated_norm(self) -> GatedNorm:
        return GatedNorm(self.device)

    @cached_property
    def _gated_attention(self) -> GatedAttention:
        return GatedAttention(self.device)

    @cached_property
    def _causal_conv(self) -> CausalConv:
        return CausalConv(self.device)

    @cached_property
    def _gated_delta_rule(self) -> GatedDeltaRule:
        return self._make_gated_delta_rule()

    def _make_gated_delta_rule(self) -> GatedDeltaRule:
        return GatedDeltaRule(self.device)

    def gated_rms_norm(self, x: Array, gate: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cuda.norm.gated_norm`."""
        return self._gated_norm.gated_rms_norm(x, gate, weight, eps=eps)

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
        """See `openinfer_kernels.cuda.attention.gated`."""
        return self._gated_attention.gated_qk_norm_rope_append(
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
        """See `openinfer_kernels.cuda.attention.gated`."""
        return self._gated_attention.output_gate(attended, projected, head_dim=head_dim)

    def causal_conv_silu(self, x: Array, weight: Array, *, state: Array, layer: int, batch: AttentionBatch) -> Array:
        """See `openinfer_kernels.cuda.linear_attention.causal_conv`."""
        return self._causal_conv.causal_conv_silu(x, weight, state=state, layer=layer, batch=batch)

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
        """See `openinfer_kernels.cuda.linear_attention.gated_delta_rule`."""
        return self._gated_delta_rule.gated_delta_rule(
            qkv, gates, a_log=a_log, dt_bias=dt_bias, state=state, layer=layer, batch=batch
        )
