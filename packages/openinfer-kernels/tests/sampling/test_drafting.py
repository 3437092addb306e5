"""Hidden states that drafters go on from: sequences in steps of any size are as if they were computed at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, HiddenMemory, PagedCache
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.testing.drafting import check_drafting

BLOCK, WIDTH, SLOTS = 4, 8, 3


def memory() -> HiddenMemory:
    return HiddenMemory(
        last=np.full((SLOTS, WIDTH), 7, np.float32),
        tail=np.zeros((SLOTS, 3, WIDTH), np.float32),
        ends=np.zeros(SLOTS, np.int32),
        begun=np.zeros(SLOTS, np.int32),
        boundary=PagedCache(data=np.zeros((12, 3, 2, 1, BLOCK, 8), np.float32), layer=1),
        boundary_layers=1,
    )


def step(start: int, count: int) -> AttentionBatch:
    """One row, whose block i is i + 2."""
    return AttentionBatch(
        positions=np.arange(start, start + count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=(np.arange(2, 12, dtype=np.int32)[None],),
        cache_slots=(np.zeros(count, np.int64),),
        max_query_tokens=count,
        max_context_tokens=40,
        block_tokens=BLOCK,
    )


def column(*values: int) -> Any:
    return np.array(values, np.int32)


def test_a_sequence_in_chunks_sees_the_state_before_each_token() -> None:
    hidden = np.random.default_rng(0).normal(size=(30, WIDTH)).astype(np.float32)
    kept, found, at = memory(), [], 0
    for count in (5, 1, 7, 3, 14):
        batch = step(at, count)
        found.append(CpuOps.hidden_before(hidden[at : at + count], kept, column(1), batch))
        CpuOps.keep_hidden(hidden[at : at + count], kept, column(1), batch)
        at += count
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate([np.zeros((1, WIDTH)), hidden[:-1]]))


def test_a_row_goes_on_from_its_last_accepted_token() -> None:
    hidden = np.random.default_rng(1).normal(size=(4, WIDTH)).astype(np.float32)
    for refused in range(3):
        kept = memory()
        CpuOps.keep_hidden(hidden, kept, column(2), step(10, 4))
        # Tokens 10 .. 13 were computed; the last known one stands after those that were not refused.
        settled = CpuOps.settle_hidden(kept, column(2), column(10 + 4 - refused + 1))
        np.testing.assert_array_equal(settled, hidden[3 - refused][None])
        np.testing.assert_array_equal(kept.last[2], hidden[3 - refused])


def test_a_sequence_after_a_cached_prefix_begins_with_what_the_block_has() -> None:
    hidden = np.random.default_rng(2).normal(size=(11, WIDTH)).astype(np.float32)
    kept = memory()
    CpuOps.keep_hidden(hidden, kept, column(0), step(0, 11))
    for start, expected in ((4, hidden[3]), (8, hidden[7]), (6, np.zeros(WIDTH)), (0, np.zeros(WIDTH))):
        kept.begun[1] = 1
        before = CpuOps.hidden_before(hidden[:2], kept, column(1), step(start, 2))
        np.testing.assert_array_equal(before[0], expected)
        assert kept.begun[1] == 0


def test_without_boundaries_a_sequence_begins_with_zeros() -> None:
    kept = replace(memory(), boundary=None)
    kept.begun[0] = 1
    assert not CpuOps.hidden_before(np.ones((2, WIDTH), np.float32), kept, column(0), step(8, 2))[0].any()


def test_every_implementation_does_the_same_on_random_steps(ops: Any) -> None:
    assert check_drafting(ops) > 300


@pytest.mark.parametrize("mapped", [None, np.array([9, 4, 7], np.int32)])
def test_ids_of_drafts(mapped: Any) -> None:
    drafts = np.full((2, 3), -1, np.int32)
    logits = np.array([[0, 2, 1], [5, 2, 1]], np.float32)

    ids = CpuOps.draft_ids(logits, drafts, 1, token_ids=mapped)

    expected = [1, 0] if mapped is None else [4, 9]
    assert ids.tolist() == expected
    assert drafts.tolist() == [[-1, expected[0], -1], [-1, expected[1], -1]]


def test_a_head_of_drafts_in_e4m3_is_the_head_but_for_its_rounding(ops: Any) -> None:
    rng = np.random.default_rng(4)
    head = ops.upload_weight(rng.normal(size=(640, 256)).astype(np.float32) / 16)
    made = ops.draft_head(head)
    whole = ops.download(head).astype(np.float32)
    for count in (1, 3, 20):
        hidden = ops.upload_weight(rng.normal(size=(count, 256)).astype(np.float32))
        found = ops.download(ops.draft_logits(hidden, made))
        right = ops.download(hidden).astype(np.float64) @ whole.T.astype(np.float64)
        assert found.dtype == np.float32
        assert 0.001 < np.linalg.norm(found - right) / np.linalg.norm(right) < 0.04  # E4M3 rounds by 2.6 % in the mean
