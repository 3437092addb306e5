import pytest

from openinfer_kv_cache import BlockStateError, CopyKind, Digest, KvConfigError, StateSlotPool, StateSlotStatus

A, B, C = (Digest(bytes([value]) * 16) for value in range(3))


@pytest.fixture
def pool():
    pool = StateSlotPool(4, max_snapshots=2)
    yield pool
    pool.check_integrity()


def kept(pool: StateSlotPool, slot: int, digest: Digest, num_tokens: int = 8) -> int:
    """Takes a snapshot at once and returns its slot."""
    copy = pool.begin_snapshot(slot, digest, num_tokens=num_tokens)
    assert copy is not None
    pool.complete(copy)
    return copy.target


def test_allocate_hands_out_every_slot_once(pool):
    assert [pool.allocate() for _ in range(5)] == [0, 1, 2, 3, None]
    assert pool.available_slots == 0


def test_leave_makes_the_slot_free(pool):
    slot = pool.allocate()
    pool.leave(slot)
    assert pool.state(slot) is StateSlotStatus.FREE
    assert pool.available_slots == 4


@pytest.mark.parametrize("verb", ["leave", "begin_snapshot", "begin_restore"])
@pytest.mark.parametrize("state", ["free", "filling", "sealed", "idle"])
def test_live_verbs_on_what_is_not_live_raise(pool, verb, state):
    live = pool.allocate()
    slot = 3
    if state != "free":
        copy = pool.begin_snapshot(live, A, num_tokens=8)
        slot = copy.target
    if state in ("sealed", "idle"):
        pool.complete(copy)
    if state == "sealed":
        pool.begin_restore(A, live)
    calls = {
        "leave": lambda: pool.leave(slot),
        "begin_snapshot": lambda: pool.begin_snapshot(slot, B, num_tokens=8),
        "begin_restore": lambda: pool.begin_restore(A, slot),
    }
    with pytest.raises(BlockStateError, match=f"slot {slot}: it is {state}, not live"):
        calls[verb]()
    assert pool.state(slot).name.lower() == state


def test_snapshot_is_found_only_after_its_copy_completed(pool):
    live = pool.allocate()
    copy = pool.begin_snapshot(live, A, num_tokens=8)
    assert (copy.kind, copy.source, copy.num_tokens) == (CopyKind.SNAPSHOT, live, 8)
    assert copy.target != live
    assert pool.find(A) is None
    pool.complete(copy)
    assert pool.find(A) == 8
    assert pool.state(copy.target) is StateSlotStatus.IDLE


def test_snapshot_of_a_boundary_that_is_kept_or_under_way_is_not_taken_again(pool):
    live, other = pool.allocate(), pool.allocate()
    copy = pool.begin_snapshot(live, A, num_tokens=8)
    assert pool.begin_snapshot(other, A, num_tokens=8) is None
    pool.complete(copy)
    assert pool.begin_snapshot(other, A, num_tokens=8) is None
    assert pool.num_snapshot_slots == pool.num_snapshots == 1


def test_snapshot_budget_evicts_the_least_recently_used(pool):
    live = pool.allocate()
    kept(pool, live, A)
    kept(pool, live, B)
    pool.complete(pool.begin_restore(A, live))
    kept(pool, live, C)
    assert (pool.find(A), pool.find(B), pool.find(C)) == (8, None, 8)
    assert pool.evicted_snapshots == 1
    assert pool.num_snapshot_slots == 2


def test_snapshot_without_budget_or_slots_returns_none_and_changes_nothing():
    pool = StateSlotPool(3, max_snapshots=1)
    live = pool.allocate()
    copy = pool.begin_snapshot(live, A, num_tokens=8)
    assert pool.begin_snapshot(live, B, num_tokens=16) is None
    pool.allocate()
    pool.cancel(copy)
    pool.allocate()
    assert pool.begin_snapshot(live, B, num_tokens=16) is None
    assert StateSlotPool(1, max_snapshots=0).allocate() == 0
    pool.check_integrity()


def test_allocate_evicts_a_snapshot_but_never_one_being_read(pool):
    live = pool.allocate()
    kept(pool, live, A)
    kept(pool, live, B)
    restore = pool.begin_restore(A, live)
    assert pool.allocate() is not None
    assert pool.allocate() is not None
    assert pool.find(B) is None
    assert pool.allocate() is None
    pool.complete(restore)
    assert pool.allocate() == restore.source
    assert pool.find(A) is None


def test_restore_unknown_boundary_returns_none(pool):
    assert pool.begin_restore(A, pool.allocate()) is None


def test_restore_carries_the_boundary_to_be_checked(pool):
    live = pool.allocate()
    snapshot = kept(pool, live, A, num_tokens=48)
    copy = pool.begin_restore(A, pool.allocate())
    assert (copy.kind, copy.source, copy.num_tokens) == (CopyKind.RESTORE, snapshot, 48)
    assert pool.state(snapshot) is StateSlotStatus.SEALED
    pool.complete(copy)
    assert pool.state(snapshot) is StateSlotStatus.IDLE


def test_restore_into_two_slots_at_once_shares_the_snapshot(pool):
    first, second = pool.allocate(), pool.allocate()
    snapshot = kept(pool, first, A)
    copies = [pool.begin_restore(A, slot) for slot in (first, second)]
    pool.complete(copies[0])
    assert pool.state(snapshot) is StateSlotStatus.SEALED
    pool.complete(copies[1])
    assert pool.state(snapshot) is StateSlotStatus.IDLE


def test_restore_into_a_slot_in_another_copy_raises(pool):
    live = pool.allocate()
    kept(pool, live, A)
    copy = pool.begin_snapshot(live, B, num_tokens=16)
    with pytest.raises(BlockStateError, match="another copy uses it"):
        pool.begin_restore(A, live)
    pool.complete(copy)
    assert pool.begin_restore(A, live) is not None


def test_snapshot_while_a_restore_is_under_way_raises(pool):
    live = pool.allocate()
    kept(pool, live, A)
    pool.begin_restore(A, live)
    with pytest.raises(BlockStateError, match="has not completed"):
        pool.begin_snapshot(live, B, num_tokens=16)


@pytest.mark.parametrize("ending", ["complete", "cancel"])
def test_leave_during_a_snapshot_keeps_the_source_until_the_copy_ended(pool, ending):
    live = pool.allocate()
    copy = pool.begin_snapshot(live, A, num_tokens=8)
    pool.leave(live)
    assert [pool.allocate() for _ in range(3)].count(None) == 1
    assert pool.state(live) is StateSlotStatus.LIVE
    getattr(pool, ending)(copy)
    assert pool.state(live) is StateSlotStatus.FREE
    assert pool.find(A) == (8 if ending == "complete" else None)


@pytest.mark.parametrize("ending", ["complete", "cancel"])
def test_leave_during_a_restore_keeps_the_target_until_the_copy_ended(pool, ending):
    live = pool.allocate()
    kept(pool, live, A)
    copy = pool.begin_restore(A, live)
    pool.leave(live)
    assert pool.state(live) is StateSlotStatus.LIVE
    getattr(pool, ending)(copy)
    assert pool.state(live) is StateSlotStatus.FREE
    assert pool.find(A) == 8


def test_leave_twice_raises(pool):
    live = pool.allocate()
    copy = pool.begin_snapshot(live, A, num_tokens=8)
    pool.leave(live)
    with pytest.raises(BlockStateError, match="its sequence has left"):
        pool.leave(live)
    pool.complete(copy)
    with pytest.raises(BlockStateError, match="it is free, not live"):
        pool.leave(live)


def test_cancel_a_snapshot_frees_its_slot_and_budget(pool):
    copy = pool.begin_snapshot(pool.allocate(), A, num_tokens=8)
    pool.cancel(copy)
    assert pool.state(copy.target) is StateSlotStatus.FREE
    assert pool.num_snapshot_slots == 0
    assert pool.find(A) is None


@pytest.mark.parametrize("first", ["complete", "cancel"])
@pytest.mark.parametrize("second", ["complete", "cancel"])
def test_copy_ends_once(pool, first, second):
    copy = pool.begin_snapshot(pool.allocate(), A, num_tokens=8)
    getattr(pool, first)(copy)
    with pytest.raises(BlockStateError, match="ended already"):
        getattr(pool, second)(copy)


def test_load_fills_a_snapshot_that_is_found_once_it_completed(pool):
    copy = pool.begin_load(A, num_tokens=8)
    assert (copy.kind, copy.source, copy.num_tokens) == (CopyKind.LOAD, copy.target, 8)
    assert pool.state(copy.target) is StateSlotStatus.FILLING
    assert pool.begin_load(A, num_tokens=8) is None
    assert pool.begin_snapshot(pool.allocate(), A, num_tokens=8) is None
    assert pool.find(A) is None
    pool.complete(copy)
    assert pool.find(A) == 8
    assert pool.begin_load(A, num_tokens=8) is None


def test_load_that_is_cancelled_leaves_a_free_slot(pool):
    copy = pool.begin_load(A, num_tokens=8)
    pool.cancel(copy)
    assert pool.state(copy.target) is StateSlotStatus.FREE
    assert pool.num_snapshot_slots == 0


def test_load_takes_the_place_of_the_oldest_snapshot_within_the_budget(pool):
    live = pool.allocate()
    kept(pool, live, A)
    kept(pool, live, B)
    copy = pool.begin_load(C, num_tokens=8)
    assert (pool.find(A), pool.find(B)) == (None, 8)
    hold = pool.begin_hold(B)
    assert pool.begin_load(A, num_tokens=8) is None
    pool.complete(hold)
    pool.complete(copy)


def test_held_snapshot_is_not_evicted_until_the_hold_is_over(pool):
    live = pool.allocate()
    kept(pool, live, A)
    first, second = pool.begin_hold(A), pool.begin_hold(A)
    assert first.kind is CopyKind.HOLD
    assert pool.begin_hold(B) is None
    kept(pool, live, B)
    kept(pool, live, C)
    assert (pool.find(A), pool.find(B)) == (8, None)
    pool.complete(first)
    assert pool.state(second.source) is StateSlotStatus.SEALED
    pool.cancel(second)
    kept(pool, live, B)
    assert (pool.find(A), pool.find(C)) == (8, None)


def test_clear_drops_snapshots_and_distrusts_live_states(pool):
    live = pool.allocate()
    kept(pool, live, A)
    assert pool.clear() == 1
    assert pool.find(A) is None
    assert pool.begin_snapshot(live, B, num_tokens=16) is None
    other = pool.allocate()
    kept(pool, other, A)
    pool.complete(pool.begin_restore(A, live))
    assert pool.begin_snapshot(live, B, num_tokens=16) is not None


def test_clear_slot_taken_anew_is_trusted(pool):
    live = pool.allocate()
    pool.clear()
    pool.leave(live)
    assert pool.allocate() == live
    assert pool.begin_snapshot(live, B, num_tokens=16) is not None


def test_clear_with_a_copy_in_flight_raises_and_changes_nothing(pool):
    live = pool.allocate()
    kept(pool, live, A)
    pool.begin_snapshot(live, B, num_tokens=16)
    with pytest.raises(BlockStateError, match="1 copies have not completed"):
        pool.clear()
    assert pool.find(A) == 8


def test_restart_drops_snapshots_and_trusts_slots_that_sequences_begin_anew_in(pool):
    live = pool.allocate()
    kept(pool, live, A)
    pool.clear()
    pool.restart()
    assert pool.find(A) is None
    assert pool.begin_snapshot(live, B, num_tokens=16) is not None
    with pytest.raises(BlockStateError, match="1 copies"):
        pool.restart()


@pytest.mark.parametrize(("num_state_slots", "max_snapshots"), [(0, 0), (2, 2), (2, -1), (2**31, 0)])
def test_construction_out_of_range_is_refused(num_state_slots, max_snapshots):
    with pytest.raises(KvConfigError):
        StateSlotPool(num_state_slots, max_snapshots=max_snapshots)
