"""`TokenBudgetScheduler`: every step has a budget of tokens, and everything that runs is a row of it.

A plan is made by walking along the run queue (`run_queue.py`) until the budget is spent:

    running, next id on the device    one token each; where blocks run short, the youngest of all is preempted,
                                      or the one that the queue policy chooses;
                                      with a grammar every other step, once the last token is known;
                                      of a tenant that has very many, in turns (`decode_turns.py`)
    their drafts                      where blocks and budget are left (`drafts/`)
    running, given ids left           chunks of prompts, or of what a preemption made them lose; where a block table has
                                      a window, as long as there are blocks for, the first ones as a decode row's
    preempted, then the queue's head  admitted while slots, blocks and budget last; where it is of a tenant that has no
                                      prompt under way, before the chunks of others, with half of the budget

No sequence is passed over, but within one bound (`order/bypass.py`), so none starves, and the oldest always has a row,
so a step is always possible. One that is held, because its next mask is not computed yet, has no row, keeps what it
has, and is as before when its mask is there.

With KV tiers (`use_tiers`), an admitted sequence first loads what the tiers have of its prefix; others are planned
meanwhile.

A result is applied up to one plan late. Until then the positions of a row with drafts are upper bounds. Ends by length
are known in advance and never planned past; an end by a stop token leaves one wasted row in the step that is in flight.
Slots and blocks come back when no step in flight has a row of their sequence.
"""

import bisect
import secrets
from collections import deque
from collections.abc import Sequence as ListLike
from collections.abc import Set as AbstractSet

from openinfer_core.engine import EngineStats
from openinfer_core.errors import ContractViolation, Refused
from openinfer_core.events import Failed, FailureKind, FinishReason, TokenEvent
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduler_options import refuse_unknown_options
from openinfer_core.scheduling import (
    AdapterPort,
    DecodeStepTime,
    PolicyCalls,
    QueuePolicy,
    SchedulerCapabilities,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from openinfer_engine.scheduler.adapter_slots import AdapterSlots
from openinfer_engine.scheduler.company import ALONE_MS, ALONE_TOKENS, Company
from openinfer_engine.scheduler.counters import Counters
from openinfer_engine.scheduler.decode_turns import DecodeTurns
from openinfer_engine.scheduler.drafts.pace import DraftPace
from openinfer_engine.scheduler.drafts.planning import add_drafts
from openinfer_engine.scheduler.integrity import check_integrity
from openinfer_engine.scheduler.itl_limit import LEAST_TOKENS, ItlLimiter
from openinfer_engine.scheduler.outputs import OutputProcessor, finished
from openinfer_engine.scheduler.run_queue import RunQueue
from openinfer_engine.scheduler.sequence import Sequence, SequenceState, count_final_tokens
from openinfer_engine.scheduler.step_builder import StepBuilder, StepInFlight
from openinfer_kv_cache import BlockListener, BlockPin, BlockStateError, Digest, PrefixHasher, TierPort

EARLY_LOADS = "early-loads"
"""The option of `--scheduler-option`: `true` loads what conversations will need before their next turn arrives."""


class TokenBudgetScheduler:
    """Implements `openinfer_core.scheduling.Scheduler`. Called from one thread, but for `stats`.

    Raises:
        Refused: `config.options` has one that it does not know; there are recurrent states beside several block tables;
            or early loads are asked for beside several block tables.
    """

    capabilities = SchedulerCapabilities(
        uses_kv_tiers=True,
        tells_kv_events=True,
        copies_states=True,
        plans_drafts=True,
        frees_windows=True,
        places_adapters=True,
    )

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        refuse_unknown_options(config.options, known=(EARLY_LOADS,))
        self._loads_early = _is_on(config.options.get(EARLY_LOADS, "false"))
        if self._loads_early and config.table_windows != (None,):
            raise Refused(
                f"{EARLY_LOADS} is for models with one block table, and this one has windows {config.table_windows}"
            )
        if config.num_snapshots and config.table_windows != (None,):
            raise Refused(
                f"num_snapshots is {config.num_snapshots} and table_windows {config.table_windows}: token-budget keeps "
                "recurrent states beside one block table without a window; give it that, (None,)"
            )
        self._config = config
        self._counters = Counters()
        self._queue = RunQueue(config, policy, self._counters)
        self._open: dict[RequestId, Sequence] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._itl_limiter = ItlLimiter(config.max_itl_ms)
        self._decode_turns = DecodeTurns()
        self._company = Company()
        self._draft_pace = DraftPace(config.max_itl_ms) if config.adapts_drafts else None

    @property
    def policy_calls(self) -> PolicyCalls:
        return self._queue.waiting.calls

    def share_digests(self, hasher: PrefixHasher) -> None:
        """As `SharesDigests` says."""
        self._queue.kv.hasher.remember_with(hasher)

    def use_tiers(self, port: TierPort) -> None:
        """Raises `ContractViolation`: prefixes are not shared, or the port lacks the model's recurrent states."""
        self._queue.use_tiers(port, early_loads=self._loads_early)

    def pin_prefix(self, digests: ListLike[Digest]) -> BlockPin:
        return self._queue.kv.pool.pin_prefix(digests)

    def use_adapters(self, port: AdapterPort) -> None:
        self._queue.adapters = AdapterSlots(self._config.max_adapters, port, self._queue.bypass)

    def drop_adapter(self, digest: bytes, kind: FailureKind, message: str) -> list[TokenEvent]:
        waiting = [
            sequence
            for sequence in self._open.values()
            if sequence.state is SequenceState.WAITING
            and sequence.request.adapter is not None
            and sequence.request.adapter.digest == digest
        ]
        for sequence in waiting:
            del self._open[sequence.request_id]
            self._queue.finish(sequence)
        return [self._failed(sequence.request, kind, message) for sequence in waiting]

    def adapter_users(self) -> dict[bytes, tuple[int, int]]:
        return {} if self._queue.adapters is None else self._queue.adapters.users()

    def take_step_times(self, times: ListLike[DecodeStepTime]) -> None:
        if self._draft_pace is not None:
            self._draft_pace.take_step_times(times)

    def listen(self, listener: BlockListener) -> None:
        """Raises `Refused`: blocks that come early are of no request, and listeners hear of blocks with their ids."""
        if self._loads_early:
            raise Refused(f"{EARLY_LOADS} and KV events do not go together; leave out one of them")
        self._queue.kv.listen(listener)

    def flush_cache(self) -> None:
        self._queue.settle()  # a loop that plans no steps has heard of ended copies, and the queue has not
        try:
            self._queue.kv.clear()
            self._queue.retention.clear()
            if self._queue.early_loads is not None:
                self._queue.early_loads.clear()
        except BlockStateError as error:
            raise Refused(f"the cache cannot be flushed now: {error}; try again") from error

    def park(self) -> bool:
        """Raises `ContractViolation`: a step is in flight."""
        if self._in_flight:
            raise ContractViolation(f"{len(self._in_flight)} steps in flight write to what would be given back")
        return self._queue.park()

    def renew_cache(self, kv_version: str) -> None:
        self._queue.kv.renew(kv_version)
        if self._queue.prefetches is not None:
            self._queue.prefetches.advance(())  # what waits has other digests now
        if self._queue.early_loads is not None:
            self._queue.early_loads.clear()

    # --- requests ---------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        """Queues a request; refuses at once what can never be served, or what the queue has no room for."""
        if request.request_id in self._open:
            raise ContractViolation(f"request id {request.request_id} is in use")
        if (reason := self._refusal(request)) is not None:
            return [self._failed(request, FailureKind.INVALID, reason)]
        if len(self._queue.waiting) + len(self._queue.followers) >= self._config.max_waiting:
            message = f"the queue is full: {self._config.max_waiting} requests are waiting; try again later"
            return [self._failed(request, FailureKind.OVERLOADED, message)]
        sequence = self._make_sequence(request, now_s)
        if not self._queue.waiting.add(sequence, request, now_s=now_s):
            sequence.kv.release()
            return [self._failed(request, FailureKind.INTERNAL, self._queue.waiting.fault_message)]
        self._open[request.request_id] = sequence
        if self._queue.adapters is not None:
            self._queue.adapters.add(sequence)
        return []

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        sequence = self._open.pop(request_id, None)
        if sequence is None:
            return []
        self._queue.finish(sequence)
        if not self._in_flight:
            self._load_early_before_sleep()
        return [finished(sequence, FinishReason.ABORT)]

    def _refusal(self, request: GenerateRequest) -> str | None:
        prompt_tokens, longest = len(request.prompt_token_ids), self._config.max_model_tokens
        room_tokens = longest - (request.sampling.max_tokens > 0)
        if prompt_tokens > room_tokens:
            return f"the prompt has {prompt_tokens} tokens; a context of {longest} has room for at most {room_tokens}"
        final_tokens = count_final_tokens(request, longest)
        if not self._queue.can_ever_hold(final_tokens):
            fitting = bisect.bisect(range(final_tokens), self._config.num_blocks, key=self._config.blocks_for_context)
            return (
                f"prompt and completion need KV memory for {final_tokens} tokens and this engine has it for "
                f"{fitting - 1}; shorten the prompt or lower max_tokens"
            )
        return None

    def _make_sequence(self, request: GenerateRequest, now_s: float) -> Sequence:
        seed = request.sampling.seed
        return Sequence(
            request,
            self._queue.kv.sequence_of(request),
            seed=secrets.randbits(64) if seed is None else seed,
            arrived_s=now_s,
            max_model_tokens=self._config.max_model_tokens,
        )

    def _failed(self, request: GenerateRequest, kind: FailureKind, message: str) -> Failed:
        self._counters.failed_requests += 1
        return Failed(request.request_id, kind, message)

    # --- plan -------------------------------------------------------------------------------------------

    def hold(self, request_ids: AbstractSet[RequestId]) -> None:
        self._queue.held = request_ids

    def plan(self, *, now_s: float) -> StepPlan | None:
        # First of all, so that blocks and prefixes of ended copies are there for the rows of this plan.
        self._queue.settle()
        self._queue.bypass.now_s = now_s
        self._queue.waiting.ask_again(now_s=now_s)
        self._queue.make_room()
        self._company.note(self._queue.shares.rows, now_s=now_s)
        builder = StepBuilder(self._config.max_step_tokens, wants_drafts=self._config.max_drafts > 0)
        unfilled = self._plan_decode_rows(builder)
        if self._config.max_drafts:
            self._add_drafts(builder, unfilled)
        self._plan_prompts(builder, unfilled)
        self._queue.prefetch()
        self._queue.count_shares()
        if not builder.rows:
            return None
        plan, record = builder.build(
            self._counters.steps,
            planned_s=now_s,
            released=self._queue.take_released(),
            adapter_loads=self._queue.take_adapter_loads(),
            num_tables=self._queue.num_tables,
            windows=self._queue.windows,
        )
        self._in_flight.append(record)
        self._counters.steps += 1
        return plan

    def _plan_decode_rows(self, builder: StepBuilder) -> list[Sequence]:
        """One token for every sequence that has its next id on the device; returns those with given ids left."""
        unfilled: list[Sequence] = []
        is_short, running = False, SequenceState.RUNNING
        sitting_out = self._sitting_out()
        for sequence in tuple(self._queue.running):  # preemptions take from the list
            computed_tokens = sequence.computed_tokens
            if sequence.state is not running:
                continue  # gave way for one before it
            if computed_tokens < sequence.given_tokens:
                if computed_tokens < sequence.capacity_tokens or (
                    not is_short and self._allocate_next(sequence, builder) is not None
                ):
                    unfilled.append(sequence)
                else:
                    is_short = True
            elif computed_tokens == sequence.target_tokens or self._waits_for_mask(sequence) or sequence in sitting_out:
                continue
            elif computed_tokens < sequence.capacity_tokens:
                builder.add_decode_row(sequence, ())
            elif not is_short and (new_blocks := self._allocate_next(sequence, builder)) is not None:
                builder.add_decode_row(sequence, new_blocks)
            else:
                # Once blocks ran short for one, all younger ones that need a block sit the step out, too.
                is_short = True
        builder.close_decode_rows()
        return [sequence for sequence in unfilled if sequence.state is SequenceState.RUNNING]

    def _waits_for_mask(self, sequence: Sequence) -> bool:
        """Its last token is in flight, or the mask that follows from it is not computed yet."""
        if not sequence.is_masked:
            return False
        return sequence.computed_tokens >= sequence.known_tokens or sequence.request_id in self._queue.held

    def _sitting_out(self) -> AbstractSet[Sequence]:
        """Decode rows of a tenant that would make another tenant's slow, and whose turn it is not."""
        if len(self._queue.shares.rows.keys() | self._decode_turns.recent_tenants) < 2:
            return frozenset()
        ready, decoding = list[Sequence](), list[Sequence]()
        begun = set[str]()
        for sequence in self._queue.running:
            if sequence.computed_tokens >= sequence.given_tokens:
                decoding.append(sequence)  # its mask may be late: it is slowed by long steps all the same
                if sequence.computed_tokens != sequence.target_tokens and not self._waits_for_mask(sequence):
                    ready.append(sequence)
            else:
                begun.add(sequence.request.tenant)
        prompts_ms = dict.fromkeys(begun, self._itl_limiter.least_prompt_ms)
        sitting_out = self._decode_turns.sitting_out(ready, decoding, prompts_ms)
        self._counters.share_rows_sat_out += len(sitting_out)
        return sitting_out

    def _allocate_next(self, sequence: Sequence, builder: StepBuilder) -> ListLike[int] | None:
        return self._queue.allocate_next(sequence, self._in_flight, builder.rows)

    def _add_drafts(self, builder: StepBuilder, unfilled: list[Sequence]) -> None:
        queue, budget_tokens = self._queue, builder.budget_tokens
        if unfilled or queue.preempted or len(queue.waiting) or len(queue.followers):
            budget_tokens //= 2  # prompts go on, however many drafts there could be
        add_drafts(
            builder,
            queue.kv.pool,
            max_drafts=self._config.max_drafts,
            budget_tokens=budget_tokens,
            num_tables=queue.num_tables,
            spare_blocks=queue.num_tables * len(queue.running),
            pace=self._draft_pace,
        )

    def _plan_prompts(self, builder: StepBuilder, unfilled: list[Sequence]) -> None:
        """Chunks of prompts; those of several tenants share the budget, and leave decode rows of others their pace."""
        head = self._queue.peek()
        begun = {sequence.request.tenant for sequence in unfilled}
        tenants = begun if head is None else begun | {head.request.tenant}
        if begun and self._queue.divides:  # the next one is of these, and may have to wait: those of others need not
            tenants |= self._queue.wanting
        if tenants:
            others_ms, least_tokens = self._beside_others(builder, tenants)
            builder.budget_tokens = self._itl_limiter.budget_tokens(
                builder.budget_tokens,
                decode_rows=builder.decode_rows,
                others_ms=others_ms,
                least_tokens=least_tokens,
            )
        if begun and len(tenants) > len(begun):  # half for those that have begun, however many newcomers there are
            with builder.limited_to(builder.budget_tokens // 2), self._queue.putting_off(begun):
                self._admit(builder, none_of=begun)
        if len(begun) > 1:
            unfilled = self._plan_shares(builder, unfilled)
        self._plan_chunks(builder, unfilled)
        heavier = self._heavier() if head is not None and self._queue.divides else frozenset[str]()
        if heavier:  # where a step has few prompt tokens, who holds little waits for no more than half of them
            with builder.limited_to(builder.budget_tokens // 2), self._queue.putting_off(heavier):
                self._admit(builder, none_of=heavier)
        self._admit(builder)

    def _heavier(self) -> AbstractSet[str]:
        """Tenants that have something waiting, as another has that holds less of slots and blocks."""
        held = {tenant: self._queue.shares.held(tenant) for tenant in self._queue.wanting}
        least = min(held.values(), default=0.0)
        return {tenant for tenant, part in held.items() if part > least}

    def _beside_others(self, builder: StepBuilder, tenants: AbstractSet[str]) -> tuple[float | None, int]:
        """What prompts of these tenants may add to a step because of others, None for anything; their least tokens."""
        with_rows = {sequence.request.tenant for sequence in builder.rows}
        # One that waits for the first time may be admitted in this step, too, after those.
        if len(tenants | with_rows | self._queue.shares.recent_tenants | self._queue.wanting) < 2:
            return (ALONE_MS, ALONE_TOKENS) if self._company.is_expected_by(tenants) else (None, LEAST_TOKENS)
        return self._decode_turns.left_ms(builder.rows, tenants), LEAST_TOKENS

    def _plan_shares(self, builder: StepBuilder, unfilled: list[Sequence]) -> list[Sequence]:
        """A chunk of each tenant's oldest prompt, in equal parts of the budget; returns the other prompts."""
        oldest: dict[str, Sequence] = {}
        for sequence in unfilled:
            oldest.setdefault(sequence.request.tenant, sequence)
        for index, sequence in enumerate(oldest.values()):
            if builder.budget_tokens:
                with builder.limited_to(max(1, builder.budget_tokens // (len(oldest) - index))):
                    self._add_chunk(builder, sequence)
        return [sequence for sequence in unfilled if oldest[sequence.request.tenant] is not sequence]

    def _plan_chunks(self, builder: StepBuilder, unfilled: list[Sequence]) -> None:
        for sequence in unfilled:
            if builder.budget_tokens:
                self._add_chunk(builder, sequence)

    def _add_chunk(self, builder: StepBuilder, sequence: Sequence) -> None:
        if self._queue.windows is not None:
            self._queue.extend_windows(sequence, self._queue.windows, num_tokens=builder.budget_tokens)
        self._counters.prompt_tokens += builder.add_chunk(sequence)
        snapshot = self._queue.begin_snapshot(sequence)
        if snapshot is not None:
            builder.snapshots[len(builder.rows) - 1] = snapshot

    def _admit(self, builder: StepBuilder, *, none_of: AbstractSet[str] = frozenset()) -> None:
        """Lets sequences in while there is room and budget, until the next would be one of these tenants."""
        while builder.budget_tokens:
            if none_of and ((head := self._queue.peek()) is None or head.request.tenant in none_of):
                return
            if (admission := self._queue.admit()) is None:
                return
            if admission.has_policy_fault:
                builder.faults[len(builder.rows)] = self._queue.waiting.fault_message
            builder.started.append(admission.start)
            if admission.restore is not None:
                builder.restores.append(admission.restore)
            if admission.hold is not None:
                builder.holds.append(admission.hold)
            self._add_chunk(builder, admission.sequence)

    # --- apply ------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        """Raises `ContractViolation`: `plan` is not the oldest in flight, or the result has another number of rows."""
        step = self._take_in_flight(plan, result)
        self._itl_limiter.note(step, applied_s=now_s)
        self._decode_turns.note(step, applied_s=now_s)
        if self._draft_pace is not None:
            num_tokens = int(result.new_counts[: step.decode_rows].sum())
            self._draft_pace.note_step(step, num_tokens=num_tokens, applied_s=now_s)
        outputs = OutputProcessor(
            step,
            result,
            queue=self._queue,
            counters=self._counters,
            seals_blocks=self._queue.matches_prefixes,
            takes_drafts=self._config.max_drafts > 0,
            draft_pace=self._draft_pace,
        )
        outputs.process()
        self._queue.begin_saves()
        for request_id in outputs.ended:
            del self._open[request_id]
        self._load_early_before_sleep()
        return outputs.events

    def _load_early_before_sleep(self) -> None:
        """Without requests the loop sleeps, and plans again only where a copy is under way."""
        if not self._open and not self._queue.is_saving:
            self._queue.load_early()

    def _take_in_flight(self, plan: StepPlan, result: StepResult) -> StepInFlight:
        if not self._in_flight or self._in_flight[0].step != plan.step:
            oldest = self._in_flight[0].step if self._in_flight else "none"
            raise ContractViolation(f"step {plan.step} was applied; the oldest step in flight is {oldest}")
        num_rows = len(self._in_flight[0].rows)
        if len(result.new_counts) != num_rows:
            raise ContractViolation(f"step {plan.step} has {num_rows} rows; its result has {len(result.new_counts)}")
        return self._in_flight.popleft()

    # --- questions --------------------------------------------------------------------------------------

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        return self._open.keys()

    def stats(self) -> EngineStats:
        """Gauges and counters; from another thread they may be of slightly different moments."""
        queue, counters, pool, snapshots = self._queue, self._counters, self._queue.kv.pool, self._queue.snapshots
        loads, prefetches, early_loads = queue.loads, queue.prefetches, queue.early_loads
        loading = 0 if loads is None else len(loads.sequences)
        return EngineStats(
            running=len(queue.running),
            waiting=len(queue.waiting) + len(queue.followers) + len(queue.preempted) + loading,
            waiting_tokens=sum(
                sequence.uncached_tokens
                for sequence in list(self._open.values())
                if sequence.state is not SequenceState.RUNNING
            ),
            blocks_used=pool.num_blocks - pool.available_blocks,
            blocks_total=pool.num_blocks,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            share_preemptions=counters.share_preemptions,
            share_rows_sat_out=counters.share_rows_sat_out,
            tenants=counters.tenants if self._open else 0,
            protected_blocks=counters.protected_blocks,
            wasted_rows=counters.wasted_rows,
            failed_requests=counters.failed_requests,
            policy_faults=queue.waiting.faults,
            state_snapshots=0 if snapshots is None else snapshots.num_snapshots,
            evicted_state_snapshots=0 if snapshots is None else snapshots.evicted_snapshots,
            loading=loading,
            tier_tokens=0 if loads is None else loads.loaded_tokens,
            retained_blocks=pool.retained_blocks,
            unsaved_blocks=queue.unsaved_blocks,
            prefetched_blocks=0 if prefetches is None else prefetches.prefetched_blocks,
            early_blocks=0 if early_loads is None else early_loads.loaded_blocks,
            early_unused_blocks=0 if early_loads is None else early_loads.unused_blocks,
        )

    def check_integrity(self) -> None:
        """Compares the scheduler's records with each other; for tests and after faults, O(blocks + tokens).

        Raises:
            IntegrityError, ContractViolation: the KV blocks, or the queue, contradict themselves.
        """
        self._queue.kv.check_integrity()
        check_integrity(self._queue, open_requests=self._open.values(), in_flight=self._in_flight)


def _is_on(value: str) -> bool:
    if value not in ("true", "false"):
        raise Refused(f"the scheduler option {EARLY_LOADS} is true or false, not {value}")
    return value == "true"
