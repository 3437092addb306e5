"""What is about cached is what is cached where prefixes are evicted from their ends, and needs few look-ups."""

import pytest

from openinfer_kv_cache import KvCache, KvCacheOptions

PROMPT = tuple(range(1, 402))


def computed(cache: KvCache, prompt: tuple[int, ...]) -> None:
    sequence = cache.sequence(prompt)
    sequence.match()
    sequence.reserve(len(prompt))
    sequence.seal(len(prompt))
    sequence.release()


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 5, 40, 131, 200, 399, 400, 401])
def test_estimate_of_a_prefix_is_its_length(num_tokens: int) -> None:
    cache = KvCache(KvCacheOptions(num_blocks=128, block_size_tokens=4))
    computed(cache, PROMPT[:num_tokens])
    for rest in ((), (7,), (7, 8, 9, 10, 11)):
        sequence = cache.sequence((*PROMPT[:num_tokens], *rest) if rest else PROMPT)
        assert sequence.estimate_cached_tokens() == sequence.count_cached_tokens()
        sequence.release()


def test_estimate_of_one_whose_end_was_evicted() -> None:
    cache = KvCache(KvCacheOptions(num_blocks=110, block_size_tokens=4))
    computed(cache, PROMPT)
    computed(cache, tuple(range(1000, 1200)))  # takes the blocks at the end of the first
    sequence = cache.sequence(PROMPT)
    assert 0 < sequence.estimate_cached_tokens() == sequence.count_cached_tokens() < 400
    sequence.release()


def test_estimate_with_windows_is_the_count() -> None:
    cache = KvCache(KvCacheOptions(num_blocks=256, block_size_tokens=4, table_windows=(None, 9)))
    computed(cache, PROMPT[:40])
    sequence = cache.sequence(PROMPT)
    assert sequence.estimate_cached_tokens() == sequence.count_cached_tokens()
    sequence.release()
