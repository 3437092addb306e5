"""Blocks that tiers fill for no sequence: found when they came, counted while they come, never of an old content."""

from collections.abc import Sequence
from typing import Any

import pytest

from openinfer_kv_cache import EarlyFill, IntegrityError, KvCache, KvCacheOptions, PrefixHit

BLOCK = 4


class Transfer:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.completed_blocks = num_blocks, 0
        self.begin_s = 0.0
        self.is_cancelled = self.has_ended = False

    def is_over(self) -> bool:
        return self.has_ended

    def end(self, completed_blocks: int) -> None:
        self.has_ended, self.completed_blocks = True, completed_blocks

    def cancel(self) -> None:
        self.is_cancelled = True

    def wait(self, timeout_s: float) -> None: ...


class Hit:
    def __init__(self, digests: Sequence[Any]) -> None:
        self.digests, self.is_closed = tuple(digests), False

    def close(self) -> None:
        self.is_closed = True


class Port:
    """Has a chain's first blocks."""

    def __init__(self, num_held: int, *, loads: bool = True) -> None:
        self.num_held, self.loads = num_held, loads
        self.hits: list[Hit] = []
        self.transfers: list[Transfer] = []
        self.places: list[int] = []

    def find(self, digests: Sequence[Any]) -> PrefixHit:
        self.hits += [Hit(digests[: self.num_held])] if self.num_held else []
        return PrefixHit(self.hits[-1:])  # type: ignore[arg-type]

    def load(self, found: PrefixHit, places: Sequence[int]) -> Transfer | None:
        if not self.loads:
            return None
        self.places = list(places)
        self.transfers.append(Transfer(found.num_blocks))
        return self.transfers[-1]


def make(num_blocks: int = 8) -> tuple[KvCache, Sequence[Any]]:
    cache = KvCache(KvCacheOptions(num_blocks=num_blocks, block_size_tokens=BLOCK))
    return cache, cache.sequence(range(6 * BLOCK)).prefix_digests()


def begin(cache: KvCache, port: Port, digests: Sequence[Any]) -> EarlyFill | None:
    return EarlyFill.begin(cache, port, digests, owner="a")  # type: ignore[arg-type]


def found_by_a_prompt(cache: KvCache) -> int:
    sequence = cache.sequence((*range(6 * BLOCK), 1))
    cached_blocks = sequence.match() // BLOCK
    sequence.release()
    return cached_blocks


@pytest.mark.parametrize("completed_blocks", [5, 2, 0])
def test_blocks_that_came_are_found_and_the_others_are_free(completed_blocks: int) -> None:
    cache, digests = make()
    port = Port(5)
    fill = begin(cache, port, digests)
    assert fill is not None
    assert (fill.num_blocks, fill.is_over(), cache.pool.available_blocks) == (5, False, 3)
    assert found_by_a_prompt(cache) == 0
    cache.check_integrity()
    port.transfers[0].end(completed_blocks)
    sealed: list[int] = []
    assert fill.finish(sealed.extend) == completed_blocks
    assert sealed == port.places[:completed_blocks]
    assert (cache.pool.idle_blocks, cache.pool.free_blocks) == (completed_blocks, 8 - completed_blocks)
    cache.check_integrity()
    assert found_by_a_prompt(cache) == completed_blocks


def test_what_came_before_all_content_was_voided_is_not_found() -> None:
    cache, digests = make()
    port = Port(4)
    fill = begin(cache, port, digests)
    assert fill is not None
    cache.clear()
    cache.check_integrity()
    port.transfers[0].end(4)
    assert fill.finish(lambda blocks: pytest.fail("nothing is to be kept")) == 0
    assert (cache.pool.free_blocks, found_by_a_prompt(cache)) == (8, 0)
    cache.check_integrity()


def test_blocks_that_were_computed_meanwhile_are_kept_once() -> None:
    cache, digests = make(16)
    port = Port(6)
    fill = begin(cache, port, digests)
    assert fill is not None
    sequence = cache.sequence((*range(6 * BLOCK), 1))
    sequence.match()
    sequence.reserve(6 * BLOCK)
    sequence.seal(6 * BLOCK)
    port.transfers[0].end(6)
    fill.finish(lambda blocks: None)
    sequence.release()
    cache.check_integrity()
    assert (cache.pool.idle_blocks, found_by_a_prompt(cache)) == (6, 6)


def test_nothing_begins_where_tiers_have_nothing_the_pool_no_room_or_the_load_does_not() -> None:
    cache, digests = make(4)
    assert begin(cache, Port(0), digests) is None
    too_much = Port(5)
    assert begin(cache, too_much, digests) is None
    assert too_much.hits[0].is_closed
    assert begin(cache, Port(3, loads=False), digests) is None
    assert cache.pool.free_blocks == 4
    cache.check_integrity()


def test_blocks_that_are_forgotten_while_they_come_are_noticed() -> None:
    cache, digests = make()
    assert begin(cache, Port(3), digests) is not None
    cache.filling.clear()
    with pytest.raises(IntegrityError, match="counts 1 users; sequences, pins and tiers account for 0"):
        cache.check_integrity()
