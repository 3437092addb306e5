"""Recurrent states: one slot per sequence, and rows that go on exactly where the last one ended."""

from dataclasses import replace

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import SlotStart, StateCopy, StepPlan
from openinfer_engine.worker.block_tables import BlockTables
from openinfer_engine.worker.state_slots import StateSlots, padded_slot_bytes
from openinfer_kernels import AttentionBatch
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor

PAGED = PagedGroup(
    name="attention",
    num_layers=1,
    tensors=tuple(PagedTensor(name=name, num_heads=1, head_dim=2, dtype=KvDtype.FLOAT32) for name in "kv"),
)
STATES = (
    StateSlotGroup(
        name="linear",
        num_layers=3,
        tensors=(
            StateTensor(name="conv", shape=(5, 3), dtype=KvDtype.FLOAT16),
            StateTensor(name="state", shape=(2, 4, 6), dtype=KvDtype.FLOAT32),
        ),
    ),
    StateSlotGroup(
        name="window", num_layers=1, tensors=(StateTensor(name="state", shape=(7,), dtype=KvDtype.FLOAT32),)
    ),
)
SPEC = KvSpec(model_tag="a", paged=(PAGED,), slots=STATES)
LAYOUT = KvLayout.from_spec(SPEC, block_size_tokens=4)


def make_slots() -> StateSlots:
    return StateSlots(LAYOUT, num_slots=5, slot_bytes=padded_slot_bytes(LAYOUT, in_blocks=False), ops=CpuOps())


def plan(rows: list[tuple[int, int, int]], started: tuple[int, ...] = ()) -> StepPlan:
    """Rows of (slot, start, count)."""
    slots, starts, counts = (np.asarray(column, np.int32) for column in zip(*rows, strict=True))
    request = GenerateRequest(request_id=RequestId(1), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    return StepPlan(
        step=0,
        slots=slots,
        starts=starts,
        counts=counts,
        num_host_tokens=counts,
        max_new=np.ones(len(rows), np.int32),
        token_ids=np.zeros(counts.sum(), np.int32),
        new_block_counts=np.ones(len(rows), np.int32),
        new_blocks=np.arange(len(rows), dtype=np.int32),
        started=tuple(SlotStart(slot=slot, request=request, seed=0) for slot in started),
    )


def batch_of(step: StepPlan) -> AttentionBatch:
    tables = BlockTables(max_num_seqs=3, max_model_tokens=32, block_size_tokens=4)
    tables.advance(step)
    return tables.batch(step, CpuOps())


def test_batch_has_the_states_of_its_rows_by_name_in_their_dtypes() -> None:
    step = plan([(2, 0, 3), (0, 0, 1)], started=(2, 0))
    batch = make_slots().join(batch_of(step), step)
    assert batch.state_slots is not None
    assert batch.state_slots.tolist() == [2, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    found = {name: (array.shape, array.dtype.name) for name, array in batch.states.items()}
    assert found == {
        "linear.conv": ((5, 3, 5, 3), "float16"),
        "linear.state": ((5, 3, 2, 4, 6), "float32"),
        "window.state": ((5, 1, 7), "float32"),
    }


def test_rows_go_on_where_the_last_one_of_their_slot_ended() -> None:
    slots = make_slots()
    slots.advance(plan([(1, 0, 4), (0, 0, 2)], started=(1, 0)))
    slots.advance(plan([(1, 4, 1)]))
    slots.advance(plan([(0, 2, 7), (1, 5, 1)]))
    slots.advance(plan([(1, 0, 9), (0, 9, 1)], started=(1,)))


def test_copies_are_kept_behind_a_step_and_restored_before_one() -> None:
    slots, ops = make_slots(), CpuOps()
    first = replace(plan([(1, 0, 4)], started=(1,)), state_snapshots=(StateCopy(source=1, target=3),))
    slots.advance(first)
    states = slots.join(batch_of(first), first).states
    for tensor in states.values():
        tensor[1] = 7
    slots.keep(first)
    slots.advance(plan([(1, 4, 1)]))
    for tensor in states.values():
        tensor[1] = 9
    copies = (StateCopy(source=3, target=0), StateCopy(source=3, target=2))
    slots.advance(replace(plan([(2, 4, 1), (0, 4, 2), (1, 5, 1)], started=(0, 2)), state_restores=copies))
    for tensor in states.values():
        assert [np.unique(ops.download(tensor[slot])).tolist() for slot in range(4)] == [[7], [9], [7], [7]]


def test_sequence_that_begins_elsewhere_than_the_copy_ends_is_refused() -> None:
    slots = make_slots()
    first = replace(plan([(1, 0, 4)], started=(1,)), state_snapshots=(StateCopy(source=1, target=3),))
    slots.advance(first)
    slots.keep(first)
    begins = replace(plan([(0, 8, 1)], started=(0,)), state_restores=(StateCopy(source=3, target=0),))
    with pytest.raises(ContractViolation, match=r"begins at position 8, .* have consumed 4 tokens"):
        slots.advance(begins)


@pytest.mark.parametrize("start", [0, 3, 5])
def test_row_that_repeats_or_skips_a_token_is_refused(start: int) -> None:
    slots = make_slots()
    slots.advance(plan([(1, 0, 4)], started=(1,)))
    with pytest.raises(ContractViolation, match=f"row 1 begins at position {start}, .* have consumed 4 tokens"):
        slots.advance(plan([(0, 0, 1), (1, start, 1)], started=(0,)))


def test_sequence_that_begins_on_a_cached_prefix_is_refused() -> None:
    with pytest.raises(ContractViolation, match=r"begins at position 16, .* have consumed 0 tokens"):
        make_slots().advance(plan([(1, 16, 4)], started=(1,)))


def test_slot_is_one_piece_of_memory_that_may_be_padded_to_whole_blocks() -> None:
    assert LAYOUT.slot_bytes < padded_slot_bytes(LAYOUT, in_blocks=False) < LAYOUT.slot_bytes + 16
    slot_bytes = padded_slot_bytes(LAYOUT, in_blocks=True)
    assert LAYOUT.slot_bytes < slot_bytes < LAYOUT.slot_bytes + LAYOUT.block_bytes
    assert slot_bytes % LAYOUT.block_bytes == 0
    slots = StateSlots(LAYOUT, num_slots=5, slot_bytes=slot_bytes, ops=CpuOps())
    for number, tensor in enumerate(slots.tensors.values(), 1):
        tensor[2] = number
    memory = np.asarray(slots.memory)
    assert memory.shape == (5, slot_bytes)
    assert memory[2].any()
    assert not memory[[0, 1, 3, 4]].any()
    memory[4] = memory[2]
    for tensor in slots.tensors.values():
        assert (tensor[4] == tensor[2]).all()


def test_copy_that_came_from_a_tier_is_restored_behind_what_it_has_consumed() -> None:
    slots = make_slots()
    copy = StateCopy(source=3, target=0, loaded_tokens=8)
    slots.advance(replace(plan([(0, 8, 1)], started=(0,)), state_restores=(copy,)))
    again = StateCopy(source=3, target=1)
    slots.advance(replace(plan([(1, 8, 1)], started=(1,)), state_restores=(again,)))
