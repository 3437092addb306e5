"""One layer of the paged cache, as the attention kernels are told of it."""

import ctypes
from typing import Any

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import CacheFormat, PagedCache

FP8_SUFFIX = "_fp8"
"""Of the sources and kernels that read or write a cache in FP8."""
_SCALE_BYTES = 4
_CHUNK_TOKENS = 16


class LayerCache(ctypes.Structure):
    """`attention::LayerCache` of `csrc/attention/attention.cuh`; in FP8 `Fp8LayerCache`, whose stride is of bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int),
        ("block_shift", ctypes.c_int),
    )


def layer_cache(cache: PagedCache) -> LayerCache:
    """B is a power of two."""
    num_layers, _, num_kv_heads, block_tokens, head_dim = cache.data.shape[1:]
    if cache.format is CacheFormat.FP8:
        place, block_stride = fp8_place(cache)
        return LayerCache(place, block_stride, num_kv_heads, block_tokens.bit_length() - 1)
    layer_values = 2 * num_kv_heads * block_tokens * head_dim
    return LayerCache(
        address(cache.data) + cache.layer * layer_values * bfloat16.itemsize,
        num_layers * layer_values,
        num_kv_heads,
        block_tokens.bit_length() - 1,
    )


def fp8_place(cache: PagedCache) -> tuple[int, int]:
    """Where the layer of a cache in FP8 begins in block 0, and how many bytes lie from one block to the next.

    Raises:
        ArrayMismatchError: codes and scales of a head are not one range of bytes, or copies could not take it whole.
    """
    arrays: tuple[Any, Any] = cache.in_fp8()
    codes, scales = arrays
    if not isinstance(codes, cupy.ndarray) or not isinstance(scales, cupy.ndarray):
        raise ArrayMismatchError(f"a cache in FP8 of {type(codes).__qualname__}: its codes and scales are on the GPU")
    num_layers, kinds, num_kv_heads, block_tokens, head_dim = codes.shape[1:]
    piece = block_tokens * (head_dim + _SCALE_BYTES)
    outer = (piece * num_kv_heads * kinds, piece * num_kv_heads, piece)
    is_one_range = (
        _has_strides(codes, (*outer, head_dim, 1))
        and _has_strides(scales, (*outer, _SCALE_BYTES))
        and codes.strides[0] == scales.strides[0] >= num_layers * outer[0]
        and address(scales) == address(codes) + block_tokens * head_dim
    )
    if not is_one_range or block_tokens % _CHUNK_TOKENS or address(codes) % 16 or codes.strides[0] % 16:
        raise ArrayMismatchError(
            f"a cache in FP8 of strides {codes.strides} and {scales.strides}: the scales of a head of a block must "
            "follow its codes, blocks of 16 tokens or a multiple, at multiples of 16 bytes"
        )
    return address(codes) + cache.layer * codes.strides[1], codes.strides[0]


def _has_strides(array: Any, strides: tuple[int, ...]) -> bool:
    """Whether all axes but the first lie so many bytes apart; one of a single entry may have any stride."""
    return all(
        size == 1 or found == wanted
        for size, found, wanted in zip(array.shape[1:], array.strides[1:], strides, strict=True)
    )
