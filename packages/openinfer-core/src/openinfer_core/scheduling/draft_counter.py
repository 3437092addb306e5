"""`DraftCounter`: what became of drafts, as the results of steps tell, whichever scheduler planned them."""

import msgspec
import numpy as np

from openinfer_core.engine import EngineStats
from openinfer_core.scheduling.step import StepResult


class DraftCounter:
    """Counts `EngineStats.spec_decode_*`.

    Args:
        max_drafts: `SchedulerConfig.max_drafts`.
    """

    def __init__(self, max_drafts: int) -> None:
        self._num_drafts = self._num_draft_tokens = 0
        self._num_accepted_per_pos = np.zeros(max_drafts, np.int64)

    def count(self, result: StepResult) -> None:
        """Takes the result of a step; rows that failed count for nothing."""
        compared, num_positions = result.draft_counts, len(self._num_accepted_per_pos)
        if not compared.any():
            return
        rows = (compared > 0) & (result.new_counts > 0)
        num_accepted = np.bincount(result.new_counts[rows] - 1, minlength=num_positions + 1)
        self._num_drafts += int(rows.sum())
        self._num_draft_tokens += int(compared[rows].sum())
        # A draft is accepted where all before it in its row were.
        self._num_accepted_per_pos += num_accepted[:0:-1].cumsum()[::-1]

    def told_in(self, stats: EngineStats) -> EngineStats:
        """Stats with what was counted here."""
        per_pos: tuple[int, ...] = tuple(self._num_accepted_per_pos.tolist())
        return msgspec.structs.replace(
            stats,
            spec_decode_num_drafts=self._num_drafts,
            spec_decode_num_draft_tokens=self._num_draft_tokens,
            spec_decode_num_accepted_tokens=sum(per_pos),
            spec_decode_num_accepted_tokens_per_pos=per_pos,
        )
