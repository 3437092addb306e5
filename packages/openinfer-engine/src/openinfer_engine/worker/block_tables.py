"""`BlockTables`: the runner's copy of each slot's KV blocks, and the attention batch of a step."""

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StepPlan
from openinfer_kernels import AttentionBatch, HostArray, Ops

_NOTHING_WRITTEN: HostArray = np.zeros((0, 4), np.int32)


class BlockTables:
    """Which KV blocks each slot's sequence has, in order, table by table. Grows by what each step's plan appends.

    Entries that a plan calls void stay as they were, or were never written: no operator reads them.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_tokens: int, block_size_tokens: int, num_tables: int = 1
    ) -> None:
        max_blocks = -(-max_model_tokens // block_size_tokens)
        self._block_size = block_size_tokens
        self._blocks: HostArray = np.zeros((num_tables, max_num_seqs, max_blocks), np.int32)
        self._num_blocks: HostArray = np.zeros((num_tables, max_num_seqs), np.int64)
        """Entries of each table, those that are void among them."""

    @property
    def block_size_tokens(self) -> int:
        return self._block_size

    def of_slots(self, slots: HostArray) -> HostArray:
        """`[n, max_blocks]` int32, the first block table of each of these slots; entries beyond its blocks are any."""
        return self._blocks[0, slots]

    def advance(self, plan: StepPlan) -> HostArray:
        """Empties the tables of slots that begin anew and appends the step's new blocks.

        Returns:
            `[n, 4]` int32, what was written: table, slot, place in the table, block.

        Raises:
            ContractViolation: the plan is not for so many tables, or a row's table would not cover the positions it
                computes.
        """
        if not plan.num_rows:
            return _NOTHING_WRITTEN
        counts = plan.new_block_counts
        num_tables, num_rows = counts.shape
        if num_tables != len(self._blocks):
            raise ContractViolation(f"the plan has blocks of {num_tables} tables, and the model {len(self._blocks)}")
        for start in plan.started:
            self._num_blocks[:, start.slot] = 0
        begins = np.maximum(self._num_blocks[:, plan.slots], plan.void_block_counts)
        ends = begins + counts
        appended = np.repeat(np.arange(counts.size), counts.ravel())  # of each new block, its table and row
        tables, rows = np.divmod(appended, num_rows)
        slots = plan.slots[rows]
        columns = begins.ravel()[appended] + np.arange(len(rows)) - (np.cumsum(counts) - counts.ravel())[appended]
        if columns.max(initial=0) >= self._blocks.shape[2]:
            raise ContractViolation("the plan gives a sequence more blocks than the longest context needs")
        self._blocks[tables, slots, columns] = plan.new_blocks
        self._num_blocks[:, plan.slots] = ends
        if (ends * self._block_size < plan.starts + plan.counts).any():
            raise ContractViolation("the plan computes positions for which it has given no blocks")
        return np.stack([tables, slots, columns, plan.new_blocks], axis=1).astype(np.int32)

    def batch(self, plan: StepPlan, ops: Ops) -> AttentionBatch:
        counts = plan.counts.astype(np.int64)
        query_starts = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        context_lens = plan.starts + plan.counts
        rows = np.repeat(np.arange(plan.num_rows), counts)
        positions = np.arange(int(query_starts[-1])) - query_starts[rows] + plan.starts[rows]
        places, offsets = np.divmod(positions, self._block_size)
        block_ids = self._blocks[:, plan.slots[rows], places]
        cache_slots = block_ids.astype(np.int64) * self._block_size + offsets
        max_context = int(context_lens.max())
        tables = self._blocks[:, plan.slots, : -(-max_context // self._block_size)]
        return AttentionBatch(
            positions=ops.upload(positions.astype(np.int32)),
            query_starts=ops.upload(query_starts),
            context_lens=ops.upload(context_lens.astype(np.int32)),
            block_tables=tuple(map(ops.upload, tables)),
            cache_slots=tuple(map(ops.upload, cache_slots)),
            max_query_tokens=int(counts.max()),
            max_context_tokens=max_context,
            block_tokens=self._block_size,
        )
