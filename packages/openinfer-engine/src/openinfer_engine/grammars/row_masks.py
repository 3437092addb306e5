"""Masks of the positions that one row samples, where its drafts are known on the host."""

from collections.abc import Container, Sequence

import numpy as np

from openinfer_core import InvalidRequest
from openinfer_core.grammars import MaskWords, TokenMatcher


def row_masks(
    matcher: TokenMatcher, drafts: Sequence[int], *, stop_token_ids: Container[int], num_words: int
) -> list[MaskWords]:
    """Advances a matcher along the drafts, and rolls it back.

    A draft after which the grammar allows nothing, or asks for too much, is forbidden where it stands: whether it would
    have been sampled is not known, so that is no reason to fail the request.

    Args:
        matcher: stands after the last token that is known; it does so again afterwards.
        drafts: of the row.
        stop_token_ids: that end the request: what comes after them is not reached.
        num_words: of a mask.

    Returns:
        One mask for each position up to the first draft that cannot be sampled; the first may be without any bit.

    Raises:
        InvalidRequest: the matcher refuses to go on; it may raise anything else, too.
    """
    masks = [_mask(matcher, num_words)]
    for draft in drafts:
        if draft in stop_token_ids or not _allows(masks[-1], draft):
            break
        matcher.accept(draft)
        try:
            masks.append(_mask(matcher, num_words))
        except InvalidRequest:
            masks.append(np.zeros(num_words, np.uint32))
        if not masks[-1].any():
            break
    num_accepted = len(masks) - 1
    if num_accepted:
        matcher.rollback(num_accepted)
    while len(masks) > 1 and not masks[-1].any():
        masks.pop()
        _forbid(masks[-1], drafts[len(masks) - 1])
    return masks


def _mask(matcher: TokenMatcher, num_words: int) -> MaskWords:
    words = np.empty(num_words, np.uint32)
    matcher.fill(words)
    return words


def _allows(words: MaskWords, token_id: int) -> bool:
    # A drafter is not trusted: its ids may be beyond the vocabulary.
    return 0 <= token_id < 32 * len(words) and bool(words[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def _forbid(words: MaskWords, token_id: int) -> None:
    words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
