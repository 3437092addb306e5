"""`BlockUsers`: which live sequence slots have a block in a table of theirs, and which one writes it."""

import numpy as np
from numpy.typing import NDArray

from openinfer_core.scheduling import SchedulerConfig, StepPlan
from openinfer_engine.guard.errors import BadPlan

_NO_OWNER = -1  # no live slot writes the block
_NO_WINDOW = 2**31 - 1


class BlockUsers:
    """Block tables as the plans build them. An *owner* is a table of a slot, numbered table * slots + slot.

    A block is written by an owner if it was appended at or after the position at which the slot's next row begins.
    Blocks before it are a shared prefix: several slots may have them, once their writer has filled them.

    An owner's entries behind its window may be another's at any time, also before a plan has said that they are void:
    a scheduler gives them back when a step is applied, and the slot may have no row in the next plan.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        windows = [_NO_WINDOW if window is None else window for window in config.table_windows]
        num_owners = len(windows) * config.max_num_seqs
        self._size_tokens = config.block_size_tokens
        self._num_blocks = config.num_blocks
        self._num_slots = config.max_num_seqs
        self._num_tables = len(windows)
        self.has_windows = any(window is not None for window in config.table_windows)
        self._windows = np.repeat(np.array(windows, np.int32), config.max_num_seqs)  # of each owner
        self._slots = np.tile(np.arange(config.max_num_seqs), len(windows))
        self._first_owners = np.arange(0, num_owners, config.max_num_seqs)[:, np.newaxis]
        self._lengths = np.zeros(num_owners, np.int32)  # entries, void ones among them
        self._num_void = np.zeros(num_owners, np.int32)  # as plans say
        self._num_left = np.zeros(num_owners, np.int32)  # first entries that are not counted as the owner's any more
        self._blocks = np.zeros((num_owners, -(-config.max_model_tokens // config.block_size_tokens)), np.int32)
        self._num_users = np.zeros(config.num_blocks, np.int32)
        self._writers = np.full(config.num_blocks, _NO_OWNER, np.int32)
        self._full_at = np.zeros(config.num_blocks, np.int32)  # the writer's position after the block's last one
        self._marks = np.zeros(config.num_blocks, np.int32)

    def owners_of(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """The owners of rows, one table's after the other's."""
        return slots if self._num_tables == 1 else (slots + self._first_owners).reshape(-1)

    # --- what owners give back --------------------------------------------------------------------------

    def void(self, plan: StepPlan, owners: NDArray[np.intp], first_positions: NDArray[np.int32]) -> None:
        """Takes the void blocks that a plan tells of.

        Args:
            plan: all of its rows are in live slots.
            owners: of its rows.
            first_positions: of each slot, the first that this plan or a later one may compute.
        """
        told, before = plan.void_block_counts.reshape(-1), self._num_void.take(owners)
        changed = np.flatnonzero(told != before)
        if not len(changed):
            return
        owners, told, before = owners[changed], told[changed], before[changed]
        most = self._count_unread(owners, first_positions)
        is_wrong = (told < before) | (told > most)
        if is_wrong.any():
            index = int(np.flatnonzero(is_wrong)[0])
            table, slot = divmod(int(owners[index]), self._num_slots)
            what = f"the first {int(told[index])} blocks of slot {slot} are void in table {table}"
            if told[index] < before[index]:
                raise BadPlan(f"{what}, and {int(before[index])} were before")
            raise BadPlan(f"{what}; its row reads all after the first {int(most[index])}")
        self._num_void[owners] = told

    def _count_unread(self, owners: NDArray[np.intp], first_positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """First entries of owners that no position from their slots' `first_positions` on reads."""
        first_read = first_positions[self._slots[owners]] - self._windows[owners] + np.int32(1)
        return np.maximum(first_read, 0) // np.int32(self._size_tokens)

    def _leave_windows(self, first_positions: NDArray[np.int32]) -> None:
        owners = np.flatnonzero(self._num_left < self._lengths)
        self._leave(owners, self._count_unread(owners, first_positions))

    def _leave(self, owners: NDArray[np.intp], ends: NDArray[np.int32]) -> None:
        """Owners have their first `ends` entries no more."""
        first = self._num_left[owners]
        counts = np.maximum(np.minimum(ends, self._lengths[owners]) - first, 0)
        self._num_left[owners] = np.maximum(first, ends)
        owners = np.repeat(owners, counts)
        blocks = self._blocks[owners, _ranges(first, counts)]
        np.subtract.at(self._num_users, blocks, 1)
        self._writers[blocks[self._writers[blocks] == owners]] = _NO_OWNER

    def release(self, slot: int) -> None:
        owners = np.arange(slot, len(self._lengths), self._num_slots)
        self._leave(owners, self._lengths[owners])
        for counts in (self._lengths, self._num_void, self._num_left):
            counts[owners] = 0

    # --- what they get ----------------------------------------------------------------------------------

    def append(
        self,
        plan: StepPlan,
        owners: NDArray[np.intp],
        ends: NDArray[np.int32],
        first_positions: NDArray[np.int32],
    ) -> None:
        """Takes a plan's new blocks.

        Args:
            plan: its void blocks were taken.
            owners: of its rows.
            ends: where the last rows of all slots end, this plan's among them.
            first_positions: as for `void`.
        """
        counts, blocks = plan.new_block_counts.reshape(-1), plan.new_blocks
        rows = np.flatnonzero(counts)
        added = counts[rows]
        # As unsigned numbers, a negative count makes the sum too large.
        if np.add.reduce(added.view(np.uint32), dtype=np.uint64) != len(blocks):
            raise BadPlan(f"new_block_counts sums up to {int(added.sum())}; new_blocks has {len(blocks)}")
        if np.maximum.reduce(blocks.view(np.uint32)) >= self._num_blocks:  # negative ones are, too
            outside = blocks[(blocks < 0) | (blocks >= self._num_blocks)]
            raise BadPlan(f"block {int(outside[0])} is appended; blocks are 0 .. {self._num_blocks - 1}")
        owners = owners[rows]
        lengths = self._lengths[owners]
        if self.has_windows:
            lengths = self._pass_void(owners, lengths)
        starts = plan.starts[rows if self._num_tables == 1 else rows % plan.num_rows]
        grown, new_lengths = owners, lengths + added
        indices = lengths
        if len(rows) != len(blocks):  # not one block each, as in decoding
            indices = _ranges(lengths, added)
            owners, starts = np.repeat(owners, added), np.repeat(starts, added)
        full_at = (indices + np.int32(1)) * np.int32(self._size_tokens)
        is_shared = full_at <= starts
        if is_shared.any():
            is_written = ~is_shared
            self._write(blocks[is_written], owners[is_written], full_at[is_written], first_positions)
            self._share(blocks[is_shared], owners[is_shared], ends, first_positions)
        else:
            self._write(blocks, owners, full_at, first_positions)
        try:
            self._blocks[owners, indices] = blocks
        except IndexError:
            owner, length = int(grown[new_lengths.argmax()]), int(new_lengths.max())
            most = (
                f"{length} blocks in table {owner // self._num_slots}; the longest context has {self._blocks.shape[1]}"
            )
            raise BadPlan(f"slot {owner % self._num_slots} has {most}") from None
        self._lengths[grown] = new_lengths

    def _pass_void(self, owners: NDArray[np.intp], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where new entries go: after the void ones, of which some may never have been there."""
        num_void = self._num_void[owners]
        were_never_there = num_void > lengths
        if not were_never_there.any():
            return lengths
        self._leave(owners[were_never_there], num_void[were_never_there])
        return np.maximum(lengths, num_void)

    def _write(
        self,
        blocks: NDArray[np.int32],
        owners: NDArray[np.intp],
        full_at: NDArray[np.int32],
        first_positions: NDArray[np.int32],
    ) -> None:
        """These are appended to be written: no live slot may have them, nor any other row or table of the plan."""
        order = np.arange(len(blocks), dtype=np.int32)
        self._marks[blocks] = order
        is_taken = self._num_users[blocks] > 0
        if self.has_windows and is_taken.any():
            self._leave_windows(first_positions)
            is_taken = self._num_users[blocks] > 0
        is_taken |= self._marks[blocks] != order
        if is_taken.any():
            block, owner = int(blocks[is_taken][0]), int(owners[is_taken][0])
            slot = owner % self._num_slots
            raise BadPlan(f"block {block} is appended to slot {slot}, which writes it, and a live slot has it, too")
        self._num_users[blocks] = 1
        self._writers[blocks] = owners
        self._full_at[blocks] = full_at

    def _share(
        self,
        blocks: NDArray[np.int32],
        owners: NDArray[np.intp],
        ends: NDArray[np.int32],
        first_positions: NDArray[np.int32],
    ) -> None:
        """These are appended with what they hold: a writer that lives has filled them, in the same table."""
        writers = self._writers[blocks]
        is_written = writers != _NO_OWNER
        if self.has_windows and is_written.any():
            # Behind its writer's window a block may have become another's, which a KV tier has filled.
            self._leave_windows(first_positions)
            writers = self._writers[blocks]
            is_written = writers != _NO_OWNER
        unfilled = is_written & (ends[writers % self._num_slots] < self._full_at[blocks])
        if unfilled.any():
            block, owner, writer = (int(values[unfilled][0]) for values in (blocks, owners, writers))
            slot, writer = owner % self._num_slots, writer % self._num_slots
            raise BadPlan(f"block {block} is a prefix of slot {slot}; slot {writer} still fills it")
        is_swapped = is_written & (writers // self._num_slots != owners // self._num_slots)
        if is_swapped.any():
            block, *pair = (int(values[is_swapped][0]) for values in (blocks, owners, writers))
            (table, slot), (other_table, other) = (divmod(owner, self._num_slots) for owner in pair)
            raise BadPlan(
                f"block {block} is a prefix of slot {slot} in table {table}; slot {other} has it in table {other_table}"
            )
        np.add.at(self._num_users, blocks, 1)

    def check_room(self, slots: NDArray[np.intp], owners: NDArray[np.intp], ends: NDArray[np.int32]) -> None:
        lengths = self._lengths.take(owners)
        if self._num_tables > 1:
            lengths = np.minimum.reduce(lengths.reshape(-1, len(slots)))
        is_short = lengths * np.int32(self._size_tokens) < ends
        if is_short.any():
            row = int(np.flatnonzero(is_short)[0])
            blocks = int(lengths[row])
            raise BadPlan(
                f"a row of slot {int(slots[row])} ends at position {int(ends[row])}; its {blocks} blocks have room for "
                f"{blocks * self._size_tokens}"
            )


def _ranges(first: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """`first[i] .. first[i] + counts[i] - 1`, one after the other."""
    numbers = np.repeat(first - np.cumsum(counts, dtype=np.int32) + counts, counts)
    numbers += np.arange(len(numbers), dtype=np.int32)
    return numbers
