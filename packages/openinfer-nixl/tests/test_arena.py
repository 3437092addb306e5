"""Objects of one memory: leases keep them where they are."""

import ctypes

import pytest

from openinfer_kv_cache import TierFailure
from openinfer_kv_offload.transfer.failures import BlockFault
from openinfer_nixl.arena import Arena


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def arena(num_slots: int = 2, *, clock: Clock | None = None) -> Arena:
    return Arena(num_slots, 8, num_landings=1, lease_s=30.0, clock=clock or Clock())


def test_an_object_is_at_the_address_of_its_lease() -> None:
    found = arena()
    found.put("a", b"12345")
    lease = found.lease("a")
    assert lease is not None
    assert ctypes.string_at(lease.address, lease.num_bytes) == b"12345"
    assert found.address <= lease.address < lease.address + lease.num_bytes <= found.address + found.num_bytes
    assert found.landings[0] not in range(found.address, found.address + 2 * 8)


def test_a_new_object_of_the_same_key_does_not_touch_what_is_leased() -> None:
    found = arena()
    found.put("a", b"old")
    lease = found.lease("a")
    assert lease is not None
    found.put("a", b"new")
    assert ctypes.string_at(lease.address, 3) == b"old"
    assert found.get("a") == b"new"
    with pytest.raises(BlockFault) as fault:
        found.put("b", b"x")
    assert fault.value.failure is TierFailure.BUSY
    found.release([lease.lease_id])
    found.put("b", b"x")
    assert found.keys("") == ("a", "b")


def test_a_deleted_object_keeps_its_place_until_its_lease_ends_or_is_late() -> None:
    clock = Clock()
    found = arena(1, clock=clock)
    found.put("a", b"old")
    assert found.lease("a") is not None
    found.delete(["a", "b"])
    assert found.get("a") is None
    assert not found.has("a")
    with pytest.raises(BlockFault):
        found.put("b", b"x")
    clock.now_s = 30.0
    found.put("b", b"x")
    assert found.get("b") == b"x"


def test_leases_are_given_back_once() -> None:
    found = arena(1)
    found.put("a", b"x")
    one, two = found.lease("a"), found.lease("a")
    assert one is not None
    assert two is not None
    found.delete(["a"])
    found.release([one.lease_id, one.lease_id])
    with pytest.raises(BlockFault):
        found.put("b", b"x")
    found.release([two.lease_id])
    found.put("b", b"x")
    with pytest.raises(BlockFault):
        found.put("c", b"x")


def test_an_object_that_is_too_large_is_refused() -> None:
    with pytest.raises(BlockFault):
        arena().put("a", bytes(9))
