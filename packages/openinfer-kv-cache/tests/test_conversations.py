"""Conversations that take turns in a pool too small for all: some are kept whole, and nothing waits for it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from openinfer_kv_cache import KvCache, KvCacheOptions, LeastRecentlyUsed
from openinfer_kv_cache.eviction.conversations import LEAST_SHARE, MAX_ENDS, TAIL_TOKENS

BLOCK = 4
FIRST = 4
"""Blocks of a conversation's first turn."""


def make_cache(num_blocks: int = 16, **options) -> KvCache:
    return KvCache(KvCacheOptions(num_blocks=num_blocks, block_size_tokens=BLOCK), **options)


def ids_of(name: int, num_blocks: int, shared: int = 0) -> list[int]:
    return [*range(shared * BLOCK), *range(1000 * name + 500, 1000 * name + 500 + BLOCK * (num_blocks - shared)), 0]


def begin(cache: KvCache, name: int, num_blocks: int = FIRST, *, owner: str = "", shared: int = 0):
    """A turn of a conversation, computed; and how many of its blocks were cached."""
    sequence = cache.sequence(ids_of(name, num_blocks, shared), owner=owner)
    hits = sequence.match() // BLOCK
    assert sequence.reserve(BLOCK * num_blocks) is not None
    sequence.seal(BLOCK * num_blocks)
    return sequence, hits


def end(cache: KvCache, sequence) -> None:
    cache.conversations.ended(sequence)
    sequence.release()


def turn(cache: KvCache, name: int, num_blocks: int = FIRST, *, owner: str = "", shared: int = 0) -> int:
    sequence, hits = begin(cache, name, num_blocks, owner=owner, shared=shared)
    end(cache, sequence)
    cache.check_integrity()
    return hits


def cycle_hits(cache: KvCache, names: range, rounds: int) -> list[int]:
    """Of each round, blocks found by all."""
    return [sum(turn(cache, name) for name in names) for _ in range(rounds)]


def test_in_a_cycle_larger_than_the_pool_some_are_found_whole() -> None:
    assert cycle_hits(make_cache(policy=LeastRecentlyUsed()), range(6), 6) == [0] * 6
    assert cycle_hits(make_cache(), range(6), 6)[2:] == [12] * 4  # three of them, and room for one that runs


def test_a_growing_conversation_is_found_from_its_third_turn_on() -> None:
    cache = make_cache(32)
    found: list[int] = []
    for blocks in range(4, 12):
        found.append(turn(cache, 0, blocks))
        for other in range(10, 18):
            turn(cache, 100 * blocks + other)
    assert found == [0, 0, 5, 6, 7, 8, 9, 10]


def answered(cache: KvCache, name: int, prompt_blocks: int, answer: int) -> tuple[int, int]:
    """A turn computed with 4 blocks of an answer of its own; blocks found, and how many its conversation keeps."""
    prompt = [1000 * name + 500 + place for place in range(BLOCK * prompt_blocks)]
    sequence = cache.sequence([*prompt, *(10**6 * answer + place for place in range(17))])
    found = sequence.match() // BLOCK
    sequence.reserve(BLOCK * (prompt_blocks + 4))
    sequence.seal(BLOCK * (prompt_blocks + 4))
    ended = cache.conversations.ended(sequence, prompt_tokens=len(prompt))
    assert ended is not None
    sequence.release()
    cache.check_integrity()
    return found, cache.pool.kept_blocks(ended.conversation)


def test_a_turn_is_known_whatever_became_of_the_answer_before_it_and_of_what_begins_one() -> None:
    cache = make_cache(64)
    found = []
    for number, prompt_blocks in enumerate(range(12, 24, 2)):
        found.append(answered(cache, 0, prompt_blocks, number + 1))  # no answer is in the next prompt
        for other in range(10, 18):
            turn(cache, 100 * number + other)
    # Its prompt is found from its third turn on, and of each conversation no more is kept than its last turn has.
    assert [blocks for blocks, _ in found][2:] == [14, 16, 18, 20]
    assert [kept for _, kept in found][1:] == [prompt_blocks + 4 for prompt_blocks in range(14, 24, 2)]


def test_prompts_that_differ_in_their_last_tokens_alone_have_one_end_and_do_not_go_on_from_it() -> None:
    cache = make_cache(64)
    ids = [*range(40)]
    other_tail = [*ids[:-TAIL_TOKENS], *range(900, 900 + TAIL_TOKENS)]
    other_block = [*ids[: -TAIL_TOKENS - BLOCK], *range(900, 900 + TAIL_TOKENS + BLOCK)]
    ends = []
    for prompt in (ids, ids, other_tail, other_block):
        sequence = cache.sequence([*prompt, 0])
        sequence.match()
        sequence.reserve(40)
        sequence.seal(40)
        ended = cache.conversations.ended(sequence, prompt_tokens=40)
        assert ended is not None
        ends.append(ended)
        sequence.release()
    assert ends[0].end == ends[1].end == ends[2].end != ends[3].end
    assert [each.interval for each in ends] == [None] * 4
    assert cache.pool.kept_idle_blocks == 0


def test_what_comes_once_is_kept_no_longer_than_by_least_recently_used() -> None:
    cache = make_cache()
    for name in range(40):
        turn(cache, name)
    assert cache.pool.kept_idle_blocks == 0
    assert [turn(cache, name) for name in (39, 38)] == [4, 4]


def test_what_comes_once_does_not_push_out_a_conversation() -> None:
    cache = make_cache()
    turn(cache, 0)
    turn(cache, 0)
    for name in range(10, 50):
        turn(cache, name)
    assert turn(cache, 0) == 4


def test_one_that_stays_away_gives_its_place_to_those_that_go_on() -> None:
    cache = make_cache()
    cycle_hits(cache, range(6), 3)
    later = cycle_hits(cache, range(10, 16), 6)
    assert later[-1] == 12
    assert turn(cache, 0) == 0


def test_of_a_conversation_without_room_the_head_is_kept() -> None:
    cache = make_cache(16)
    for _ in range(3):
        turn(cache, 0, 10)
        turn(cache, 1, 10)
        turn(cache, 2, 12)
    hits = [turn(cache, name, 10) for name in (0, 1)]
    assert max(hits) >= 4
    assert sum(hits) < 20


def test_kept_blocks_can_all_be_allocated() -> None:
    cache = make_cache()
    cycle_hits(cache, range(4), 4)
    assert cache.pool.kept_idle_blocks > 0
    blocks = cache.pool.allocate(16)
    assert blocks is not None
    assert cache.pool.kept_idle_blocks == 0
    cache.pool.release(blocks)
    cache.check_integrity()


def test_retained_blocks_go_after_kept_ones() -> None:
    cache = make_cache()
    turn(cache, 0)
    turn(cache, 0)
    sequence, _ = begin(cache, 1)
    sequence.retain(60.0)
    end(cache, sequence)
    running, _ = begin(cache, 2, 12)
    assert [cache.sequence(ids_of(name, 4)).count_cached_tokens() for name in (0, 1)] == [0, 16]
    end(cache, running)


def test_after_its_deadline_a_kept_block_is_kept() -> None:
    now_s = [0.0]
    cache = make_cache(clock=lambda: now_s[0])
    turn(cache, 0)
    sequence, _ = begin(cache, 0)
    sequence.retain(60.0)
    end(cache, sequence)
    turn(cache, 1)
    now_s[0] = 61.0
    running, _ = begin(cache, 2, 12)
    assert [cache.sequence(ids_of(name, 4)).count_cached_tokens() for name in (0, 1)] == [16, 0]
    end(cache, running)


def test_part_of_a_kept_conversation_is_given_up_from_its_tail() -> None:
    cache = make_cache()
    turn(cache, 0, 8)
    turn(cache, 0, 8)
    running, _ = begin(cache, 1, 13)
    assert cache.sequence(ids_of(0, 8)).count_cached_tokens() == 3 * BLOCK
    end(cache, running)


def test_a_head_that_conversations_share_stays_with_the_last_one() -> None:
    cache = make_cache(24)
    for _ in range(3):
        for name in range(3):
            turn(cache, name, 6, shared=3)
    assert [turn(cache, name, 6, shared=3) for name in range(3)] == [6, 6, 6]


def test_conversations_that_go_on_from_one_turn_are_several() -> None:
    """A sub-agent goes on from its parent's turn, and each of sessions with one first turn from that."""
    cache = make_cache(24)
    sequence = cache.sequence(range(BLOCK * 3 + 1))
    sequence.match()
    sequence.reserve(BLOCK * 3)
    sequence.seal(BLOCK * 3)
    end(cache, sequence)
    for _ in range(4):
        hits = [turn(cache, name, 8, shared=3) for name in range(1, 6)]
    assert hits.count(8) >= 2


def test_another_owner_gets_its_share_from_one_that_keeps_all() -> None:
    cache = make_cache()
    cycle_hits(cache, range(4), 4)
    assert turn(cache, 50, 8, owner="other") == 0
    cycle_hits(cache, range(4), 4)
    assert turn(cache, 50, 8, owner="other") == 8


def test_cleared_cache_knows_no_conversations() -> None:
    cache = make_cache()
    cycle_hits(cache, range(4), 3)
    cache.clear()
    assert cache.pool.kept_idle_blocks == 0
    turn(cache, 0)
    assert cache.pool.kept_idle_blocks == 0  # its first turn


def test_conversations_shorter_than_a_part_of_the_pool_are_not_kept() -> None:
    cache = make_cache(round(2 / LEAST_SHARE))
    turn(cache, 0, 1)
    turn(cache, 0, 1)
    assert cache.pool.kept_idle_blocks == 0


def test_ends_that_are_remembered_are_bounded() -> None:
    cache = make_cache(2)
    for name in range(MAX_ENDS + 1):
        end(cache, begin(cache, name + 1, 1)[0])
    turn(cache, 1, 1)
    assert cache.pool.kept_idle_blocks == 0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9), st.booleans(), st.booleans()), max_size=60))
@pytest.mark.parametrize("owners", [1, 3])
def test_any_order_of_turns_leaves_the_pool_whole(owners: int, steps: list[tuple[int, int, bool, bool]]) -> None:
    cache = make_cache(20)
    running: list = []
    for name, num_blocks, is_long, retains in steps:
        if is_long and running:
            end(cache, running.pop(0))
        sequence = cache.sequence(ids_of(name, num_blocks, min(2, num_blocks)), owner=str(name % owners))
        sequence.match()
        if sequence.reserve(BLOCK * num_blocks) is None:
            sequence.release()
            continue
        sequence.seal(BLOCK * num_blocks)
        if retains:
            sequence.retain(60.0)
        running.append(sequence)
        cache.check_integrity()
        assert cache.pool.kept_idle_blocks <= cache.pool.idle_blocks
    while running:
        end(cache, running.pop())
    cache.check_integrity()
    blocks = cache.pool.allocate(20)
    assert blocks is not None
    assert len(set(blocks)) == 20
    assert cache.pool.kept_idle_blocks == 0
