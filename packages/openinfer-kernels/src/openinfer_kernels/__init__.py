"""Operators of LLM inference behind one contract (`Ops`), and the tables they read.

Importing this loads NumPy only. An implementation is asked for by its module: `openinfer_kernels.cpu.CpuOps`.
"""

from openinfer_kernels.errors import KernelsError, RopeConfigError, WeightDtypeError
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
from openinfer_kernels.rope import RopeParameters, YarnScaling, attention_factor, rope_table

__all__ = [
    "Array",
    "AttentionBatch",
    "Bias",
    "HostArray",
    "KernelsError",
    "Logprobs",
    "Ops",
    "Penalties",
    "RopeConfigError",
    "RopeParameters",
    "SamplingBatch",
    "TokenMask",
    "WeightDtypeError",
    "YarnScaling",
    "attention_factor",
    "rope_table",
]
