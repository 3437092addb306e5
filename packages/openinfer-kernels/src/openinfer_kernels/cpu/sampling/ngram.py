"""Looked up drafts on the CPU: all places of a sequence are compared at once, token by token backwards."""

import numpy as np

from openinfer_kernels.ops import Array, HostArray
from openinfer_kernels.ops.drafting import NgramHistory, NgramMatch, NgramRule

_NONE = -1


def ngram_drafts(history: NgramHistory, slots: Array, last_ids: Array, lengths: Array, *, rule: NgramRule) -> Array:
    drafts = np.full((len(slots), history.drafts.shape[1]), _NONE, np.int32)
    for row, (slot, last_id, length) in enumerate(
        zip(slots.tolist(), last_ids.tolist(), lengths.tolist(), strict=True)
    ):
        if _take(history, slot, last_id, length):
            found = _look_up(history, slot, rule)
            drafts[row, : len(found)] = found
        history.drafts[slot] = drafts[row]
    return drafts


def _take(history: NgramHistory, slot: int, last_id: int, length: int) -> bool:
    """Whether the sequence in the slot has grown; then its ids are there."""
    known, begin = int(history.known[slot]), int(history.references[slot])
    ids = history.ids[slot]
    if length <= known or begin + length > len(ids):
        return False
    accepted = history.drafts[slot, : length - 1 - known]
    ids[begin + known : begin + length - 1] = _NONE
    ids[begin + known : begin + known + len(accepted)] = accepted
    ids[begin + length - 1] = last_id
    history.known[slot] = length
    return True


def _look_up(history: NgramHistory, slot: int, rule: NgramRule) -> HostArray:
    reference, length = int(history.references[slot]), int(history.known[slot])
    ids = history.ids[slot, : reference + length]
    most = min(history.drafts.shape[1], rule.max_tokens - length)
    end = reference or len(ids)  # of what is looked up
    matched = _matches(ids, end - 1, rule.reference_n_max if reference else rule.n_max)
    longest = int(matched.max(initial=0))
    if longest < rule.n_min or most <= 0:
        return ids[:0]
    places = np.flatnonzero(matched == longest)
    is_latest = rule.match is NgramMatch.LATEST
    first = int(places[-1 if is_latest else 0]) + 1
    if is_latest and not reference:
        return ids[first + np.arange(most) % (end - first)]
    return ids[first : min(first + most, end)]


def _matches(ids: HostArray, count: int, n_max: int) -> HostArray:
    """How many of the last tokens of `ids` stand before and at each of the first `count` places, `n_max` at most."""
    matched = np.zeros(count, np.int32)
    alive = np.arange(count)
    for back in range(min(n_max, len(ids))):
        alive = alive[(alive >= back)]
        alive = alive[ids[alive - back] == ids[len(ids) - 1 - back]]
        matched[alive] += 1
    return matched
