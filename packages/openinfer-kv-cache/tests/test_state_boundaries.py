"""A listener of a model with recurrent states hears of what a sequence can begin on, whatever comes in what order."""

import random
from array import array

import pytest

from openinfer_kv_cache import Digest, KvCache, KvCacheOptions, StoredBlocks
from openinfer_kv_cache.state_boundaries import StateBoundaries

SIZE = 2


class Router:
    """What was told, with each block's parent and tokens."""

    def __init__(self):
        self.known = {}

    def stored(self, blocks):
        parent = blocks.parent
        for place, digest in enumerate(blocks.digests):
            assert digest not in self.known
            self.known[digest] = (parent, list(blocks.token_ids[place * SIZE : (place + 1) * SIZE]))
            parent = digest
        assert len(blocks.token_ids) == SIZE * len(blocks.digests)

    def removed(self, digests):
        assert digests
        for digest in digests:
            del self.known[digest]

    def cleared(self):
        self.known.clear()


# Two chains that part after two blocks: 0 1 2 3 and 0 1 4 5.
PARENT = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4}


def named(number):
    return None if number is None else Digest(bytes([number]) * 16)


def expected(blocks, states):
    """What is of use: each block from which present blocks lead to one with states."""
    useful = set()
    for number in states & blocks:
        each = number
        while each is not None and each in blocks:
            useful.add(each)
            each = PARENT[each]
    return useful


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_is_what_leads_to_states(seed):
    draw, router = random.Random(seed), Router()
    boundaries, blocks, states = StateBoundaries(router), set(), set()
    for _ in range(300):
        number = draw.randrange(6)
        match draw.randrange(5):
            case 0 | 1 if number not in blocks:
                run = [number]
                while (
                    len(run) < 3 and (child := next((c for c, p in PARENT.items() if p == run[-1]), None)) is not None
                ):
                    if child in blocks:
                        break
                    run.append(child)
                blocks.update(run)
                ids = array("I", [each for name in run for each in (name, name)])
                boundaries.stored(StoredBlocks(named(PARENT[number]), [named(each) for each in run], ids, None, None))
            case 2 if blocks:
                gone = draw.sample(sorted(blocks), draw.randint(1, min(2, len(blocks))))
                blocks.difference_update(gone)
                boundaries.removed([named(each) for each in gone])
            case 3 if number not in states:
                states.add(number)
                boundaries.kept(named(number))
            case 4 if states:
                gone = draw.choice(sorted(states))
                states.discard(gone)
                boundaries.given_up(named(gone))
            case _:
                pass
        assert set(router.known) == {named(each) for each in expected(blocks, states)}
        assert all(router.known[named(each)] == (named(PARENT[each]), [each] * 2) for each in expected(blocks, states))
    boundaries.cleared()
    assert not router.known


def test_a_cache_with_slots_tells_when_a_snapshot_is_there_and_when_it_has_gone():
    cache, router = (
        KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=SIZE, num_state_slots=3, max_snapshots=1)),
        Router(),
    )
    cache.listen(router)
    sequence, slot = cache.sequence(range(8)), cache.slots.allocate()
    sequence.reserve(8)
    sequence.seal(8)
    digests = sequence.prefix_digests()
    assert not router.known
    cache.slots.complete(cache.slots.begin_snapshot(slot, digests[1], num_tokens=4))
    assert set(router.known) == set(digests[:2])
    cache.slots.complete(cache.slots.begin_snapshot(slot, digests[3], num_tokens=8))  # in the place of the first
    assert set(router.known) == set(digests)
    sequence.release()
    cache.pool.allocate(5)  # takes the last block
    assert not router.known


def test_a_cache_without_slots_tells_at_once():
    cache, router = KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=SIZE)), Router()
    cache.listen(router)
    sequence = cache.sequence(range(4))
    sequence.reserve(4)
    sequence.seal(4)
    assert set(router.known) == set(sequence.prefix_digests())
