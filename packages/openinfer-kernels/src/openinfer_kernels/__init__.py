"""Operators of LLM inference behind one contract (`Ops`), and the tables they read.

Importing this loads NumPy only. An implementation is asked for by its module: `openinfer_kernels.cpu.CpuOps`, or
`openinfer_kernels.cuda.CudaOps` where an extra brought CuPy.
"""

from openinfer_kernels.errors import (
    ArrayMismatchError,
    CudaCallError,
    DeviceUnavailableError,
    KernelBuildError,
    KernelProviderError,
    KernelsError,
    OperatorMissingError,
    RopeConfigError,
    WeightDtypeError,
)
from openinfer_kernels.ops import (
    Array,
    AttentionBatch,
    Bias,
    HostArray,
    Logprobs,
    Ops,
    Penalties,
    SamplingBatch,
    TokenMask,
)
from openinfer_kernels.rope import RopeParameters, YarnScaling, attention_factor, rope_table, softmax_factor
from openinfer_kernels.weights import RandomWeight, WeightPart

__all__ = [
    "Array",
    "ArrayMismatchError",
    "AttentionBatch",
    "Bias",
    "CudaCallError",
    "DeviceUnavailableError",
    "HostArray",
    "KernelBuildError",
    "KernelProviderError",
    "KernelsError",
    "Logprobs",
    "OperatorMissingError",
    "Ops",
    "Penalties",
    "RandomWeight",
    "RopeConfigError",
    "RopeParameters",
    "SamplingBatch",
    "TokenMask",
    "WeightDtypeError",
    "WeightPart",
    "YarnScaling",
    "attention_factor",
    "rope_table",
    "softmax_factor",
]
