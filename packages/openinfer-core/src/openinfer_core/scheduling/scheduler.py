"""Who decides each step: `Scheduler` and its configuration, and the queue policies that it asks."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from openinfer_core.engine import EngineStats
from openinfer_core.errors import InvalidRequest
from openinfer_core.events import TokenEvent
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduler_options import check_scheduler_options
from openinfer_core.scheduling.step import StepPlan, StepResult
from openinfer_core.windows import MAX_TABLES, blocks_for_context

MAX_ADAPTERS = 1 << 16
"""Bound of `SchedulerConfig.max_adapters`."""

MAX_DRAFTS = 64
"""Bound of `SchedulerConfig.max_drafts`."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits a scheduler works within.

    Raises:
        InvalidRequest: a value is out of range.
    """

    num_blocks: int
    """KV blocks of the pool."""
    block_size_tokens: int
    table_windows: tuple[int | None, ...] = (None,)
    """The block tables of each sequence: how many tokens, its own among them, a token sees in a table's layers; None:
    all before it. More than one, or a window, is given to a scheduler that declares `frees_windows` alone."""
    max_num_seqs: int
    """Sequence slots, hence rows of one step, at most."""
    max_step_tokens: int
    """Token budget of one step."""
    max_model_tokens: int
    """Longest context; a request reaching it finishes with `length`."""
    max_waiting: int = 4096
    prefix_cache: bool = True
    layout_digest: str = ""
    """The digest of the KV layout: part of every block's identity."""
    digest_key: bytes | None = None
    """The secret that block identities are made with, where KV outlives this process; None draws one."""
    num_snapshots: int = 0
    """State slots after the first `max_num_seqs`, for copies. A model with states has `prefix_cache` off
    here; a scheduler that plans `StateCopy`s may share prefixes all the same, where it has copied the states."""
    max_adapters: int = 0
    """Adapter slots of the device; 0 without adapters. See `PlacesAdapters`."""
    max_drafts: int = 0
    """Drafts of one row at most; 0 without a drafter. Device drafts are planned only up to it."""
    adapts_drafts: bool = False
    """Whether a row should have fewer drafts, or none, where they are not worth what they cost."""
    max_itl_ms: int | None = None
    """What a step with decode rows should take at most: prompts are given as many tokens as fit. A scheduler that
    cannot keep to it raises `Refused` when it is made with one."""
    options: dict[str, str] = {}
    """The scheduler's own, as a user wrote them. One that it does not know, it refuses (`refuse_unknown_options`)."""

    def __post_init__(self) -> None:
        check_scheduler_options(self.options, field="options")
        for name in (
            "num_blocks",
            "block_size_tokens",
            "max_num_seqs",
            "max_step_tokens",
            "max_model_tokens",
            "max_waiting",
        ):
            value = getattr(self, name)
            if not 1 <= value < 2**31:
                raise InvalidRequest(f"{name} is {value}; it must be in 1 .. 2^31 - 1", field=name)
        self._check_tables()
        if not 0 <= self.num_snapshots < 2**31:
            raise InvalidRequest(
                f"num_snapshots is {self.num_snapshots}; it must be in 0 .. 2^31 - 1", field="num_snapshots"
            )
        if not 0 <= self.max_adapters <= MAX_ADAPTERS:
            raise InvalidRequest(
                f"max_adapters is {self.max_adapters}; it must be in 0 .. {MAX_ADAPTERS}", field="max_adapters"
            )
        if not 0 <= self.max_drafts <= MAX_DRAFTS:
            raise InvalidRequest(
                f"max_drafts is {self.max_drafts}; it must be in 0 .. {MAX_DRAFTS}", field="max_drafts"
            )
        if self.max_itl_ms is not None and self.max_itl_ms < 1:
            raise InvalidRequest(f"max_itl_ms is {self.max_itl_ms}; it must be at least 1", field="max_itl_ms")
        if self.max_step_tokens < self.max_num_seqs:
            raise InvalidRequest(
                f"max_step_tokens ({self.max_step_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a step could not give every sequence one token",
                field="max_step_tokens",
            )

    def _check_tables(self) -> None:
        windows = self.table_windows
        if not 1 <= len(windows) <= MAX_TABLES:
            raise InvalidRequest(
                f"table_windows has {len(windows)} entries; it must have 1 .. {MAX_TABLES}", field="table_windows"
            )
        if any(window is not None and not 1 <= window < 2**31 for window in windows):
            raise InvalidRequest(
                f"table_windows is {windows}; each must be None or in 1 .. 2^31 - 1", field="table_windows"
            )

    def blocks_for_context(self, num_tokens: int) -> int:
        """Blocks of all tables that a sequence of `num_tokens` tokens needs; a pool with as many has to serve it."""
        return blocks_for_context(num_tokens, self.table_windows, self.block_size_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """What a queue policy is told of a request; of a scheduler that does not know the last two, their defaults."""

    request: GenerateRequest
    arrival: int
    """Its number in order of arrival; end the key with it to break ties fairly."""
    cached_tokens: int = 0
    """Prompt tokens whose KV is cached at this moment: they would not be computed."""
    is_adapter_loaded: bool = True
    """Whether its adapter is on the device at this moment; True for a request without one."""


class QueuePolicy(Protocol):
    """The order of the waiting queue: the small hook most people want.

    A plug-in of the group `openinfer.queue_policies` is a callable taking a `QueuePolicyConfig`. The queue serves
    the smallest key first and never passes over its head, so that no request starves while others fit.

    `key` is called when a request arrives, and then `admitted` or `withdrawn` once. What a hook raises fails the
    request it was called for and no other, and is counted.

    A policy with a true attribute `asks_again` is asked again for the keys of requests that wait, some of them before
    each step, because what is cached and loaded changes. Then one that has waited for `max_bypass_s` (an attribute,
    too; 30 seconds without it) goes before all that have not, in order of arrival, whatever its key.

    A policy with a true attribute `lets_cached_pass` lets a scheduler serve one of a tenant's requests before others of
    that tenant that take long to compute, where its prompt is cached and theirs are not; within bounds that the
    scheduler states. By default the order of the keys is kept.
    """

    def key(self, waiting: WaitingRequest) -> Any:
        """The request's place; keys must order among each other."""
        ...

    def admitted(self, request: GenerateRequest) -> None:
        """The request leaves the queue to run: accounting goes here. Not called again after a preemption."""
        ...

    def withdrawn(self, request: GenerateRequest) -> None:
        """The request leaves the queue unserved (aborted, failed)."""
        ...


@runtime_checkable
class ChoosesVictim(QueuePolicy, Protocol):
    """A `QueuePolicy` that also says which running request gives way where blocks run short.

    A hook that not every policy has, nor every scheduler asks. Without it, or where it raises or answers no index of a
    candidate, the youngest gives way; such an answer is counted as a fault and fails no request.
    """

    def victim(self, candidates: Sequence[GenerateRequest]) -> int:
        """The index of the request to preempt: it is computed again from the tokens it has, and resumes by its age.

        Args:
            candidates: at least one, in order of first admission. The oldest that runs is not among them, so that it
                can always finish, and none that already has a row in the step being planned.
        """
        ...


@runtime_checkable
class CountsTokens(QueuePolicy, Protocol):
    """A `QueuePolicy` that is told what a request has come to.

    A hook that not every policy has, nor every scheduler calls. What it raises is counted as a fault and fails no
    request.
    """

    def ended(self, request: GenerateRequest, *, generated_tokens: int) -> None:
        """A request that was admitted has ended, well or not, with so many tokens."""
        ...


@runtime_checkable
class SharesRows(QueuePolicy, Protocol):
    """A `QueuePolicy` that divides what runs between tenants: sequence slots, and KV blocks in use.

    A hook that not every policy has, nor every scheduler asks. A scheduler that does admits what `next` says, in place
    of the order of the keys, and may preempt requests of a tenant that holds more than its share for one that holds
    less. Where the hook raises, the order of the keys stands in, which is counted as a fault and fails no request.
    """

    def next(self, full: AbstractSet[str]) -> RequestId:
        """Which of the requests that wait, at least one, is admitted next.

        Args:
            full: tenants that hold their share, or that others come before at the moment. Theirs is next where none
                of another tenant waits.
        """
        ...

    def weight(self, tenant: str) -> float:
        """A tenant's share relative to others', above 0."""
        ...


class QueuePolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may tell a queue policy."""

    tenant_weights: dict[str, float] = {}
    """Shares per tenant; tenants not named weigh 1."""

    def __post_init__(self) -> None:
        for tenant, weight in self.tenant_weights.items():
            if not 1e-6 <= weight <= 1e6:
                raise InvalidRequest(
                    f"weight of tenant {tenant!r} is {weight}; it must be in 1e-6 .. 1e6", field="tenant_weights"
                )


class SchedulerCapabilities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a scheduler declares about itself; the kit asks of it what these leave, and the engine refuses the rest.

    Nothing declared is the plain scheduler: it keeps the queue policy's order, ends no request early and has no KV
    tiers, no KV events and no drafts.
    """

    own_order: bool = False
    """Requests are not always admitted in the order of the queue policy's keys; the policy is asked and told."""
    own_policy: bool = False
    """The queue policy is never asked, so the order is the scheduler's, too; `--queue-policy` is refused with it."""
    may_shed: bool = False
    """A waiting request may end early with `Failed`: `OVERLOADED`, or `DEADLINE` if it has a `deadline_s`."""
    uses_kv_tiers: bool = False
    """It is an `openinfer_kv_cache.TieredScheduler`; `--kv-tier` is refused without."""
    tells_kv_events: bool = False
    """It is an `openinfer_kv_cache.KvEventSource`; `--kv-events` is refused without."""
    copies_states: bool = False
    """It plans `StateCopy`s, so that a model with recurrent states shares prefixes; `--kv-tier` is refused with such a
    model without."""
    plans_drafts: bool = False
    """Its rows may have drafts; a drafter is refused without."""
    places_adapters: bool = False
    """It is a `PlacesAdapters`; `--lora` and `--max-loras` are refused without."""
    frees_windows: bool = False
    """It keeps several block tables per sequence and gives back what lies behind their windows
    (`SchedulerConfig.table_windows`); without it, it is given one table, and all KV is kept."""

    @property
    def keeps_policy_order(self) -> bool:
        return not (self.own_order or self.own_policy)


@runtime_checkable
class FlushesCache(Protocol):
    """A `Scheduler` that can forget what it has cached."""

    def flush_cache(self) -> None:
        """No request that comes later finds KV computed before; those that run keep theirs. No step is in flight.

        Raises:
            Refused: not now, such as while copies of KV are under way.
        """
        ...


@runtime_checkable
class ChangesWeights(Protocol):
    """A `Scheduler` whose requests can leave the device, and begin anew on other weights."""

    def park(self) -> bool:
        """Takes the slots and KV blocks of all requests; whether nothing has any, and no copy of KV is under way.

        They stay unfinished and start again, with the tokens that they have, when steps are planned again. No step is
        in flight, and none is planned before this was true once; it is called until it is.
        """
        ...

    def renew_cache(self, kv_version: str) -> None:
        """Forgets all KV, and names what is computed from now on by that version as well. After `park`.

        The same version gives the same names, so that KV tiers find what was computed with the same weights.
        """
        ...


@runtime_checkable
class HoldsRows(Protocol):
    """A `Scheduler` that plans around requests whose next mask is not computed yet.

    Without it such a request is planned all the same, and the step waits for its mask; with it, others go on.
    """

    def hold(self, request_ids: AbstractSet[RequestId]) -> None:
        """Called before `plan`: until it is called again, these have no row that samples, and no others are held.

        A request is held only between one of its tokens and the next. It keeps its slot and blocks, unless it gives
        way as any other. Where all that could run is held, `plan` returns None, and is asked again.
        """
        ...


class Scheduler(Protocol):
    """Decides each step. A plug-in of the group `openinfer.schedulers` is a callable `(SchedulerConfig, QueuePolicy)`.

    Called from one thread, but for `stats`. `apply` is called once for every plan, in order; between `plan` and its
    `apply` at most one further `plan` is made. A request has one terminal event and no event after it, and one
    `Scheduled` before its first `Tokens`. A request with a grammar or restrictions (`sampling.is_masked`) has no row in
    a step planned between a step that samples it and that step's `apply`, since the mask of its next token depends on
    this one; its drafts are host ids, since no mask can be made after drafts that the host does not know.

    `openinfer_core.testing.scheduler` checks all of this.

    The host ends requests whose `deadline_s` is over: it calls `abort` and answers `Failed(DEADLINE)`. A scheduler that
    declares `may_shed` may end waiting requests before that.
    """

    @property
    def capabilities(self) -> SchedulerCapabilities:
        """The same in every instance and at any time: a class attribute will do."""
        ...

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        """Queues a request; returns a terminal event at once if it can never be served or the queue is full.

        Args:
            request: the request; its id is not in use.
            now_s: monotonic seconds.
        """
        ...

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        """Ends a request, waiting or running, with `Finished(ABORT)` at once; unknown ids give no event.

        Rows of it that are in flight are computed and ignored.
        """
        ...

    def plan(self, *, now_s: float) -> StepPlan | None:
        """The next step, or None if nothing can run now.

        With requests unfinished and no plan outstanding it must not return None: that would be a wedge. Only one that
        was given KV tiers may, while blocks are on their way, and one that was told to hold requests (`HoldsRows`);
        the loop waits for them and asks again.
        """
        ...

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        """Takes a step's result; returns what happened to its requests, in row order."""
        ...

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        """Requests added and not ended: a live view, such as a dict's keys, since it is asked for in every iteration.

        The loop compares it with the requests that it handed over, and ends those that are missing here.
        """
        ...

    def stats(self) -> EngineStats:
        """Gauges and counters, called from any thread; `step_age_s` is the loop's.

        With all requests ended and all plans applied, no block is used.
        """
        ...
