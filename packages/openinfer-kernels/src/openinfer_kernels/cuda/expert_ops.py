"""The operators of mixtures of experts, of quantised weights and of groups on a GPU, for `CudaOps`."""

from functools import cached_property
from typing import TYPE_CHECKING

from openinfer_kernels.cuda.gemm.grouped_gemm import GroupedGemm
from openinfer_kernels.cuda.gemm.grouped_linear import GroupedLinear
from openinfer_kernels.cuda.gemm.quantised import Quantised
from openinfer_kernels.cuda.moe.experts import Experts
from openinfer_kernels.cuda.moe.routing import Router
from openinfer_kernels.ops import Array, ExpertChoice, QuantisedWeight, Routing, Weight
from openinfer_kernels.weights.quantised import QuantisedPart

if TYPE_CHECKING:
    from openinfer_kernels.cuda.common.device import Device
    from openinfer_kernels.cuda.common.memory import Memory
    from openinfer_kernels.cuda.gemm.linear import Linear


class CudaExpertOps:
    """`ExpertOps` and `QuantisedOps` on one GPU. Kernels are loaded at their first use: most models have no experts."""

    device: "Device"
    _memory: "Memory"
    _linear: "Linear"

    @cached_property
    def _router(self) -> Router:
        return Router(self.device)

    @cached_property
    def _grouped_gemm(self) -> GroupedGemm:
        return self._make_grouped_gemm()

    def _make_grouped_gemm(self) -> GroupedGemm:
        return GroupedGemm(self.device)

    @cached_property
    def _experts(self) -> Experts:
        return Experts(self.device, self._grouped_gemm)

    @cached_property
    def _quantised(self) -> Quantised:
        return Quantised(self.device, self._grouped_gemm, self._memory, self._linear)

    @cached_property
    def _grouped_linear(self) -> GroupedLinear:
        return GroupedLinear(self._grouped_gemm, self._quantised, self._linear)

    def top_experts(
        self, logits: Array, *, routing: Routing, cache_slots: Array | None = None, bias: Array | None = None
    ) -> ExpertChoice:
        """See `openinfer_kernels.cuda.moe.routing`."""
        return self._router.top_experts(logits, routing=routing, cache_slots=cache_slots, bias=bias)

    def table_experts(
        self, logits: Array, token_ids: Array, table: Array, *, routing: Routing, cache_slots: Array | None = None
    ) -> ExpertChoice:
        """See `openinfer_kernels.cuda.moe.routing`."""
        return self._router.table_experts(logits, token_ids, table, routing=routing, cache_slots=cache_slots)

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
        """See `openinfer_kernels.cuda.moe.experts`."""
        return self._experts.experts(x, choice, gate_up, down, first_expert=first_expert, limit=limit, shared=shared)

    def swiglu(self, gate_up: Array, *, limit: float | None = None) -> Array:
        """See `openinfer_kernels.cuda.moe.experts`."""
        return self._experts.swiglu(gate_up, limit=limit)

    def upload_quantised(self, *parts: QuantisedPart, num_matrices: int | None = None) -> QuantisedWeight:
        """See `openinfer_kernels.cuda.gemm.quantised`."""
        return self._quantised.upload_quantised(parts, num_matrices)

    def upload_widened(self, *parts: QuantisedPart) -> Array:
        """See `openinfer_kernels.cuda.gemm.quantised`."""
        return self._quantised.upload_widened(parts)

    def quantised_linear(self, x: Array, weight: QuantisedWeight) -> Array:
        """See `openinfer_kernels.cuda.gemm.quantised`."""
        return self._quantised.quantised_linear(x, weight)

    def grouped_linear(self, x: Array, weight: Weight) -> Array:
        """See `openinfer_kernels.cuda.gemm.grouped_linear`."""
        return self._grouped_linear.grouped_linear(x, weight)
