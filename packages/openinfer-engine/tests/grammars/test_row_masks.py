"""Masks along a row's drafts: as far as a draft can be sampled, and the matcher stands where it stood."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from openinfer_core import InvalidRequest
from openinfer_core.grammars import MaskWords, mask_words
from openinfer_core.scheduling import StepPlan
from openinfer_engine.grammars.mask_cache import MaskCache
from openinfer_engine.grammars.row_masks import FollowedOutput, with_rows_cut

VOCAB = 40
STOP = 39
EMPTY = {"new_block_counts": np.zeros(3, np.int32), "new_blocks": np.zeros(0, np.int32)}


class ChoiceMatcher:
    """Allows the next tokens of some words, and the stop token where one of them ends."""

    def __init__(self, *words: Sequence[int], min_tokens: int = 0, unlucky: int | None = None) -> None:
        self.words = [tuple(word) for word in words]
        self.min_tokens = min_tokens
        self.unlucky = unlucky
        self.accepted: list[int] = []

    def fill(self, words: MaskWords) -> None:
        place, allowed = len(self.accepted), set[int]()
        for word in self.words:
            if word[:place] == tuple(self.accepted):
                allowed.add(word[place] if place < len(word) else STOP)
        if allowed == {STOP} and place < self.min_tokens:
            raise InvalidRequest("it ends before min_tokens", field="min_tokens")
        words[:] = 0
        for token_id in allowed - {-1}:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def accept(self, token_id: int) -> None:
        if token_id == self.unlucky:
            raise RuntimeError("an unlucky number")
        self.accepted.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.accepted)
        del self.accepted[len(self.accepted) - num_tokens :]


def masks_of(matcher: Any, *drafts: int) -> list[list[int]]:
    output = FollowedOutput(matcher, MaskCache(), num_words=mask_words(VOCAB))
    masks = output.masks_along(drafts, stop_token_ids={STOP})
    return [np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() for words in masks]


@pytest.mark.parametrize(
    ("drafts", "masks"),
    [
        ((), [[7]]),
        ((7, 8, 9), [[7], [8, 33], [9], [STOP]]),
        ((7, 33), [[7], [8, 33], [34]]),
        ((7, 9, 8), [[7], [8, 33]]),
        ((8, 9), [[7]]),
        ((7, 8, 9, STOP, 1), [[7], [8, 33], [9], [STOP]]),
        ((7, -1, 8), [[7], [8, 33]]),
        ((7, 2**31 - 1), [[7], [8, 33]]),
        ((7, 64), [[7], [8, 33]]),
    ],
)
def test_there_is_a_mask_up_to_the_first_draft_that_cannot_be_sampled(
    drafts: tuple[int, ...], masks: list[list[int]]
) -> None:
    matcher = ChoiceMatcher((7, 8, 9), (7, 33, 34))
    assert masks_of(matcher, *drafts) == masks
    assert matcher.accepted == []


def test_a_matcher_that_has_come_some_way_is_rolled_back_to_there() -> None:
    matcher = ChoiceMatcher((7, 8, 9, 10))
    matcher.accept(7)
    assert masks_of(matcher, 8, 9) == [[8], [9], [10]]
    assert matcher.accepted == [7]


def test_there_is_no_mask_after_a_draft_after_which_nothing_is_allowed() -> None:
    matcher = ChoiceMatcher((7, 8, -1), (7, 9, 10))
    assert masks_of(matcher, 7, 8, 1) == [[7], [8, 9]]  # as without drafts: 8 may be sampled, and ends the request then
    assert matcher.accepted == []
    assert masks_of(ChoiceMatcher((7, 8, -1)), 7, 8) == [[7], [8]]
    assert masks_of(ChoiceMatcher((-1,)), 7, 8) == [[]]


@pytest.mark.parametrize(
    "matcher",
    [ChoiceMatcher((7, 8), (7, 9, 10), min_tokens=3), ChoiceMatcher((7, 8, 9), (7, 9, 10), unlucky=8)],
    ids=["refuses", "raises"],
)
def test_what_a_matcher_raises_on_a_draft_ends_drafts_and_not_the_request(matcher: ChoiceMatcher) -> None:
    output = FollowedOutput(matcher, MaskCache(), num_words=mask_words(VOCAB))
    assert len(output.masks_along((7, 8, 9), stop_token_ids={STOP})) == 2
    assert matcher.accepted == []
    # It is asked along no drafts again.
    output.follow([7])
    assert len(output.masks_along((9, 10), stop_token_ids={STOP})) == 1
    assert matcher.accepted == [7]


def test_what_a_matcher_raises_on_what_was_sampled_is_heard() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        masks_of(ChoiceMatcher((), min_tokens=3), 7)
    output = FollowedOutput(ChoiceMatcher((7, 8, 9), unlucky=8), MaskCache(), num_words=mask_words(VOCAB))
    output.follow([7, 8])
    with pytest.raises(RuntimeError, match="unlucky"):
        output.masks_along((9,), stop_token_ids={STOP})


def test_rows_are_cut_before_the_first_draft_without_a_mask() -> None:
    columns = {
        "starts": (0, 5, 9),
        "counts": (4, 4, 3),  # a prompt of two and two drafts; three drafts after the slot's last id; a plain chunk
        "num_host_tokens": (4, 3, 3),
        "max_new": (3, 4, 0),
        "draft_counts": (0, 0, 0),
        "slots": (0, 1, 2),
    }
    arrays = {name: np.asarray(values, np.int32) for name, values in columns.items()}
    plan = StepPlan(step=3, token_ids=np.arange(10, 20, dtype=np.int32), **EMPTY, **arrays)
    cut = with_rows_cut(plan, {0: 2, 1: 1})
    assert cut.token_ids.tolist() == [10, 11, 12, 17, 18, 19]
    assert (cut.counts.tolist(), cut.num_host_tokens.tolist()) == ([3, 1, 3], [3, 0, 3])
    assert (cut.max_new.tolist(), cut.starts.tolist()) == ([2, 1, 0], [0, 5, 9])
    assert with_rows_cut(plan, {0: 3, 1: 4}) is plan
