"""Hidden states that drafters go on from, on the CPU."""

import numpy as np

from openinfer_kernels.cpu.gemm.low_bit_activations import quantise_rows
from openinfer_kernels.cpu.gemm.quantised import head_logits
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, HostArray, QuantisedWeight
from openinfer_kernels.ops.drafting import HiddenMemory


def hidden_before(hidden: Array, memory: HiddenMemory, slots: Array, batch: AttentionBatch) -> Array:
    rows = _rows(slots, batch)
    firsts = batch.query_starts[rows]
    _restore(memory, rows, slots[rows], batch)
    before = np.zeros_like(hidden)
    end = int(batch.query_starts[-1])
    before[1:end] = hidden[: max(end - 1, 0)]
    before[firsts] = memory.last[slots[rows]]
    before[batch.positions == 0] = 0  # no key: whatever a slot holds, nothing is made of it
    return before


def keep_hidden(hidden: Array, memory: HiddenMemory, slots: Array, batch: AttentionBatch) -> None:
    depth = memory.tail.shape[1]
    for row in _rows(slots, batch).tolist():
        slot, begin, end = int(slots[row]), int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        last = hidden[max(begin, end - depth) : end][::-1]
        memory.tail[slot, : len(last)] = last
        memory.last[slot] = hidden[end - 1]
        memory.ends[slot] = batch.positions[end - 1]
        if memory.boundary is not None:
            tokens = begin + np.flatnonzero((batch.positions[begin:end] + 1) % batch.block_tokens == 0)
            table = batch.block_tables[memory.boundary.table]
            blocks = table[row, batch.positions[tokens] // batch.block_tokens]
            _boundary_rows(memory)[blocks, : hidden.shape[1]] = hidden[tokens]


def settle_hidden(memory: HiddenMemory, slots: Array, lengths: Array, *, hidden: Array | None = None) -> Array:
    if hidden is None:
        back = memory.ends[slots] - (lengths - 2)
        hidden = memory.tail[slots, back.clip(0, memory.tail.shape[1] - 1)]
    memory.last[slots] = hidden
    return hidden


def join_columns(*parts: Array) -> Array:
    return np.concatenate(parts, axis=1)


def clear_rows(matrix: Array, positions: Array, position: int) -> None:
    matrix[positions == position] = 0


def put_ids(ids: Array, matrix: Array, column: int) -> None:
    matrix[:, column] = ids


def add_logits(target: Array, logits: Array, *, first: int, step: int) -> None:
    target += logits[first::step][: len(target)]


def draft_ids(logits: Array, drafts: Array, column: int, *, token_ids: Array | None = None) -> Array:
    ids = logits.argmax(axis=1).astype(np.int32)
    ids = ids if token_ids is None else token_ids[ids]
    drafts[:, column] = ids
    return ids


def draft_head(head: Array) -> QuantisedWeight:
    return quantise_rows(np.asarray(head, np.float32))


def draft_logits(hidden: Array, head: QuantisedWeight) -> Array:
    return head_logits(hidden, head)


def _rows(slots: Array, batch: AttentionBatch) -> HostArray:
    """Those that are no padding."""
    return np.flatnonzero((np.diff(batch.query_starts) > 0) & (slots >= 0))


def _restore(memory: HiddenMemory, rows: HostArray, slots: HostArray, batch: AttentionBatch) -> None:
    is_begun = memory.begun[slots] != 0
    rows, slots = rows[is_begun], slots[is_begun]
    memory.begun[slots] = 0
    memory.last[slots] = 0
    positions = batch.positions[batch.query_starts[rows]]
    at_end = (positions > 0) & (positions % max(batch.block_tokens, 1) == 0)
    if memory.boundary is not None and at_end.any():
        table = batch.block_tables[memory.boundary.table]
        blocks = table[rows[at_end], positions[at_end] // batch.block_tokens - 1]
        memory.last[slots[at_end]] = _boundary_rows(memory)[blocks, : memory.last.shape[1]]


def _boundary_rows(memory: HiddenMemory) -> HostArray:
    """`[blocks, numbers]`: a view of the layers of each block."""
    if memory.boundary is None:
        raise ArrayMismatchError("this memory of hidden states has no boundaries")
    data, first = memory.boundary.in_compute_dtype(), memory.boundary.layer
    blocks = data.reshape(len(data), -1)
    numbers = blocks.shape[1] // data.shape[1]
    return blocks[:, first * numbers : (first + memory.boundary_layers) * numbers]
