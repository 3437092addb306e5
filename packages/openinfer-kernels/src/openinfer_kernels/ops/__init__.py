"""The operator contract: what a model and the sampler may ask of a device.

`Ops` is one `Protocol`. `openinfer_kernels.cpu.CpuOps` (NumPy) and a CUDA module implement it with the same
names, and one parametrised test compares them. A model receives `ops` and never asks which one it is.

Letters used for shapes: `T` tokens of this step over all rows, `R` rows (sequences) of this step, `h` hidden
size, `H`/`K` query/KV heads on this rank, `D` head dimension, `F` MLP width on this rank, `V` vocabulary
rows, `B` tokens per KV block. `x @ W.T` always means a weight stored `[out, in]`, as checkpoints publish it.

Compute dtype: float32 on the CPU (BF16 weights are converted when they are uploaded); BF16 storage with float32
accumulation on a GPU. Integer arrays are int32 unless said otherwise.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from openinfer_kernels.ops.arrays import Array, HostArray
from openinfer_kernels.ops.attention import AttentionOps
from openinfer_kernels.ops.batch import AttentionBatch, KeptInputs
from openinfer_kernels.ops.cache import CacheFormat, PagedCache
from openinfer_kernels.ops.dense import DenseOps
from openinfer_kernels.ops.drafting import DraftingOps, HiddenMemory, NgramHistory, NgramMatch, NgramOps, NgramRule
from openinfer_kernels.ops.experts import ExpertChoice, ExpertOps, GroupScore, Routing, RoutingOps, Scoring
from openinfer_kernels.ops.hyper_connections import HyperConnectionOps, HyperMix, HyperWeights
from openinfer_kernels.ops.latent_attention import LatentAttentionOps
from openinfer_kernels.ops.linear_attention import LinearAttentionOps, ReplayOps
from openinfer_kernels.ops.lora import LoraOps
from openinfer_kernels.ops.memory import MemoryOps
from openinfer_kernels.ops.norms import NormOps
from openinfer_kernels.ops.quantised import LinearWeight, QuantisedWeight
from openinfer_kernels.ops.sampling import Bias, Logprobs, Penalties, SamplingBatch, SamplingOps, TokenMask
from openinfer_kernels.ops.sparse_attention import CompressedEntries, SparseAttentionOps

__all__ = [
    "Array",
    "AttentionBatch",
    "AttentionOps",
    "Bias",
    "CacheFormat",
    "CompressedEntries",
    "DenseOps",
    "DraftingOps",
    "ExpertChoice",
    "ExpertOps",
    "GroupScore",
    "HiddenMemory",
    "HostArray",
    "HyperConnectionOps",
    "HyperMix",
    "HyperWeights",
    "KeptInputs",
    "LatentAttentionOps",
    "LinearAttentionOps",
    "LinearWeight",
    "Logprobs",
    "LoraOps",
    "MemoryOps",
    "NgramHistory",
    "NgramMatch",
    "NgramOps",
    "NgramRule",
    "NormOps",
    "Ops",
    "PagedCache",
    "Penalties",
    "QuantisedWeight",
    "ReplayOps",
    "Routing",
    "RoutingOps",
    "SamplingBatch",
    "SamplingOps",
    "Scoring",
    "SparseAttentionOps",
    "TokenMask",
]


class Ops(
    MemoryOps,
    DenseOps,
    LoraOps,
    NormOps,
    AttentionOps,
    LinearAttentionOps,
    ReplayOps,
    LatentAttentionOps,
    SparseAttentionOps,
    HyperConnectionOps,
    RoutingOps,
    ExpertOps,
    SamplingOps,
    NgramOps,
    DraftingOps,
    Protocol,
):
    """The operators of one device. Inputs are checked by the caller once per shape, not per call.

    Every method returns new arrays unless its docstring says what it mutates.
    """

    @property
    def name(self) -> str:
        """`cpu` or `cuda`: for `openinfer plan` and messages, never for a branch in a model."""
        ...

    @property
    def extra(self) -> Mapping[str, Callable[..., Any]]:
        """Operators that providers add, by name; see `openinfer_kernels.providers.ExtendsOperators`.

        Asking for another raises `OperatorMissingError`.
        """
        ...
