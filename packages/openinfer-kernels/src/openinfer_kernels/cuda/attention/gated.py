"""What gated attention does around the attention itself, in two kernels. `csrc/attention/gated_attention.cu`."""

import ctypes
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from openinfer_kernels.cuda.attention.layer_cache import FP8_SUFFIX, fp8_place
from openinfer_kernels.cuda.common.arrays import address, fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, CacheFormat, PagedCache

_STEM = "gated_attention"
_THREADS = 256
_VECTOR_HEAD_DIMS = (64, 128, 256)
"""With a kernel of their own, where a multiple of 16 dimensions is rotated; any other has a slower one."""
_MAX_HEAD_DIM = 512
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("projected", "q_norm", "k_norm", "rope", "positions", "slots", "q", "cache")
        ),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads", "block_tokens", "rope_positions", "rotated")),
        ("eps", ctypes.c_float),
    )


class GatedAttention:
    """The operators on one device."""

    def __init__(self, device: Device) -> None:
        self._vectors = {
            head_dim: device.kernel(_STEM, f"gated_qk_norm_rope_append_{head_dim}") for head_dim in _VECTOR_HEAD_DIMS
        }
        self._device = device
        self._singles = device.kernel(_STEM, "gated_qk_norm_rope_append_singles")
        self._gate_vectors = device.kernel(_STEM, "output_gate_vectors")
        self._gate_singles = device.kernel(_STEM, "output_gate_singles")

    @cached_property
    def _fp8(self) -> Mapping[int, Kernel]:
        stem, name = _STEM + FP8_SUFFIX, f"gated_qk_norm_rope_append{FP8_SUFFIX}"
        return {head_dim: self._device.kernel(stem, f"{name}_{head_dim}") for head_dim in _VECTOR_HEAD_DIMS}

    def gated_qk_norm_rope_append(
        self,
        projected: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """K and V of a token whose cache slot is negative, padding of a captured step, are written nowhere."""
        is_fp8 = cache.format is CacheFormat.FP8
        data, cache_slots = cache.data if is_fp8 else cache.in_compute_dtype(), batch.cache_slots[cache.table]
        _check(
            projected,
            q_norm=q_norm,
            k_norm=k_norm,
            rope=rope,
            data=data,
            positions=batch.positions,
            cache_slots=cache_slots,
            is_fp8=is_fp8,
        )
        num_tokens, head_dim, rotated = projected.shape[0], q_norm.shape[0], 2 * rope.shape[2]
        num_kv_heads, block_tokens = data.shape[3], data.shape[4]
        num_heads = projected.shape[1] // head_dim // 2 - num_kv_heads
        out = cupy.empty((num_tokens, num_heads, head_dim), bfloat16)
        if is_fp8:
            place, block_stride = fp8_place(cache)
        else:
            layer_values = 2 * num_kv_heads * block_tokens * head_dim
            place, block_stride = address(data) + cache.layer * layer_values * bfloat16.itemsize, layer_values
            block_stride *= data.shape[1]
        arguments = _Arguments(
            *map(address, (projected, q_norm, k_norm, rope, batch.positions, cache_slots, out)),
            place,
            block_stride,
            num_heads,
            num_kv_heads,
            block_tokens,
            rope.shape[1],
            rotated,
            eps,
        )
        heads = num_heads + 2 * num_kv_heads
        fits = rotated % 16 == 0 and fits_vectors(projected, q_norm, k_norm, data)
        if head_dim in self._vectors and fits:
            threads = heads * head_dim // 8
            block = min(_THREADS, -(-threads // 32) * 32)
            kernels = self._fp8 if is_fp8 else self._vectors
            kernels[head_dim]((num_tokens, -(-threads // block), 1), (block, 1, 1), [arguments], overlap=True)
        elif is_fp8:
            raise ArrayMismatchError(
                f"heads of {head_dim} values, {rotated} of them rotated, have no kernel that writes a cache in FP8: "
                f"one of {_VECTOR_HEAD_DIMS}, and a multiple of 16, with arrays at multiples of 16 bytes"
            )
        else:
            self._singles((num_tokens, heads, 1), (32, 1, 1), [arguments, ctypes.c_int(head_dim)], overlap=True)
        return out

    def output_gate(self, attended: Array, projected: Array, *, head_dim: int) -> Array:
        require(attended, bfloat16, ndim=2, what="attended")
        require(projected, bfloat16, ndim=2, what="projected")
        (num_tokens, values), row_values = attended.shape, projected.shape[1]
        if len(projected) != num_tokens or values % head_dim or row_values < 2 * values:
            raise ArrayMismatchError(
                f"attended {attended.shape} and projected {projected.shape} do not agree on heads of {head_dim}"
            )
        out = cupy.empty(attended.shape, bfloat16)
        is_wide = head_dim % 8 == 0 and row_values % 8 == 0 and fits_vectors(attended, projected)
        kernel, width = (self._gate_vectors, 8) if is_wide else (self._gate_singles, 1)
        arguments = [attended, projected, out, *(ctypes.c_int(size) for size in (values, row_values, head_dim))]
        kernel((num_tokens, -(-values // (width * _THREADS)), 1), (_THREADS, 1, 1), arguments, overlap=True)
        return out


def _check(
    projected: Array,
    *,
    q_norm: Array,
    k_norm: Array,
    rope: Array,
    data: Array,
    positions: Array,
    cache_slots: Array,
    is_fp8: bool,
) -> None:
    require(projected, bfloat16, ndim=2, what="projected")
    require(q_norm, bfloat16, ndim=1, what="q_norm")
    require(k_norm, bfloat16, ndim=1, what="k_norm")
    require(rope, _FLOAT32, ndim=3, what="rope")
    if not is_fp8:  # whose place says it all
        require(data, bfloat16, ndim=6, what="the cache")
    require(positions, _INT32, ndim=1, what="batch.positions")
    require(cache_slots, _INT64, ndim=1, what="batch.cache_slots")
    head_dim = q_norm.shape[0]
    if head_dim > _MAX_HEAD_DIM:
        raise ArrayMismatchError(f"head dimension {head_dim} is not supported: at most {_MAX_HEAD_DIM}")
    agrees = data.shape[5] == head_dim and projected.shape[1] % (2 * head_dim) == 0
    if not agrees or rope.shape[2] * 2 > head_dim:
        raise ArrayMismatchError(
            f"shapes do not agree on the head dimension {head_dim} of q_norm: "
            f"projected {projected.shape}, rope {rope.shape}, cache {data.shape}"
        )
