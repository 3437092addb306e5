"""`RunQueue`: the unfinished sequences in the order in which they are served, with the slots and KV blocks they hold.

    running  oldest … youngest │ preempted  oldest … youngest │ waiting  in policy order
             slot and blocks   │            nothing           │          nothing

The order within the first two is that of first admission, and it keeps itself: only the youngest that runs is
preempted, the oldest preempted is resumed first, and none waiting is admitted before all have resumed. So
the oldest never gives way, and as `RunQueue.can_ever_hold` was asked before it entered, it can run to its end.

A queue policy may choose another than the youngest (`ChoosesVictim`), but never the oldest that runs. Then younger ones
may run while an older one is preempted, and each list is in order by itself. Still the oldest that runs ends, and none
enters before the oldest preempted has resumed, so that all end.

A queue policy that divides what runs between tenants (`SharesRows`) chooses what is admitted, by `row_shares.py`: of a
tenant that holds its share nothing is admitted or resumed while another that holds less has something to run. Where
there is no slot or block for that one, one of a tenant beyond its share gives way, but never the oldest that runs.
And the newcomers of one that holds less, by its weight, come before the preempted of another: many of that tenant
may resume at once, each with all its tokens to compute again. They also pass the next one where there is no room for
it. It has something running while it holds more, and comes next at the latest when that has ended.

One that waits may be passed by later ones, within one bound (`order/bypass.py`):

- one whose prefix another computes at the moment is no head: it follows that one (`followers.py`), and comes before all
  that waits when the prefix is there;
- one whose adapter has no slot is passed by those that `adapter_slots.py` lets in: later ones of its tenant first, then
  those of the tenant that the policy would serve next;
- one that takes long to compute is passed by one of its tenant that is cached (`order/cached_first.py`), where the
  policy lets it (`lets_cached_pass`).

A preempted sequence that is held (its next mask is not computed yet) is passed over until it is not. The time is
bounded, so the same holds from then on.

With KV tiers (`use_tiers`) an admitted sequence whose prefix is being loaded is kept apart (`loads.py`), with slot and
blocks, and is sorted in when the load has ended; later ones may have been admitted meanwhile. Where blocks run short,
the youngest load is given up before a running sequence is preempted.

A sequence has `num_tables` block tables. Those with a window (`windows.py`) get blocks chunk by chunk: the first ones
of a chunk as a decode row gets its own, by age and with preemption, more only as far as blocks are left.
"""

import bisect
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

from openinfer_core.errors import ContractViolation
from openinfer_core.request import RequestId
from openinfer_core.scheduling import AdapterLoad, QueuePolicy, SchedulerConfig, SlotStart, StateCopy
from openinfer_core.scheduling.waiting_queue import WaitingQueue
from openinfer_engine.scheduler.adapter_slots import AdapterSlots
from openinfer_engine.scheduler.admission import BlockAllocation, BlockAllocator
from openinfer_engine.scheduler.counters import Counters
from openinfer_engine.scheduler.followers import MAX_FOLLOWERS, Followers
from openinfer_engine.scheduler.loads import Loads
from openinfer_engine.scheduler.order.bypass import Bypass
from openinfer_engine.scheduler.order.cached_first import SCAN, CachedFirst
from openinfer_engine.scheduler.order.room_to_grow import RoomToGrow
from openinfer_engine.scheduler.prefetches import MAX_WAITING, Prefetches
from openinfer_engine.scheduler.retention import Retention
from openinfer_engine.scheduler.returning.early_loads import EarlyLoads
from openinfer_engine.scheduler.row_shares import RowShares
from openinfer_engine.scheduler.sequence import NO_SLOT, Sequence, SequenceState
from openinfer_engine.scheduler.states.prefixes import StatePrefixes
from openinfer_engine.scheduler.states.saves import StateSaves
from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_engine.scheduler.step_builder import StepInFlight
from openinfer_engine.scheduler.windows import Windows
from openinfer_kv_cache import BlockSaves, KvCache, KvCacheOptions, PrefetchingPort, StateSlotCopy, TierPort

PARK_PATIENCE_S = 1.0
"""What copies into KV tiers may take before they are cancelled, when all is to leave the device."""
BYPASS_SCAN = 256
"""Requests of a tenant, or of all where a policy knows none, that are looked at for one that may pass."""
MAX_NEWCOMERS = 64
"""Requests of a tenant that others give way to at a time."""
MAX_QUICK_TOKENS = 1024
"""To compute of a prompt before whose first token no early load begins; a longer one's steps hide what that takes."""


@dataclass(slots=True, eq=False)
class Admission:
    """A sequence begins to run, or resumes."""

    sequence: Sequence
    start: SlotStart
    has_policy_fault: bool  # whether the queue policy raised on it: then its first row fails
    restore: StateCopy | None = None  # brings the recurrent states of the prefix that it begins on
    hold: StateSlotCopy | None = None  # of the snapshot restored, until the step was applied; only with KV tiers


class RunQueue:
    """See the module. Its methods keep the order; the lists are for reading."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy, counters: Counters) -> None:
        self.kv = KvCache(
            KvCacheOptions(
                num_blocks=config.num_blocks,
                block_size_tokens=config.block_size_tokens,
                layout_digest=config.layout_digest,
                table_windows=config.table_windows,
                num_state_slots=config.max_num_seqs + config.num_snapshots if config.num_snapshots else 0,
                max_snapshots=config.num_snapshots,
            ),
            digest_key=config.digest_key,
        )
        self.loads: Loads | None = None
        self.saves: BlockSaves | None = None  # None without KV tiers
        self.prefetches: Prefetches | None = None  # None where tiers have one level, or the model several block tables
        self.early_loads: EarlyLoads | None = None  # None where they were not asked for
        self._state_saves: StateSaves | None = None  # with KV tiers, for a model with recurrent states
        self.snapshots = None  # None for a model without recurrent states, or where none are kept
        if self.kv.slots is not None:
            self.snapshots = Snapshots(
                self.kv.slots, num_running_slots=config.max_num_seqs, block_size_tokens=config.block_size_tokens
            )
        self.retention = Retention(self.kv, self.snapshots)
        self.waiting = WaitingQueue[Sequence](policy, describe=self._describe)
        self.bypass = Bypass()
        self._cached_first = CachedFirst(self.bypass, self.snapshots)
        self.adapters: AdapterSlots | None = None  # None where no adapters are served
        self._bypassed: list[Sequence] = []  # by what `_next` has said last
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []  # youngest first, so that the end is next
        self.followers = Followers(block_size_tokens=config.block_size_tokens, snapshots=self.snapshots)
        self.held: AbstractSet[RequestId] = frozenset()  # have no row that samples (`HoldsRows`)
        # whether one that was held, or of a tenant with its share, ever was: that ends the one order of ages
        self.has_passed_over = False
        self.num_slots = config.max_num_seqs
        self.released: list[int] = []  # slots that their sequences left since the last plan
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.matches_prefixes = config.prefix_cache or self.snapshots is not None
        self.num_tables = len(config.table_windows)
        self.windows = None  # None where no block table has a window
        if any(config.table_windows):
            self.windows = Windows(config, seals_blocks=self.matches_prefixes)
        self._allocator = BlockAllocator(
            self.kv.pool,
            num_tables=self.num_tables,
            windows=self.windows,
            matches_prefixes=self.matches_prefixes,
            snapshots=self.snapshots,
            hurry=self._hurry_saves,
            runs=lambda tenant: self.shares.rows[tenant] > 0,
        )
        self._room_to_grow = RoomToGrow(block_size_tokens=config.block_size_tokens)
        self.shares = RowShares(self.kv.pool, num_slots=config.max_num_seqs, weight=self.waiting.weight)
        self.divides = self.waiting.shares is not None
        self._put_off: AbstractSet[str] = frozenset()
        self._stuck_held = math.inf  # what the tenants hold, at least, of those that found no room in this plan
        self._promised: Sequence | None = None  # others gave way for it
        self._counters = counters
        self._num_admitted = 0

    def use_tiers(self, port: TierPort, *, early_loads: bool = False) -> None:
        """With `early_loads` also for conversations that will go on, which needs one block table.

        Raises `ContractViolation`: prefixes are not shared, or the port lacks the model's recurrent states.
        """
        if not self.matches_prefixes:
            raise ContractViolation("KV tiers need a prefix cache")
        snapshots, block_tokens = self.snapshots, self.kv.pool.block_size_tokens
        self.loads = Loads(port, block_size_tokens=block_tokens, snapshots=snapshots)
        self.saves = BlockSaves(self.kv.pool, port)
        if isinstance(port, PrefetchingPort) and self.num_tables == 1:
            self.prefetches = Prefetches(port, block_size_tokens=block_tokens)
        if early_loads:
            self.early_loads = EarlyLoads(self.kv, port)
        if snapshots is None:
            return
        if not port.chunks_per_slot:
            raise ContractViolation("KV tiers of a model with recurrent states need the states' memory")
        self._allocator.prefixes = StatePrefixes(snapshots, port, self.kv.hasher, block_size_tokens=block_tokens)
        self._state_saves = StateSaves(snapshots, port, self.kv.hasher)

    @property
    def unsaved_blocks(self) -> int:
        return sum(saves.unsaved_blocks for saves in (self.saves, self._state_saves) if saves is not None)

    @property
    def is_saving(self) -> bool:
        return any(saves.is_moving for saves in (self.saves, self._state_saves) if saves is not None)

    def begin_saves(self) -> None:
        for saves in (self.saves, self._state_saves):
            if saves is not None:
                saves.begin()

    def prefetch(self) -> None:
        """Brings up what those that wait will load; after all of a plan were admitted."""
        if self.prefetches is not None:
            self.prefetches.advance(self.waiting.first(MAX_WAITING))
        self.load_early()

    def load_early(self) -> None:
        """Goes on with what conversations will need, after a plan, or when nothing is left to plan."""
        if self.early_loads is not None:
            waits = self._loading or self.given_up or self._has_more() or any(map(_is_quick_turn, self.running))
            self.early_loads.advance(is_busy=bool(waits))

    def settle(self) -> None:
        if self.early_loads is not None:
            self.early_loads.settle()
        for saves in (self.saves, self._state_saves):
            if saves is not None:
                saves.settle()
        if self.loads is not None:
            for sequence in self.loads.settle():
                self.give_back(sequence)

    @property
    def _loading(self) -> ListLike[Sequence]:
        return () if self.loads is None else self.loads.sequences

    @property
    def given_up(self) -> ListLike[Sequence]:
        return () if self.loads is None else self.loads.given_up

    # --- in ---------------------------------------------------------------------------------------------

    def admit(self) -> Admission | None:
        """Lets the next sequence run if there is a slot, and blocks for every id it knows.

        Where there are none, newcomers of tenants that hold less may pass it (`_may_pass`), and no others.
        """
        while (ready := self._take_ready()) is None:
            sequence = self._head()
            if sequence is None or not self.free_slots:
                return None
            if self.early_loads is not None and self.early_loads.holds_back(sequence.kv, now_s=self.bypass.now_s):
                return None
            allocation = self._allocate(sequence)
            if allocation is None:
                if self._may_pass(sequence):
                    continue
                return None
            self._leave(sequence)
            if self.early_loads is not None:
                self.early_loads.begun(sequence.kv)
            if not self._begin_load(sequence, allocation):
                return self._start(sequence, allocation.cached_tokens)
        return self._start(*ready)

    def _allocate(self, sequence: Sequence) -> BlockAllocation | None:
        """Blocks for the next one, of those that are not kept for others; None, too, where slots are."""
        kept = self._kept_for_overdue(sequence)
        kept_slots, kept_for = self._kept_from(sequence)
        if len(self.free_slots) <= len(kept) + kept_slots:
            return None
        kept_blocks = self.num_tables * sum(map(self.followers.own_blocks, kept))
        kept_blocks += self._room_to_grow.blocks_for(sequence, (*self.running, *self._loading))
        return self._allocator.allocate(
            sequence, running=self.running, loading=self._loading, kept_blocks=kept_blocks, kept_for=kept_for
        )

    def _may_pass(self, stuck: Sequence) -> bool:
        """Whether others may be next in this plan, as there is no room for a sequence: those of tenants that hold less.

        Its tenant has something running while it holds more. It comes next when that has ended, at the latest, and
        then none passes it.
        """
        held = self.shares.held(stuck.request.tenant) if self.divides and stuck is not self._promised else 0.0
        if not 0 < held < self._stuck_held:
            return False
        self._stuck_held = held
        return True

    def _kept_from(self, sequence: Sequence) -> tuple[int, Mapping[str, int]]:
        if not self.divides:
            return 0, {}
        return self.shares.kept_from(sequence, num_blocks=self._blocks_of(sequence))

    def _blocks_of(self, sequence: Sequence) -> int:
        """That all ids which a sequence knows take, in all tables."""
        return self.num_tables * self.kv.pool.blocks_for(sequence.known_tokens)

    def _head(self) -> Sequence | None:
        """The next one that does not follow another."""
        while (sequence := self._next()) is not None and self._follows(sequence):
            pass
        return sequence

    def _follows(self, sequence: Sequence) -> bool:
        """Whether the next one lets others pass until its prefix is computed: then it is out of the queue."""
        if sequence.state is not SequenceState.WAITING or not (self.matches_prefixes and sequence.may_match):
            return False
        is_new = sequence not in self.followers
        if sequence is self._promised or (is_new and len(self.followers) >= MAX_FOLLOWERS):
            return False
        following = self.followers.find(sequence, running=self.running, loading=self._loading)
        if following is None:
            return False
        if is_new:
            sequence.has_policy_fault = not self.waiting.admit(sequence)
        self.followers.add(sequence, following)
        return True

    def _kept_for_overdue(self, sequence: Sequence) -> ListLike[Sequence]:
        """Overdue ones that wait for their prefix: one that is admitted before them leaves them slots and blocks."""
        if not len(self.followers) or sequence.state is not SequenceState.WAITING:
            return ()
        if sequence is self._promised or sequence in self.followers:
            return ()
        followers = self.followers
        return [each for each in followers.sequences if self.bypass.is_overdue(each) and followers.is_waiting(each)]

    def _take_ready(self) -> tuple[Sequence, int] | None:
        while self.loads is not None and (ready := self.loads.take_ready()) is not None:
            sequence, tokens = ready
            if tokens is not None and self._has_room(sequence, tokens + 1):
                return sequence, tokens
            self._step_back(sequence)
            self.give_back(sequence)
        return None

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether tables with a window, which were given what is loaded, get room for what comes next."""
        return sequence.kv.reserve(sequence.known_tokens, windowed_tokens=num_tokens) is not None

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.PREEMPTED:
            self.preempted.remove(sequence)
        else:
            if sequence in self.followers:
                self.followers.remove(sequence)
            else:
                sequence.has_policy_fault = not self.waiting.admit(sequence)
            sequence.admission, self._num_admitted = self._num_admitted, self._num_admitted + 1
            self._count_bypass(sequence)
            if self.adapters is not None:
                self.adapters.enter(sequence)
        if sequence is self._promised:
            self._promised = None
        sequence.slot = self.free_slots.pop()
        self.shares.enter(sequence)

    def _begin_load(self, sequence: Sequence, allocation: BlockAllocation) -> bool:
        if self.loads is None:
            return False
        if self._allocator.prefixes is not None:
            is_loading = self._begin_state_load(sequence, allocation, self._allocator.prefixes, self.loads)
        elif sequence.asked_tiers or sequence.has_policy_fault or not sequence.may_match:
            return False
        else:
            sequence.asked_tiers = True
            is_loading = self.loads.begin(sequence)
        if is_loading:
            sequence.transition(SequenceState.LOADING)
        return is_loading

    def _begin_state_load(
        self, sequence: Sequence, allocation: BlockAllocation, prefixes: StatePrefixes, loads: Loads
    ) -> bool:
        if allocation.found is None:
            return False
        load = prefixes.begin(sequence.kv, allocation.found, cached_tokens=allocation.cached_tokens)
        if load is not None:
            loads.add(sequence, load)
        return load is not None

    def _start(self, sequence: Sequence, cached_tokens: int) -> Admission:
        if not sequence.has_run:
            sequence.has_run = True
            sequence.cached_tokens = cached_tokens
            self._counters.cached_tokens += cached_tokens
        sequence.transition(SequenceState.RUNNING)
        bisect.insort(self.running, sequence, key=_age)
        start = sequence.take_slot(cached_tokens=cached_tokens)
        if self.windows is not None:
            self.windows.start(sequence)
        admission = Admission(sequence, start, sequence.has_policy_fault)
        if self.snapshots is not None and cached_tokens:
            admission.restore = self.snapshots.restore(sequence.kv, cached_tokens, start.slot)
            if self._allocator.prefixes is not None:
                admission.hold = self.snapshots.hold_after(sequence.kv, cached_tokens)
        return admission

    def _next(self) -> Sequence | None:
        """None, too, while a result of the one to resume is outstanding, or a copy uses its blocks."""
        full = frozenset[str]()
        if self.divides:
            full = self.shares.full(self.waiting.tenants, [*self.preempted, *self.followers.sequences])
        promised = self._promised
        self._bypassed = []
        if (
            promised is not None
            and promised.request.tenant not in full
            and promised.request_id not in self.held
            and (promised.adapter_slot != NO_SLOT or self.adapters is None or self.adapters.may_enter(promised))
        ):
            return None if promised.is_held else promised
        put_off = self._put_off | self._behind_stuck()
        later = full | put_off
        holding = self._newcomers_holding(later) if self.preempted and self.divides else {}
        resumed, passed = self._next_to_resume(later, min(holding.values(), default=math.inf))
        if resumed is None:
            chosen = self._next_newcomer(full, put_off)
            # Of a tenant with its share, those that have run come first.
            return None if chosen is not None and chosen.request.tenant in full & passed else chosen
        held = self.shares.held(resumed.request.tenant) if holding else 0.0
        before = {tenant for tenant, amount in holding.items() if amount < held}
        if before:
            others = {*later, *holding, *self.waiting.tenants} - before
            chosen = self._next_newcomer(others, put_off)
            if chosen is not None and chosen.request.tenant in before:
                return chosen
        return None if resumed.is_held else resumed

    def _newcomers_holding(self, later: AbstractSet[str]) -> dict[str, float]:
        """What each tenant holds that has one to admit for the first time, but those that come `later`."""
        followers = self.followers
        ready = {each.request.tenant for each in followers.sequences if not followers.is_waiting(each)}
        return {tenant: self.shares.held(tenant) for tenant in {*self.waiting.tenants, *ready} - later}

    def _next_to_resume(self, later: AbstractSet[str], least_held: float) -> tuple[Sequence | None, AbstractSet[str]]:
        """The oldest preempted one whose tenant holds no more than `least_held`; else that of the tenant with least.

        Returns:
            None if there is none but of tenants that come `later` and held ones; and the tenants passed over.
        """
        passed = set[str]()
        behind: dict[str, Sequence] = {}  # the oldest of each tenant that holds more
        for sequence in reversed(self.preempted):
            tenant = sequence.request.tenant
            if sequence.request_id not in self.held and tenant not in later:
                if math.isinf(least_held) or self.shares.held(tenant) <= least_held:
                    return sequence, passed
                behind.setdefault(tenant, sequence)
            self.has_passed_over = True
            passed.add(tenant)
        least = min(behind, key=self.shares.held, default=None)
        return None if least is None else behind[least], passed

    def _behind_stuck(self) -> AbstractSet[str]:
        """Tenants that hold no less than one whose next found no room."""
        if math.isinf(self._stuck_held):
            return frozenset()
        return {tenant for tenant in self.wanting if self.shares.held(tenant) >= self._stuck_held}

    def _next_newcomer(self, full: AbstractSet[str], put_off: AbstractSet[str]) -> Sequence | None:
        """One whose prefix was computed meanwhile, unless its tenant comes later; else of those that wait."""
        for sequence in self.followers.sequences:
            if sequence.request.tenant in full or sequence.request.tenant in put_off:
                continue
            if not self.followers.is_waiting(sequence) and self._may_enter(sequence):
                return sequence
            self._pass(sequence)
        return self._next_waiting(full, put_off)

    def _next_waiting(self, full: AbstractSet[str], put_off: AbstractSet[str]) -> Sequence | None:
        """Of those that wait for the first time, or None if that is of a tenant that is put off, or has its share."""
        chosen = self.waiting.next(full | put_off)
        if chosen is None or (put_off and chosen.request.tenant in full | put_off):
            return None
        return self._prefer_cached(chosen) if self._may_enter(chosen) else self._bypass(chosen, full)

    def _may_enter(self, sequence: Sequence) -> bool:
        """Whether its adapter has a slot, or it needs none."""
        return self.adapters is None or self.adapters.may_enter(sequence)

    def _prefer_cached(self, chosen: Sequence) -> Sequence:
        """The next in order, or one that goes before it since its prompt is cached."""
        if not (self.waiting.lets_cached_pass and self.matches_prefixes and self.free_slots) or len(self.waiting) < 2:
            return chosen
        cached, passed = self._cached_first.choose(self._of_its_tenant(chosen))
        if cached is None or not self._may_enter(cached):
            return chosen
        self._bypassed += passed
        return cached

    def _of_its_tenant(self, chosen: Sequence) -> Iterator[Sequence]:
        """The next in order, and those of its tenant that come after it."""
        yield chosen
        tenant = None if self.waiting.shares is None else chosen.request.tenant
        yield from (each for each in self.waiting.first(SCAN, tenant=tenant) if each is not chosen)

    def _bypass(self, chosen: Sequence, full: AbstractSet[str]) -> Sequence | None:
        """The first that may pass `chosen`, whose adapter has no slot; in the order of its tenant, then of others.

        Those that are passed are noted in `_bypassed`. Tenants with their share come after the others here, too.
        """
        tried: set[str] = set()
        asked: AbstractSet[str] = full
        while True:
            tenant = None if self.waiting.shares is None else chosen.request.tenant
            for sequence in self.waiting.first(BYPASS_SCAN, tenant=tenant):
                if self._may_enter(sequence):
                    return sequence
                self._pass(sequence)
            if tenant is None:
                return None
            tried.add(tenant)
            following = self.waiting.next(asked | tried)
            if following is not None and following.request.tenant in tried:
                asked = frozenset()
                following = self.waiting.next(tried)
            if following is None or following.request.tenant in tried:
                return None
            chosen = following

    def _pass(self, sequence: Sequence) -> None:
        """Notes that the next to run passes one that waits for its prefix, or whose adapter has no slot."""
        self.bypass.begin(sequence)
        self._bypassed.append(sequence)
        if self.adapters is not None:
            self.adapters.claim_if_overdue(sequence)

    def _count_bypass(self, admitted: Sequence) -> None:
        self.bypass.count(self._bypassed)
        self.bypass.forget(admitted)
        self._bypassed = []

    def _describe(self, sequence: Sequence) -> tuple[int, bool]:
        cached_tokens = sequence.kv.count_cached_tokens() if sequence.may_match else 0
        return cached_tokens, self.adapters is None or self.adapters.is_resident(sequence)

    def take_adapter_loads(self) -> tuple[AdapterLoad, ...]:
        return () if self.adapters is None else self.adapters.take_loads()

    def make_room(self) -> None:
        """Where the next one finds no slot or blocks, and its tenant holds less than its share, others give way.

        Called once for each plan, before anything is admitted to it.
        """
        self._stuck_held = math.inf
        if self.divides:
            self.shares.note_step()
        if not self.divides or not self._has_more():
            return
        if any(sequence.is_held for sequence in self.preempted):
            return  # what gave way has not given back yet
        sequence = self._head()
        if sequence is None or self.shares.rows.keys() <= {sequence.request.tenant}:
            return
        wanting, num_blocks = self.wanting, self._blocks_of(sequence)
        coming_slots, coming_blocks = 0, self._early_blocks_coming()
        # Room for one a step would make the last of many newcomers wait for as many steps.
        for place in range(self._num_newcomers(sequence)):
            if not self.shares.stays_within(sequence, wanting, num_blocks=num_blocks, num_rows=place + 1):
                return
            taken_blocks = place * (num_blocks + self.num_tables)  # by those before, each with its reserve
            while not (
                len(self.free_slots) + coming_slots > place and self._would_fit(sequence, coming_blocks - taken_blocks)
            ):
                ready = (each for each in self.shares.victims(self.running, wanting) if self.shares.has_gone_on(each))
                victim = next(ready, None)
                if victim is None:
                    return
                if victim.rows_in_flight:
                    coming_slots += 1
                    coming_blocks += self._own_blocks(victim)
                self._preempt_for_share(victim)
                self._promised = sequence

    def _num_newcomers(self, sequence: Sequence) -> int:
        """That there is to be room for: this one, and those that wait for the first time of the same tenant."""
        num_waiting = self.waiting.tenants.get(sequence.request.tenant, 0)
        return max(1, min(num_waiting, MAX_NEWCOMERS)) if sequence.state is SequenceState.WAITING else 1

    @property
    def wanting(self) -> AbstractSet[str]:
        """Tenants that have something waiting."""
        others = (*self.preempted, *self.followers.sequences)
        return {*self.waiting.tenants, *(sequence.request.tenant for sequence in others)}

    @contextmanager
    def putting_off(self, tenants: AbstractSet[str]) -> Generator[None]:
        """Meanwhile none of these tenants is the next one, neither for the first time nor to resume.

        They have a prompt under way, or what one that was preempted has to compute again, which goes on in each step,
        and their next one would wait for the rest of it; what comes after that, of others, need not.
        """
        self._put_off = tenants if self.divides else frozenset()
        try:
            yield
        finally:
            self._put_off = frozenset()

    def _has_more(self) -> bool:
        """Whether anything is to be admitted or resumed, now or later."""
        return bool(self.preempted or len(self.waiting) or len(self.followers))

    def _would_fit(self, sequence: Sequence, coming_blocks: int) -> bool:
        num_active = len(self.running) + len(self._loading)
        return self._allocator.would_fit(sequence, num_active=num_active, coming_blocks=coming_blocks)

    def _own_blocks(self, sequence: Sequence) -> int:
        pool = self.kv.pool
        return sum(pool.num_users(block_id) == 1 for table in sequence.kv.tables for block_id in table.held)

    def _preempt_for_share(self, sequence: Sequence) -> None:
        self._counters.share_preemptions += 1
        self.has_passed_over = True
        self._preempt(sequence)

    def count_shares(self) -> None:
        """Notes what `stats` tells of tenants, after a plan."""
        wanting = self.wanting
        self._counters.tenants = len(wanting | self.shares.rows.keys())
        self._counters.protected_blocks = self.kv.pool.protected_blocks() if wanting else 0

    def peek(self) -> Sequence | None:
        """The one to admit or resume next, if there will be room; None, too, while a load or a result comes first."""
        return self._head() if self._has_more() else None

    # --- states -----------------------------------------------------------------------------------------

    def begin_snapshot(self, sequence: Sequence) -> StateSlotCopy | None:
        """The copy of a running sequence's states after the row planned last, if they are to be kept there."""
        end_tokens = sequence.computed_tokens
        if self.snapshots is None or end_tokens not in sequence.snapshot_positions:
            return None
        copy = self.snapshots.take(sequence.kv, end_tokens, sequence.slot)
        if copy is None and self._state_saves is not None and not self.snapshots.has_after(sequence.kv, end_tokens):
            self._state_saves.hurry()
        return copy

    def end_snapshot(self, copy: StateSlotCopy, *, good: bool) -> None:
        """The step that the copy ran after was applied; `good` if its row was computed for a sequence that lives."""
        if self.snapshots is None:
            raise ContractViolation("a copy of states ended, and none are kept")
        self.snapshots.end(copy, good=good)
        if good and self._state_saves is not None:
            self._state_saves.note(copy.digest)

    def end_hold(self, hold: StateSlotCopy) -> None:
        if self.snapshots is None:
            raise ContractViolation("a hold of states ended, and none are kept")
        self.snapshots.end(hold, good=True)

    # --- growth -----------------------------------------------------------------------------------------

    def can_ever_hold(self, num_tokens: int) -> bool:
        return self.kv.can_ever_fit(num_tokens)

    def allocate_next(
        self, sequence: Sequence, in_flight: Iterable[StepInFlight], planned: ListLike[Sequence]
    ) -> ListLike[int] | None:
        """The blocks added for one more position of a running sequence; None if it has to sit this step out.

        `planned` have a row in this step, so that they do not give way.
        """
        while True:
            victim = self._victim_for_prefixes(sequence, planned)
            if victim is not None:
                # What others keep of their prefixes is not taken for one beyond its share.
                if self._are_blocks_coming(in_flight):
                    return None
                self._preempt_for_share(victim)
                if victim is sequence:
                    return None
                continue
            new_blocks = sequence.kv.reserve(sequence.computed_tokens + 1)
            if new_blocks is not None:
                break
            # Blocks that steps in flight or copies still use are about to come back, and with drafts in flight the
            # position is a bound, which may be beyond the one needed: nothing is preempted for them.
            if sequence.drafts_in_flight or self._are_blocks_coming(in_flight):
                return None
            # Loads go before running sequences: their prefix can be computed later.
            if self._give_up_load():
                continue
            victim = self._choose_victim(planned)
            if not self.waiting.chooses_victim:  # a policy that does has an order of its own
                self._room_to_grow.preempted(victim)
            self._preempt(victim)
            if victim is sequence:
                return None
        sequence.capacity_tokens = sequence.kv.capacity_tokens
        return new_blocks

    def _victim_for_prefixes(self, sequence: Sequence, planned: ListLike[Sequence]) -> Sequence | None:
        """Who gives way before a running sequence takes blocks of prefixes that other tenants keep; None: it may."""
        pool = self.kv.pool
        if not self.divides or pool.free_blocks >= self.num_tables:
            return None
        if pool.available_blocks - pool.protected_blocks(sequence.request.tenant) >= self.num_tables:
            return None
        has_row = set(planned)
        victims = self.shares.victims_for_prefixes(self.running)
        return next((each for each in victims if each not in has_row), None)

    def extend_windows(self, sequence: Sequence, windows: Windows, *, num_tokens: int) -> None:
        """Room for a sequence's next given ids in tables with a window, as far as there are blocks beyond the reserve.

        Args:
            sequence: runs, and has room for one id at least.
            windows: of the queue.
            num_tokens: ids that a chunk may have.
        """
        pool = self.kv.pool
        reserve = self.num_tables * (len(self.running) + len(self._loading) - 1)
        blocks = max(0, pool.available_blocks - reserve) // windows.num_windowed
        end = min(
            sequence.computed_tokens + num_tokens,
            sequence.given_tokens,
            sequence.capacity_tokens + blocks * pool.block_size_tokens,
        )
        if end > sequence.capacity_tokens:
            sequence.kv.reserve(sequence.given_tokens, windowed_tokens=end)
            sequence.capacity_tokens = sequence.kv.capacity_tokens

    def _choose_victim(self, planned: ListLike[Sequence]) -> Sequence:
        youngest = self.running[-1]
        has_row = set(planned)
        if not self.waiting.chooses_victim:
            if not self.divides:
                return youngest
            victims = self.shares.victims(self.running, self.wanting)
            chosen = next((each for each in victims if each not in has_row), youngest)
            self.has_passed_over |= chosen is not youngest
            return chosen
        candidates = [sequence for sequence in self.running[1:] if sequence not in has_row]
        if not candidates:
            return youngest  # the only one that runs
        chosen = self.waiting.victim([sequence.request for sequence in candidates])
        return youngest if chosen is None else candidates[chosen]

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back; what it has generated will be given when it resumes."""
        self.running.remove(sequence)
        self.released.append(sequence.slot)
        self._step_back(sequence)
        sequence.asked_tiers = False
        self._counters.preemptions += 1
        # A step in flight still writes to its slot and blocks: these come back with its last row.
        if not sequence.rows_in_flight:
            self.give_back(sequence)

    def _early_blocks_coming(self) -> int:
        """Blocks that come back from loads for turns that have not arrived: they give way."""
        early_loads = self.early_loads
        return early_loads.num_filling if early_loads is not None and early_loads.give_way() else 0

    def _are_blocks_coming(self, in_flight: Iterable[StepInFlight]) -> bool:
        if self._early_blocks_coming():
            return True
        if self.saves is not None and self.saves.are_blocks_coming():
            return True
        if self.loads is not None and self.loads.is_ending:
            return True
        return any(self._gives_back(sequence) for record in in_flight for sequence in record.rows)

    def _gives_back(self, sequence: Sequence) -> bool:
        """Whether a sequence with rows in flight gives blocks back when they are applied."""
        if sequence.state is not SequenceState.RUNNING or sequence.computed_tokens == sequence.target_tokens:
            return True
        return self.windows is not None and self.windows.is_freeing(sequence)

    def _hurry_saves(self) -> None:
        self._early_blocks_coming()
        if self.saves is not None:
            self.saves.are_blocks_coming()

    def _give_up_load(self) -> bool:
        if self.loads is None or not self.loads.sequences:
            return False
        sequence = max(self.loads.sequences, key=_age)
        self.loads.give_up(sequence)
        self._step_back(sequence)
        self.settle()  # it may be over already
        return True

    def _step_back(self, sequence: Sequence) -> None:
        sequence.transition(SequenceState.PREEMPTED)
        self.shares.leave(sequence)
        bisect.insort(self.preempted, sequence, key=lambda each: -each.admission)

    def take_released(self) -> tuple[int, ...]:
        released, self.released = self.released, []
        return tuple(released)

    def park(self) -> bool:
        """Preempts all that run or load; whether nothing has slots or blocks any more, and no copy is under way."""
        while self.running:
            self._preempt(self.running[-1])
        while self._give_up_load():
            pass
        for saves in (self.saves, self._state_saves):
            if saves is not None:
                saves.hurry(PARK_PATIENCE_S)
        self.settle()
        if self._early_blocks_coming():
            return False
        return not (self.is_saving or self.given_up)

    # --- out --------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        if sequence is self._promised:
            self._promised = None
        is_following = sequence in self.followers
        if sequence.state is not SequenceState.WAITING or is_following:
            self.waiting.ended(sequence.request, generated_tokens=sequence.completion_tokens)
        match sequence.state:
            case SequenceState.WAITING if is_following:
                self.followers.remove(sequence)
            case SequenceState.WAITING:
                self.waiting.withdraw(sequence)
            case SequenceState.PREEMPTED:
                self.preempted.remove(sequence)
            case SequenceState.LOADING if self.loads is not None:
                self.loads.give_up(sequence)
                self.shares.leave(sequence)
            case _:
                self.running.remove(sequence)
                self.released.append(sequence.slot)
                self.shares.leave(sequence)
        sequence.transition(SequenceState.FINISHED)
        self._room_to_grow.ended(sequence)
        self.bypass.forget(sequence)
        if self.adapters is not None:
            self.adapters.leave(sequence)
        if not sequence.is_held:
            self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Frees what a sequence holds that runs no longer and that no step in flight and no copy uses."""
        if sequence.slot != NO_SLOT:
            self.free_slots.append(sequence.slot)
            sequence.slot = NO_SLOT
        if sequence.state is SequenceState.FINISHED:
            self._end_turn(sequence)
            self.retention.ended(sequence)
            sequence.kv.release()
        else:
            sequence.kv.shrink(0)

    def _end_turn(self, sequence: Sequence) -> None:
        """Of several choices of one request, which have their prompt in common, the first one is the turn."""
        if sequence.request.choice:
            return
        turn = self.kv.conversations.ended(sequence.kv, prompt_tokens=sequence.prompt_tokens)
        if turn is not None and self.early_loads is not None:
            self.early_loads.ended(sequence.kv, turn)


def _is_quick_turn(sequence: Sequence) -> bool:
    """Whether its first token is due in a step or two, as most of its prompt was cached."""
    has_token = sequence.known_tokens > sequence.prompt_tokens
    return not has_token and sequence.prompt_tokens - sequence.cached_tokens <= MAX_QUICK_TOKENS


def _age(sequence: Sequence) -> int:
    return sequence.admission
