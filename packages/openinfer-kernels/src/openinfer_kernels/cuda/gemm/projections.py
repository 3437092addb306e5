"""Products with a model's weight matrices: plain ones go to `Linear`, quantised ones to `Quantised`."""

from collections.abc import Callable

from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.gemm.quantised import Quantised
from openinfer_kernels.cuda.moe.experts import Experts
from openinfer_kernels.ops import Array, AttentionBatch, LinearWeight, QuantisedWeight


class Projections:
    """Both kinds on one device.

    What quantised weights need is asked for at the first of them: a model of plain ones never loads its kernels.
    """

    def __init__(self, linear: Linear, quantised: Callable[[], Quantised], experts: Callable[[], Experts]) -> None:
        self._linear = linear
        self._quantised = quantised
        self._experts = experts

    def linear(self, x: Array, weight: LinearWeight, batch: AttentionBatch, bias: Array | None = None) -> Array:
        del batch
        if not isinstance(weight, QuantisedWeight):
            return self._linear.linear(x, weight, bias)
        if bias is not None:
            raise ValueError("a quantised weight has no bias")
        return self._quantised().linear(x, weight)

    def linear_swiglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        del batch
        if not isinstance(gate_up, QuantisedWeight):
            return self._linear.linear_swiglu(x, gate_up)
        gated = self._quantised().linear_swiglu(x, gate_up)
        return self._experts().swiglu(self._quantised().linear(x, gate_up)) if gated is None else gated

    def linear_geglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        return self._linear.geglu(self.linear(x, gate_up, batch))
