"""What became of drafts is counted from the results of steps alone."""

from typing import Any

import numpy as np

from openinfer_core.engine import EngineStats
from openinfer_core.scheduling import StepResult
from openinfer_core.scheduling.draft_counter import DraftCounter


def result(new_counts: list[int], draft_counts: list[int]) -> StepResult:
    def column(values: list[int]) -> Any:
        return np.array(values, np.int32)

    return StepResult(
        new_counts=column(new_counts), token_ids=column([0] * sum(new_counts)), draft_counts=column(draft_counts)
    )


def counted(counter: DraftCounter) -> tuple[int, int, int, tuple[int, ...]]:
    stats = counter.told_in(EngineStats(steps=7, spec_decode_num_drafts=99))
    assert stats.steps == 7
    return (
        stats.spec_decode_num_drafts,
        stats.spec_decode_num_draft_tokens,
        stats.spec_decode_num_accepted_tokens,
        stats.spec_decode_num_accepted_tokens_per_pos,
    )


def test_rows_with_drafts_are_counted_by_what_they_yield() -> None:
    counter = DraftCounter(3)
    counter.count(result([1, 1, 0], [0, 0, 0]))
    assert counted(counter) == (0, 0, 0, (0, 0, 0))
    counter.count(result([4, 1, 1, 2, 0], [3, 3, 0, 1, 0]))
    assert counted(counter) == (3, 7, 4, (2, 1, 1))
    counter.count(result([3], [2]))
    assert counted(counter) == (4, 9, 6, (3, 2, 1))


def test_rows_that_failed_count_for_nothing() -> None:
    counter = DraftCounter(2)
    counter.count(result([0, 2], [2, 2]))
    assert counted(counter) == (1, 2, 1, (1, 0))


def test_engine_without_drafts_has_none_to_count() -> None:
    counter = DraftCounter(0)
    counter.count(result([1], [0]))
    assert counted(counter) == (0, 0, 0, ())
