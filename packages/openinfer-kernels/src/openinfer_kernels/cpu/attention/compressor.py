"""Compressed entries: means of windows of tokens, with weights per channel; both compressors of DeepSeek-V4.

A window may begin and end in different steps. Its tokens are always added in the same order, so that an entry does not
depend on how its sequence was cut into steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.rope_tail import rotate_tail
from openinfer_kernels.cpu.linear_attention.state_rows import batch_slots
from openinfer_kernels.cpu.norm.rms_norm import rms_norm
from openinfer_kernels.ops import AttentionBatch


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step."""

    index: int
    """Of the step."""
    slot: int
    """Of its states."""
    tokens: slice
    start: int
    """Position of its first token."""
    end: int
    """Position after its last token."""


@dataclass(frozen=True, slots=True)
class EntryWriter:
    """Norms, rotates and stores entries."""

    norm: NDArray[Any]
    eps: float
    rope: NDArray[Any]
    cache: NDArray[Any]
    layer: int
    ratio: int
    batch: AttentionBatch

    def write(self, row: Row, windows: NDArray[Any], entries: NDArray[Any]) -> None:
        """`entries [n, d]` of `windows [n]` of a row."""
        normed = rms_norm(entries.astype(np.float32, copy=False), self.norm, eps=self.eps)
        rotated = rotate_tail(normed, windows * self.ratio, self.rope)
        blocks, rows = entry_places(self.batch, row.index, windows, self.ratio)
        self.cache[blocks, self.layer, 0, rows] = rotated


def rows_of(batch: AttentionBatch) -> Iterator[Row]:
    starts = batch.query_starts.tolist()
    for index, (slot, context) in enumerate(zip(batch_slots(batch).tolist(), batch.context_lens.tolist(), strict=True)):
        tokens = slice(starts[index], starts[index + 1])
        yield Row(index, slot, tokens, context - (starts[index + 1] - starts[index]), context)


def entry_places(
    batch: AttentionBatch, row: int, windows: NDArray[Any], ratio: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Blocks, and rows in them, of some entries of a row of the step."""
    ends = windows * ratio + ratio - 1
    (block_tables,) = batch.block_tables
    return block_tables[row, ends // batch.block_tokens], ends % batch.block_tokens // ratio


@np.errstate(over="ignore", invalid="ignore")
def compress_windows(
    projected: NDArray[Any],
    *,
    ape: NDArray[Any],
    norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    state: NDArray[Any],
    cache: NDArray[Any],
    layer: int,
    batch: AttentionBatch,
) -> None:
    ratio, width = len(ape), len(ape[0])
    writer = EntryWriter(norm, eps, rope, cache, layer, ratio, batch)
    for row in rows_of(batch):
        first, last = row.start // ratio, (row.end - 1) // ratio
        open_windows = np.zeros((last - first + 1, 3, width), np.float32)
        # The running maximum of a window without tokens.
        open_windows[:, 0] = -np.inf
        # A window that an earlier step began goes on with its sums.
        if row.start % ratio:
            open_windows[0] = state[row.slot, layer]
        _absorb(open_windows, projected[row.tokens], ape, start=row.start - first * ratio)
        complete = row.end // ratio - first
        if complete:
            entries = open_windows[:complete, 2] / open_windows[:complete, 1]
            writer.write(row, first + np.arange(complete), entries)
        state[row.slot, layer] = open_windows[-1]


def _absorb(windows: NDArray[Any], projected: NDArray[Any], ape: NDArray[Any], *, start: int) -> None:
    """Adds tokens to `windows [n, 3, d]`, the first of them at place `start` of the first window.

    A running softmax, as in Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3.
    """
    ratio, width = len(ape), len(ape[0])
    places = start + np.arange(len(projected))
    values, weights = projected[:, :width], projected[:, width:]
    # Place by place: tokens of one place are of different windows, so that no assignment writes a window twice,
    # and a window's tokens are added in their order.
    for place in np.unique(places % ratio).tolist():
        tokens = np.flatnonzero(places % ratio == place)
        into = places[tokens] // ratio
        largest, total, weighted = windows[into].swapaxes(0, 1)
        logits = weights[tokens] + ape[place]
        highest = np.maximum(largest, logits)
        kept, new = np.exp(largest - highest), np.exp(logits - highest)
        windows[into] = np.stack((highest, total * kept + new, weighted * kept + new * values[tokens]), axis=1)


@np.errstate(over="ignore", invalid="ignore")
def compress_overlapping_windows(
    projected: NDArray[Any],
    *,
    ape: NDArray[Any],
    norm: NDArray[Any],
    eps: float,
    rope: NDArray[Any],
    state: NDArray[Any],
    cache: NDArray[Any],
    layer: int,
    batch: AttentionBatch,
) -> None:
    ratio, width = len(ape), len(ape[0])
    ring = 2 * ratio
    writer = EntryWriter(norm, eps, rope, cache, layer, ratio, batch)
    for row in rows_of(batch):
        positions = np.arange(row.start, row.end)
        tokens = projected[row.tokens].astype(np.float32)
        tokens[:, width:] += ape[positions % ratio]
        before = np.arange(max(0, row.start - ring + 1), row.start)
        known = np.concatenate((state[row.slot, layer, before % ring], tokens))
        windows = np.arange(row.start // ratio, row.end // ratio)
        if len(windows):
            writer.write(row, windows, _overlapping_means(known, windows, ratio, first=row.start - len(before)))
        state[row.slot, layer, positions[-ring:] % ring] = tokens[-ring:]


def _overlapping_means(known: NDArray[Any], windows: NDArray[Any], ratio: int, *, first: int) -> NDArray[Any]:
    """Entries `[n, d]` of windows whose tokens are in `known [tokens, 4 d]`, from position `first` on."""
    width = known.shape[1] // 2
    half = width // 2
    own = windows[:, None] * ratio - first + np.arange(ratio)  # [n, m]
    has_previous = windows > 0
    previous = np.where(has_previous[:, None], own - ratio, 0)
    values = np.concatenate((known[previous, :half], known[own, half:width]), axis=1)  # [n, 2 m, d]
    logits = np.concatenate((known[previous, width : width + half], known[own, width + half :]), axis=1)
    # The first window has none before it.
    logits[~has_previous, :ratio] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (weights * values).sum(axis=1) / weights.sum(axis=1)
