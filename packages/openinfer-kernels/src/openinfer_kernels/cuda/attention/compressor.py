"""Compressed entries of windows of tokens. `csrc/attention/compressor.cu`."""

import ctypes

from openinfer_kernels.cuda.attention.sparse_arrays import FLOAT32, Entries, Rope, entries_of, rope_of
from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.cuda.linear_attention.state_rows import StateRows, layer_of_states, require_states, state_rows
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch

_MOST_CHANNELS = 512


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("projected", "ape", "norm", "state", "cache")),
        ("rows", StateRows),
        ("entries", Entries),
        ("rope", Rope),
        ("slot_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class Compressor:
    """One of the two operators on one device, chosen by `overlapping`."""

    def __init__(self, device: Device, *, overlapping: bool) -> None:
        name = "overlapping_windows" if overlapping else "windows"
        self._overlapping = overlapping
        self._entries = device.kernel("compressor", f"compress_{name}")
        self._steps = device.kernel("compressor", f"compress_{name}_steps")
        self._keep = device.kernel("compressor", f"keep_{name}")

    def compress(
        self,
        projected: Array,
        *,
        ape: Array,
        norm: Array,
        eps: float,
        rope: Array,
        state: Array,
        cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """Appends entries of at most 512 channels, a multiple of 32."""
        require(projected, FLOAT32, ndim=2, what="the projected tokens")
        require(ape, FLOAT32, ndim=2, what="ape")
        require(norm, bfloat16, ndim=1, what="the weight of the norm")
        require_states(state, FLOAT32, ndim=4, what="the state of open windows")
        ratio, width = ape.shape
        size = width // 2 if self._overlapping else width
        shape = (2 * ratio, 2 * width) if self._overlapping else (3, size)
        if projected.shape[1] != 2 * width or norm.shape != (size,) or state.shape[2:] != shape:
            raise ArrayMismatchError(f"tokens {projected.shape}, ape {ape.shape} and state {state.shape} do not agree")
        if size % 32 or size > _MOST_CHANNELS:
            raise ArrayMismatchError(f"entries of {size} values are not supported: a multiple of 32 up to 512")
        begin, slot_stride = layer_of_states(state, layer)
        entries, rows = entries_of(cache, layer, ratio=ratio, batch=batch), state_rows(batch)
        arguments = _Arguments(
            address(projected),
            address(ape),
            address(norm),
            begin,
            entries.cache,
            rows,
            entries,
            rope_of(rope),
            slot_stride,
            eps,
        )
        tokens, block = len(projected), (size, 1, 1)
        if batch.max_query_tokens == 1:
            self._steps((tokens, 1, 1), block, [arguments])
            return
        self._entries((tokens, 1, 1), block, [arguments])
        self._keep((rows.num_rows, 2 * ratio if self._overlapping else 1, 1), block, [arguments])
