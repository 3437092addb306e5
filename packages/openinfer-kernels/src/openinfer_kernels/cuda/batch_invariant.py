"""`BatchInvariantCudaOps`: results that are the same, bit for bit, in any batch.

    products     none divides its inner size among blocks; each kernel is compared with one reference before it is used
    attention    one kernel for prompts, chunks and decode rows: it walks over keys in tiles that begin at multiples of
                 128 (64) in their sequence, so that a token's sums do not depend on the tokens computed next to it
    experts      one kernel with one tile for any number of tokens: a token's sums go over K in one order
    windows      keys of windows and entries are not divided; columns of streams are, into pieces of one length
    delta rule   token by token also in prompts: a chunk's bits depend on where it begins
    adapters     none divides its inner size among blocks
    all others   compute a row, or a token, by itself anyway

So a token's result depends on its own sequence alone: not on other rows, nor on how a prompt is cut into chunks, nor on
what of it was cached.
"""

from functools import cached_property

from openinfer_kernels.cuda.attention.paged import Attention, OneKernelAttention
from openinfer_kernels.cuda.attention.window import WindowAttention
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.gemm.grouped_gemm import GroupedGemm
from openinfer_kernels.cuda.gemm.invariant_products import InvariantProducts
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.linear_attention.gated_delta_rule import GatedDeltaRule
from openinfer_kernels.cuda.lora.lora import Lora
from openinfer_kernels.cuda.mla.latent_attention import LatentAttention
from openinfer_kernels.cuda.norm.hyper_connections import HyperConnections
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.errors import OperatorMissingError

_EXPERT_TILE_TOKENS = 32


class BatchInvariantCudaOps(CudaOps):
    """`CudaOps` whose results of a token depend on its own sequence alone; see docs/reference/kernels.md."""

    @cached_property
    def _linear(self) -> Linear:
        decode_gemm = DecodeGemm(self.device, most_blocks_per_tile=1)
        return Linear(self.device, decode_gemm, None, InvariantProducts(decode_gemm))

    @property
    def fused_adapters(self) -> None:
        """Its products divide K."""

    @cached_property
    def _lora(self) -> Lora:
        return Lora(self.device, divides=False)

    @cached_property
    def _grouped_gemm(self) -> GroupedGemm:
        return GroupedGemm(self.device, tile_tokens=_EXPERT_TILE_TOKENS)

    @cached_property
    def _attention(self) -> Attention:
        return OneKernelAttention(self.device)

    @cached_property
    def _latent_attention(self) -> LatentAttention:
        """Refused: its kernel divides contexts by what else there is."""
        raise OperatorMissingError(
            "latent_attention has no batch-invariant CUDA kernel yet; serve the model without --batch-invariant, or "
            "with --device cpu"
        )

    @cached_property
    def _window_attention(self) -> WindowAttention:
        return WindowAttention(self.device, divides=False)

    @cached_property
    def _hyper_connections(self) -> HyperConnections:
        return HyperConnections(self.device, chooses=False)

    @cached_property
    def _gated_delta_rule(self) -> GatedDeltaRule:
        return GatedDeltaRule(self.device, in_chunks=False)
