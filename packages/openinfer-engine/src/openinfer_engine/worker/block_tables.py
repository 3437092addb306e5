"""`BlockTables`: the runner's copy of each slot's KV blocks, and the attention batch of a step."""

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StepPlan
from openinfer_kernels import AttentionBatch, HostArray, Ops


class BlockTables:
    """Which KV blocks each slot's sequence has, in order. Grows by what each step's plan appends."""

    def __init__(self, *, max_num_seqs: int, max_model_tokens: int, block_size_tokens: int) -> None:
        max_blocks = -(-max_model_tokens // block_size_tokens)
        self._block_size = block_size_tokens
        self._blocks: HostArray = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks: HostArray = np.zeros(max_num_seqs, np.int64)

    def advance(self, plan: StepPlan) -> HostArray:
        """Empties the tables of slots that begin anew and appends the step's new blocks.

        Returns:
            `[n, 3]` int32, what was written: slot, place in its table, block.

        Raises:
            ContractViolation: a row's table would not cover the positions it computes.
        """
        for start in plan.started:
            self._num_blocks[start.slot] = 0
        rows = np.repeat(np.arange(plan.num_rows), plan.new_block_counts)
        firsts = np.cumsum(plan.new_block_counts) - plan.new_block_counts
        slots = plan.slots[rows]
        columns = self._num_blocks[slots] + np.arange(len(rows)) - firsts[rows]
        if columns.max(initial=0) >= self._blocks.shape[1]:
            raise ContractViolation("the plan gives a sequence more blocks than the longest context needs")
        self._blocks[slots, columns] = plan.new_blocks
        self._num_blocks[plan.slots] += plan.new_block_counts
        covered = self._num_blocks[plan.slots] * self._block_size
        if (covered < plan.starts + plan.counts).any():
            raise ContractViolation("the plan computes positions for which it has given no blocks")
        return np.stack([slots, columns, plan.new_blocks], axis=1).astype(np.int32)

    def batch(self, plan: StepPlan, ops: Ops) -> AttentionBatch:
        counts = plan.counts.astype(np.int64)
        query_starts = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        context_lens = plan.starts + plan.counts
        rows = np.repeat(np.arange(plan.num_rows), counts)
        positions = np.arange(int(query_starts[-1])) - query_starts[rows] + plan.starts[rows]
        block_ids = self._blocks[plan.slots[rows], positions // self._block_size]
        cache_slots = block_ids.astype(np.int64) * self._block_size + positions % self._block_size
        max_context = int(context_lens.max())
        tables = self._blocks[plan.slots, : -(-max_context // self._block_size)]
        return AttentionBatch(
            positions=ops.upload(positions.astype(np.int32)),
            query_starts=ops.upload(query_starts),
            context_lens=ops.upload(context_lens.astype(np.int32)),
            block_tables=ops.upload(tables),
            cache_slots=ops.upload(cache_slots),
            max_query_tokens=int(counts.max()),
            max_context_tokens=max_context,
            block_tokens=self._block_size,
        )
