"""The conformance kit of `KvTier`: call `check_tier` from a test of your tier, and run `tier_machine`.

Every rule opens a tier over a new `TierCase`, disturbs it with the fault injector, and compares bytes.
"""

from collections.abc import Callable

from openinfer_kv_cache.errors import KvTierError, LayoutMismatchError
from openinfer_kv_cache.testing.device_blocks import FakeDeviceBlock
from openinfer_kv_cache.testing.tier_cases import (
    CANARY,
    TierCase,
    chain,
    check_completed,
    content,
    empty,
    ended,
    filled,
    kit_layout,
    load,
    save,
)
from openinfer_kv_cache.testing.tier_faults import FaultInjector, FaultyMedium, Gate, InjectedFault
from openinfer_kv_cache.tiers.contract import KvTier, TierFailure, Transfer, TransferState
from openinfer_kv_cache.tiers.traits import DeviceTier, Medium

__all__ = ["FaultInjector", "FaultyMedium", "Gate", "InjectedFault", "Medium", "TierCase", "check_tier"]

_MEDIUM_FAILURES = {
    InjectedFault.ERROR: TierFailure.IO_ERROR,
    InjectedFault.FULL: TierFailure.FULL,
    InjectedFault.GONE: TierFailure.GONE,
}


def check_tier(make_case: Callable[[], TierCase]) -> None:
    """Runs every rule in an empty place that `make_case` makes each time; `AssertionError` says which is broken."""
    for rule in (*_RULES, *(_PERSISTENT_RULES if make_case().is_persistent else ())):
        rule(make_case())


def _opened(case: TierCase) -> tuple[KvTier, FaultInjector]:
    faults = FaultInjector()
    return case.open(kit_layout(), faults), faults


def _gives_back_what_was_saved(case: TierCase) -> None:
    tier, _ = _opened(case)
    digests = chain(1, 6)
    assert load(tier, digests) == 0, "an empty tier found something"
    assert save(tier, digests[:4]) is TransferState.COMPLETED, "a save without a fault ended partial"
    assert save(tier, digests[:4]) is TransferState.COMPLETED, "saving again what is there ended partial"
    assert load(tier, digests) == 4, "blocks that were saved were not found"
    stored = max(each.stored_blocks for each in tier.counters())
    assert stored == 4, f"4 different blocks were saved and {stored} are stored"
    tier.close()


def _moves_blocks_of_a_device(case: TierCase) -> None:
    tier, faults = _opened(case)
    if isinstance(tier, DeviceTier) and tier.takes_device_blocks:
        digests = chain(7, 4)
        right = [content(digest, tier.layout) for digest in digests]
        saved = ended(tier.save(digests, [FakeDeviceBlock(each) for each in right]))
        assert saved is TransferState.COMPLETED, "a save of a device's blocks ended partial"
        blocks = [FakeDeviceBlock(bytes(tier.layout.block_bytes)) for _ in digests]
        assert ended(tier.load(tier.find(digests), blocks)) is TransferState.COMPLETED, (
            "a load to a device ended partial"
        )
        assert [bytes(block.memory) for block in blocks] == right, "WRONG KV on a device"
        assert load(tier, digests) == 4, "blocks of a device did not come back to this machine's memory"
        for memory in tier.pinnable_memory():
            assert not memory.readonly, "a device cannot copy into memory that is read-only"
    faults.clear()
    tier.close()


def _finds_the_longest_beginning_only(case: TierCase) -> None:
    tier, _ = _opened(case)
    digests = chain(2, 5)
    save(tier, [digests[0], digests[1], digests[3]])
    assert load(tier, digests) == 2, "find must stop at the first block that is not there"
    assert load(tier, digests[2:]) == 0, "find must not skip a missing first block"
    assert load(tier, []) == 0, "an empty chain has no blocks"
    tier.close()


def _refuses_misuse(case: TierCase) -> None:
    tier, _ = _opened(case)
    digests = chain(3, 2)
    save(tier, digests)
    right = empty(2, tier.layout)
    wrong = [[right[0]], [right[0], right[1][1:]], [right[0], right[1].toreadonly()]]
    for blocks in wrong:
        hit = tier.find(digests)
        _assert_refused(lambda hit=hit, blocks=blocks: tier.load(hit, blocks), "memory that is not its blocks")
        hit.close()
    _assert_refused(lambda: tier.save(digests, [right[0]]), "one block for two digests")
    hit = tier.find(digests)
    ended(tier.load(hit, right))
    _assert_refused(lambda: tier.load(hit, right), "a hit that was loaded already")
    hit.close()
    closed = tier.find(digests)
    closed.close()
    closed.close()
    _assert_refused(lambda: tier.load(closed, right), "a closed hit")
    tier.close()


def _assert_refused(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except KvTierError:
        return
    raise AssertionError(f"the tier took {what}; it must raise KvTierError")


def _reports_a_failing_medium(case: TierCase) -> None:
    tier, faults = _opened(case)
    for seed, (kind, expected) in enumerate(_MEDIUM_FAILURES.items()):
        digests = chain(10 + seed, 3)
        faults.on_next_writes(kind)
        transfer = tier.save(digests, filled(digests, tier.layout))
        assert ended(transfer) is TransferState.PARTIAL, f"{kind} on write went unnoticed"
        assert transfer.failure is expected, f"{kind} on write was reported as {transfer.failure}"
        faults.clear()
        load(tier, digests)
        assert save(tier, digests) is TransferState.COMPLETED, f"the tier did not recover from {kind}"
        assert load(tier, digests) == 3, f"blocks saved after {kind} were not found"
    failures = {reason: count for each in tier.counters() for reason, count in each.failures.items() if count}
    assert set(_MEDIUM_FAILURES.values()) <= set(failures), f"failures were not counted by reason: {failures}"
    tier.close()


def _reports_a_medium_that_fails_to_read(case: TierCase) -> None:
    tier, faults = _opened(case)
    digests = chain(20, 3)
    save(tier, digests)
    for kind in (InjectedFault.ERROR, InjectedFault.GONE):
        faults.on_next_reads(kind)
        blocks = empty(3, tier.layout)
        transfer = tier.load(tier.find(digests), blocks)
        assert ended(transfer) is TransferState.PARTIAL, f"{kind} on read went unnoticed"
        assert transfer.failure is _MEDIUM_FAILURES[kind], f"{kind} on read was reported as {transfer.failure}"
        check_completed(transfer, digests, blocks, tier.layout)
    tier.close()


def _never_gives_wrong_bytes(case: TierCase) -> None:
    tier, faults = _opened(case)
    for seed, kind in enumerate((InjectedFault.BIT_FLIP, InjectedFault.TORN_WRITE)):
        digests = chain(30 + seed, 3)
        faults.on_next_writes(kind)
        save(tier, digests)
        faults.clear()
        blocks = empty(3, tier.layout)
        transfer = tier.load(tier.find(digests), blocks)
        ended(transfer)
        check_completed(transfer, digests, blocks, tier.layout)
        assert transfer.completed_blocks < 3, f"{kind} on write was not noticed"
        assert transfer.failure in (TierFailure.CORRUPT, None), f"{kind} was reported as {transfer.failure}"
        first = tier.find(digests)
        assert len(first.digests) == 0, f"the first block was hit by {kind} and can still be found"
        first.close()
        assert save(tier, digests) is TransferState.COMPLETED, "a dropped block could not be saved again"
        assert load(tier, digests) == 3, "a dropped block was saved again and not found"
    assert sum(each.corrupt_blocks for each in tier.counters()) >= 2, "dropped blocks were not counted"
    tier.close()


def _checks_what_it_read(case: TierCase) -> None:
    tier, faults = _opened(case)
    digests = chain(40, 2)
    save(tier, digests)
    faults.on_next_reads(InjectedFault.BIT_FLIP)
    assert load(tier, digests) < 2, "a bit that flipped on the way was not noticed"
    tier.close()


def _ends_at_its_deadline(case: TierCase) -> None:
    tier, faults = _opened(case)
    digests = chain(50, 2)
    save(tier, digests)
    gate = faults.hold_next_read()
    blocks = empty(2, tier.layout)
    transfer = tier.load(tier.find(digests), blocks, timeout_s=0.0)
    gate.release()
    assert ended(transfer) is TransferState.PARTIAL, "a load without any time did not end partial"
    assert transfer.failure is TierFailure.DEADLINE, f"a passed deadline was reported as {transfer.failure}"
    tier.close()


def _cancels_after_the_copy(case: TierCase) -> None:
    tier, faults = _opened(case)
    digests = chain(60, 4)
    save(tier, digests)
    gate = faults.hold_next_read()
    blocks = empty(4, tier.layout)
    transfer = tier.load(tier.find(digests), blocks)
    gate.wait_entered()
    transfer.cancel()
    _let_pending_end(transfer, gate)
    state = ended(transfer)
    assert state in (TransferState.CANCELLED, TransferState.COMPLETED), f"a cancelled load ended as {state}"
    ours = bytes([CANARY ^ 0xFF]) * tier.layout.block_bytes
    for block in blocks:
        block[:] = ours
    gate.release()
    tier.close()
    assert all(bytes(block) == ours for block in blocks), "the tier wrote into memory after the transfer had ended"


def _let_pending_end(transfer: Transfer, gate: Gate) -> None:
    """Opens the gate for a transfer that needs it to end; another has its medium hang until the test has looked."""
    if transfer.poll() is TransferState.PENDING:
        gate.release()


def _reads_nothing_after_a_cancelled_save(case: TierCase) -> None:
    tier, faults = _opened(case)
    digests = chain(70, 3)
    gate = faults.hold_next_write()
    blocks = filled(digests, tier.layout)
    transfer = tier.save(digests, blocks)
    gate.wait_entered()
    transfer.cancel()
    _let_pending_end(transfer, gate)
    ended(transfer)
    for block in blocks:
        block[:] = bytes(len(block))
    gate.release()
    load(tier, digests)
    assert save(tier, digests) is TransferState.COMPLETED, "after a cancelled save nothing could be saved"
    assert load(tier, digests) == 3, "after a cancelled save nothing was found"
    tier.close()


def _keeps_a_hit_until_it_is_closed(case: TierCase) -> None:
    tier, _ = _opened(case)
    digests = chain(80, 2)
    save(tier, digests)
    hit = tier.find(digests)
    for seed in range(90, 94):
        save(tier, chain(seed, case.capacity_blocks))
    blocks = empty(2, tier.layout)
    transfer = tier.load(hit, blocks)
    assert ended(transfer) is TransferState.COMPLETED, f"a held block was given up: {transfer.failure}"
    check_completed(transfer, digests, blocks, tier.layout)
    tier.close()


def _answers_after_close(case: TierCase) -> None:
    tier, _ = _opened(case)
    digests = chain(100, 1)
    save(tier, digests)
    hit = tier.find(digests)
    tier.close()
    tier.close()
    for transfer in (
        tier.load(hit, empty(1, tier.layout)),
        tier.save(digests, filled(digests, tier.layout)),
    ):
        assert ended(transfer) is TransferState.PARTIAL, "a closed tier moved bytes"
        assert transfer.failure is TierFailure.CLOSED, f"a closed tier answered {transfer.failure}"
    assert not tier.find(digests).digests, "a closed tier found something"


def _keeps_blocks_over_a_restart(case: TierCase) -> None:
    tier, _ = _opened(case)
    digests = chain(110, 5)
    save(tier, digests)
    tier.close()
    again, _ = _opened(case)
    assert load(again, digests) == 5, "blocks were lost by closing and opening"
    again.close()


def _has_given_up_what_it_evicted(case: TierCase) -> None:
    """Else a medium outgrows its budget, and no counter of the tier tells of it."""
    tier, _ = _opened(case)
    for seed in range(140, 145):
        save(tier, chain(seed, case.capacity_blocks))
    stored = {each.tier: each.stored_blocks for each in tier.counters()}
    evicted = sum(each.evicted_blocks for each in tier.counters())
    assert evicted, f"a tier took 5 times capacity_blocks ({case.capacity_blocks}) and gave nothing up: make it smaller"
    tier.close()
    again, _ = _opened(case)
    for each in again.counters():
        assert each.stored_blocks <= stored[each.tier], (
            f"{each.tier} stored {stored[each.tier]} blocks when it was closed, and {each.stored_blocks} were there "
            "when it was opened again: what it evicts must be deleted from its medium"
        )
    again.close()


def _drops_what_was_torn_before_a_restart(case: TierCase) -> None:
    for kind in (InjectedFault.TORN_WRITE, InjectedFault.ERROR, InjectedFault.BIT_FLIP):
        tier, faults = _opened(case)
        digests = chain(120, 3)
        save(tier, digests[:2])
        faults.on_next_writes(kind)
        save(tier, digests[2:])
        tier.close()
        again, _ = _opened(case)
        assert load(again, digests) >= 2, f"whole blocks were lost with the one hit by {kind}"
        save(again, digests)
        again.close()


def _refuses_another_layout(case: TierCase) -> None:
    tier, _ = _opened(case)
    save(tier, chain(130, 1))
    tier.close()
    for other in (kit_layout(model_tag="another checkpoint of this shape"), kit_layout(head_dim=3_000)):
        try:
            opened = case.open(other, FaultInjector())
        except LayoutMismatchError:
            continue
        opened.close()
        raise AssertionError("a store of another layout was opened; it must raise LayoutMismatchError")


_RULES: tuple[Callable[[TierCase], None], ...] = (
    _gives_back_what_was_saved,
    _moves_blocks_of_a_device,
    _finds_the_longest_beginning_only,
    _refuses_misuse,
    _reports_a_failing_medium,
    _reports_a_medium_that_fails_to_read,
    _never_gives_wrong_bytes,
    _checks_what_it_read,
    _ends_at_its_deadline,
    _cancels_after_the_copy,
    _reads_nothing_after_a_cancelled_save,
    _keeps_a_hit_until_it_is_closed,
    _answers_after_close,
)
_PERSISTENT_RULES: tuple[Callable[[TierCase], None], ...] = (
    _keeps_blocks_over_a_restart,
    _drops_what_was_torn_before_a_restart,
    _has_given_up_what_it_evicted,
    _refuses_another_layout,
)
