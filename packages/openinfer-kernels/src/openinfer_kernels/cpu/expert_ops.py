"""The operators of mixtures of experts and of quantised weights on the CPU, for `CpuOps`."""

from openinfer_kernels.cpu.gemm.linear import linear
from openinfer_kernels.cpu.gemm.quantised import upload_quantised, widened
from openinfer_kernels.cpu.moe.experts import experts, limited_swiglu
from openinfer_kernels.cpu.moe.routing import table_experts, top_experts
from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.experts import ExpertChoice, Routing
from openinfer_kernels.ops.quantised import QuantisedWeight, Weight
from openinfer_kernels.weights.quantised import QuantisedPart


class CpuExpertOps:
    """`ExpertOps` and `QuantisedOps` in host memory."""

    def top_experts(
        self, logits: Array, *, routing: Routing, cache_slots: Array | None = None, bias: Array | None = None
    ) -> ExpertChoice:
        """See `openinfer_kernels.cpu.moe.routing`."""
        return top_experts(logits, routing=routing, cache_slots=cache_slots, bias=bias)

    def table_experts(
        self, logits: Array, token_ids: Array, table: Array, *, routing: Routing, cache_slots: Array | None = None
    ) -> ExpertChoice:
        """See `openinfer_kernels.cpu.moe.routing`."""
        return table_experts(logits, token_ids, table, routing=routing, cache_slots=cache_slots)

    def experts(
        self,
        x: Array,
        choice: ExpertChoice,
        gate_up: Weight,
        down: Weight,
        *,
        first_expert: int = 0,
        limit: float | None = None,
        shared: Array | None = None,
    ) -> Array:
        """See `openinfer_kernels.cpu.moe.experts`."""
        return experts(x, choice, gate_up, down, first_expert=first_expert, limit=limit, shared=shared)

    def swiglu(self, gate_up: Array, *, limit: float | None = None) -> Array:
        """See `openinfer_kernels.cpu.moe.experts`."""
        return limited_swiglu(gate_up, limit)

    def upload_quantised(self, *parts: QuantisedPart, num_matrices: int | None = None) -> QuantisedWeight:
        """See `openinfer_kernels.cpu.gemm.quantised`."""
        return upload_quantised(parts, num_matrices)

    def upload_widened(self, *parts: QuantisedPart) -> Array:
        """See `openinfer_kernels.cpu.gemm.quantised`."""
        return widened(upload_quantised(parts, None))

    def quantised_linear(self, x: Array, weight: QuantisedWeight) -> Array:
        """See `openinfer_kernels.cpu.gemm.quantised`."""
        return linear(x, widened(weight))
