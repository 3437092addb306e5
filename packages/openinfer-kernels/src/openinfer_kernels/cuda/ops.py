"""`CudaOps`: a table of the methods that serve the operator contract on a GPU, and the families of kernels they are of.

    rms_norm = served_by(_norm, Norm.rms_norm)
                  │          └── has the parameters of `Ops.rms_norm`
                  └── makes the family, which loads its kernels

A family is made when the first of its operators is looked up, so that a model never loads the kernels of operators that
it does not use; those of every model are loaded at the start. A method found once is an attribute of the instance.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from openinfer_kernels.cuda.attention.compressor import Compressor
from openinfer_kernels.cuda.attention.gated import GatedAttention
from openinfer_kernels.cuda.attention.indexer import Indexer
from openinfer_kernels.cuda.attention.paged import Attention
from openinfer_kernels.cuda.attention.qk_norm_rope_append import QkNormRopeAppend
from openinfer_kernels.cuda.attention.rope_tail import RopeTail
from openinfer_kernels.cuda.attention.window import WindowAttention
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.embedding import Embedding
from openinfer_kernels.cuda.common.mapped_memory import temporaries
from openinfer_kernels.cuda.common.memory import Memory
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.gemm.gemm import Gemm
from openinfer_kernels.cuda.gemm.grouped_gemm import GroupedGemm
from openinfer_kernels.cuda.gemm.grouped_linear import GroupedLinear
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.gemm.output_head import DraftHeads, Fp8Heads, OutputHeads
from openinfer_kernels.cuda.gemm.projections import Projections
from openinfer_kernels.cuda.gemm.quantised import Quantised
from openinfer_kernels.cuda.linear_attention.causal_conv import CausalConv
from openinfer_kernels.cuda.linear_attention.gated_delta_rule import GatedDeltaRule
from openinfer_kernels.cuda.linear_attention.kept_inputs import KeptStates
from openinfer_kernels.cuda.lora.adapted_gemm import AdaptedGemm
from openinfer_kernels.cuda.lora.lora import Lora
from openinfer_kernels.cuda.lowbit.low_bit_activations import LowBitActivations
from openinfer_kernels.cuda.lowbit.lowbit_experts import LowbitExperts
from openinfer_kernels.cuda.mla.append import LatentAppend
from openinfer_kernels.cuda.mla.latent_attention import LatentAttention
from openinfer_kernels.cuda.moe.experts import Experts
from openinfer_kernels.cuda.moe.routing import Router
from openinfer_kernels.cuda.norm.gated_norm import GatedNorm
from openinfer_kernels.cuda.norm.hyper_connections import HyperConnections
from openinfer_kernels.cuda.norm.rms_norm import Norm
from openinfer_kernels.cuda.sampling.drafting import Drafting
from openinfer_kernels.cuda.sampling.logprobs import LogprobsKernels
from openinfer_kernels.cuda.sampling.ngram import NgramDrafts
from openinfer_kernels.cuda.sampling.sampling import Sampling
from openinfer_kernels.ops.extra import ExtraOperators
from openinfer_kernels.weights.low_bit_activations import PromptSteps

_Family = TypeVar("_Family")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class _Served:
    """Finds an operator at its first lookup and keeps it in the instance, where later lookups end."""

    def __init__(self, family: cached_property[Any], method: Callable[..., Any]) -> None:
        self._family, self.method, self._name = family, method, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, ops: object | None, owner: type) -> Any:
        if ops is None:
            return self
        operator = getattr(getattr(ops, str(self._family.attrname)), self.method.__name__)
        if getattr(type(ops), self._name) is self:  # not where a subclass asks for what it overrides
            ops.__dict__[self._name] = operator
        return operator


def served_by(
    family: cached_property[_Family], method: Callable[Concatenate[_Family, _Parameters], _Result]
) -> "staticmethod[_Parameters, _Result]":  # the class cannot be subscripted at run time
    """An operator that a method of a family serves: looked up on an instance, it is that method of its family."""
    return cast("Any", _Served(family, method))


class CudaOps:
    """`openinfer_kernels.Ops` on one GPU.

    Everything runs on CuPy's current stream and may be captured into a graph. Arrays are contiguous CuPy arrays; what
    the contract calls the compute dtype is BF16. Operators check their arrays and raise `ArrayMismatchError`.
    One thread at a time, and one stream at a time: products share a workspace.
    """

    name = "cuda"
    extra: Mapping[str, Callable[..., Any]] = ExtraOperators()

    def __init__(
        self, device: Device | None = None, *, activations: PromptSteps | None = None, fp8_head: bool = False
    ) -> None:
        """Loads the kernels of every model; `device` None opens GPU 0.

        Args:
            device: whose operators these are.
            activations: the steps whose activations are quantised as the weights are; None: none. Hopper alone.
            fp8_head: whether the output head is quantised to E4M3. Hopper alone.

        Raises:
            DeviceUnavailableError: there is no GPU that can run them.
            KernelBuildError: kernels had to be compiled and could not be.
        """
        self.device = Device.open() if device is None else device
        self._activations, self._fp8_head = activations, fp8_head
        self._has_draft_heads = False
        for family in _OF_EVERY_MODEL:
            getattr(self, family)

    def tuning(self) -> AbstractContextManager[None]:
        """Within it, products measure algorithms for the shapes they meet: for the warm-up, before any capture."""
        return self._linear.tuning()

    def close(self) -> None:
        """Gives back what libraries hold; arrays live on."""
        self._linear.close()
        if self._low_bit is not None:
            self._low_bit.close()
        if self._has_draft_heads:
            self._draft_heads.close()

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self.device)

    @cached_property
    def _linear(self) -> Linear:
        return Linear(self.device, DecodeGemm(self.device), Gemm(self.device), LibraryProducts(self.device))

    @cached_property
    def _grouped_gemm(self) -> GroupedGemm:
        return GroupedGemm(self.device)

    @cached_property
    def _quantised(self) -> Quantised:
        return Quantised(self.device, self._grouped_gemm, self._memory, self._linear, self._lowbit_experts)

    @cached_property
    def _low_bit(self) -> LowBitActivations | None:
        if not self._activations and not self._fp8_head:
            return None
        with temporaries():  # cuBLASLt's workspace, which the first head may ask for among the weights
            return LowBitActivations(self.device, self._linear)

    @cached_property
    def _heads(self) -> OutputHeads:
        quantised = Fp8Heads(self.device, self._memory, self._low_bit) if self._fp8_head and self._low_bit else None
        return OutputHeads(self._linear, quantised)

    @cached_property
    def _draft_heads(self) -> DraftHeads:
        self._has_draft_heads = True
        return DraftHeads(self.device, self._memory, self._linear)

    @cached_property
    def _projections(self) -> Projections:
        low_bit = self._low_bit if self._activations else None
        return Projections(self._linear, lambda: self._quantised, lambda: self._experts, low_bit, self._activations)

    @cached_property
    def _grouped_linear(self) -> GroupedLinear:
        return GroupedLinear(self._grouped_gemm, self._quantised, self._linear)

    @cached_property
    def _lora(self) -> Lora:
        return Lora(self.device)

    @cached_property
    def _fused_adapters(self) -> AdaptedGemm | None:
        return AdaptedGemm.on(self.device)

    @property
    def fused_adapters(self) -> AdaptedGemm | None:
        return self._fused_adapters

    @cached_property
    def _embedding(self) -> Embedding:
        return Embedding(self.device)

    @cached_property
    def _norm(self) -> Norm:
        return Norm(self.device)

    @cached_property
    def _gated_norm(self) -> GatedNorm:
        return GatedNorm(self.device)

    @cached_property
    def _hyper_connections(self) -> HyperConnections:
        return HyperConnections(self.device)

    @cached_property
    def _qk_norm_rope_append(self) -> QkNormRopeAppend:
        return QkNormRopeAppend(self.device)

    @cached_property
    def _attention(self) -> Attention:
        return Attention(self.device)

    @cached_property
    def _gated_attention(self) -> GatedAttention:
        return GatedAttention(self.device)

    @cached_property
    def _latent_append(self) -> LatentAppend:
        return LatentAppend(self.device)

    @cached_property
    def _latent_attention(self) -> LatentAttention:
        return LatentAttention(self.device, self._linear)

    @cached_property
    def _causal_conv(self) -> CausalConv:
        return CausalConv(self.device)

    @cached_property
    def _gated_delta_rule(self) -> GatedDeltaRule:
        return GatedDeltaRule(self.device)

    @cached_property
    def _kept_states(self) -> KeptStates:
        return KeptStates(self._causal_conv, self._gated_delta_rule)

    @cached_property
    def _rope_tail(self) -> RopeTail:
        return RopeTail(self.device)

    @cached_property
    def _compressor(self) -> Compressor:
        return Compressor(self.device, overlapping=False)

    @cached_property
    def _overlapping_compressor(self) -> Compressor:
        return Compressor(self.device, overlapping=True)

    @cached_property
    def _indexer(self) -> Indexer:
        return Indexer(self.device)

    @cached_property
    def _window_attention(self) -> WindowAttention:
        return WindowAttention(self.device)

    @cached_property
    def _router(self) -> Router:
        return Router(self.device)

    @cached_property
    def _experts(self) -> Experts:
        return Experts(self.device, self._grouped_gemm, self._lowbit_experts)

    @cached_property
    def _lowbit_experts(self) -> LowbitExperts | None:
        return LowbitExperts(self.device) if LowbitExperts.there_are_some(self.device) else None

    @cached_property
    def _sampling(self) -> Sampling:
        return Sampling(self.device)

    @cached_property
    def _logprobs(self) -> LogprobsKernels:
        return LogprobsKernels(self.device)

    @cached_property
    def _ngram(self) -> NgramDrafts:
        return NgramDrafts(self.device)

    @cached_property
    def _drafting(self) -> Drafting:
        return Drafting(self.device, self._memory, self._sampling)

    upload = served_by(_memory, Memory.upload)
    upload_weight = served_by(_memory, Memory.upload_weight)
    upload_float32 = served_by(_memory, Memory.upload_float32)
    loading = served_by(_memory, Memory.loading)
    download = served_by(_memory, Memory.download)
    zeros = served_by(_memory, Memory.zeros)
    host_weights = served_by(_memory, Memory.host_weights)
    copy_weights = served_by(_memory, Memory.copy_weights)
    copy_rows = served_by(_memory, Memory.copy_rows)
    upload_quantised = served_by(_quantised, Quantised.upload_quantised)
    upload_dequantised = served_by(_quantised, Quantised.upload_dequantised)

    embedding = served_by(_embedding, Embedding.embedding)
    residual_embedding = served_by(_embedding, Embedding.residual_embedding)
    linear = served_by(_projections, Projections.linear)
    quantise_head = served_by(_heads, OutputHeads.quantise_head)
    logits = served_by(_heads, OutputHeads.logits)
    linear_swiglu = served_by(_projections, Projections.linear_swiglu)
    linear_geglu = served_by(_projections, Projections.linear_geglu)
    geglu = served_by(_linear, Linear.geglu)
    soft_cap = served_by(_linear, Linear.soft_cap)
    grouped_linear = served_by(_grouped_linear, GroupedLinear.grouped_linear)
    lora_shrink = served_by(_lora, Lora.lora_shrink)
    lora_expand = served_by(_lora, Lora.lora_expand)
    lora_expand_swiglu = served_by(_lora, Lora.lora_expand_swiglu)

    rms_norm = served_by(_norm, Norm.rms_norm)
    add_rms_norm = served_by(_norm, Norm.add_rms_norm)
    zero_centred_rms_norm = served_by(_norm, Norm.zero_centred_rms_norm)
    add_zero_centred_rms_norm = served_by(_norm, Norm.add_zero_centred_rms_norm)
    gated_rms_norm = served_by(_gated_norm, GatedNorm.gated_rms_norm)
    hyper_streams = served_by(_hyper_connections, HyperConnections.streams)
    hyper_read = served_by(_hyper_connections, HyperConnections.read)
    hyper_write = served_by(_hyper_connections, HyperConnections.write)
    hyper_head = served_by(_hyper_connections, HyperConnections.head)
    hyper_add = served_by(_hyper_connections, HyperConnections.add)

    qk_norm_rope_append = served_by(_qk_norm_rope_append, QkNormRopeAppend.qk_norm_rope_append)
    zero_centred_qk_norm_rope_append = served_by(
        _qk_norm_rope_append, QkNormRopeAppend.zero_centred_qk_norm_rope_append
    )
    rope_append = served_by(_qk_norm_rope_append, QkNormRopeAppend.rope_append)
    paged_attention = served_by(_attention, Attention.paged_attention)
    gated_qk_norm_rope_append = served_by(_gated_attention, GatedAttention.gated_qk_norm_rope_append)
    output_gate = served_by(_gated_attention, GatedAttention.output_gate)
    latent_norm_rope_append = served_by(_latent_append, LatentAppend.latent_norm_rope_append)
    latent_attention = served_by(_latent_attention, LatentAttention.latent_attention)
    causal_conv_silu = served_by(_causal_conv, CausalConv.causal_conv_silu)
    gated_delta_rule = served_by(_gated_delta_rule, GatedDeltaRule.gated_delta_rule)
    keep_inputs = served_by(_kept_states, KeptStates.keep_inputs)
    replay_inputs = served_by(_kept_states, KeptStates.replay_inputs)

    norm_rope_tail = served_by(_rope_tail, RopeTail.norm_rope_tail)
    rope_tail = served_by(_rope_tail, RopeTail.rope_tail)
    compress_windows = served_by(_compressor, Compressor.compress)
    compress_overlapping_windows = served_by(_overlapping_compressor, Compressor.compress)
    index_scores = served_by(_indexer, Indexer.scores)
    select_entries = served_by(_indexer, Indexer.select)
    window_attention = served_by(_window_attention, WindowAttention.window_attention)
    append_window = served_by(_window_attention, WindowAttention.append_window)

    top_experts = served_by(_router, Router.top_experts)
    table_experts = served_by(_router, Router.table_experts)
    experts = served_by(_experts, Experts.experts)
    swiglu = served_by(_experts, Experts.swiglu)

    sample = served_by(_sampling, Sampling.sample)
    logprobs = served_by(_logprobs, LogprobsKernels.logprobs)
    ngram_drafts = served_by(_ngram, NgramDrafts.ngram_drafts)
    hidden_before = served_by(_drafting, Drafting.hidden_before)
    keep_hidden = served_by(_drafting, Drafting.keep_hidden)
    settle_hidden = served_by(_drafting, Drafting.settle_hidden)
    join_columns = served_by(_drafting, Drafting.join_columns)
    clear_rows = served_by(_drafting, Drafting.clear_rows)
    draft_ids = served_by(_drafting, Drafting.draft_ids)
    put_ids = served_by(_drafting, Drafting.put_ids)
    add_logits = served_by(_drafting, Drafting.add_logits)
    draft_head = served_by(_draft_heads, DraftHeads.draft_head)
    draft_logits = served_by(_draft_heads, DraftHeads.draft_logits)


_OF_EVERY_MODEL = (
    "_memory",
    "_embedding",
    "_linear",
    "_norm",
    "_qk_norm_rope_append",
    "_attention",
    "_sampling",
    "_logprobs",
)
