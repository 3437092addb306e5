"""Attention to windows and compressed entries. `csrc/attention/window_attention.cu`."""

import ctypes

from openinfer_kernels.cuda.attention.sparse_arrays import FLOAT32, INT32, Entries, Rope, empty, entries_of, rope_of
from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.cuda.linear_attention.state_rows import StateRows, layer_of_states, require_states, state_rows
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, CompressedEntries

_SIZE = 512
_THREADS = 256
_TILE_KEYS = 16
_ROW_BYTES = 2 * _SIZE
_HEADS = (16, 32, 64)
"""Of a block, at most; 64 need more shared memory than some GPUs have, which take them in two groups."""
_LEAST_SPLIT_KEYS = 64
_MOST_SPLITS = 16


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "kv", "sinks", "window", "selected", "out", "partial_values", "partial_sums")
        ),
        ("rows", StateRows),
        ("entries", Entries),
        ("rope", Rope),
        ("slot_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("room", "num_seen", "first_key")),
        *((name, ctypes.c_int) for name in ("num_selected", "heads", "split_keys")),
        ("scale", ctypes.c_float),
    )


class WindowAttention:
    """The operator on one device; `divides`: whether the splits of a token's keys may depend on the whole step."""

    def __init__(self, device: Device, *, divides: bool = True) -> None:
        self._most_splits = _MOST_SPLITS if divides else 1
        self._multiprocessors = device.num_multiprocessors
        self._attend = {
            heads: device.kernel("window_attention", f"window_attention_{heads}", shared_bytes=_shared_bytes(heads))
            for heads in _HEADS
            if _shared_bytes(heads) <= device.max_shared_bytes
        }
        self._merge = device.kernel("window_attention", "merge_window_attention")
        self._keep = device.kernel("window_attention", "keep_window")

    def window_attention(
        self,
        q: Array,
        kv: Array,
        *,
        sinks: Array,
        window: Array,
        layer: int,
        entries: CompressedEntries | None,
        rope: Array,
        scale: float,
        batch: AttentionBatch,
        num_seen: int | None = None,
        first_key: int = 0,
    ) -> Array:
        """`[T, H * 512]` for keys of 512."""
        require(q, bfloat16, ndim=3, what="the queries")
        require(sinks, FLOAT32, ndim=1, what="the sinks")
        begin, slot_stride = _window_of(kv, window, layer)
        tokens, heads, size = q.shape
        room = window.shape[2]
        seen: int = room if num_seen is None else num_seen
        if kv.shape != (tokens, size) or sinks.shape != (heads,) or not 0 < seen <= room or first_key < 0:
            raise ArrayMismatchError(
                f"queries {q.shape}, kv {kv.shape} and window {window.shape} are not supported: keys have 512 values, "
                f"and {seen} of them are seen, from {first_key} on"
            )
        selected = None if entries is None else entries.selected
        if selected is not None:
            require(selected, INT32, ndim=2, what="the selected entries")
        splits, split_keys = self._splits(tokens, seen, entries, batch)
        out = empty((tokens, heads * size), bfloat16)
        several = splits > 1
        values = empty((tokens, splits, heads, size), FLOAT32) if several else None
        sums = empty((tokens, splits, heads, 2), FLOAT32) if several else None
        arguments = _Arguments(
            address(q),
            address(kv),
            address(sinks),
            begin,
            None if selected is None else address(selected),
            address(out),
            None if values is None else address(values),
            None if sums is None else address(sums),
            state_rows(batch),
            Entries()
            if entries is None
            else entries_of(entries.cache, entries.layer, ratio=entries.ratio, batch=batch),
            rope_of(rope),
            slot_stride,
            room,
            seen,
            first_key,
            0 if selected is None else selected.shape[1],
            heads,
            split_keys,
            scale,
        )
        most = next((each for each in self._attend if heads <= each), max(self._attend))
        self._attend[most]((tokens, splits, -(-heads // most)), (_THREADS, 1, 1), [arguments])
        if several:
            self._merge((tokens, heads, 1), (_THREADS, 1, 1), [arguments, ctypes.c_int(splits)])
        # The window is written last: the attention reads what it held before this step.
        self._keep((len(batch.context_lens), room, 1), (64, 1, 1), [arguments])
        return out

    def append_window(self, kv: Array, *, window: Array, layer: int, batch: AttentionBatch) -> None:
        begin, slot_stride = _window_of(kv, window, layer)
        room = window.shape[2]
        arguments = _Arguments(kv=address(kv), window=begin, rows=state_rows(batch), slot_stride=slot_stride, room=room)
        self._keep((len(batch.context_lens), room, 1), (64, 1, 1), [arguments])

    def _splits(
        self, tokens: int, window: int, entries: CompressedEntries | None, batch: AttentionBatch
    ) -> tuple[int, int]:
        """The number of split-KV partitions of each token and the keys of one, chosen so that the GPU is busy."""
        most = window
        if entries is not None:
            seen = batch.max_context_tokens // entries.ratio
            most += seen if entries.selected is None else min(seen, entries.selected.shape[1])
        wanted = min(self._multiprocessors // max(tokens, 1), self._most_splits, -(-most // _LEAST_SPLIT_KEYS))
        splits = max(1, wanted)
        keys = -(-most // splits)
        return splits, -(-keys // _TILE_KEYS) * _TILE_KEYS


def _window_of(kv: Array, window: Array, layer: int) -> tuple[int, int]:
    """Where a layer of slot 0 begins, and values from slot to slot."""
    require(kv, bfloat16, ndim=2, what="kv")
    require_states(window, bfloat16, ndim=4, what="the window")
    if kv.shape[1] != _SIZE or window.shape[3] != _SIZE:
        raise ArrayMismatchError(f"kv {kv.shape} and window {window.shape} are not supported: keys have 512 values")
    return layer_of_states(window, layer)


def _shared_bytes(heads: int) -> int:
    """Queries, two tiles of keys, scores and factors."""
    return (heads + 2 * _TILE_KEYS) * _ROW_BYTES + heads * _TILE_KEYS * 4 + heads * 4
