"""`LowBitCpuOps`: operators that quantise what a checkpoint has not quantised, because a user asks for it."""

import numpy as np

from openinfer_kernels.cpu.common.weights import upload_weight
from openinfer_kernels.cpu.gemm.low_bit_activations import LowBitProducts, quantise_rows
from openinfer_kernels.cpu.ops import CpuOps
from openinfer_kernels.ops import QuantisedWeight
from openinfer_kernels.weights.low_bit_activations import PromptSteps
from openinfer_kernels.weights.plain import WeightPart


class LowBitCpuOps(CpuOps):
    """`CpuOps` with activations of prompts (W8A8), the output head, or both in few bits."""

    def __init__(self, *, activations: PromptSteps | None = None, fp8_head: bool = False) -> None:
        """Args:
        activations: the steps whose activations are quantised; None: none.
        fp8_head: whether the output head is quantised.
        """
        self._fp8_head = fp8_head
        if activations is not None:
            products = LowBitProducts(activations)
            self.linear = products.linear
            self.linear_swiglu = products.linear_swiglu
            self.linear_geglu = products.linear_geglu

    def quantise_head(self, *parts: WeightPart) -> QuantisedWeight | None:
        return quantise_rows(np.asarray(upload_weight(*parts))) if self._fp8_head else None
