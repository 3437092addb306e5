"""Masks of the positions that one row samples, where its drafts are known on the host.

A `FollowedOutput` is a matcher and the tokens that it was not told yet: where a cached mask stands for what it would
say, neither is it asked nor told, so that of many equal outputs one matcher alone works.
"""

from collections.abc import Container, Sequence

import numpy as np

from openinfer_core import InvalidRequest
from openinfer_core.grammars import HasMaskIdentity, MaskWords, TokenMatcher
from openinfer_engine.grammars.mask_cache import MaskCache, state_after


class FollowedOutput:
    """One request's output, and what may come next. Called from one thread at a time.

    Args:
        matcher: at the beginning of the output.
        num_words: of a mask.

    Attributes:
        state: the digest of what the matcher was made from and all tokens since; None if it shares no masks.
    """

    def __init__(self, matcher: TokenMatcher, cache: MaskCache, *, num_words: int) -> None:
        self.state = matcher.mask_identity if isinstance(matcher, HasMaskIdentity) else None
        self._matcher = matcher
        self._cache = cache
        self._num_words = num_words
        self._untold: list[int] = []

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that were sampled."""
        self._untold += token_ids
        if self.state is not None:
            for token_id in token_ids:
                self.state = state_after(self.state, token_id)

    def masks_along(self, drafts: Sequence[int], *, stop_token_ids: Container[int]) -> list[MaskWords]:
        """A mask before each draft and after the last, up to the first draft that cannot be sampled.

        The matcher is advanced along the drafts, and rolled back. The last mask is without any bit where the grammar
        allows nothing, or the matcher refuses to go on. They are not to be changed.

        Args:
            drafts: of the row.
            stop_token_ids: that end the request: what comes after them is not reached.

        Raises:
            InvalidRequest: the matcher refuses to go on; it may raise anything else, too.
        """
        state, num_told = self.state, 0
        first = self._cached(state)
        if first is None:
            self._tell()
            first = self._computed(state)
        masks = [first]
        for num_drafts, draft in enumerate(drafts, 1):
            if draft in stop_token_ids or not _allows(masks[-1], draft):
                break
            state = None if state is None else state_after(state, draft)
            words = self._cached(state)
            if words is None:
                self._tell(drafts[num_told:num_drafts])
                num_told = num_drafts
                words = self._computed_after_draft(state)
            masks.append(words)
            if not words.any():
                break
        if num_told:
            self._matcher.rollback(num_told)
        return masks

    def _cached(self, state: bytes | None) -> MaskWords | None:
        return None if state is None else self._cache.get(state)

    def _tell(self, drafts: Sequence[int] = ()) -> None:
        untold, self._untold = self._untold, []
        for token_id in (*untold, *drafts):
            self._matcher.accept(token_id)

    def _computed(self, state: bytes | None) -> MaskWords:
        words = np.empty(self._num_words, np.uint32)
        self._matcher.fill(words)
        words.flags.writeable = False
        if state is not None:
            self._cache.put(state, words)
        return words

    def _computed_after_draft(self, state: bytes | None) -> MaskWords:
        try:
            return self._computed(state)
        except InvalidRequest:
            return np.zeros(self._num_words, np.uint32)


def row_masks(masks: Sequence[MaskWords], drafts: Sequence[int]) -> list[MaskWords]:
    """The masks of a row's positions.

    A draft after which the grammar allows nothing, or asks for too much, is forbidden where it stands: whether it would
    have been sampled is not known, so that is no reason to fail the request.

    Args:
        masks: `FollowedOutput.masks_along`, of these drafts or of more.
        drafts: of the row.

    Returns:
        One mask for each position up to the first draft that cannot be sampled; the first may be without any bit.
    """
    found = list(masks[: len(drafts) + 1])
    while len(found) > 1 and not found[-1].any():
        found.pop()
        found[-1] = _without(found[-1], drafts[len(found) - 1])
    return found


def _allows(words: MaskWords, token_id: int) -> bool:
    # A drafter is not trusted: its ids may be beyond the vocabulary.
    return 0 <= token_id < 32 * len(words) and bool(words[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def _without(words: MaskWords, token_id: int) -> MaskWords:
    left = words.copy()
    left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return left
