"""Which connection makes room: the oldest waiting one of the client that has most of them."""

import random
from collections import Counter

from openinfer_server.http.connections import ConnectionTable


def test_oldest_of_the_client_with_most_waiting_goes_first():
    table = ConnectionTable(10)
    ended = []
    slots = {}
    for name in ("a1", "b1", "b2", "b3", "a2"):
        slots[name] = table.enter(name[0])
        slots[name].abort = lambda name=name: ended.append(name)
    slots["b1"].asks()
    slots["b1"].waits()  # it has just had a request, so b2 is older
    slots["a2"].asks()
    slots["a2"].is_spent()
    while table.evict():
        pass
    assert ended[0] == "b2"  # then both have two, and it is either's first
    assert sorted(ended) == ["a1", "a2", "b1", "b2", "b3"]
    assert ended.index("a2") < ended.index("a1")
    assert ended.index("b3") < ended.index("b1")
    assert (table.num_open, table.num_live, table.num_evicted) == (5, 0, 5)


def test_connection_with_a_request_is_never_told_to_end():
    table = ConnectionTable(2)
    asking, waiting = table.enter("a"), table.enter("a")
    asking.asks()
    assert table.evict()
    assert not table.evict()
    table.leave(waiting)
    assert (table.num_open, table.num_waiting) == (1, 0)
    asking.waits()
    assert table.evict()


def test_what_was_told_to_end_neither_waits_nor_counts_again():
    table = ConnectionTable(2)
    slot = table.enter("a")
    table.evict()
    slot.waits()
    assert (table.num_live, table.num_waiting) == (0, 0)
    table.leave(slot)
    table.leave(slot)
    slot.waits()
    assert (table.num_open, table.num_waiting) == (0, 0)


def test_books_agree_with_a_plain_list_in_random_use():
    draw = random.Random(0)
    table = ConnectionTable(1000)
    waiting, asking, closing = [], [], []
    for _ in range(5000):
        match draw.randrange(6):
            case 0 | 1:
                slot = table.enter(draw.choice("abcdefgh"))
                slot.abort = lambda slot=slot: closing.append(slot)
                waiting.append(slot)
            case 2 if waiting:
                asking.append(waiting.pop(draw.randrange(len(waiting))))
                asking[-1].asks()
            case 3 if asking:
                waiting.append(asking.pop(draw.randrange(len(asking))))
                waiting[-1].waits()
            case 4 if waiting or asking or closing:
                group = draw.choice([each for each in (waiting, asking, closing) if each])
                table.leave(group.pop(draw.randrange(len(group))))
            case 5:
                owners = Counter(slot.owner for slot in waiting)
                assert table.evict() == bool(waiting)
                if waiting:
                    evicted = closing[-1]
                    assert owners[evicted.owner] == max(owners.values())
                    assert evicted is next(slot for slot in waiting if slot.owner == evicted.owner)
                    waiting.remove(evicted)
        assert table.num_waiting == len(waiting)
        assert table.num_live == len(waiting) + len(asking)
        assert table.num_open == table.num_live + len(closing)
