"""Bookkeeping of objects: who holds what, and what goes first."""

import pytest

from openinfer_kv_cache.testing.tier_cases import chain
from openinfer_kv_offload.remote.object_index import ObjectIndex

A, B, C, D = chain(0, 4)


@pytest.fixture
def index():
    made = ObjectIndex(3)
    made.add([A, B, C])
    yield made
    made.check_integrity()


def test_the_longest_known_beginning_is_held_and_not_given_up(index):
    held = index.hold_prefix([A, B, D, C])
    assert [each.digest for each in held] == [A, B]
    assert index.make_room() == [C]
    assert index.make_room() is None  # A and B are held, and the place of C is being filled
    index.release(held)
    assert index.make_room() == [B]  # the tail of a chain goes first


def test_what_is_dropped_by_a_late_request_after_its_release_is_gone_for_good(index):
    held = index.hold_prefix([A])
    index.release(held)
    assert index.drop(held[0])
    assert not index.drop(held[0])
    assert A not in index
    assert index.make_room() == []


def test_what_is_dropped_while_held_can_be_added_anew_beside_its_holder(index):
    (old,) = index.hold_prefix([A])
    index.drop(old)
    assert index.add([A]) == 1
    (new,) = index.hold_prefix([A])
    index.release([old])
    assert not index.drop(old)
    assert A in index
    index.release([new])


def test_forgetting_spares_what_is_held(index):
    held = index.hold_prefix([A])
    assert index.forget([A, B, D]) == 1
    assert index.digests() == {A, C}
    index.release(held)


def test_a_place_that_was_not_filled_is_free_again(index):
    assert index.make_room() == [A]
    index.end_filling()
    assert index.make_room() == []
