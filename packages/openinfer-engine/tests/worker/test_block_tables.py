"""Block tables against a naive list per slot."""

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import SlotStart, StepPlan
from openinfer_engine.worker.block_tables import BlockTables
from openinfer_kernels import AttentionBatch
from openinfer_kernels.cpu import CpuOps

BLOCK = 4


def start(slot: int) -> SlotStart:
    request = GenerateRequest(request_id=RequestId(slot), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    return SlotStart(slot=slot, request=request, seed=0)


def plan(rows: list[tuple[int, int, int, list[int]]], started: tuple[int, ...] = ()) -> StepPlan:
    """Rows of (slot, start, count, new blocks)."""
    counts = [count for _, _, count, _ in rows]
    return StepPlan(
        step=0,
        slots=np.asarray([slot for slot, *_ in rows], np.int32),
        starts=np.asarray([first for _, first, *_ in rows], np.int32),
        counts=np.asarray(counts, np.int32),
        num_host_tokens=np.asarray(counts, np.int32),
        max_new=np.ones(len(rows), np.int32),
        token_ids=np.zeros(sum(counts), np.int32),
        new_block_counts=np.asarray([len(blocks) for *_, blocks in rows], np.int32),
        new_blocks=np.asarray([block for *_, blocks in rows for block in blocks], np.int32),
        started=tuple(start(slot) for slot in started),
    )


def make_tables() -> BlockTables:
    return BlockTables(max_num_seqs=4, max_model_tokens=32, block_size_tokens=BLOCK)


def test_batch_over_random_traffic_equals_lists_per_slot() -> None:
    rng = np.random.default_rng(7)
    tables, ops = make_tables(), CpuOps()
    lists: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for _ in range(60):
        slots = rng.permutation(4)[: rng.integers(1, 5)].tolist()
        started = tuple(slot for slot in slots if slot not in lists or rng.random() < 0.2 or lengths[slot] > 24)
        for slot in started:
            lists[slot], lengths[slot] = [], 0
        rows = []
        for slot in slots:
            count = int(rng.integers(1, 8))
            needed = -(-(lengths[slot] + count) // BLOCK) - len(lists[slot])
            new = rng.integers(1, 1000, needed).tolist()
            lists[slot] += new
            rows.append((slot, lengths[slot], count, new))
            lengths[slot] += count
        step = plan(rows, started)
        written = [
            [slot, len(lists[slot]) - len(new) + i, block] for slot, *_, new in rows for i, block in enumerate(new)
        ]
        assert tables.advance(step).tolist() == written
        batch = tables.batch(step, ops)
        _check(batch, rows, lists)


def _check(batch: AttentionBatch, rows: list[tuple[int, int, int, list[int]]], lists: dict[int, list[int]]) -> None:
    positions: list[int] = []
    cache_slots: list[int] = []
    for slot, first, count, _ in rows:
        for position in range(first, first + count):
            positions.append(position)
            cache_slots.append(lists[slot][position // BLOCK] * BLOCK + position % BLOCK)
    assert batch.positions.tolist() == positions
    assert batch.cache_slots.tolist() == cache_slots
    ends = [first + count for _, first, count, _ in rows]
    assert batch.context_lens.tolist() == ends
    assert batch.max_context_tokens == max(ends)
    assert batch.max_query_tokens == max(count for _, _, count, _ in rows)
    for row, (slot, _, _, _) in enumerate(rows):
        used = -(-ends[row] // BLOCK)
        assert batch.block_tables[row, :used].tolist() == lists[slot][:used]


def test_advance_with_uncovered_positions_is_a_violation() -> None:
    with pytest.raises(ContractViolation, match="no blocks"):
        make_tables().advance(plan([(0, 0, 5, [3])], started=(0,)))


def test_advance_beyond_the_longest_context_is_a_violation() -> None:
    with pytest.raises(ContractViolation, match="more blocks"):
        make_tables().advance(plan([(0, 0, 1, list(range(9)))], started=(0,)))
