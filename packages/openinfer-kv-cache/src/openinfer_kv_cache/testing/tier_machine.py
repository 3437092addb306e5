"""`tier_machine`: random use of a tier under random faults, as a hypothesis state machine.

Whatever happens, a block that completed has its only right bytes, every transfer ends, and memory is the caller's again
after that. Needs hypothesis (the extra `testing`).
"""

from collections import Counter
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openinfer_kv_cache.testing.tier_cases import (
    TierCase,
    chain,
    check_completed,
    empty,
    ended,
    filled,
    kit_layout,
    load,
    save,
)
from openinfer_kv_cache.testing.tier_faults import FaultInjector, InjectedFault
from openinfer_kv_cache.tiers.contract import KvTier, TierHit, TransferState
from openinfer_kv_cache.tiers.traits import PrefetchingTier

_CHAINS = st.integers(0, 3)
_LENGTHS = st.integers(1, 6)


class TierMachine(RuleBasedStateMachine):
    """The rules; `tier_machine` binds them to a tier."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = kit_layout()
        self.faults = FaultInjector()
        self.case = self.new_case()
        self.seen = self.counter()
        self.tier: KvTier = self.case.open(self.layout, self.faults)
        self.held: list[tuple[int, TierHit]] = []
        self.steps_since_open = 0

    def new_case(self) -> TierCase:
        """An empty place; `tier_machine` says which."""
        raise NotImplementedError

    def counter(self) -> Counter[str]:
        raise NotImplementedError

    @rule(seed=_CHAINS, length=_LENGTHS)
    def save_chain(self, seed: int, length: int) -> None:
        self.seen[f"save {save(self.tier, chain(seed, length))}"] += 1

    @rule(seed=_CHAINS, length=_LENGTHS)
    def load_chain(self, seed: int, length: int) -> None:
        self.seen["loaded blocks"] += load(self.tier, chain(seed, length))

    @rule(seed=_CHAINS, length=_LENGTHS)
    def save_and_load_chain(self, seed: int, length: int) -> None:
        self.save_chain(seed, length)
        self.load_chain(seed, length)

    @precondition(lambda self: isinstance(self.tier, PrefetchingTier))
    @rule(seed=_CHAINS, length=_LENGTHS, is_cancelled=st.booleans())
    def prefetch_chain(self, seed: int, length: int, is_cancelled: bool) -> None:  # noqa: FBT001 -- drawn by hypothesis
        assert isinstance(self.tier, PrefetchingTier)
        found = self.tier.prefetch(chain(seed, length))
        assert 0 <= found.num_held <= length
        if found.transfer is not None:
            assert 0 < found.transfer.num_blocks <= found.num_held
            if is_cancelled:
                found.transfer.cancel()
            self.seen[f"prefetch {ended(found.transfer)}"] += 1

    @rule(seed=_CHAINS, length=_LENGTHS)
    def hold(self, seed: int, length: int) -> None:
        if len(self.held) < 3:
            self.held.append((seed, self.tier.find(chain(seed, length))))

    @precondition(lambda self: self.held)
    @rule(is_loaded=st.booleans())
    def end_hit(self, is_loaded: bool) -> None:  # noqa: FBT001 -- drawn by hypothesis
        seed, hit = self.held.pop(0)
        if not is_loaded:
            return hit.close()
        digests = list(hit.digests)
        assert digests == chain(seed, len(digests)), "a held hit changed"
        blocks = empty(len(digests), self.layout)
        transfer = self.tier.load(hit, blocks)
        ended(transfer)
        check_completed(transfer, digests, blocks, self.layout)
        self.seen["blocks of held hits"] += transfer.completed_blocks
        return None

    @rule(seed=_CHAINS, length=_LENGTHS)
    def cancel_load(self, seed: int, length: int) -> None:
        # What it touches after its end would be seen.
        digests = chain(seed, length)
        hit = self.tier.find(digests)
        blocks = empty(len(hit.digests), self.layout)
        transfer = self.tier.load(hit, blocks)
        transfer.cancel()
        self.seen[f"cancelled load {ended(transfer)}"] += 1
        check_completed(transfer, digests, blocks, self.layout)

    @rule(seed=_CHAINS, length=_LENGTHS)
    def cancel_save(self, seed: int, length: int) -> None:
        # What was stored must be right all the same.
        digests = chain(seed, length)
        blocks = filled(digests, self.layout)
        transfer = self.tier.save(digests, blocks)
        transfer.cancel()
        self.seen[f"cancelled save {ended(transfer)}"] += 1
        for block in blocks:
            block[:] = bytes(len(block))

    @rule(seed=_CHAINS, length=_LENGTHS)
    def load_without_time(self, seed: int, length: int) -> None:
        digests = chain(seed, length)
        hit = self.tier.find(digests)
        blocks = empty(len(hit.digests), self.layout)
        transfer = self.tier.load(hit, blocks, timeout_s=0.0)
        self.seen[f"load without time {ended(transfer)}"] += 1
        check_completed(transfer, digests, blocks, self.layout)

    @rule(kind=st.sampled_from(InjectedFault), on_write=st.booleans())
    def plan_fault(self, kind: InjectedFault, on_write: bool) -> None:  # noqa: FBT001 -- drawn by hypothesis
        (self.faults.on_next_writes if on_write else self.faults.on_next_reads)(kind)
        self.seen[f"fault {kind}"] += 1

    @precondition(lambda self: self.steps_since_open > 12)
    @rule()
    def reopen(self) -> None:
        self.steps_since_open = 0
        self.tier.close()
        for _, hit in self.held:
            assert self.tier.load(hit, empty(len(hit.digests), self.layout)).poll() is not TransferState.PENDING
        self.held.clear()
        self.tier = self.case.open(self.layout, self.faults)
        self.seen["reopened"] += 1

    @invariant()
    def books_agree(self) -> None:
        # Runs after each rule, so it counts them.
        self.steps_since_open += 1
        self.seen["steps"] += 1
        check = getattr(self.tier, "check_integrity", None)
        if check is not None:
            check()

    def teardown(self) -> None:
        self.books_agree()
        self.tier.close()


def tier_machine(make_case: Callable[[], TierCase]) -> tuple[type[TierMachine], Counter[str]]:
    """The machine for one tier, and what its runs have seen: assert that blocks were loaded at all.

    Returns:
        A class for `hypothesis.stateful.run_state_machine_as_test` (or its `.TestCase`), and its counters.
    """
    seen: Counter[str] = Counter()

    class BoundTierMachine(TierMachine):
        def new_case(self) -> TierCase:
            return make_case()

        def counter(self) -> Counter[str]:
            return seen

    return BoundTierMachine, seen
