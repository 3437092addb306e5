"""Products with a model's weight matrices: plain ones go to `Linear`, quantised ones to `Quantised`.

In the steps that `PromptSteps` says activations are quantised, too, if the operators were made so: `LowBitActivations`.
"""

from collections.abc import Callable

from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.gemm.quantised import Quantised
from openinfer_kernels.cuda.lowbit.low_bit_activations import LowBitActivations
from openinfer_kernels.cuda.moe.experts import Experts
from openinfer_kernels.ops import Array, AttentionBatch, LinearWeight, QuantisedWeight
from openinfer_kernels.weights.low_bit_activations import PromptSteps


class Projections:
    """Both kinds on one device.

    What quantised weights need is asked for at the first of them: a model of plain ones never loads its kernels.
    """

    def __init__(
        self,
        linear: Linear,
        quantised: Callable[[], Quantised],
        experts: Callable[[], Experts],
        low_bit: LowBitActivations | None = None,
        steps: PromptSteps | None = None,
    ) -> None:
        self._linear = linear
        self._quantised = quantised
        self._experts = experts
        self._low_bit = low_bit
        self._steps = steps

    def linear(self, x: Array, weight: LinearWeight, batch: AttentionBatch, bias: Array | None = None) -> Array:
        if not isinstance(weight, QuantisedWeight):
            return self._linear.linear(x, weight, bias)
        if bias is not None:
            raise ValueError("a quantised weight has no bias")
        low_bit = self._low_bit_of(x, weight, batch)
        return self._quantised().linear(x, weight) if low_bit is None else low_bit.linear(x, weight)

    def linear_swiglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        if not isinstance(gate_up, QuantisedWeight):
            return self._linear.linear_swiglu(x, gate_up)
        low_bit = self._low_bit_of(x, gate_up, batch)
        if low_bit is not None:
            return low_bit.linear_swiglu(x, gate_up)
        gated = self._quantised().linear_swiglu(x, gate_up)
        return self._experts().swiglu(self._quantised().linear(x, gate_up)) if gated is None else gated

    def linear_geglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        return self._linear.geglu(self.linear(x, gate_up, batch))

    def _low_bit_of(self, x: Array, weight: QuantisedWeight, batch: AttentionBatch) -> LowBitActivations | None:
        if self._low_bit is None or self._steps is None or not self._steps.include(len(x), batch):
            return None
        return self._low_bit if self._low_bit.serves(weight) else None
