import threading

import pytest

from openinfer_kv_cache import KvTierError, LayoutMismatchError, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, check_completed, empty, ended, filled, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import FaultInjector, InjectedFault
from openinfer_kv_offload import (
    DiskTier,
    DiskTierOptions,
    HostTier,
    HostTierOptions,
    Promotion,
    StackOptions,
    StoreAccess,
    TierConfigError,
    TierStack,
    WriteMode,
    settings,
)
from openinfer_kv_offload.stack.write_behind import WriteBehindWorker

LAYOUT = kit_layout()


@pytest.fixture
def open_stack(tmp_path):
    stacks = []

    def opened(*, host_blocks=4, faults=None, layout=LAYOUT, **options):
        wrap = {} if faults is None else {"wrap_medium": faults.wrap}
        host = HostTier(layout, HostTierOptions(capacity_bytes=host_blocks * 3904), **wrap)
        disk = DiskTier(LAYOUT, DiskTierOptions(folder=str(tmp_path / "store"), budget_bytes=2**20))
        stacks.append((TierStack([host, disk], StackOptions(**options)), host, disk))
        return stacks[-1]

    yield opened
    for stack, host, disk in stacks:
        host.check_integrity()
        disk.check_integrity()
        stack.close()


def stored(tier):
    return tier.counters()[0].stored_blocks


def test_write_through_stores_in_every_tier(open_stack):
    stack, host, disk = open_stack()
    assert save(stack, chain(1, 3)) is TransferState.COMPLETED
    assert (stored(host), stored(disk)) == (3, 3)
    assert [each.tier for each in stack.counters()] == ["host", "disk"]


def test_write_back_stores_below_only_what_is_evicted(open_stack):
    stack, host, disk = open_stack(write=WriteMode.BACK)
    save(stack, chain(1, 4))
    assert (stored(host), stored(disk)) == (4, 0)
    save(stack, chain(2, 2))
    assert (stored(host), stored(disk)) == (4, 2)
    assert load(stack, chain(1, 4)) == 4
    assert load(stack, chain(2, 2)) == 2


def test_flush_hands_everything_down_so_that_a_restart_finds_it(open_stack):
    stack, _, _ = open_stack(write=WriteMode.BACK)
    save(stack, chain(1, 3))
    stack.flush()
    stack.close()
    again, host, _ = open_stack(write=WriteMode.BACK)
    assert load(again, chain(1, 3)) == 3
    assert stored(host) == 3


def test_a_chain_is_put_together_from_both_tiers(open_stack):
    stack, host, disk = open_stack(promotion=Promotion.NEVER)
    digests = chain(1, 5)
    save(host, digests[1:2])
    save(host, digests[3:4])
    save(disk, digests[0:1])
    save(disk, digests[2:3])
    assert load(stack, digests) == 4
    assert (host.counters()[0].loaded_blocks, disk.counters()[0].loaded_blocks) == (2, 2)


@pytest.mark.parametrize(("promotion", "in_host"), [(Promotion.ON_LOAD, 3), (Promotion.NEVER, 0)])
def test_what_was_loaded_from_below_is_promoted_if_the_user_wants_it(promotion, in_host, open_stack):
    stack, host, disk = open_stack(promotion=promotion)
    save(disk, chain(1, 3))
    assert load(stack, chain(1, 3)) == 3
    assert stored(host) == in_host
    assert load(stack, chain(1, 3)) == 3
    assert disk.counters()[0].loaded_blocks == 6 - in_host


def test_prefetched_blocks_are_loaded_from_the_first_tier(open_stack):
    stack, host, disk = open_stack(host_blocks=8)
    save(disk, chain(1, 5))
    save(host, chain(1, 2))
    held, transfer = stack.prefetch(chain(1, 7))
    assert (held, transfer.num_blocks) == (5, 3)
    assert ended(transfer) is TransferState.COMPLETED
    assert stored(host) == 5
    assert load(stack, chain(1, 5)) == 5
    assert (host.counters()[0].loaded_blocks, disk.counters()[0].loaded_blocks) == (5, 3)
    assert stack.prefetch(chain(1, 7)) == (5, None)
    assert stack.prefetch(chain(2, 7)) == (0, None)


@pytest.mark.parametrize("options", [{"promotion": Promotion.NEVER}, {"host_blocks": 3}])
def test_nothing_is_prefetched_without_promotion_or_room(options, open_stack):
    stack, host, disk = open_stack(**options)
    save(disk, chain(1, 3))
    assert stack.prefetch_blocks == 0
    assert stack.prefetch(chain(1, 3)) == (3, None)
    assert (stored(host), disk.counters()[0].loaded_blocks) == (0, 0)


def test_a_quarter_of_the_first_tier_may_be_prefetched(open_stack):
    stack, host, _ = open_stack(host_blocks=8)
    assert (host.num_blocks, stack.prefetch_blocks) == (8, 2)


def test_a_prefetch_that_fails_or_is_cancelled_costs_nothing_but_itself(open_stack):
    faults = FaultInjector()
    stack, host, disk = open_stack(host_blocks=8, faults=faults)
    save(disk, chain(1, 3))
    faults.on_next_writes(InjectedFault.ERROR)
    ended(stack.prefetch(chain(1, 3)).transfer)
    assert stored(host) < 3
    gate = faults.hold_next_write()
    _, transfer = stack.prefetch(chain(1, 3))
    while transfer.completed_blocks < 3:
        transfer.wait(0.01)
    transfer.poll()
    gate.wait_entered()
    transfer.cancel()
    assert transfer.poll() is TransferState.PENDING
    gate.release()
    ended(transfer)
    assert load(stack, chain(1, 3)) == 3


def test_a_load_is_pending_until_its_promotion_no_longer_reads_the_blocks(open_stack):
    faults = FaultInjector()
    stack, host, disk = open_stack(faults=faults)
    save(disk, chain(1, 1))
    gate = faults.hold_next_write()
    blocks = empty(1, LAYOUT)
    transfer = stack.load(stack.find(chain(1, 1)), blocks)
    while transfer.completed_blocks == 0 or stored(host):
        transfer.wait(0.01)
    transfer.poll()
    gate.wait_entered()
    assert transfer.poll() is TransferState.PENDING
    gate.release()
    assert ended(transfer) is TransferState.COMPLETED
    check_completed(transfer, chain(1, 1), blocks, LAYOUT)
    assert stored(host) == 1


def test_a_corrupt_upper_copy_is_dropped_and_the_lower_one_serves_the_next_find(open_stack):
    faults = FaultInjector()
    stack, host, _ = open_stack(faults=faults)
    faults.on_next_writes(InjectedFault.BIT_FLIP)
    save(stack, chain(1, 2))
    transfer = stack.load(stack.find(chain(1, 2)), empty(2, LAYOUT))
    assert ended(transfer) is TransferState.PARTIAL
    assert transfer.failure is TierFailure.CORRUPT
    assert load(stack, chain(1, 2)) == 2
    assert host.counters()[0].corrupt_blocks == 1


def test_a_save_that_one_tier_refuses_is_short_and_kept_by_the_other(open_stack):
    faults = FaultInjector()
    stack, host, disk = open_stack(faults=faults)
    faults.on_next_writes(InjectedFault.FULL)
    transfer = stack.save(chain(1, 2), filled(chain(1, 2), LAYOUT))
    assert ended(transfer) is TransferState.PARTIAL
    assert transfer.failure is TierFailure.FULL
    assert transfer.completed_blocks == 2
    assert (stored(host), stored(disk)) == (0, 2)


def test_stacks_that_cannot_work_are_refused(tmp_path):
    host = HostTier(LAYOUT, HostTierOptions(capacity_bytes=10_000))
    other = HostTier(kit_layout(model_tag="other"), HostTierOptions(capacity_bytes=10_000), name="other")
    disk = DiskTier(LAYOUT, DiskTierOptions(folder=str(tmp_path / "store"), budget_bytes=2**20))
    with pytest.raises(TierConfigError, match="two tiers or more"):
        TierStack([host])
    with pytest.raises(TierConfigError, match="different names"):
        TierStack([host, host])
    with pytest.raises(LayoutMismatchError, match="model_tag"):
        TierStack([host, other])
    with pytest.raises(TierConfigError, match="disk does not; use write-through"):
        TierStack([disk, host], StackOptions(write=WriteMode.BACK))
    for tier in (host, other, disk):
        tier.close()


def test_a_disk_that_another_process_fills_is_read_and_not_written(tmp_path):
    options = {"folder": str(tmp_path / "store"), "budget_bytes": 2**20}
    writer = DiskTier(LAYOUT, DiskTierOptions(**options))
    save(writer, chain(1, 2))
    readers = [DiskTier(LAYOUT, DiskTierOptions(**options, access=StoreAccess.READ), name=f"disk{i}") for i in range(2)]
    host = HostTier(LAYOUT, HostTierOptions(capacity_bytes=4 * 3904))
    with pytest.raises(TierConfigError, match="needs both to accept saves"):
        TierStack([host, readers[0]], StackOptions(write=WriteMode.BACK))
    stack = TierStack([host, readers[0]])
    assert load(stack, chain(1, 2)) == 2
    assert save(stack, chain(2, 1)) is TransferState.COMPLETED
    assert stored(host) == 3
    only_readers = TierStack(readers)
    with pytest.raises(KvTierError, match="accepts saves"):
        only_readers.save(chain(3, 1), filled(chain(3, 1), LAYOUT))
    for tier in (stack, only_readers, writer):
        tier.close()


def test_misuse_in_a_later_part_leaves_nothing_under_way(open_stack):
    stack, host, disk = open_stack(promotion=Promotion.NEVER)
    save(host, chain(1, 1))
    save(disk, chain(1, 2)[1:])
    right, wrong = empty(1, LAYOUT)[0], empty(1, LAYOUT)[0][1:]
    with pytest.raises(KvTierError, match=r"blocks\[0\] has 3899 bytes"):
        stack.load(stack.find(chain(1, 2)), [right, wrong])
    host.check_integrity()
    assert load(stack, chain(1, 2)) == 2


def test_write_behind_waits_for_the_first_tier_alone_and_hands_down_all_the_same(open_stack):
    stack, host, disk = open_stack(write=WriteMode.BEHIND, host_blocks=8)
    assert save(stack, chain(1, 6)) is TransferState.COMPLETED
    assert stored(host) == 6
    stack.flush()
    assert stored(disk) == 6
    assert load(disk, chain(1, 6)) == 6
    assert host.counters()[0].hit_blocks == 0


def test_write_behind_does_not_hand_down_what_is_corrupt_or_gone():
    faults = FaultInjector()
    host = HostTier(LAYOUT, HostTierOptions(capacity_bytes=4 * 3904), wrap_medium=faults.wrap)
    lower = HostTier(LAYOUT, HostTierOptions(capacity_bytes=16 * 3904), name="lower")
    worker = WriteBehindWorker(host, [lower], timeout_s=10.0, num_threads=1)
    save(host, chain(1, 3))
    faults.on_next_reads(InjectedFault.BIT_FLIP)
    worker.enqueue([*chain(1, 3), *chain(9, 1)])
    assert worker.flush(30)
    assert stored(lower) == 2
    assert host.counters()[0].corrupt_blocks == 1
    assert worker.close(1.0, 30.0)
    host.close()
    lower.close()


def test_write_behind_of_a_closed_stack_is_on_the_disk(tmp_path):
    setting = f"host=64KiB;disk={tmp_path},1MiB"
    stack = settings.open_stack(LAYOUT, setting)
    save(stack, chain(1, 6))
    stack.close()
    again = settings.open_stack(LAYOUT, setting)
    assert load(again, chain(1, 6)) == 6
    again.close()


def test_write_behind_needs_a_first_tier_that_can_be_copied_from(tmp_path):
    tiers = [
        DiskTier(LAYOUT, DiskTierOptions(folder=str(tmp_path), budget_bytes=2**20)),
        HostTier(LAYOUT, HostTierOptions(capacity_bytes=2**16)),
    ]
    tiers[0].accepts_saves = False
    with pytest.raises(TierConfigError, match="cannot be copied from"):
        TierStack(tiers, StackOptions(write=WriteMode.BEHIND))
    for tier in tiers:
        tier.close()


class PendingSave:
    """Goes on until it is cancelled."""

    num_blocks, completed_blocks, failure = 1, 0, None

    def __init__(self):
        self.cancelled = threading.Event()

    def cancel(self):
        self.cancelled.set()

    def wait(self, timeout_s=None):
        assert self.cancelled.wait(30)


class SlowTier:
    """A tier below whose saves take for ever."""

    name, layout, accepts_saves = "slow", LAYOUT, True

    def __init__(self):
        self.saves = []
        self.begun = threading.Event()

    def save(self, digests, blocks, *, timeout_s=None):
        self.saves.append(PendingSave())
        self.begun.set()
        return self.saves[-1]


def test_write_behind_that_is_closed_gives_up_what_is_under_way_and_asks_for_no_more():
    host = HostTier(LAYOUT, HostTierOptions(capacity_bytes=64 * 3904))
    slow = SlowTier()
    worker = WriteBehindWorker(host, [slow, slow], timeout_s=1e6, num_threads=1)
    save(host, chain(1, 40))
    worker.enqueue(chain(1, 40))
    assert slow.begun.wait(30)
    assert worker.close(0.0, 30.0)
    assert len(slow.saves) == 1
    host.close()


class ClosedLate:
    """A tier of a plug-in whose `close` waits until the test has looked."""

    def __init__(self, tier):
        self._tier = tier
        self.may_end = threading.Event()
        self.has_ended = threading.Event()

    def __getattr__(self, name):
        if name == "close_within":
            raise AttributeError(name)
        return getattr(self._tier, name)

    def close(self):
        assert self.may_end.wait(30)
        self._tier.close()
        self.has_ended.set()


def test_a_stack_ends_without_a_tier_that_is_told_no_time_and_closes_those_below():
    tiers = [HostTier(LAYOUT, HostTierOptions(capacity_bytes=4 * 3904), name=name) for name in ("first", "second")]
    late = ClosedLate(tiers[0])
    stack = TierStack([late, tiers[1]])
    assert not stack.close_within(0.0)
    assert tiers[1].close_within(30.0)
    assert ended(tiers[1].save(chain(1, 1), filled(chain(1, 1), LAYOUT))) is TransferState.PARTIAL
    assert not late.has_ended.is_set()
    late.may_end.set()
    assert late.has_ended.wait(30)


class RaisingTier:
    """A third-party tier whose transfers cannot be begun."""

    def __init__(self, tier):
        self._tier = tier

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def load(self, hit, blocks, *, timeout_s=None):
        raise RuntimeError("injected")

    def save(self, digests, blocks, *, timeout_s=None):
        raise RuntimeError("injected")


@pytest.fixture
def stack_with_a_raising_tier():
    opened = []

    def make(*, is_first, **options):
        raising, sound = (
            HostTier(LAYOUT, HostTierOptions(capacity_bytes=4 * 3904), name=name) for name in ("raising", "sound")
        )
        tiers = [RaisingTier(raising), sound] if is_first else [sound, RaisingTier(raising)]
        opened.append(TierStack(tiers, StackOptions(**options)))
        return opened[-1], raising, sound

    yield make
    for stack in opened:
        stack.close()


class BegunTransfer:
    """Pending until it was cancelled and waited for."""

    def __init__(self):
        self.calls = []

    def cancel(self):
        self.calls.append("cancel")

    def wait(self, timeout_s=None):
        self.calls.append("wait")


def test_nothing_of_a_save_goes_on_when_a_tier_raises(stack_with_a_raising_tier, monkeypatch):
    stack, _, sound = stack_with_a_raising_tier(is_first=False, write=WriteMode.THROUGH)
    begun = BegunTransfer()
    monkeypatch.setattr(sound, "save", lambda *_, **__: begun)
    with pytest.raises(RuntimeError, match="injected"):
        stack.save(chain(1, 2), filled(chain(1, 2), LAYOUT))
    assert begun.calls == ["cancel", "wait"]


def test_nothing_of_a_load_goes_on_when_a_tier_raises(stack_with_a_raising_tier, monkeypatch):
    stack, raising, sound = stack_with_a_raising_tier(is_first=False)
    digests = chain(1, 2)
    save(sound, digests[:1])
    save(raising, digests[1:])
    begun = BegunTransfer()
    monkeypatch.setattr(sound, "load", lambda *_, **__: begun)
    with pytest.raises(RuntimeError, match="injected"):
        stack.load(stack.find(digests), empty(2, LAYOUT))
    assert begun.calls == ["cancel", "wait"]


def test_a_load_lands_though_the_tier_above_raises_when_it_is_promoted(stack_with_a_raising_tier):
    stack, _, sound = stack_with_a_raising_tier(is_first=True)
    save(sound, chain(1, 2))
    assert load(stack, chain(1, 2)) == 2
