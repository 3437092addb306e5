"""Attention over a window of tokens and compressed entries, with sinks; keys are values, and all heads share them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.compressor import Row, entry_places, rows_of
from openinfer_kernels.cpu.attention.rope_tail import rotate_tail
from openinfer_kernels.ops import AttentionBatch
from openinfer_kernels.ops.sparse_attention import CompressedEntries

_TOKENS_AT_ONCE = 64


@np.errstate(over="ignore", invalid="ignore")
def window_attention(
    q: NDArray[Any],
    kv: NDArray[Any],
    *,
    sinks: NDArray[Any],
    window: NDArray[Any],
    layer: int,
    entries: CompressedEntries | None,
    rope: NDArray[Any],
    scale: float,
    batch: AttentionBatch,
    num_seen: int | None = None,
    first_key: int = 0,
    tokens_at_once: int = _TOKENS_AT_ONCE,
) -> NDArray[Any]:
    out = np.empty_like(q)
    room = window.shape[2]
    width = room if num_seen is None else num_seen
    for row in rows_of(batch):
        before = np.arange(max(0, row.start - width + 1), row.start)
        near = np.concatenate((window[row.slot, layer, before % room], kv[row.tokens]))
        first_near = row.start - len(before)
        far = _entries(row, entries, batch)
        for first in range(row.tokens.start, row.tokens.stop, tokens_at_once):
            tokens = slice(first, min(first + tokens_at_once, row.tokens.stop))
            positions = row.start + np.arange(tokens.start, tokens.stop) - row.tokens.start
            begin = max(first_near, int(positions[0]) - width + 1, first_key)
            keys = near[begin - first_near : int(positions[-1]) + 1 - first_near]
            distance = positions[:, None] - np.arange(begin, int(positions[-1]) + 1)
            seen = (distance >= 0) & (distance < width)
            if entries is not None:
                visible = _visible(positions, entries, tokens, len(far))
                last = int(np.flatnonzero(visible.any(axis=0))[-1]) + 1 if visible.any() else 0
                keys, seen = np.concatenate((far[:last], keys)), np.concatenate((visible[:, :last], seen), axis=1)
            out[tokens] = _attend(q[tokens] * np.float32(scale), keys, seen, sinks)
        # After the row is computed: its tokens overwrite the oldest ones, which its first tokens still see.
        _keep(row, kv, window, layer)
    return rotate_tail(out, batch.positions, rope, direction=-1.0).reshape(len(q), -1)


def append_window(kv: NDArray[Any], *, window: NDArray[Any], layer: int, batch: AttentionBatch) -> None:
    for row in rows_of(batch):
        if row.end > 0:  # else padding
            _keep(row, kv, window, layer)


def _keep(row: Row, kv: NDArray[Any], window: NDArray[Any], layer: int) -> None:
    room = window.shape[2]
    kept = np.arange(max(row.start, row.end - room), row.end)
    window[row.slot, layer, kept % room] = kv[row.tokens][len(kv[row.tokens]) - len(kept) :]


def _entries(row: Row, entries: CompressedEntries | None, batch: AttentionBatch) -> NDArray[Any]:
    """`[entries, D]`, all that a row's last token can see."""
    if entries is None:
        return np.empty((0, 0), np.float32)
    blocks, rows = entry_places(batch, row.index, np.arange(row.end // entries.ratio), entries.ratio)
    return entries.cache[blocks, entries.layer, 0, rows]


def _visible(positions: NDArray[Any], entries: CompressedEntries, tokens: slice, num_entries: int) -> NDArray[np.bool_]:
    """`[n, entries]`: which of a row's entries each of its tokens sees."""
    visible = np.arange(num_entries) < ((positions + 1) // entries.ratio)[:, None]
    if entries.selected is None:
        return visible
    chosen = np.zeros((len(positions), num_entries + 1), np.bool_)
    np.put_along_axis(chosen, entries.selected[tokens].astype(np.int64), values=True, axis=1)  # -1 is the last column
    return visible & chosen[:, :num_entries]


def _attend(queries: NDArray[Any], keys: NDArray[Any], seen: NDArray[Any], sinks: NDArray[Any]) -> NDArray[Any]:
    """Attention of `queries [n, H, D]` to those of `keys [keys, D]` that `seen [n, keys]` says: `[n, H, D]`."""
    scores = queries @ keys.T  # [n, H, keys]
    np.copyto(scores, -np.inf, where=~seen[:, None])
    # A sink has a score and no value: it takes part in the sum of weights alone.
    top = np.maximum(scores.max(axis=2, keepdims=True, initial=-np.inf), sinks[:, None])
    np.exp(scores - top, out=scores)
    total = scores.sum(axis=2, keepdims=True) + np.exp(sinks[:, None] - top)
    return (scores @ keys) / total
