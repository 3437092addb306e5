"""`CudaOps`: the operator contract over the operator families beside this file."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from openinfer_kernels.cuda.attention.paged import Attention, OneKernelAttention
from openinfer_kernels.cuda.attention.qk_norm_rope_append import QkNormRopeAppend
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.embedding import Embedding
from openinfer_kernels.cuda.common.memory import Memory
from openinfer_kernels.cuda.expert_ops import CudaExpertOps
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.gemm.gemm import Gemm
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.linear_attention_ops import CudaLinearAttentionOps
from openinfer_kernels.cuda.mla.latent_attention import CudaLatentAttentionOps
from openinfer_kernels.cuda.norm.rms_norm import Norm
from openinfer_kernels.cuda.sampling.logprobs import LogprobsKernels
from openinfer_kernels.cuda.sampling.sampling import Sampling
from openinfer_kernels.cuda.sparse_attention_ops import CudaSparseAttentionOps
from openinfer_kernels.ops import Array, AttentionBatch, HostArray, Logprobs, SamplingBatch
from openinfer_kernels.weights.plain import WeightPart


class CudaOps(CudaLatentAttentionOps, CudaLinearAttentionOps, CudaSparseAttentionOps, CudaExpertOps):
    """`openinfer_kernels.Ops` on one GPU.

    Everything runs on CuPy's current stream and may be captured into a graph. Arrays are contiguous CuPy arrays; what
    the contract calls the compute dtype is BF16. Operators check their arrays and raise `ArrayMismatchError`.
    One thread at a time, and one stream at a time: products share a workspace.
    """

    def __init__(self, device: Device | None = None) -> None:
        """Loads every kernel; `device` None opens GPU 0.

        Raises:
            DeviceUnavailableError: there is no GPU that can run them.
            KernelBuildError: kernels had to be compiled and could not be.
        """
        self.device = Device.open() if device is None else device
        self._memory = Memory(self.device)
        self._embedding = Embedding(self.device)
        self._linear = self._make_linear()
        self._norm = Norm(self.device)
        self._qk_norm_rope_append = QkNormRopeAppend(self.device)
        self._attention = self._make_attention()
        self._sampling = Sampling(self.device)
        self._logprobs = LogprobsKernels(self.device)

    def _make_linear(self) -> Linear:
        return Linear(self.device, DecodeGemm(self.device), Gemm(self.device), LibraryProducts(self.device))

    def _make_attention(self) -> Attention | OneKernelAttention:
        return Attention(self.device)

    @property
    def name(self) -> str:
        """`cuda`."""
        return "cuda"

    def tuning(self) -> AbstractContextManager[None]:
        """Within it, products measure algorithms for the shapes they meet: for the warm-up, before any capture."""
        return self._linear.tuning()

    def close(self) -> None:
        """Gives back what libraries hold; arrays live on."""
        self._linear.close()

    # --- memory -----------------------------------------------------------------------------------------

    def upload(self, host: HostArray) -> Array:
        """See `openinfer_kernels.cuda.common.memory`."""
        return self._memory.upload(host)

    def upload_weight(self, *parts: WeightPart) -> Array:
        """See `openinfer_kernels.cuda.common.memory`."""
        return self._memory.upload_weight(*parts)

    def upload_float32(self, *parts: WeightPart) -> Array:
        """See `openinfer_kernels.cuda.common.memory`."""
        return self._memory.upload_float32(*parts)

    def loading(self, progress: Callable[[int], None] = lambda num_bytes: None) -> AbstractContextManager[None]:
        """See `openinfer_kernels.cuda.common.memory`."""
        return self._memory.loading(progress)

    def download(self, array: Array) -> HostArray:
        """See `openinfer_kernels.cuda.common.memory`."""
        return self._memory.download(array)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] | None = None) -> Array:
        """See `openinfer_kernels.cuda.common.memory`."""
        return self._memory.zeros(shape, dtype)

    def copy_rows(self, array: Array, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `openinfer_kernels.cuda.common.memory`."""
        self._memory.copy_rows(array, sources=sources, targets=targets)

    # --- dense ------------------------------------------------------------------------------------------

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """See `openinfer_kernels.cuda.common.embedding`."""
        return self._embedding.embedding(token_ids, table)

    def residual_embedding(self, token_ids: Array, table: Array) -> Array:
        """See `openinfer_kernels.cuda.common.embedding`."""
        return self._embedding.residual_embedding(token_ids, table)

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """See `openinfer_kernels.cuda.gemm.linear`."""
        return self._linear.linear(x, weight, bias)

    def logits(self, hidden: Array, head: Array) -> Array:
        """See `openinfer_kernels.cuda.gemm.linear`."""
        return self._linear.logits(hidden, head)

    def linear_swiglu(self, x: Array, gate_up: Array) -> Array:
        """See `openinfer_kernels.cuda.gemm.linear`."""
        return self._linear.linear_swiglu(x, gate_up)

    # --- norms ------------------------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cuda.norm.rms_norm`."""
        return self._norm.rms_norm(x, weight, eps=eps)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cuda.norm.rms_norm`."""
        return self._norm.add_rms_norm(x, residual, weight, eps=eps)

    def zero_centred_rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cuda.norm.rms_norm`."""
        return self._norm.zero_centred_rms_norm(x, weight, eps=eps)

    def add_zero_centred_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """See `openinfer_kernels.cuda.norm.rms_norm`."""
        return self._norm.add_zero_centred_rms_norm(x, residual, weight, eps=eps)

    # --- attention --------------------------------------------------------------------------------------

    def qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """See `openinfer_kernels.cuda.attention.qk_norm_rope_append`."""
        return self._qk_norm_rope_append.qk_norm_rope_append(
            qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            rope=rope,
            kv_cache=kv_cache,
            layer=layer,
            batch=batch,
        )

    def rope_append(self, qkv: Array, *, rope: Array, kv_cache: Array, layer: int, batch: AttentionBatch) -> Array:
        """See `openinfer_kernels.cuda.attention.qk_norm_rope_append`."""
        return self._qk_norm_rope_append.rope_append(qkv, rope=rope, kv_cache=kv_cache, layer=layer, batch=batch)

    def paged_attention(self, q: Array, kv_cache: Array, *, layer: int, batch: AttentionBatch, scale: float) -> Array:
        """See `openinfer_kernels.cuda.attention.paged`."""
        return self._attention.paged_attention(q, kv_cache, layer=layer, batch=batch, scale=scale)

    # --- sampling ---------------------------------------------------------------------------------------

    def sample(self, logits: Array, sampling: SamplingBatch) -> Array:
        """See `openinfer_kernels.cuda.sampling.sampling`."""
        return self._sampling.sample(logits, sampling)

    def logprobs(self, logits: Array, token_ids: Array, *, top: int) -> Logprobs:
        """See `openinfer_kernels.cuda.sampling.logprobs`."""
        return self._logprobs.logprobs(logits, token_ids, top=top)
