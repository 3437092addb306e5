"""Events of a pool with several block tables: each says which table it is of, and a hash is the same in all."""

from array import array

import msgspec

from openinfer_engine.kv_events.tables import TableEvents
from openinfer_kv_cache import Digest, StoredBlocks, table_digests

A, B = (Digest(bytes(15) + bytes([each])) for each in (1, 2))
IDS = array("I", [7, 8, 9, 10])


def stored(table, *digests, parent=None):
    parent = None if parent is None else table_digests([parent], table)[0]
    return StoredBlocks(parent, table_digests(digests, table), IDS[: 2 * len(digests)], None, None, table)


def encoded(events):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(events))


def test_events_name_their_table_its_kind_and_its_window():
    events = TableEvents((None, 1024), block_size_tokens=2)
    assert encoded(events.events(stored(0, A, B))) == [
        ["BlockStored", [1, 2], None, [7, 8, 9, 10], 2, None, "GPU", None, None, 0, "full_attention", None]
    ]
    assert encoded(events.events(stored(1, B, parent=A))) == [
        ["BlockStored", [2], 1, [7, 8], 2, None, "GPU", None, None, 1, "sliding_window", 1024]
    ]


def test_what_is_removed_is_told_by_table():
    events = TableEvents((None, 8, 8), block_size_tokens=2)
    for table in range(3):
        events.events(stored(table, A, B))
    removed = [table_digests([B], 1)[0], A, table_digests([A], 1)[0], table_digests([A], 2)[0]]
    assert encoded(events.events(removed)) == [
        ["BlockRemoved", [2, 1], "GPU", 1],
        ["BlockRemoved", [1], "GPU", 0],
        ["BlockRemoved", [1], "GPU", 2],
    ]


def test_a_block_that_no_router_was_told_of_takes_away_none_of_another_table():
    events = TableEvents((None, 8), block_size_tokens=2)
    events.events(stored(0, A))
    events.events(stored(1, A))
    windowed = table_digests([A], 1)
    assert len(events.events(windowed)) == 1
    assert events.events(windowed) == []  # another copy of it, found since, has gone too
    events.events(stored(1, A))
    assert encoded(events.events(None)) == [["AllBlocksCleared"]]
    assert events.events([A]) == []
