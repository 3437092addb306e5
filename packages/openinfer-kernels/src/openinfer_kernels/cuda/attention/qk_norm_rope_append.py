"""What happens to Q, K and V between their projection and attention, in one kernel: norms, RoPE, write to the cache."""

import ctypes
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from openinfer_kernels.cuda.attention.layer_cache import FP8_SUFFIX, fp8_place
from openinfer_kernels.cuda.common.arrays import address, fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, CacheFormat, PagedCache

_STEM = "qk_norm_rope_append"
_THREADS = 256
_VALUES = 8
"""Of a thread."""
_MANY_TOKENS = 512
"""From so many on there is work for every multiprocessor, and a thread takes `_HEADS_AT_ONCE` heads; before, one."""
_HEADS_AT_ONCE = 3
_VECTOR_HEAD_DIMS = (32, 64, 128, 256)
"""With a kernel of their own; any other even one up to `_MAX_HEAD_DIM` has a slower one."""
_MAX_HEAD_DIM = 512
_ADAPTED_STEM = "adapted_heads"
ADAPTED_HEAD_DIMS = (64, 128, 256)
"""Of `qk_norm_rope_append_adapted`."""
ADAPTED_RANKS = (16, 64)
"""For up to so many, kernels that `csrc/lora/deferred_tiles.cuh` is part of: with more they have more registers."""
_ADAPTED_THREADS, _ADAPTED_TOKENS, _ADAPTED_VALUES = 128, 16, 256
"""Of a block, and the values that it has of each token."""
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "q_norm", "k_norm", "rope", "positions", "slots", "q", "cache")),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads", "block_tokens", "rope_positions")),
        ("eps", ctypes.c_float),
    )


_ByHeadDim = Mapping[int, Kernel]
_ByRankAndHeadDim = Mapping[tuple[int, int], Kernel]


class _Adapted(NamedTuple):
    """What is added to Q, K and V."""

    delta: ctypes.Structure
    most_rank: int


class QkNormRopeAppend:
    """The fused operator on one device, with norms of either convention and without."""

    def __init__(self, device: Device) -> None:
        self._normed = _Kernels(device, "qk_norm_rope_append")
        self._zero_centred = _Kernels(device, "zero_centred_qk_norm_rope_append")
        self._plain = _Kernels(device, "rope_append")

    def qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """K and V of a token whose cache slot is negative, padding of a captured step, are written nowhere."""
        norms = _checked_norms(q_norm, k_norm)
        return self._normed.launch(qkv, norms=norms, eps=eps, rope=rope, cache=cache, batch=batch)

    def qk_norm_rope_append_adapted(
        self,
        qkv: Array,
        delta: ctypes.Structure,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
        most_rank: int,
    ) -> Array:
        """`qk_norm_rope_append` of few tokens, in heads of `ADAPTED_HEAD_DIMS`, to which a `DeferredDelta` is added.

        `most_rank`, one of `ADAPTED_RANKS`, is at least the delta's rank.

        Raises:
            ArrayMismatchError: heads of another size, more tokens, or arrays at addresses that vectors do not fit.
        """
        norms = _checked_norms(q_norm, k_norm)
        adapted = _Adapted(delta, most_rank)
        return self._normed.launch(qkv, norms=norms, eps=eps, rope=rope, cache=cache, batch=batch, adapted=adapted)

    def zero_centred_qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        norms = _checked_norms(q_norm, k_norm)
        return self._zero_centred.launch(qkv, norms=norms, eps=eps, rope=rope, cache=cache, batch=batch)

    def rope_append(self, qkv: Array, *, rope: Array, cache: PagedCache, batch: AttentionBatch) -> Array:
        return self._plain.launch(qkv, norms=(), eps=0.0, rope=rope, cache=cache, batch=batch)


class _Kernels:
    """The kernels of one of the three."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name
        self._few, self._many = _vector_kernels(device, _STEM, name)
        self._pairs = device.kernel(_STEM, f"{name}_pairs")

    @cached_property
    def _fp8(self) -> tuple[_ByHeadDim, _ByHeadDim]:
        return _vector_kernels(self._device, _STEM + FP8_SUFFIX, self._name + FP8_SUFFIX)

    @cached_property
    def _adapted(self) -> _ByRankAndHeadDim:
        return _adapted_kernels(self._device, _ADAPTED_STEM)

    @cached_property
    def _adapted_fp8(self) -> _ByRankAndHeadDim:
        return _adapted_kernels(self._device, _ADAPTED_STEM + FP8_SUFFIX)

    def launch(
        self,
        qkv: Array,
        *,
        norms: tuple[Array, ...],
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
        adapted: "_Adapted | None" = None,
    ) -> Array:
        """With `adapted` of what `qk_norm_rope_append` alone has."""
        is_fp8 = cache.format is CacheFormat.FP8
        data, cache_slots = cache.data if is_fp8 else cache.in_compute_dtype(), batch.cache_slots[cache.table]
        _check(
            qkv, norms=norms, rope=rope, data=data, positions=batch.positions, cache_slots=cache_slots, is_fp8=is_fp8
        )
        num_kv_heads, block_tokens, head_dim = data.shape[3:]
        num_tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim
        num_heads = heads - 2 * num_kv_heads
        out = cupy.empty((num_tokens, num_heads, head_dim), bfloat16)
        if is_fp8:
            place, block_stride = fp8_place(cache)
        else:
            layer_values = 2 * num_kv_heads * block_tokens * head_dim
            place, block_stride = address(data) + cache.layer * layer_values * bfloat16.itemsize, layer_values
            block_stride *= data.shape[1]
        q_norm, k_norm = map(address, norms) if norms else (None, None)
        arguments = _Arguments(
            address(qkv),
            q_norm,
            k_norm,
            *map(address, (rope, batch.positions, cache_slots, out)),
            place,
            block_stride,
            num_heads,
            num_kv_heads,
            block_tokens,
            rope.shape[1],
            eps,
        )
        if adapted is not None:
            if (
                head_dim not in ADAPTED_HEAD_DIMS
                or num_tokens >= _MANY_TOKENS
                or not fits_vectors(qkv, *norms, rope, data)
            ):
                raise ArrayMismatchError(
                    f"{num_tokens} tokens in heads of {head_dim} values add no adapters: fewer than {_MANY_TOKENS}, in "
                    f"heads of one of {ADAPTED_HEAD_DIMS}, at multiples of 16 bytes"
                )
            kernel = (self._adapted_fp8 if is_fp8 else self._adapted)[adapted.most_rank, head_dim]
            grid = -(-num_tokens // _ADAPTED_TOKENS), -(-heads * head_dim // _ADAPTED_VALUES), 1
            kernel(grid, (_ADAPTED_THREADS, 1, 1), [arguments, adapted.delta], overlap=True)
        elif head_dim in self._few and fits_vectors(qkv, *norms, rope, data):
            threads = heads * head_dim // _VALUES
            block = min(_THREADS, -(-threads // 32) * 32)
            few, many = self._fp8 if is_fp8 else (self._few, self._many)
            kernels, heads_at_once = (few, 1) if num_tokens < _MANY_TOKENS else (many, _HEADS_AT_ONCE)
            grid = (num_tokens, -(-threads // (block * heads_at_once)), 1)
            kernels[head_dim](grid, (block, 1, 1), [arguments], overlap=True)
        elif is_fp8:
            raise ArrayMismatchError(
                f"heads of {head_dim} values have no kernel that writes a cache in FP8: one of {_VECTOR_HEAD_DIMS}, "
                "with arrays at multiples of 16 bytes"
            )
        else:
            self._pairs((num_tokens, heads, 1), (32, 1, 1), [arguments, ctypes.c_int(head_dim)], overlap=True)
        return out


def _vector_kernels(device: Device, stem: str, name: str) -> tuple[_ByHeadDim, _ByHeadDim]:
    """Those for few tokens, and for many."""
    few, many = (
        {head_dim: device.kernel(stem, f"{name}_{tokens}_{head_dim}") for head_dim in _VECTOR_HEAD_DIMS}
        for tokens in ("few", "many")
    )
    return few, many


def _adapted_kernels(device: Device, stem: str) -> _ByRankAndHeadDim:
    return {
        (rank, head_dim): device.kernel(stem, f"{stem}_{rank}_{head_dim}")
        for rank in ADAPTED_RANKS
        for head_dim in ADAPTED_HEAD_DIMS
    }


def _checked_norms(q_norm: Array, k_norm: Array) -> tuple[Array, Array]:
    require(q_norm, bfloat16, ndim=1, what="q_norm")
    require(k_norm, bfloat16, ndim=1, what="k_norm")
    return q_norm, k_norm


def _check(
    qkv: Array,
    *,
    norms: tuple[Array, ...],
    rope: Array,
    data: Array,
    positions: Array,
    cache_slots: Array,
    is_fp8: bool,
) -> None:
    require(qkv, bfloat16, ndim=2, what="qkv")
    require(rope, _FLOAT32, ndim=3, what="rope")
    if not is_fp8:  # whose place says it all
        require(data, bfloat16, ndim=6, what="the cache")
    require(positions, _INT32, ndim=1, what="batch.positions")
    require(cache_slots, _INT64, ndim=1, what="batch.cache_slots")
    head_dim = data.shape[5]
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise ArrayMismatchError(f"head dimension {head_dim} is not supported: an even one, at most {_MAX_HEAD_DIM}")
    if any(len(norm) != head_dim for norm in norms) or qkv.shape[1] % head_dim or rope.shape[2] * 2 != head_dim:
        raise ArrayMismatchError(
            f"shapes do not agree on the head dimension {head_dim} of the cache: norms "
            f"{[norm.shape for norm in norms]}, qkv {qkv.shape}, rope {rope.shape}"
        )
