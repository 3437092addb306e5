"""Drafts of decode rows, added to a step when each of its decode rows has its position and the blocks for that.

So drafts take nothing from any sequence: a row has as many as are left before its last position, as the budget leaves,
and as there is room for in its blocks and in free ones beyond one per table for each running sequence; at worst none.
"""

from openinfer_engine.scheduler.drafts.pace import DraftPace
from openinfer_engine.scheduler.step_builder import StepBuilder
from openinfer_kv_cache import BlockPool


def add_drafts(
    builder: StepBuilder,
    pool: BlockPool,
    *,
    max_drafts: int,
    budget_tokens: int,
    num_tables: int,
    spare_blocks: int,
    pace: DraftPace | None = None,
) -> None:
    """Adds drafts to decode rows, oldest sequence first: of the device, or with a grammar those that the host has.

    Args:
        builder: its decode rows are closed, and it has no others.
        pool: where blocks for drafts come from.
        max_drafts: of one row.
        budget_tokens: drafts of all rows at most.
        num_tables: block tables of a sequence, each of which needs the room.
        spare_blocks: of the pool, how many are left to others.
        pace: what rows are worth; None: as many as there may be.
    """
    if pace is not None:
        budget_tokens = pace.begin_step(builder.rows, max_drafts=max_drafts, budget_tokens=budget_tokens)
        if not budget_tokens:
            return
    for row, sequence in enumerate(builder.rows):
        end = builder.ends[row]
        num_drafts = min(max_drafts, sequence.final_tokens - end, budget_tokens)
        if sequence.is_masked:
            num_drafts = min(num_drafts, len(sequence.drafts))
        if pace is not None and num_drafts > 0:
            num_drafts = pace.most_drafts(row, sequence, num_drafts)
        if num_drafts > 0 and end + num_drafts > sequence.capacity_tokens:
            missing_blocks = num_tables * (pool.blocks_for(end + num_drafts) - len(sequence.kv.blocks))
            if missing_blocks <= pool.available_blocks - spare_blocks:
                sequence.kv.reserve(end + num_drafts)
                sequence.capacity_tokens = sequence.kv.capacity_tokens
                builder.grown_rows.append(row)
            num_drafts = min(num_drafts, sequence.capacity_tokens - end)
        if num_drafts > 0:
            builder.add_drafts(row, num_drafts)
            budget_tokens -= num_drafts
