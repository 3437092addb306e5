"""`MaskCache`: bounded in bytes and in masks; what was used last stays."""

import numpy as np
import pytest

from openinfer_engine.grammars.mask_cache import CACHE_MASKS, MaskCache, state_after


def mask(number: int, words: int = 64) -> np.ndarray:
    return np.full(words, number, np.uint32)


@pytest.mark.parametrize(
    ("words", "limits", "kept"),
    [(64, {"max_bytes": 2560}, 10), (64, {"max_masks": 7}, 7), (256, {"max_bytes": 2560, "max_masks": 7}, 2)],
)
def test_the_least_recently_used_make_room(words: int, limits: dict[str, int], kept: int) -> None:
    cache = MaskCache(**limits)
    states = [state_after(b"", number) for number in range(20)]
    for number, state in enumerate(states):
        cache.put(state, mask(number, words))
        assert cache.get(states[0]) is not None or kept < 2
    left = [state for state in states if cache.get(state) is not None]
    assert left == [states[0], *states[20 - (kept - 1) :]]


def test_small_vocabularies_are_bounded_in_masks() -> None:
    cache = MaskCache()
    states = [state_after(b"", number) for number in range(CACHE_MASKS + 5)]
    for number, state in enumerate(states):
        cache.put(state, mask(number))
    assert sum(cache.get(state) is not None for state in states) == CACHE_MASKS


def test_a_mask_is_taken_once() -> None:
    cache = MaskCache(max_bytes=512)
    for _ in range(5):
        cache.put(b"a", mask(1))
    cache.put(b"b", mask(2))
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is not None
