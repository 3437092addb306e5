"""Products of 17 to 64 tokens whose adapters are added by the kernel after them: `csrc/lora/deferred_delta.cuh`.

    product, and A x beside it ─► y, float32 A x ─► add_rms_norm, qk_norm_rope_append or swiglu of y + B (A x)

`y` is the product as it is without adapters, of the same bits; of gate and up before they are gated. What is deferred
is decided by shapes alone, so that a step is captured and replayed in one way.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_kernels.cuda.attention.qk_norm_rope_append import ADAPTED_HEAD_DIMS, ADAPTED_RANKS, QkNormRopeAppend
from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.tensor_maps import TensorMaps
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.gemm.gemm import Gemm, weight_box
from openinfer_kernels.cuda.gemm.tiles import Epilogue, Partition
from openinfer_kernels.cuda.lora.adapter_maps import AdapterMaps
from openinfer_kernels.cuda.lora.decode_adapters import decode_adapters
from openinfer_kernels.cuda.norm.rms_norm import ADAPTED_NORM_SIZES, Norm
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, PagedCache
from openinfer_kernels.ops.lora import AddedBy, DeferredProduct, DeltaOperator

LEAST_TOKENS, MOST_TOKENS = 17, 64
"""Of fewer, products with adapters in one launch are quicker; for more, A x beside a product is not compiled."""
MOST_RANK = ADAPTED_RANKS[-1]
_SWIGLU_STEM = "adapted_swiglu"
_SWIGLU_TOKENS, _SWIGLU_COLUMNS = 16, 32
"""Of a warp, and of a block: `csrc/lora/deferred_tiles.cuh` has these."""
_ROW_UNIT = 16
_PIECES_OF_NORM, _PIECES_OF_GATES, _PIECES_OF_HEADS = 1, 2, 3
_FLOAT32 = np.dtype(np.float32)


class DeferredDelta(ctypes.Structure):
    """The struct of that name."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shrunk", "b", "slots")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_slots", "pieces", "rank", "num_columns", "splits")),
    )


@dataclass(frozen=True, slots=True)
class Beside:
    """A product without adapters, and the arrays that what they add to it is made of."""

    y: Array
    shrunk: Array
    """`[splits, T, P r]` float32; of tokens without an adapter whatever was there."""
    num_slots: int
    rank: int
    columns: Array
    """`[out, E]`"""
    adapter_slots: Array

    @property
    def most_rank(self) -> int:
        """Of the kernel that serves it."""
        return next(rank for rank in ADAPTED_RANKS if self.rank <= rank)

    @property
    def delta(self) -> DeferredDelta:
        places = (address(each) for each in (self.shrunk, self.columns, self.adapter_slots))
        splits, num_tokens, values = self.shrunk.shape
        sizes = num_tokens, self.num_slots, values // self.rank, self.rank, self.columns.shape[1], splits
        return DeferredDelta(*places, *sizes)


@dataclass(frozen=True, slots=True)
class Deferred:
    """`DeferredProduct`"""

    product: Beside
    added_by: AddedBy
    starts: tuple[int, ...]

    @property
    def y(self) -> Array:
        return self.product.y


class DeferredAdapters:
    """The products and the operators after them, on one device: Hopper."""

    def __init__(self, device: Device, decode_gemm: DecodeGemm, gemm: Gemm) -> None:
        self._decode_gemm, self._gemm = decode_gemm, gemm
        self._norm, self._heads = Norm(device), QkNormRopeAppend(device)
        self._maps = TensorMaps()
        self._swiglu = {rank: device.kernel(_SWIGLU_STEM, f"{_SWIGLU_STEM}_{rank}") for rank in ADAPTED_RANKS}

    def serves(
        self, weight: Array, a: Array, *, num_tokens: int, starts: Sequence[int], added_by: AddedBy | None
    ) -> bool:
        """Whether the operator after the product can add what adapters do, for so many tokens; None: `swiglu`."""
        if not LEAST_TOKENS <= num_tokens <= MOST_TOKENS or a.shape[2] > MOST_RANK:
            return False
        if added_by is None:
            width = len(weight) // _PIECES_OF_GATES
            return tuple(starts) == (0, width, 2 * width) and width % _SWIGLU_COLUMNS == 0
        if added_by.operator is DeltaOperator.ADD_RMS_NORM:
            return len(starts) == 1 + _PIECES_OF_NORM and len(weight) in ADAPTED_NORM_SIZES
        whole_heads = all(start % added_by.head_dim == 0 for start in starts)
        return len(starts) == 1 + _PIECES_OF_HEADS and whole_heads and added_by.head_dim in ADAPTED_HEAD_DIMS

    def linear(
        self,
        x: Array,
        weight: Array,
        a: Array,
        columns: Array,
        adapter_slots: Array,
        *,
        starts: Sequence[int],
        added_by: AddedBy,
    ) -> Deferred | None:
        """None where it is not served: by the operator, or as the product has no room for A x beside it."""
        if not self.serves(weight, a, num_tokens=len(x), starts=starts, added_by=added_by):
            return None
        product = self._multiply(x, weight, a, columns, adapter_slots, starts=starts, is_gated=False)
        return None if product is None else Deferred(product, added_by, tuple(starts))

    def linear_swiglu(
        self, x: Array, gate_up: Array, a: Array, columns: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array | None:
        """Two launches; a token without an adapter has the bits of `linear_swiglu`."""
        if not self.serves(gate_up, a, num_tokens=len(x), starts=starts, added_by=None):
            return None
        product = self._multiply(x, gate_up, a, columns, adapter_slots, starts=starts, is_gated=True)
        if product is None:
            return None
        width = len(gate_up) // _PIECES_OF_GATES
        out = cupy.empty((len(x), width), bfloat16)
        kernel, threads = self._swiglu[product.most_rank], -(-len(x) // _SWIGLU_TOKENS) * 32
        arguments = [product.y, out, ctypes.c_int(width), product.delta]
        kernel((width // _SWIGLU_COLUMNS, 1, 1), (threads, 1, 1), arguments, overlap=True)
        return out

    def _multiply(
        self,
        x: Array,
        weight: Array,
        a: Array,
        columns: Array,
        adapter_slots: Array,
        *,
        starts: Sequence[int],
        is_gated: bool,
    ) -> Beside | None:
        out = cupy.empty((len(x), len(weight)), bfloat16)
        if self._decode_gemm.serves(x, weight):
            given, shrunk = decode_adapters(x, a, columns, adapter_slots, starts)
            self._decode_gemm.multiply_beside(x, weight, out, adapters=given)
        else:
            made = self._multiply_more(x, weight, out, a, adapter_slots, is_gated=is_gated)
            if made is None:
                return None
            shrunk = made
        return Beside(out, shrunk, len(a), a.shape[2], columns, adapter_slots)

    def _multiply_more(
        self, x: Array, weight: Array, out: Array, a: Array, adapter_slots: Array, *, is_gated: bool
    ) -> Array | None:
        """By tiles of 64 tokens; A x."""
        num_slots, pieces, rank, inner = a.shape
        rows = num_slots * pieces * rank
        if rows % _ROW_UNIT:
            return None
        if is_gated:
            partition = self._gemm.partition_gates_beside(x, weight, shrink_rows=rows)
        else:
            partition = self._gemm.partition_beside(x, weight, shrink_rows=rows)
        if partition is None:
            return None
        shrunk = cupy.empty((1, len(x), pieces * rank), _FLOAT32)
        maps = self.maps_of(partition, a, rows, inner)
        maps.slots, maps.out = address(adapter_slots), address(shrunk)
        self._gemm.multiply_beside(partition, x, weight, out, adapters=maps, shrink_tiles=maps.shrink_tiles)
        return shrunk

    def maps_of(self, partition: Partition, a: Array, rows: int, inner: int) -> AdapterMaps:
        """Of `Gemm.multiply_beside`, but for where slots are and A x goes; `a` has so many rows in all."""
        pieces, rank = a.shape[1:3]
        box = weight_box(Epilogue.STORE, partition.tile, address(a), (rows, inner))
        return AdapterMaps(
            a=self._maps.of(box),
            pieces=pieces,
            columns=rows // pieces,
            rank=rank,
            halves=1,
            shrink_tiles=-(-rows // partition.tile.columns),
            parts=1,
        )

    def add_rms_norm(self, product: DeferredProduct, residual: Array, weight: Array, *, eps: float) -> Array:
        """`add_rms_norm(y + B (A x))`; tokens without an adapter have the bits of `add_rms_norm(y)`."""
        return self._norm.add_rms_norm_adapted(product.y, residual, weight, _own(product).product.delta, eps=eps)

    def qk_norm_rope_append(
        self,
        product: DeferredProduct,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """The same of Q, K and V.

        Raises:
            ArrayMismatchError: the cache has other heads than the product.
        """
        own = _own(product)
        num_kv_heads, head_dim = cache.data.shape[3], cache.data.shape[5]
        end = own.starts[-1]
        expected = (0, end - 2 * num_kv_heads * head_dim, end - num_kv_heads * head_dim, end)
        if head_dim != own.added_by.head_dim or own.starts != expected:
            raise ArrayMismatchError(
                f"pieces at {list(own.starts)} are not Q, K and V of a cache of {num_kv_heads} heads of {head_dim}"
            )
        return self._heads.qk_norm_rope_append_adapted(
            own.y,
            own.product.delta,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            rope=rope,
            cache=cache,
            batch=batch,
            most_rank=own.product.most_rank,
        )


def _own(product: DeferredProduct) -> Deferred:
    if not isinstance(product, Deferred):
        raise ArrayMismatchError(f"a deferred product of {type(product).__qualname__}: it is another device's")
    return product
