"""Scores of compressed entries, and the best of them. `csrc/attention/indexer.cu`."""

import ctypes

from openinfer_kernels.cuda.attention.sparse_arrays import FLOAT32, INT32, Entries, empty, entries_of
from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.cuda.linear_attention.state_rows import StateRows, state_rows
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch

_SIZE = 128
_THREADS = 128
_SELECT_THREADS = 512
_PIECE_ENTRIES = 256
_HEADS = (16, 32, 64)


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "weights", "scores")),
        ("rows", StateRows),
        ("entries", Entries),
        *((name, ctypes.c_int) for name in ("heads", "num_entries")),
        ("scale", ctypes.c_float),
    )


class Indexer:
    """The operators on one device."""

    def __init__(self, device: Device) -> None:
        self._scores = {heads: device.kernel("indexer", f"index_scores_{heads}") for heads in _HEADS}
        self._select = device.kernel("indexer", "select_entries")

    def scores(
        self,
        queries: Array,
        weights: Array,
        *,
        cache: Array,
        layer: int,
        ratio: int,
        scale: float,
        batch: AttentionBatch,
    ) -> Array:
        """`[T, E]` float32 of up to 64 heads of 128."""
        require(queries, bfloat16, ndim=3, what="the index queries")
        require(weights, FLOAT32, ndim=2, what="the weights of the index heads")
        tokens, heads, size = queries.shape
        if size != _SIZE or weights.shape != (tokens, heads) or heads > _HEADS[-1]:
            raise ArrayMismatchError(
                f"index queries {queries.shape} with weights {weights.shape} are not supported: up to 64 heads of 128"
            )
        num_entries = max(1, batch.max_context_tokens // ratio)
        out = empty((tokens, num_entries), FLOAT32)
        arguments = _Arguments(
            address(queries),
            address(weights),
            address(out),
            state_rows(batch),
            entries_of(cache, layer, ratio=ratio, batch=batch),
            heads,
            num_entries,
            scale,
        )
        kernel = self._scores[next(most for most in _HEADS if heads <= most)]
        kernel((-(-num_entries // _PIECE_ENTRIES), tokens, 1), (_THREADS, 1, 1), [arguments])
        return out

    def select(self, scores: Array, k: int) -> Array:
        require(scores, FLOAT32, ndim=2, what="the scores of entries")
        tokens, num_entries = scores.shape
        out = empty((tokens, k), INT32)
        sizes = [ctypes.c_int(num_entries), ctypes.c_int(k)]
        self._select((tokens, 1, 1), (_SELECT_THREADS, 1, 1), [scores, out, *sizes])
        return out
