"""Masks along a row's drafts: as far as a draft can be sampled, and the matcher stands where it stood."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from openinfer_core import InvalidRequest
from openinfer_core.grammars import MaskWords, mask_words
from openinfer_engine.grammars.mask_cache import MaskCache
from openinfer_engine.grammars.row_masks import FollowedOutput, row_masks

VOCAB = 40
STOP = 39


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
        assert 0 < num_tokens <= len(self.accepted)
        del self.accepted[len(self.accepted) - num_tokens :]


def masks_of(matcher: Any, *drafts: int) -> list[list[int]]:
    output = FollowedOutput(matcher, MaskCache(), num_words=mask_words(VOCAB))
    masks = row_masks(output.masks_along(drafts, stop_token_ids={STOP}), drafts)
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


def test_a_draft_after_which_nothing_is_allowed_is_forbidden_in_its_place() -> None:
    matcher = ChoiceMatcher((7, 8, -1), (7, 9, 10))
    assert masks_of(matcher, 7, 8, 1) == [[7], [9]]
    assert matcher.accepted == []


def test_a_draft_after_which_the_matcher_refuses_is_forbidden_in_its_place() -> None:
    matcher = ChoiceMatcher((7, 8), (7, 9, 10), min_tokens=3)
    assert masks_of(matcher, 7, 8, 1) == [[7], [9]]


def test_forced_tokens_into_a_dead_end_leave_a_mask_without_a_bit() -> None:
    assert masks_of(ChoiceMatcher((7, 8, -1)), 7, 8) == [[]]


def test_a_matcher_that_refuses_at_once_or_raises_is_heard() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        masks_of(ChoiceMatcher((), min_tokens=3), 7)
    with pytest.raises(RuntimeError, match="unlucky"):
        masks_of(ChoiceMatcher((7, 8, 9), unlucky=8), 7, 8, 9)
