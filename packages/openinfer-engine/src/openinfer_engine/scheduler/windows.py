"""`Windows`: block tables whose layers see only the last tokens, and what of them running sequences give back.

    computed tokens   0 .................................................. C
    table, window w   │  void: given back  │  C - w + 1 and later: seen  │  room
                                                                               ▲ capacity_tokens

A table without a window has blocks for every id that its sequence knows, from admission on. A table with one gets room
chunk by chunk, and when a step is applied it gives back what no later position sees. So of a long context it holds a
window and the chunks in flight. With nothing in flight a window and one more position touch at most the blocks that
`KvCache.can_ever_fit` counts, so that the oldest sequence can always go on.
"""

from collections.abc import Sequence as ListLike

import numpy as np

from openinfer_core.scheduling import Int32Column, SchedulerConfig
from openinfer_engine.scheduler.sequence import Sequence, SequenceState
from openinfer_kv_cache.windows import first_visible_block

_RUNNING = SequenceState.RUNNING


class Windows:
    """Of a config in which a table has one.

    Args:
        config: the scheduler's.
        seals_blocks: whether computed blocks are sealed; otherwise they are given back as they are.
    """

    def __init__(self, config: SchedulerConfig, *, seals_blocks: bool) -> None:
        windows = [window for window in config.table_windows if window is not None]
        self.num_windowed = len(windows)
        self._widest_tokens = max(windows)
        self._table_windows = config.table_windows
        self._block_tokens = config.block_size_tokens
        self._frees_unsealed = not seals_blocks
        self._void_counts = np.zeros((len(config.table_windows), config.max_num_seqs), np.int32)

    def lasting_tokens(self, begin_tokens: int, known_tokens: int) -> int:
        """Room that a sequence beginning at `begin_tokens` needs in tables with a window for as long as it runs."""
        return min(known_tokens, max(begin_tokens, self._widest_tokens) + 2 * self._block_tokens)

    def start(self, sequence: Sequence) -> None:
        """A sequence has taken a slot, and its tables may begin with void entries."""
        self._void_counts[:, sequence.slot] = [table.num_void for table in sequence.kv.tables]

    def free(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Gives back what no position from the true computed length on sees: rows in flight begin there or later."""
        # One that was preempted gives back everything with its last row in flight.
        if sequence.state is _RUNNING and sequence.kv.free_behind_windows(
            num_computed_tokens, unsealed=self._frees_unsealed
        ):
            self.start(sequence)

    def void_counts(self, slots: ListLike[int]) -> Int32Column:
        """`[tables, rows]` void entries of each slot's block tables."""
        return self._void_counts.take(slots, axis=1)

    def is_freeing(self, sequence: Sequence) -> bool:
        """Whether a running sequence gives blocks back when its rows in flight are applied, drafts not counted."""
        return any(num_void < first for num_void, first in self.bounds(sequence))

    def bounds(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Of each block table: its void entries, and the first that is seen after the rows in flight."""
        end_tokens = sequence.computed_tokens - sequence.drafts_in_flight
        return [
            (table.num_void, first_visible_block(end_tokens, window, self._block_tokens))
            for table, window in zip(sequence.kv.tables, self._table_windows, strict=True)
        ]
