"""A cache that owners share: the one that has most gives up what it has not used for longest."""

from openinfer_core.owned_cache import OwnedCache


def of_size(max_bytes: int) -> OwnedCache[int, str]:
    return OwnedCache(max_bytes, size_of=len)


def test_owner_with_most_makes_room_and_those_below_lose_nothing() -> None:
    cache = of_size(10)
    for key in range(3):
        assert cache.put("small", key, "x") == []
    made_room = [key for key in range(100, 120) for key in cache.put("large", key, "x")]
    assert made_room == [*range(100, 113)]
    assert [cache.get("small", key) for key in range(3)] == ["x", "x", "x"]
    assert (cache.held_bytes("small"), cache.held_bytes("large"), cache.num_owners, len(cache)) == (3, 7, 2, 10)


def test_what_was_used_last_goes_last() -> None:
    cache = of_size(3)
    for key in range(3):
        cache.put("a", key, "x")
    cache.touch("a", [0])
    assert cache.put("a", 3, "x") == [1]


def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = of_size(3)
    cache.put("a", 0, "x")
    assert cache.put("b", 1, "xxxx") == []
    assert (cache.get("a", 0), cache.get("b", 1), cache.num_owners) == ("x", None, 1)


def test_nothing_is_kept_of_an_owner_without_entries() -> None:
    cache = of_size(3)
    for number in range(100):
        cache.put(str(number), number, "xx")
        cache.drop(str(number), number)
    assert (cache.num_owners, cache.num_bytes, len(cache)) == (0, 0, 0)
