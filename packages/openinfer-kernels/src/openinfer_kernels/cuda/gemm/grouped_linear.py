"""A product per group of values of a token: one launch for all groups, which are read and written where they lie."""

from openinfer_kernels.cuda.common.arrays import require
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm.dispatch import tile_of
from openinfer_kernels.cuda.gemm.grouped_gemm import Epilogue, GroupedGemm, kernels_of
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.gemm.quantised import Quantised
from openinfer_kernels.cuda.lowbit.lowbit_tiles import TiledWeight
from openinfer_kernels.cuda.moe.experts import check_weight
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, LinearWeight, QuantisedWeight


class GroupedLinear:
    """Products on one device: few tokens by `csrc/gemm/grouped_gemm.cuh`, more by cuBLASLt with a batch of matrices."""

    def __init__(self, gemm: GroupedGemm, quantised: Quantised, linear: Linear) -> None:
        self._gemm = gemm
        self._quantised = quantised
        self._linear = linear

    def grouped_linear(self, x: Array, weight: LinearWeight) -> Array:
        require(x, bfloat16, ndim=2, what="x")
        check_weight(weight, ndim=3, what="the weight")
        groups, rows, columns = weight.shape
        if x.shape[1] != groups * columns:
            raise ArrayMismatchError(f"x {x.shape} has no {groups} pieces for the weights {list(weight.shape)}")
        if isinstance(weight, TiledWeight):
            raise ArrayMismatchError(f"the weights {list(weight.shape)} are held for experts: upload them as grouped")
        quantised = isinstance(weight, QuantisedWeight)
        tile_tokens = tile_of(kernels_of(weight), len(x))
        if self._gemm.chooses and (tile_tokens is None or (groups == 1 and not quantised)):
            dense = self._quantised.dequantised(weight) if quantised else weight
            return self._linear.grouped_linear(x, dense, weights_first=not quantised)
        out = cupy.empty((len(x), groups * rows), bfloat16)
        if len(x):
            self._gemm.multiply(x, weight, out, epilogue=Epilogue.STORE, tile_tokens=tile_tokens)
        return out
