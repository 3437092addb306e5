"""RMSNorm and RoPE of the last dimensions of vectors. `csrc/attention/rope_tail.cu` has the formula."""

import ctypes

from openinfer_kernels.cuda.attention.sparse_arrays import INT32, Rope, empty, rope_of
from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch

_THREADS = 256
_VECTORS_OF_BLOCK = _THREADS // 32
_MOST = 1024


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "positions", "y")),
        ("rope", Rope),
        *((name, ctypes.c_int) for name in ("num_vectors", "per_token", "size")),
        ("eps", ctypes.c_float),
    )


class RopeTail:
    """The operators on one device."""

    def __init__(self, device: Device) -> None:
        self._norm_rope = device.kernel("rope_tail", "norm_rope_tail")
        self._rope = device.kernel("rope_tail", "rope_tail")

    def norm_rope_tail(
        self, x: Array, weight: Array | None, *, eps: float, rope: Array, batch: AttentionBatch
    ) -> Array:
        """RMSNorm of each vector of `x [T, n, d]`, d at most 1,024, then RoPE."""
        if weight is not None:
            require(weight, bfloat16, ndim=1, what="the weight of the norm")
        return self._run(self._norm_rope, x, weight, eps=eps, rope=rope, batch=batch)

    def rope_tail(self, x: Array, *, rope: Array, batch: AttentionBatch) -> Array:
        return self._run(self._rope, x, None, eps=0.0, rope=rope, batch=batch)

    def _run(
        self, kernel: Kernel, x: Array, weight: Array | None, *, eps: float, rope: Array, batch: AttentionBatch
    ) -> Array:
        require(x, bfloat16, ndim=3, what="x")
        require(batch.positions, INT32, ndim=1, what="batch.positions")
        tokens, per_token, size = x.shape
        table = rope_of(rope)
        if size % 8 or size > _MOST or 2 * table.pairs > size or (weight is not None and weight.shape != (size,)):
            raise ArrayMismatchError(f"vectors of {size} values with {2 * table.pairs} rotated are not supported")
        out = empty(x.shape, bfloat16)
        vectors = tokens * per_token
        arguments = _Arguments(
            address(x),
            None if weight is None else address(weight),
            address(batch.positions),
            address(out),
            table,
            vectors,
            per_token,
            size,
            eps,
        )
        kernel((-(-vectors // _VECTORS_OF_BLOCK), 1, 1), (_THREADS, 1, 1), [arguments], overlap=True)
        return out
