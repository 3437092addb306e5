"""Answers that wait until their KV is in the tier: when they are told, what of, and what is pinned meanwhile."""

import pytest

from openinfer_core import Finished, FinishReason, RequestId
from openinfer_engine.kv_transfer import Handovers
from openinfer_kv_cache import BlockPool, Digest

NUM_BLOCKS = 16
DIGESTS = [Digest(bytes([number]) * 16) for number in range(NUM_BLOCKS)]
MIB = 1 << 20


class Save:
    """A save that the test ends."""

    begin_s = 0.0

    def __init__(self, digests):
        self.digests = list(digests)
        self.num_blocks = len(digests)
        self.completed_blocks = 0
        self.is_cancelled = self._is_over = False

    def end(self, completed_blocks=None):
        self.completed_blocks = self.num_blocks if completed_blocks is None else completed_blocks
        self._is_over = True

    def is_over(self):
        return self._is_over

    def cancel(self):
        self.is_cancelled = True

    def wait(self, timeout_s):
        del timeout_s


class Port:
    """Keeps the saves that were begun."""

    def __init__(self, *, takes=True):
        self.saves = []
        self._takes = takes

    def save(self, digests, places):
        assert len(digests) == len(places)
        if not self._takes:
            return None
        self.saves.append(Save(digests))
        return self.saves[-1]


def pool_with(num_sealed):
    pool = BlockPool(NUM_BLOCKS, 4)
    blocks = pool.allocate(num_sealed)
    pool.seal(blocks, DIGESTS[:num_sealed])
    pool.release(blocks)
    return pool


def ended(number):
    return Finished(RequestId(number), FinishReason.LENGTH, 10, 1, 0)


def handovers_of(pool, port, *, block_bytes=1):
    return Handovers(scheduler=pool, port=port, block_bytes=block_bytes, num_blocks=NUM_BLOCKS, timeout_s=2.0)


def test_an_answer_waits_until_all_blocks_are_there():
    pool, port = pool_with(3), Port()
    handovers = handovers_of(pool, port)
    handovers.begin(ended(1), DIGESTS[:3], now_s=0.0)
    assert port.saves[0].digests == DIGESTS[:3]
    assert handovers.settle(now_s=1.0) == []
    assert pool.idle_blocks == 0  # nothing of it may be evicted meanwhile
    port.saves[0].end()
    (told,) = handovers.settle(now_s=1.1)
    assert (told.finished, told.digests, told.is_whole) == (ended(1), DIGESTS[:3], True)
    assert pool.idle_blocks == 3
    assert not handovers


def test_after_its_deadline_an_answer_tells_of_what_is_there_and_pins_go_when_the_copy_has_ended():
    pool, port = pool_with(4), Port()
    handovers = handovers_of(pool, port)
    handovers.begin(ended(1), DIGESTS[:4], now_s=0.0)
    port.saves[0].completed_blocks = 2
    assert handovers.settle(now_s=1.99) == []
    (told,) = handovers.settle(now_s=2.01)
    assert (told.digests, told.is_whole) == (DIGESTS[:2], False)
    assert port.saves[0].is_cancelled
    assert (pool.idle_blocks, len(handovers)) == (0, 1)
    port.saves[0].end(2)
    assert handovers.settle(now_s=3.0) == []
    assert (pool.idle_blocks, len(handovers)) == (4, 0)


def test_the_deadline_grows_with_the_bytes():
    handovers = handovers_of(pool_with(4), Port(), block_bytes=64 * MIB)
    handovers.begin(ended(1), DIGESTS[:4], now_s=0.0)
    assert handovers.settle(now_s=5.9) == []
    assert len(handovers.settle(now_s=6.1)) == 1


def test_a_save_that_ends_early_is_begun_again_a_few_times():
    pool, port = pool_with(3), Port()
    handovers = handovers_of(pool, port)
    handovers.begin(ended(1), DIGESTS[:3], now_s=0.0)
    port.saves[0].end(1)
    assert handovers.settle(now_s=0.1) == []  # a moment later
    assert handovers.settle(now_s=0.2) == []
    assert len(port.saves) == 2
    port.saves[1].end()
    assert handovers.settle(now_s=0.3)[0].is_whole


def test_a_tier_that_is_dead_is_not_waited_for_until_the_deadline():
    port, now_s = Port(), 0.0
    handovers = handovers_of(pool_with(3), port)
    handovers.begin(ended(1), DIGESTS[:3], now_s=now_s)
    told = []
    while not told:
        port.saves[-1].end(0)
        now_s += 0.06
        told = handovers.settle(now_s=now_s)
        assert now_s < 1.9
    assert told[0].digests == []
    assert len(port.saves) == 4


def test_a_tier_that_takes_no_saves_lands_nothing():
    handovers = handovers_of(pool_with(3), Port(takes=False))
    handovers.begin(ended(1), DIGESTS[:3], now_s=0.0)
    told = []
    for _ in range(10):
        told += handovers.settle(now_s=0.1)
    assert [each.digests for each in told] == [[]]


def test_what_the_pool_has_lost_is_not_told():
    pool, port = pool_with(2), Port()
    handovers = handovers_of(pool, port)
    handovers.begin(ended(1), DIGESTS[:4], now_s=0.0)
    port.saves[0].end()
    (told,) = handovers.settle(now_s=0.1)
    assert (told.digests, told.is_whole) == (DIGESTS[:2], False)


def test_a_prompt_of_less_than_a_block_is_told_at_once():
    handovers = handovers_of(pool_with(1), Port())
    handovers.begin(ended(1), [], now_s=0.0)
    (told,) = handovers.settle(now_s=0.0)
    assert (told.digests, told.is_whole) == ([], True)


def test_at_most_half_of_the_pool_is_pinned_but_for_one_alone():
    pool, port = pool_with(12), Port()
    handovers = handovers_of(pool, port)
    handovers.begin(ended(1), DIGESTS[:10], now_s=0.0)  # more than half, and alone
    handovers.begin(ended(2), DIGESTS[:2], now_s=0.0)
    assert len(port.saves) == 1
    port.saves[0].end()
    assert [told.finished.request_id for told in handovers.settle(now_s=0.1)] == [1]
    assert handovers.settle(now_s=0.2) == []
    assert len(port.saves) == 2
    port.saves[1].end()
    assert [told.finished.request_id for told in handovers.settle(now_s=0.3)] == [2]
    assert pool.idle_blocks == 12


@pytest.mark.parametrize("is_over", [True, False])
def test_an_aborted_request_gives_its_blocks_back_when_nothing_reads_them(is_over):
    pool, port = pool_with(3), Port()
    handovers = handovers_of(pool, port)
    handovers.begin(ended(1), DIGESTS[:3], now_s=0.0)
    if is_over:
        port.saves[0].end(0)
    assert handovers.withdraw(RequestId(1)) == ended(1)
    assert handovers.withdraw(RequestId(1)) is None
    assert pool.idle_blocks == (3 if is_over else 0)
    port.saves[0].end(0)
    assert handovers.settle(now_s=0.1) == []
    assert pool.idle_blocks == 3
