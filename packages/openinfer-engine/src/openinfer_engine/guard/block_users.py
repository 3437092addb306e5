"""`BlockUsers`: which live sequence slots have a block in their table, and which one writes it."""

import numpy as np
from numpy.typing import NDArray

from openinfer_core.scheduling import SchedulerConfig, StepPlan
from openinfer_engine.guard.errors import BadPlan

_NO_SLOT = -1  # no live slot writes the block


class BlockUsers:
    """Block tables as the plans build them.

    A block is written by a slot if it was appended at or after the position at which the slot's next row begins. Blocks
    before it are a shared prefix: several slots may have them, once their writer has filled them.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._size_tokens = config.block_size_tokens
        self._num_blocks = config.num_blocks
        self._lengths = np.zeros(config.max_num_seqs, np.int32)  # blocks in each slot's table
        self._num_users = np.zeros(config.num_blocks, np.int32)
        self._writers = np.full(config.num_blocks, _NO_SLOT, np.int32)
        self._full_at = np.zeros(config.num_blocks, np.int32)  # the writer's position after the block's last one
        self._tables: list[list[int]] = [[] for _ in range(config.max_num_seqs)]
        self._marks = np.zeros(config.num_blocks, np.int32)

    def append(self, plan: StepPlan, ends: NDArray[np.int32]) -> None:
        """Takes a plan's new blocks; `ends` are where the last rows of all slots end, this plan's among them."""
        counts, blocks = plan.new_block_counts, plan.new_blocks
        rows = np.flatnonzero(counts)
        added = counts[rows]
        # As unsigned numbers, a negative count makes the sum too large.
        if np.add.reduce(added.view(np.uint32), dtype=np.uint64) != len(blocks):
            raise BadPlan(f"new_block_counts sums up to {int(added.sum())}; new_blocks has {len(blocks)}")
        if np.maximum.reduce(blocks.view(np.uint32)) >= self._num_blocks:  # negative ones are, too
            outside = blocks[(blocks < 0) | (blocks >= self._num_blocks)]
            raise BadPlan(f"block {int(outside[0])} is appended; blocks are 0 .. {self._num_blocks - 1}")
        owners, starts = plan.slots[rows], plan.starts[rows]
        lengths = self._lengths[owners]
        self._lengths[owners] = lengths + added
        self._note_tables(owners.tolist(), added.tolist(), blocks.tolist())
        indices = lengths + np.int32(1)  # how many blocks its slot's table has with each new one
        if len(rows) != len(blocks):  # not one block each, as in decoding
            indices = np.repeat(indices - np.cumsum(added, dtype=np.int32) + added, added)
            indices += np.arange(len(blocks), dtype=np.int32)
            owners, starts = np.repeat(owners, added), np.repeat(starts, added)
        full_at = indices * np.int32(self._size_tokens)
        is_shared = full_at <= starts
        if is_shared.any():
            is_written = ~is_shared
            shared = blocks[is_shared]
            self._write(blocks[is_written], owners[is_written], full_at[is_written])
            self._check_shared(shared, owners[is_shared], ends)
            np.add.at(self._num_users, shared, 1)
        else:
            self._write(blocks, owners, full_at)

    def _note_tables(self, slots: list[int], added: list[int], blocks: list[int]) -> None:
        first = 0
        for slot, count in zip(slots, added, strict=True):
            self._tables[slot] += blocks[first : first + count]
            first += count

    def _write(self, blocks: NDArray[np.int32], owners: NDArray[np.int32], full_at: NDArray[np.int32]) -> None:
        """These are appended to be written: no live slot may have them, nor any other row of the plan."""
        order = np.arange(len(blocks), dtype=np.int32)
        self._marks[blocks] = order
        is_taken = (self._num_users[blocks] > 0) | (self._marks[blocks] != order)
        if is_taken.any():
            block, slot = int(blocks[is_taken][0]), int(owners[is_taken][0])
            raise BadPlan(f"block {block} is appended to slot {slot}, which writes it, and a live slot has it, too")
        self._num_users[blocks] = 1
        self._writers[blocks] = owners
        self._full_at[blocks] = full_at

    def _check_shared(self, blocks: NDArray[np.int32], owners: NDArray[np.int32], ends: NDArray[np.int32]) -> None:
        writers = self._writers[blocks]
        unfilled = (writers != _NO_SLOT) & (ends[writers] < self._full_at[blocks])
        if unfilled.any():
            block, slot = int(blocks[unfilled][0]), int(owners[unfilled][0])
            raise BadPlan(f"block {block} is a prefix of slot {slot}; slot {int(writers[unfilled][0])} still fills it")

    def check_room(self, slots: NDArray[np.intp], ends: NDArray[np.int32]) -> None:
        room = self._lengths.take(slots) * np.int32(self._size_tokens)
        is_short = room < ends
        if is_short.any():
            row = int(np.flatnonzero(is_short)[0])
            blocks = int(self._lengths[slots[row]])
            raise BadPlan(
                f"a row of slot {int(slots[row])} ends at position {int(ends[row])}; its {blocks} blocks have room for "
                f"{blocks * self._size_tokens}"
            )

    def release(self, slot: int) -> None:
        if self._tables[slot]:
            blocks = np.array(self._tables[slot], np.int32)
            np.subtract.at(self._num_users, blocks, 1)
            self._writers[blocks[self._writers[blocks] == slot]] = _NO_SLOT
            self._tables[slot] = []
        self._lengths[slot] = 0
