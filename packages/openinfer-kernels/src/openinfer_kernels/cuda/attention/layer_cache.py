"""One layer of the paged cache, as the attention kernels are told of it."""

import ctypes

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.ops import PagedCache


class LayerCache(ctypes.Structure):
    """`attention::LayerCache` of `csrc/attention/attention.cuh`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int),
        ("block_shift", ctypes.c_int),
    )


def layer_cache(cache: PagedCache) -> LayerCache:
    """B is a power of two."""
    num_layers, _, num_kv_heads, block_tokens, head_dim = cache.data.shape[1:]
    layer_values = 2 * num_kv_heads * block_tokens * head_dim
    return LayerCache(
        address(cache.data) + cache.layer * layer_values * bfloat16.itemsize,
        num_layers * layer_values,
        num_kv_heads,
        block_tokens.bit_length() - 1,
    )
