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
    CacheFormat,
    CompressedEntries,
    ExpertChoice,
    GroupScore,
    HostArray,
    HyperMix,
    HyperWeights,
    LinearWeight,
    Logprobs,
    Ops,
    PagedCache,
    Penalties,
    QuantisedWeight,
    Routing,
    SamplingBatch,
    Scoring,
    TokenMask,
)
from openinfer_kernels.rope import RopeParameters, YarnScaling, attention_factor, rope_table, softmax_factor
from openinfer_kernels.weights.plain import RandomWeight, WeightPart
from openinfer_kernels.weights.quantised import QuantisedPart, RandomCodes, WeightFormat

__all__ = [
    "Array",
    "ArrayMismatchError",
    "AttentionBatch",
    "Bias",
    "CacheFormat",
    "CompressedEntries",
    "CudaCallError",
    "DeviceUnavailableError",
    "ExpertChoice",
    "GroupScore",
    "HostArray",
    "HyperMix",
    "HyperWeights",
    "KernelBuildError",
    "KernelProviderError",
    "KernelsError",
    "LinearWeight",
    "Logprobs",
    "OperatorMissingError",
    "Ops",
    "PagedCache",
    "Penalties",
    "QuantisedPart",
    "QuantisedWeight",
    "RandomCodes",
    "RandomWeight",
    "RopeConfigError",
    "RopeParameters",
    "Routing",
    "SamplingBatch",
    "Scoring",
    "TokenMask",
    "WeightDtypeError",
    "WeightFormat",
    "WeightPart",
    "YarnScaling",
    "attention_factor",
    "rope_table",
    "softmax_factor",
]
