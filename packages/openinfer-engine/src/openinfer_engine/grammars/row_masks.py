"""Masks of the positions that one row samples, where its drafts are known on the host.

A `FollowedOutput` is a matcher and the tokens that it was not told yet: where a cached mask stands for what it would
say, neither is it asked nor told, so that of many equal outputs one matcher alone works.
"""

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from openinfer_core.grammars import HasMaskIdentity, MaskWords, TokenMatcher
from openinfer_core.scheduling import StepPlan
from openinfer_engine.grammars.mask_cache import MaskCache, state_after

logger = logging.getLogger("openinfer.engine")


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
        self._follows_drafts = True  # until the matcher raises on one

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that were sampled."""
        self._untold += token_ids
        if self.state is not None:
            for token_id in token_ids:
                self.state = state_after(self.state, token_id)

    def masks_along(self, drafts: Sequence[int], *, stop_token_ids: Container[int]) -> list[MaskWords]:
        """A mask before each draft and after the last, up to the first draft that cannot be sampled.

        The matcher is advanced along the drafts, and rolled back. There are no masks from a draft on after which the
        grammar allows nothing, or the matcher refuses to go on: whether it would be sampled is not known. The first
        mask may be without any bit. They are not to be changed.

        Args:
            drafts: of the row.
            stop_token_ids: that end the request: what comes after them is not reached.

        Raises:
            InvalidRequest: the matcher refuses to go on after what was sampled; it may raise anything else, too.
        """
        state, num_told = self.state, 0
        first = self._cached(state)
        if first is None:
            self._tell()
            first = self._computed(state)
        masks = [first]
        for num_drafts, draft in enumerate(drafts if self._follows_drafts else (), 1):
            if draft in stop_token_ids or not _allows(masks[-1], draft):
                break
            state = None if state is None else state_after(state, draft)
            words = self._cached(state)
            if words is None:
                self._tell()
                words, num_told = self._mask_after(drafts[:num_drafts], num_told, state)
            if words is None or not words.any():
                break
            masks.append(words)
        if num_told or not self._follows_drafts:
            self._matcher.rollback(num_told)
        return masks

    def _mask_after(self, drafts: Sequence[int], num_told: int, state: bytes | None) -> tuple[MaskWords | None, int]:
        """The mask after these drafts, of which so many were told; None, and none for later rows, if that is too much.

        Whether such a draft is sampled is not known, so the request goes on: without it, it would have had no trouble.
        """
        try:
            for draft in drafts[num_told:]:
                self._matcher.accept(draft)
                num_told += 1
            return self._computed(state), num_told
        except Exception as error:  # noqa: BLE001
            self._follows_drafts = False
            logger.info("a matcher raised on a draft; its request goes on without drafts: %s", error)
            return None, num_told

    def _cached(self, state: bytes | None) -> MaskWords | None:
        return None if state is None else self._cache.get(state)

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        for token_id in untold:
            self._matcher.accept(token_id)

    def _computed(self, state: bytes | None) -> MaskWords:
        words = np.empty(self._num_words, np.uint32)
        self._matcher.fill(words)
        words.flags.writeable = False
        if state is not None:
            self._cache.put(state, words)
        return words


def with_rows_cut(plan: StepPlan, num_positions: Mapping[int, int]) -> StepPlan:
    """The plan without the host drafts that cannot be sampled, or after which no mask is known.

    Args:
        plan: of the scheduler.
        num_positions: row -> positions that it may sample, at least 1; its other drafts are the host's.
    """
    fewer = np.zeros(plan.num_rows, np.int32)
    for row, count in num_positions.items():
        fewer[row] = plan.max_new[row] - count
    if not fewer.any():
        return plan
    ends, is_kept = plan.num_host_tokens.cumsum(), np.ones(len(plan.token_ids), np.bool_)
    for row in fewer.nonzero()[0].tolist():
        is_kept[ends[row] - fewer[row] : ends[row]] = False
    return replace(
        plan,
        counts=plan.counts - fewer,
        num_host_tokens=plan.num_host_tokens - fewer,
        max_new=plan.max_new - fewer,
        token_ids=plan.token_ids[is_kept],
    )


def _allows(words: MaskWords, token_id: int) -> bool:
    # A drafter is not trusted: its ids may be beyond the vocabulary.
    return 0 <= token_id < 32 * len(words) and bool(words[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))
