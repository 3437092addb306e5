"""What a server knows of a replica is what the replica has, however messages are lost, repeated and late."""

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_ray.kv_events.stream import KvEventStream
from openinfer_ray.kv_events.told_prefixes import ToldPrefixes

MEDIA = ("GPU", "CPU", "STORAGE")


def digest(number: int) -> bytes:
    return bytes(8) + number.to_bytes(8, "big")


def stored(*hashes: int, medium: str = "GPU", more: Sequence[object] = ()) -> list[object]:
    keys = [("pirate", "salt"), *[("pirate",)] * (len(hashes) - 1)] if hashes and hashes[0] % 2 else None
    return ["BlockStored", list(hashes), 7, [1] * 4 * len(hashes), 4, None, medium, "pirate", keys, *more]


def removed(*hashes: int, medium: str = "GPU", more: Sequence[object] = ()) -> list[object]:
    return ["BlockRemoved", list(hashes), medium, *more]


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stream_of(*batches: bytes, num_blocks: int = 100) -> tuple[KvEventStream, ToldPrefixes]:
    held = ToldPrefixes(num_blocks)
    stream = KvEventStream(held)
    stream.replayed(enumerate(batches))
    return stream, held


def test_a_prefix_counts_as_far_as_each_block_is_held() -> None:
    _, held = stream_of(batch(stored(1, 2, 3)), batch(removed(2)))
    assert held.count([digest(1), digest(2), digest(3)]) == 1
    assert held.count([digest(3)]) == 1
    assert held.count([]) == 0


def test_a_block_counts_while_any_medium_holds_it() -> None:
    _, held = stream_of(batch(stored(1)), batch(stored(1, medium="CPU")), batch(removed(1)))
    assert held.count([digest(1)]) == 1
    held.removed([1], "CPU")
    assert held.count([digest(1)]) == 0
    held.stored([2], "TAPE")
    assert held.count([digest(2)]) == 0


def test_a_prompt_counts_from_when_it_was_sent_until_its_replica_tells_of_it() -> None:
    stream, held = stream_of()
    held.note([digest(1), digest(2)])
    assert held.count([digest(1), digest(2)]) == 2
    assert stream.hear(0, batch(stored(1, 2)))
    assert stream.hear(1, batch(removed(1, 2)))
    assert held.count([digest(1), digest(2)]) == 0


def test_prompts_that_were_never_computed_are_forgotten() -> None:
    _, held = stream_of(num_blocks=2)
    held.note([digest(1), digest(2)])
    held.note([digest(3), digest(4)])
    assert held.count([digest(1)]) == 0
    assert held.count([digest(3), digest(4)]) == 2


def test_other_tables_than_the_first_do_not_count() -> None:
    _, held = stream_of(
        batch(stored(1, 2, more=(0, "full_attention", None)), stored(3, more=(1, "sliding_window", 8))),
        batch(removed(1, more=(1,)), removed(2, more=(0,))),
    )
    assert held.count([digest(1), digest(2)]) == 1
    assert held.count([digest(3)]) == 0


def test_a_cleared_cache_and_a_message_that_cannot_be_read_leave_nothing() -> None:
    stream, held = stream_of(batch(stored(1)), batch(["AllBlocksCleared"]))
    assert held.count([digest(1)]) == 0
    assert stream.hear(2, batch(stored(1)))
    assert stream.hear(3, b"\xc1")
    assert held.num_told == 0
    assert stream.next_sequence == 4


def test_a_gap_is_refused_until_it_is_filled() -> None:
    stream, held = stream_of(batch(stored(1)))
    assert not stream.hear(2, batch(stored(3)))
    stream.replayed([(1, batch(stored(2)))])
    assert stream.hear(2, batch(stored(3)))
    assert stream.hear(0, batch(removed(1)))  # heard before
    assert held.count([digest(1), digest(2), digest(3)]) == 3


def test_a_gap_that_cannot_be_filled_makes_what_was_known_void() -> None:
    stream, held = stream_of(batch(stored(1)))
    stream.replayed([(5, batch(stored(2)))])
    assert held.count([digest(1)]) == 0
    assert held.count([digest(2)]) == 1
    assert stream.next_sequence == 6


Change = tuple[bool, int, str]  # stored or removed, block, medium


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from(MEDIA)), max_size=4), max_size=20
    ),
    fates=st.lists(st.sampled_from(["heard", "lost", "twice", "lost, replay kept short"]), min_size=20, max_size=20),
)
def test_after_the_last_message_a_server_knows_no_block_that_is_gone(
    steps: list[list[Change]], fates: list[str]
) -> None:
    stream, held = stream_of()
    truth: dict[int, set[str]] = {}
    messages: list[bytes] = []
    was_cut = False
    for number, changes in enumerate([*steps, []]):
        events = []
        for is_stored, block, medium in changes:
            media = truth.setdefault(block, set())
            (media.add if is_stored else media.discard)(medium)
            events.append((stored if is_stored else removed)(block, medium=medium))
        messages.append(batch(*events))
        fate = "heard" if number == len(steps) else fates[number]
        if fate.startswith("lost"):
            continue
        for _ in range(2 if fate == "twice" else 1):
            if not stream.hear(number, messages[number]):
                kept = number if "lost, replay kept short" in fates[:number] else stream.next_sequence
                was_cut = was_cut or kept > stream.next_sequence
                stream.replayed(enumerate(messages[kept:], kept))
    known = {block for block in range(10) if held.count([digest(block)])}
    there = {block for block, media in truth.items() if media}
    assert known <= there
    assert was_cut or known == there
