"""What happens between latent attention's projections and attention, in one kernel: norm, RoPE, write to the cache."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, fits_vectors, require, require_rows
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, PagedCache

_THREADS, _VECTOR = 256, 8
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "latent", "norm", "rope", "positions", "slots", "out", "cache")),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("q_stride", "latent_stride", "num_heads", "head_dim")),
        *((name, ctypes.c_int) for name in ("latent_dim", "rope_dim", "block_tokens", "rope_positions")),
        ("eps", ctypes.c_float),
    )


class LatentAppend:
    """The fused operator on one device."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.kernel("latent_append", "latent_norm_rope_append")

    def latent_norm_rope_append(
        self,
        q: Array,
        latent: Array,
        *,
        head_dim: int,
        norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """The latent of a token whose cache slot is negative, padding of a captured step, is written nowhere."""
        latent_dim, rope_dim = norm.shape[0], 2 * rope.shape[2]
        data, cache_slots = cache.in_compute_dtype(), batch.cache_slots[cache.table]
        _check(
            q,
            latent,
            head_dim=head_dim,
            norm=norm,
            rope=rope,
            data=data,
            positions=batch.positions,
            cache_slots=cache_slots,
        )
        num_tokens, num_heads = len(q), q.shape[1] // head_dim
        out = cupy.empty((num_tokens, num_heads, head_dim), bfloat16)
        num_layers, block_tokens, entry = data.shape[1], data.shape[4], data.shape[5]
        layer_values = block_tokens * entry
        arguments = _Arguments(
            *map(address, (q, latent, norm, rope, batch.positions, cache_slots, out)),
            address(data) + cache.layer * layer_values * bfloat16.itemsize,
            num_layers * layer_values,
            *(array.strides[0] // bfloat16.itemsize for array in (q, latent)),
            num_heads,
            head_dim,
            latent_dim,
            rope_dim,
            block_tokens,
            rope.shape[1],
            eps,
        )
        blocks = 1 + -(-num_heads * head_dim // (_VECTOR * _THREADS))
        self._kernel((num_tokens, blocks, 1), (_THREADS, 1, 1), [arguments], overlap=True)
        return out


def _check(
    q: Array,
    latent: Array,
    *,
    head_dim: int,
    norm: Array,
    rope: Array,
    data: Array,
    positions: Array,
    cache_slots: Array,
) -> None:
    require_rows(q, bfloat16, what="q")
    require_rows(latent, bfloat16, what="latent")
    require(norm, bfloat16, ndim=1, what="norm")
    require(rope, _FLOAT32, ndim=3, what="rope")
    require(data, bfloat16, ndim=6, what="the cache")
    require(positions, _INT32, ndim=1, what="batch.positions")
    require(cache_slots, _INT64, ndim=1, what="batch.cache_slots")
    latent_dim, rope_dim = norm.shape[0], 2 * rope.shape[2]
    row_sizes = (array.strides[0] // bfloat16.itemsize for array in (q, latent))
    sizes = (latent_dim, rope_dim, head_dim, *row_sizes)
    agree = latent.shape[1] == data.shape[5] == latent_dim + rope_dim and q.shape[1] % head_dim == 0
    agree = agree and data.shape[2:4] == (1, 1) and head_dim > rope_dim
    vectors = not any(size % _VECTOR for size in sizes) and fits_vectors(q, latent, norm, rope, data)
    if not agree or not vectors or latent_dim + rope_dim > _VECTOR * _THREADS:
        raise ArrayMismatchError(
            f"q {q.shape}, latent {latent.shape}, norm {norm.shape}, rope {rope.shape} and cache {data.shape} "
            f"with heads of {head_dim} must agree, in multiples of {_VECTOR}, at most {_VECTOR * _THREADS} in an entry"
        )
