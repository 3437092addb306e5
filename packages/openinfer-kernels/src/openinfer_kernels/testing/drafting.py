"""Operators of drafters on a device against those of the CPU, over steps of random rows."""

from dataclasses import replace
from typing import Any

import numpy as np

from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.ops import AttentionBatch, HostArray, Ops, PagedCache
from openinfer_kernels.ops.drafting import HiddenMemory
from openinfer_kernels.weights.bfloat16 import rounded

_SLOTS, _BLOCK, _BLOCKS, _LAYERS, _DEPTH = 9, 4, 60, 5, 3
_COLUMNS = 16
_STATE_ARRAYS = ("last", "tail", "ends", "begun")


def check_drafting(ops: Ops, *, hidden_size: int = 96, steps: int = 30, seed: int = 0) -> int:
    """Raises `AssertionError` at the first difference; returns how many tokens were compared.

    Args:
        ops: of the device.
        hidden_size: a multiple of 8, at most 128.
        steps: so many.
        seed: of what is drawn.
    """
    rng = np.random.default_rng(seed)
    own, right = _memory(ops, hidden_size), _memory(CpuOps(), hidden_size)
    compared = 0
    for _ in range(steps):
        slots, batch = _step(rng)
        hidden = rounded(rng.normal(size=(len(batch.positions), hidden_size)).astype(np.float32))
        begun = rng.integers(0, _SLOTS, 2)
        for slot in begun.tolist():
            for memory, operators in ((own, ops), (right, CpuOps())):
                memory.begun[slot : slot + 1] = operators.upload(np.ones(1, np.int32))
        uploaded = _uploaded(ops, batch)
        on_device = ops.upload_weight(hidden), own, ops.upload(slots), uploaded
        expected = CpuOps.hidden_before(hidden, right, slots, batch)
        _same(ops, ops.hidden_before(*on_device), expected)
        CpuOps.keep_hidden(hidden, right, slots, batch)
        ops.keep_hidden(*on_device)
        compared += len(hidden)
        _same_memory(ops, own, right)
        rows = np.flatnonzero(slots >= 0)
        chosen, ends = slots[rows], right.ends[slots[rows]]
        lengths = (ends + 2 - rng.integers(0, _DEPTH, len(rows))).astype(np.int32)
        given = rounded(rng.normal(size=(len(rows), hidden_size)).astype(np.float32)) if rng.random() < 0.3 else None
        settled = CpuOps.settle_hidden(right, chosen, lengths, hidden=given)
        found = ops.settle_hidden(
            own, ops.upload(chosen), ops.upload(lengths), hidden=None if given is None else ops.upload_weight(given)
        )
        _same(ops, found, settled)
        _same_memory(ops, own, right)
        _check_columns(ops, rng, hidden)
        _check_cleared(ops, hidden, batch, int(rng.integers(0, 24)))
        _check_ids(ops, rng)
    return compared


def _memory(ops: Ops, hidden_size: int) -> HiddenMemory:
    blocks: Any = ops.zeros((_BLOCKS, _LAYERS, 2, 1, _BLOCK, 8))
    return HiddenMemory(
        last=ops.zeros((_SLOTS, 2, hidden_size))[:, 0],  # among the recurrent states of a slot
        tail=ops.zeros((_SLOTS, _DEPTH, hidden_size)),
        ends=ops.zeros((_SLOTS,), np.int32),
        begun=ops.zeros((_SLOTS,), np.int32),
        boundary=PagedCache(data=blocks, layer=2),
        boundary_layers=-(-hidden_size // (2 * _BLOCK * 8)),
    )


def _step(rng: np.random.Generator) -> tuple[HostArray, AttentionBatch]:
    """Slots and batch of some rows, the last ones of which are padding, as are the last tokens."""
    rows, padding = int(rng.integers(1, 6)), int(rng.integers(0, 3))
    slots = np.full(rows + padding, -1, np.int32)
    slots[:rows] = rng.permutation(_SLOTS)[:rows]
    counts = np.zeros(rows + padding, np.int32)
    counts[:rows] = rng.integers(1, 12, rows)
    starts = np.where(rng.random(rows) < 0.5, rng.integers(0, 6, rows) * _BLOCK, rng.integers(0, 30, rows))
    ends = np.cumsum(counts)
    total = int(ends[-1]) + int(rng.integers(0, 4))
    positions = np.zeros(total, np.int32)
    for row, start in enumerate(starts.tolist()):
        positions[ends[row] - counts[row] : ends[row]] = start + np.arange(counts[row])
    tables = np.stack([rng.permutation(_BLOCKS)[:_COLUMNS] for _ in slots])
    order = rng.permutation(_BLOCKS)[: rows * 11].reshape(rows, 11)  # no two rows write to one block
    tables[:rows, :11] = order
    return slots, AttentionBatch(
        positions=positions,
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=np.zeros(len(slots), np.int32),
        block_tables=(tables.astype(np.int32),),
        cache_slots=(np.zeros(total, np.int64),),
        max_query_tokens=int(counts.max()),
        max_context_tokens=48,
        block_tokens=_BLOCK,
    )


def _uploaded(ops: Ops, batch: AttentionBatch) -> AttentionBatch:
    names = ("positions", "query_starts", "context_lens")
    arrays: dict[str, Any] = {name: ops.upload(getattr(batch, name)) for name in names}
    arrays |= {name: tuple(map(ops.upload, getattr(batch, name))) for name in ("block_tables", "cache_slots")}
    return replace(batch, **arrays)


def _check_columns(ops: Ops, rng: np.random.Generator, hidden: HostArray) -> None:
    other = rounded(rng.normal(size=(len(hidden), 24)).astype(np.float32))
    joined = ops.join_columns(ops.upload_weight(hidden), ops.upload(other))
    _same(ops, joined, CpuOps.join_columns(hidden, other))
    _same(ops, ops.join_columns(ops.upload(other)), other)


def _check_cleared(ops: Ops, hidden: HostArray, batch: AttentionBatch, position: int) -> None:
    own, right = ops.upload_weight(hidden), hidden.copy()
    ops.clear_rows(own, ops.upload(batch.positions), position)
    CpuOps.clear_rows(right, batch.positions, position)
    _same(ops, own, right)


def _check_ids(ops: Ops, rng: np.random.Generator) -> None:
    rows, columns = int(rng.integers(1, 9)), int(rng.integers(3, 3000))
    logits = rng.normal(size=(rows, columns)).astype(np.float32)
    mapped = None if rng.random() < 0.5 else rng.permutation(4000)[:columns].astype(np.int32)
    drafts = np.full((rows, 3), -1, np.int32)
    own, column = ops.upload(drafts), int(rng.integers(3))
    expected = CpuOps.draft_ids(logits, drafts, column, token_ids=mapped)
    given = None if mapped is None else ops.upload(mapped)
    found = ops.draft_ids(ops.upload(logits), own, column, token_ids=given)
    np.testing.assert_array_equal(ops.download(found), expected)
    np.testing.assert_array_equal(ops.download(own), drafts)
    _check_sums(ops, rng)
    ops.put_ids(found, own, (column + 1) % 3)
    CpuOps.put_ids(expected, drafts, (column + 1) % 3)
    np.testing.assert_array_equal(ops.download(own), drafts)
    logits[0, 0] = np.nan
    is_id = ops.download(ops.draft_ids(ops.upload(logits), own, 0)) >= 0
    assert is_id.all(), "a row that is not finite has no id"


def _check_sums(ops: Ops, rng: np.random.Generator) -> None:
    rows, step, columns = (int(rng.integers(1, end)) for end in (9, 6, 9000))
    target = rng.normal(size=(rows, columns)).astype(np.float32)
    logits = rng.normal(size=(rows * step + int(rng.integers(3)), columns + 5)).astype(np.float32)
    own, given, first = ops.upload(target), ops.upload(logits)[:, :columns], int(rng.integers(step))
    expected = target + logits[first : rows * step : step, :columns]
    CpuOps.add_logits(target, logits[:, :columns], first=first, step=step)
    ops.add_logits(own, given, first=first, step=step)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(ops.download(own), expected)


def _same(ops: Ops, found: Any, expected: HostArray) -> None:
    np.testing.assert_array_equal(np.asarray(ops.download(found), np.float32), expected)


def _same_memory(ops: Ops, own: HiddenMemory, right: HiddenMemory) -> None:
    for name in _STATE_ARRAYS:
        np.testing.assert_array_equal(
            np.asarray(ops.download(getattr(own, name)), np.float32),
            np.asarray(getattr(right, name), np.float32),
            err_msg=name,
        )
    assert own.boundary is not None
    assert right.boundary is not None
    _same(ops, own.boundary.data, right.boundary.data)
