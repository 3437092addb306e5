"""Block tables against a naive list per slot."""

from dataclasses import replace

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
            [0, slot, len(lists[slot]) - len(new) + i, block] for slot, *_, new in rows for i, block in enumerate(new)
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
    assert batch.cache_slots[0].tolist() == cache_slots
    ends = [first + count for _, first, count, _ in rows]
    assert batch.context_lens.tolist() == ends
    assert batch.max_context_tokens == max(ends)
    assert batch.max_query_tokens == max(count for _, _, count, _ in rows)
    for row, (slot, _, _, _) in enumerate(rows):
        used = -(-ends[row] // BLOCK)
        assert batch.block_tables[0][row, :used].tolist() == lists[slot][:used]


def test_new_blocks_of_a_table_come_after_what_is_void_there() -> None:
    tables, ops = BlockTables(max_num_seqs=2, max_model_tokens=32, block_size_tokens=BLOCK, num_tables=2), CpuOps()

    def step(
        counts: list[list[int]], blocks: list[int], void: list[list[int]], first: int, *, begins: bool
    ) -> StepPlan:
        given = plan([(1, first, 4, []), (0, 0, 4, [])] if begins else [(1, first, 4, [])], (1, 0) if begins else ())
        columns = {"new_block_counts": counts, "new_blocks": blocks, "void_block_counts": void}
        return replace(given, **{name: np.asarray(each, np.int32) for name, each in columns.items()})

    # A table may begin with void entries that were never there, as after a prefix hit.
    written = tables.advance(step([[3, 1], [1, 1]], [5, 6, 7, 8, 9, 10], [[0, 0], [2, 0]], 8, begins=True))
    assert written.tolist() == [
        [0, 1, 0, 5], [0, 1, 1, 6], [0, 1, 2, 7], [0, 0, 0, 8], [1, 1, 2, 9], [1, 0, 0, 10],
    ]  # fmt: skip
    # One that had entries goes on after them, or after the void ones, whichever is later.
    written = tables.advance(step([[1], [1]], [11, 12], [[0], [1]], 12, begins=False))
    assert written.tolist() == [[0, 1, 3, 11], [1, 1, 3, 12]]
    last = step([[1], [0]], [13], [[0], [5]], 16, begins=False)
    assert tables.advance(last).tolist() == [[0, 1, 4, 13]]
    batch = tables.batch(last, ops)
    assert batch.block_tables[0].tolist() == [[5, 6, 7, 11, 13]]
    assert batch.block_tables[1][0, 2:4].tolist() == [9, 12]
    assert batch.cache_slots[0].tolist() == [52, 53, 54, 55]


def test_a_plan_for_another_number_of_tables_is_a_violation() -> None:
    tables = BlockTables(max_num_seqs=4, max_model_tokens=32, block_size_tokens=BLOCK, num_tables=2)
    with pytest.raises(ContractViolation, match="1 tables, and the model 2"):
        tables.advance(plan([(0, 0, 4, [3])], started=(0,)))
    assert not len(tables.advance(plan([])))


def test_a_table_that_does_not_cover_a_position_is_a_violation_though_another_does() -> None:
    tables = BlockTables(max_num_seqs=4, max_model_tokens=32, block_size_tokens=BLOCK, num_tables=2)
    counts = np.array([[2], [1]], np.int32)
    with pytest.raises(ContractViolation, match="no blocks"):
        tables.advance(replace(plan([(0, 0, 5, [1, 2, 3])], started=(0,)), new_block_counts=counts))


def test_advance_with_uncovered_positions_is_a_violation() -> None:
    with pytest.raises(ContractViolation, match="no blocks"):
        make_tables().advance(plan([(0, 0, 5, [3])], started=(0,)))


def test_advance_beyond_the_longest_context_is_a_violation() -> None:
    with pytest.raises(ContractViolation, match="more blocks"):
        make_tables().advance(plan([(0, 0, 1, list(range(9)))], started=(0,)))
