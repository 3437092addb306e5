"""`Line`: everybody who is not finished, in the order in which they are served, with the slots and KV blocks they hold.

    running  oldest … youngest │ preempted  oldest … youngest │ waiting  in policy order
             slot and blocks   │            nothing           │          nothing

The order within the first two is that of first admission, and it keeps itself: only the youngest that runs is
preempted, the oldest preempted is resumed first, and nobody is admitted from the queue before all have resumed. So
the oldest never gives way, and as `Line.can_ever_hold` was asked before it entered, it can run to its end.

With KV tiers (`use_tiers`) somebody admitted whose prefix is on its way stands beside the line (`loads.py`), with slot
and blocks, and takes his place in it when the load has ended; others may have been admitted behind him meanwhile. Where
blocks run short, the youngest load is given up before anybody is preempted.
"""

import bisect
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import QueuePolicy, SchedulerConfig, SlotStart, StateCopy
from openinfer_core.waiting_queue import WaitingQueue
from openinfer_engine.kv_tiers.port import TierPort
from openinfer_engine.scheduler.counters import Counters
from openinfer_engine.scheduler.draft import StepInFlight
from openinfer_engine.scheduler.loads import Loads
from openinfer_engine.scheduler.saves import Saves
from openinfer_engine.scheduler.sequence import NO_SLOT, Sequence, SequenceState
from openinfer_engine.scheduler.snapshots import Snapshots
from openinfer_kv_cache import BlockSequence, KvCache, KvCacheOptions, SlotCopy


@dataclass(slots=True, eq=False)
class Admission:
    """A sequence begins to run, or resumes."""

    sequence: Sequence
    start: SlotStart
    is_spoilt: bool
    """Whether the queue policy raised on it."""
    restore: StateCopy | None = None
    """Brings the recurrent states of the prefix that it begins on."""


class Line:
    """See the module. Its methods keep the order; the lists are for reading."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy, counters: Counters) -> None:
        self.kv = KvCache(
            KvCacheOptions(
                num_blocks=config.num_blocks,
                block_size_tokens=config.block_size_tokens,
                layout_digest=config.layout_digest,
                num_slots=config.max_num_seqs + config.num_snapshots if config.num_snapshots else 0,
                max_snapshots=config.num_snapshots,
            ),
            digest_key=config.digest_key,
        )
        self.loads: Loads | None = None
        self.saves: Saves | None = None
        """Both None without KV tiers."""
        self.snapshots = None
        """None for a model without recurrent states, or where none are kept."""
        if self.kv.slots is not None:
            self.snapshots = Snapshots(
                self.kv.slots, num_running_slots=config.max_num_seqs, block_size_tokens=config.block_size_tokens
            )
        self.waiting = WaitingQueue[Sequence](policy)
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        """Youngest first, so that the end is next."""
        self.num_slots = config.max_num_seqs
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.matches_prefixes = config.prefix_cache or self.snapshots is not None
        self._counters = counters
        self._num_admitted = 0

    def use_tiers(self, port: TierPort) -> None:
        """From now on prefixes come from tiers, too, and sealed blocks go there.

        Raises:
            ContractViolation: prefixes are not shared, or only where copies of recurrent states are kept.
        """
        if not self.matches_prefixes or self.snapshots is not None:
            raise ContractViolation("KV tiers need a prefix cache, and a model without recurrent states")
        self.loads = Loads(port, block_size_tokens=self.kv.pool.block_size_tokens)
        self.saves = Saves(self.kv.pool, port)

    def settle(self) -> None:
        """Takes back the blocks of copies from and to tiers that have ended."""
        if self.saves is not None:
            self.saves.settle()
        if self.loads is not None:
            for sequence in self.loads.settle():
                self.give_back(sequence)

    @property
    def given_up(self) -> ListLike[Sequence]:
        """Sequences whose load was given up and whose blocks a copy may still touch."""
        return () if self.loads is None else self.loads.given_up

    # --- in ---------------------------------------------------------------------------------------------

    def admit(self) -> Admission | None:
        """Lets the next in line run if there is a slot, and blocks for every id it knows; nobody is passed over.

        One block per running sequence has to stay spare, lest the newcomer is preempted at their next block. Who has a
        prefix in common with a prompt that is being computed waits for it, and computes it not a second time.
        """
        while (ready := None if self.loads is None else self.loads.take_ready()) is None:
            sequence = self._next()
            if sequence is None or not self.free_slots:
                return None
            cached_tokens = self._reserve(sequence)
            if cached_tokens is None:
                return None
            self._leave(sequence)
            if not self._begin_load(sequence, cached_tokens):
                return self._start(sequence, cached_tokens)
        return self._start(*ready)

    def _leave(self, sequence: Sequence) -> None:
        """Takes the next in line out of the preempted or the queue, and gives it a slot."""
        if sequence.state is SequenceState.PREEMPTED:
            self.preempted.pop()
        else:
            sequence.is_spoilt = not self.waiting.admit_head()
            sequence.admission, self._num_admitted = self._num_admitted, self._num_admitted + 1
        sequence.slot = self.free_slots.pop()

    def _begin_load(self, sequence: Sequence, cached_tokens: int) -> bool:
        """Whether the tiers have more of the sequence's prefix, which is on its way then."""
        if self.loads is None or sequence.asked_tiers or sequence.is_spoilt or not sequence.may_match:
            return False
        sequence.asked_tiers = True
        is_loading = self.loads.begin(sequence, cached_tokens)
        if is_loading:
            sequence.move(SequenceState.LOADING)
        return is_loading

    def _start(self, sequence: Sequence, cached_tokens: int) -> Admission:
        """The sequence runs from now on, behind the tokens whose KV is there."""
        if not sequence.has_run:
            sequence.has_run = True
            sequence.cached_tokens = cached_tokens
            self._counters.cached_tokens += cached_tokens
        sequence.move(SequenceState.RUNNING)
        bisect.insort(self.running, sequence, key=_age)
        start = sequence.take_slot(cached_tokens=cached_tokens)
        restore = None
        if self.snapshots is not None and cached_tokens:
            restore = self.snapshots.restore(sequence.kv, cached_tokens, start.slot)
        return Admission(sequence, start, sequence.is_spoilt, restore)

    def _next(self) -> Sequence | None:
        """None, too, while a result of the one to resume is outstanding, or a copy uses its blocks."""
        if not self.preempted:
            return self.waiting.head
        sequence = self.preempted[-1]
        return None if sequence.is_held else sequence

    def _reserve(self, sequence: Sequence) -> int | None:
        """Takes blocks for every id a sequence knows, cached ones first.

        Returns:
            The tokens found in the cache; None if blocks are short, or others compute what it needs first, and will
            have it in the cache soon. Then nothing has changed.
        """
        kv, pool, spare_blocks = sequence.kv, self.kv.pool, self._num_admitted_sequences()
        matched_tokens = cached_tokens = 0
        if self.matches_prefixes and sequence.may_match:
            if self.snapshots is None and self._is_being_computed(kv):
                return None
            if not kv.would_fit(sequence.known_tokens, spare_blocks=spare_blocks):
                self._hurry_saves()
                return None
            matched_tokens = cached_tokens = kv.match()
            if self.snapshots is not None:
                cached_tokens = kv.shrink(self.snapshots.longest_prefix(kv, matched_tokens))
                missing_blocks = pool.blocks_for(sequence.known_tokens) - len(kv.blocks)
                if missing_blocks + spare_blocks > pool.available_blocks:  # what was shared would be there twice
                    kv.shrink(0)
                    return None
        elif pool.blocks_for(sequence.known_tokens) + spare_blocks > pool.available_blocks:
            self._hurry_saves()
            return None
        if kv.reserve(sequence.known_tokens) is None:
            raise ContractViolation(f"blocks for request {sequence.request_id} were there and could not be reserved")
        if self.snapshots is not None:
            sequence.snapshot_places = self.snapshots.places(
                matched_tokens=matched_tokens, begin_tokens=cached_tokens, known_tokens=sequence.known_tokens
            )
        return cached_tokens

    def _is_being_computed(self, kv: BlockSequence) -> bool:
        """Whether the prompt of somebody who runs or loads has the block that `kv` would have to compute first."""
        block_tokens = self.kv.pool.block_size_tokens
        loading = () if self.loads is None else self.loads.sequences
        return any(
            other.kv.num_sealed_blocks < other.prompt_tokens // block_tokens and kv.would_wait_for(other.kv)
            for others in (self.running, loading)
            for other in others
        )

    def _num_admitted_sequences(self) -> int:
        """Those with blocks that will want more."""
        return len(self.running) + (0 if self.loads is None else len(self.loads.sequences))

    # --- states -----------------------------------------------------------------------------------------

    def begin_snapshot(self, sequence: Sequence) -> SlotCopy | None:
        """The copy of a running sequence's states behind the row planned last, if they are to be kept there."""
        if self.snapshots is None or sequence.computed_tokens not in sequence.snapshot_places:
            return None
        return self.snapshots.take(sequence.kv, sequence.computed_tokens, sequence.slot)

    def end_snapshot(self, copy: SlotCopy, *, good: bool) -> None:
        """The step behind which the copy ran was applied; `good` if its row was computed for a sequence that lives."""
        if self.snapshots is None:
            raise ContractViolation("a copy of states ended, and none are kept")
        self.snapshots.end(copy, good=good)

    # --- growth -----------------------------------------------------------------------------------------

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` computed positions fits, with everybody else preempted."""
        return self.kv.can_ever_fit(num_tokens)

    def grow(self, sequence: Sequence, in_flight: Iterable[StepInFlight]) -> ListLike[int] | None:
        """Makes room for one more position of a running sequence, preempting the youngest as needed.

        Returns:
            The blocks added; None if it has to sit this step out, because blocks that a step in flight still uses are
            about to come back, or because it was the youngest itself.
        """
        while (new_blocks := sequence.kv.reserve(sequence.computed_tokens + 1)) is None:
            if self._are_blocks_coming(in_flight):
                return None
            if self._give_up_load():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        sequence.capacity_tokens = sequence.kv.capacity_tokens
        return new_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Sends the youngest running sequence back; what it has generated will be given when it resumes."""
        self.running.pop()
        self.preempted.append(sequence)
        sequence.move(SequenceState.PREEMPTED)
        sequence.asked_tiers = False
        self._counters.preemptions += 1
        if not sequence.rows_in_flight:
            self.give_back(sequence)

    def _are_blocks_coming(self, in_flight: Iterable[StepInFlight]) -> bool:
        """Whether steps or copies that were begun give blocks back when they end."""
        if self.saves is not None and self.saves.are_blocks_coming():
            return True
        return (self.loads is not None and self.loads.is_ending) or _are_blocks_in_flight(in_flight)

    def _hurry_saves(self) -> None:
        """Blocks are short: slow copies are cancelled."""
        if self.saves is not None:
            self.saves.are_blocks_coming()

    def _give_up_load(self) -> bool:
        """Gives up the youngest load, if there is one: its blocks come back, and its prefix is computed later."""
        if self.loads is None or not self.loads.sequences:
            return False
        sequence = max(self.loads.sequences, key=_age)
        self.loads.give_up(sequence)
        sequence.move(SequenceState.PREEMPTED)
        bisect.insort(self.preempted, sequence, key=lambda each: -each.admission)
        self.settle()  # it may be over already
        return True

    # --- out --------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        match sequence.state:
            case SequenceState.WAITING:
                self.waiting.withdraw(sequence)
            case SequenceState.PREEMPTED:
                self.preempted.remove(sequence)
            case SequenceState.LOADING if self.loads is not None:
                self.loads.give_up(sequence)
            case _:
                self.running.remove(sequence)
        sequence.move(SequenceState.FINISHED)
        if not sequence.is_held:
            self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Frees what a sequence holds that runs no longer and that no step in flight and no copy uses."""
        if sequence.slot != NO_SLOT:
            self.free_slots.append(sequence.slot)
            sequence.slot = NO_SLOT
        if sequence.state is SequenceState.FINISHED:
            sequence.kv.release()
        else:
            sequence.kv.shrink(0)


def _age(sequence: Sequence) -> int:
    return sequence.admission


def _are_blocks_in_flight(in_flight: Iterable[StepInFlight]) -> bool:
    """Whether a sequence with a row in flight holds blocks that it gives back when the step is applied."""
    return any(
        sequence.state is not SequenceState.RUNNING or sequence.computed_tokens == sequence.target_tokens
        for record in in_flight
        for sequence in record.rows
    )
