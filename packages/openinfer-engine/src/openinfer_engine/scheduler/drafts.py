"""Drafts of decode rows, added to a step when each of its decode rows has its position and the blocks for that.

So drafts take nothing from any sequence: a row has as many as are left before its last position, as the budget leaves,
and as there is room for in its blocks and in free ones beyond one for each running sequence; at worst none.
"""

from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.step_builder import StepBuilder
from openinfer_kv_cache import BlockPool


def add_drafts(
    builder: StepBuilder, pool: BlockPool, *, max_drafts: int, budget_tokens: int, spare_blocks: int
) -> None:
    """Adds drafts to decode rows, oldest sequence first: of the device, or with a grammar those that the host has.

    Args:
        builder: its decode rows are closed, and it has no others.
        pool: where blocks for drafts come from.
        max_drafts: of one row.
        budget_tokens: drafts of all rows at most.
        spare_blocks: of the pool, how many are left to others.
    """
    new_blocks, first_block = list[int](), 0
    for row, sequence in enumerate(builder.rows):
        end_block = first_block + builder.new_block_counts[row]
        new_blocks += builder.new_blocks[first_block:end_block]
        first_block = end_block
        end = builder.ends[row]
        num_drafts = min(max_drafts, sequence.final_tokens - end, budget_tokens)
        if sequence.is_masked:
            num_drafts = min(num_drafts, len(sequence.drafts))
        if num_drafts > 0 and end + num_drafts > sequence.capacity_tokens:
            added = _reserve(sequence, end + num_drafts, pool, spare_blocks)
            builder.new_block_counts[row] += len(added)
            new_blocks += added
            num_drafts = min(num_drafts, sequence.capacity_tokens - end)
        if num_drafts > 0:
            builder.add_drafts(row, num_drafts)
            budget_tokens -= num_drafts
    builder.new_blocks = new_blocks


def _reserve(sequence: Sequence, num_tokens: int, pool: BlockPool, spare_blocks: int) -> list[int]:
    missing_blocks = pool.blocks_for(num_tokens) - len(sequence.kv.blocks)
    if missing_blocks > pool.available_blocks - spare_blocks:
        return []
    added = list(sequence.kv.reserve(num_tokens) or ())
    sequence.capacity_tokens = sequence.kv.capacity_tokens
    sequence.sent_blocks += len(added)
    return added
