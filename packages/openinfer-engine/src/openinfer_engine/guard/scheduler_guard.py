"""`SchedulerGuard`: what stands between the step loop and a scheduler, which may be anyone's.

    what goes wrong                             what follows
    add, abort, plan or apply raises            `PluginFault`: the engine ends, and every request with it
    returns what the contract does not know     the same
    unfinished requests and no plan (`wedged`)  the same
    a plan breaks the contract (`plan_check`)   the same, before a device sees it; our own scheduler's are not checked
    a request is added and forgotten            it alone ends with `Failed(INTERNAL)`
    one is counted and never gets a row         the same, after `starvation_timeout_s` (`row_watch`)
    a call takes longer than a second           it cannot be interrupted; `EngineStats.slow_call` says so meanwhile, and
                                                names the queue policy where most of that time is in its calls

Each is named with the plug-in in the log and in what clients are told, and counted.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import msgspec

from openinfer_core import (
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    PluginFault,
    PluginFaults,
    RequestId,
    Scheduled,
    SlowCall,
    TokenEvent,
    Tokens,
)
from openinfer_core.plugins import PLUGIN_ERRORS, QUEUE_POLICIES, SCHEDULERS
from openinfer_core.scheduling import (
    ChangesWeights,
    HoldsRows,
    PolicyCalls,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from openinfer_engine.guard.errors import BadPlan
from openinfer_engine.guard.plan_check import PlanCheck
from openinfer_engine.guard.row_watch import RowWatch

logger = logging.getLogger("openinfer.engine")

SLOW_CALL_S = 1.0
_EVENT_TYPES = frozenset((Scheduled, Tokens, Finished, Failed))


class FaultKind(StrEnum):
    """How a scheduler broke its contract; a label of `openinfer_plugin_faults_total`."""

    LOST_REQUEST = "lost_request"
    STARVED_REQUEST = "starved_request"
    SLOW_CALL = "slow_call"
    BAD_PLAN = "bad_plan"
    BAD_ANSWER = "bad_answer"
    RAISED = "raised"
    WEDGED = "wedged"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """How a scheduler is guarded: its calls always, and its rows and plans where there are limits for them."""

    plugin: str  # its name, distribution and version, for messages
    rows: SchedulerConfig | None = None  # its limits, where requests without a row are watched
    starvation_timeout_s: float = math.inf
    plan_check: PlanCheck | None = None  # for schedulers of other distributions


class SchedulerGuard:
    """Calls a scheduler for the step loop. Called from the loop's thread, but for `stats`."""

    def __init__(
        self, scheduler: Scheduler, options: GuardOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._holds_rows = scheduler if isinstance(scheduler, HoldsRows) else None
        self._changes_weights = scheduler if isinstance(scheduler, ChangesWeights) else None
        told: object = getattr(scheduler, "policy_calls", None)
        self._policy = told if isinstance(told, PolicyCalls) else None
        self._policy_before_s = 0.0  # what all calls before this one took of the policy
        self._slow_policy_calls = 0
        self._options = options
        self._clock = clock
        if self._policy is not None:
            self._policy.clock = clock  # ages are compared
        self._counts = dict.fromkeys(FaultKind, 0)
        self._check = options.plan_check
        self._watch: RowWatch | None = None
        if options.rows is not None:
            self._watch = RowWatch(options.rows, timeout_s=options.starvation_timeout_s, now_s=clock())
        # The call that the loop is in, for other threads: one assignment, so that they never see half of it.
        self._call: tuple[str, float] | None = None
        self._told_call: tuple[str, float] | None = None
        self._must_check_owners = False
        self._last_stats = EngineStats()
        self._has_told_stats = False

    # --- calls ------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished_ids)

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        try:
            return self._scheduler.unfinished_ids
        except PLUGIN_ERRORS as error:
            raise self._raised("unfinished_ids", error) from error

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        if self._watch is not None:
            self._watch.add(request)
        call = self._call = ("add", self._clock())
        try:
            events = self._scheduler.add(request, now_s=now_s)
        except PLUGIN_ERRORS as error:
            raise self._raised("add", error) from error
        finally:
            self._leave(call)
        return self._events(events, "add")

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        call = self._call = ("abort", self._clock())
        try:
            events = self._scheduler.abort(request_id)
        except PLUGIN_ERRORS as error:
            raise self._raised("abort", error) from error
        finally:
            self._leave(call)
        return self._events(events, "abort")

    def hold(self, request_ids: AbstractSet[RequestId]) -> None:
        """Tells a scheduler that can do without their rows; the others plan them, and their masks are waited for."""
        if self._watch is not None:
            self._watch.held = request_ids
        if self._holds_rows is None:
            return
        call = self._call = ("hold", self._clock())
        try:
            self._holds_rows.hold(request_ids)
        except PLUGIN_ERRORS as error:
            raise self._raised("hold", error) from error
        finally:
            self._leave(call)

    @property
    def changes_weights(self) -> bool:
        """Whether `park` and `renew_cache` may be called."""
        return self._changes_weights is not None

    def park(self) -> bool:
        """As `ChangesWeights.park`; `PluginFault` if it raises."""
        try:
            return self._changes_weights is not None and self._changes_weights.park()
        except PLUGIN_ERRORS as error:
            raise self._raised("park", error) from error

    def renew_cache(self, kv_version: str) -> None:
        """As `ChangesWeights.renew_cache`; `PluginFault` if it raises."""
        try:
            if self._changes_weights is not None:
                self._changes_weights.renew_cache(kv_version)
        except PLUGIN_ERRORS as error:
            raise self._raised("renew_cache", error) from error

    def plan(self) -> StepPlan | None:
        """The scheduler's next plan; `PluginFault` if it raises, or the plan breaks the contract."""
        now_s = self._clock()
        call = self._call = ("plan", now_s)
        try:
            plan = self._scheduler.plan(now_s=now_s)
        except PLUGIN_ERRORS as error:
            raise self._raised("plan", error) from error
        finally:
            self._leave(call)
        if plan is None:
            return None
        if type(plan) is not StepPlan:
            raise self._fault(FaultKind.BAD_ANSWER, f"returned {type(plan).__name__} from plan")
        if self._check is not None:
            self._check_plan(self._check, plan)
        if self._watch is not None:
            self._watch.planned(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        now_s = self._clock()
        call = self._call = ("apply", now_s)
        try:
            events = self._scheduler.apply(plan, result, now_s=now_s)
        except PLUGIN_ERRORS as error:
            raise self._raised("apply", error) from error
        finally:
            self._leave(call)
        if self._check is not None:
            self._check.applied(plan, result)
        return self._events(events, "apply")

    def _leave(self, call: tuple[str, float]) -> None:
        self._call = None
        taken_s = self._clock() - call[1]
        policy, before_s = self._policy, self._policy_before_s
        if policy is not None:
            self._policy_before_s = policy.spent_s
        if taken_s <= SLOW_CALL_S:
            return
        if policy is not None and (by_policy_s := policy.spent_s - before_s) > taken_s / 2:
            self._slow_policy_calls += 1
            message = "the queue policy %s took %.1f of the %.1f s in %s"
            logger.warning(message, policy.policy, by_policy_s, taken_s, call[0])
        else:
            self._counts[FaultKind.SLOW_CALL] += 1
            logger.warning("the scheduler %s took %.1f s in %s", self._options.plugin, taken_s, call[0])

    def _events(self, events: object, call: str) -> list[TokenEvent]:
        if type(events) is not list:
            raise self._fault(FaultKind.BAD_ANSWER, f"returned {type(events).__name__}, not a list, from {call}")
        if self._check is not None:
            strange = set(map(type, cast("list[object]", events))) - _EVENT_TYPES
            if strange:
                names = ", ".join(sorted(kind.__name__ for kind in strange))
                raise self._fault(FaultKind.BAD_ANSWER, f"returned events of type {names} from {call}")
        return cast("list[TokenEvent]", events)

    # --- plans ------------------------------------------------------------------------------------------

    def _check_plan(self, check: PlanCheck, plan: StepPlan) -> None:
        try:
            check.check(plan)
            for start in plan.started:
                if start.request.request_id not in self._scheduler.unfinished_ids:
                    raise BadPlan(f"request {start.request.request_id} is started, and is not among unfinished_ids")
            if self._must_check_owners:
                self._must_check_owners = False
                self._check_owners(check)
        except BadPlan as error:
            raise self._fault(FaultKind.BAD_PLAN, f"made a plan that breaks the contract: {error}") from error
        except Exception as error:
            # Columns of other kinds than the contract's, on which NumPy raises.
            message = f"made a plan that cannot be read ({type(error).__name__})"
            raise self._fault(FaultKind.BAD_PLAN, message) from error

    def _check_owners(self, check: PlanCheck) -> None:
        """Ended requests leave their slots with the next plan."""
        unfinished = self._scheduler.unfinished_ids
        for slot, request_id in check.owners.items():
            if request_id not in unfinished:
                raise BadPlan(f"request {request_id} has ended, and its slot {slot} is not among released")

    def wedged(self, num_unfinished: int) -> PluginFault:
        return self._fault(FaultKind.WEDGED, f"is wedged: it has {num_unfinished} requests and plans no step")

    # --- requests ---------------------------------------------------------------------------------------

    def reconcile(self, handed: AbstractSet[RequestId]) -> list[Failed]:
        """Ends requests that the scheduler has lost, or starves.

        Args:
            handed: requests without a terminal event that were given to the scheduler.
        """
        try:
            lost = handed - self._scheduler.unfinished_ids
        except PLUGIN_ERRORS as error:
            raise self._raised("unfinished_ids", error) from error
        self._must_check_owners = True
        failures = [
            self._end(
                request_id, FaultKind.LOST_REQUEST, "lost this request: it was added, has no end, and is not there"
            )
            for request_id in sorted(lost)
        ]
        for request_id, idle_s in self._starved().items():
            if request_id in handed and request_id not in lost:
                what = f"did not run this request for {idle_s:.0f} s in which it could"
                failures.append(self._end(request_id, FaultKind.STARVED_REQUEST, what))
        return failures

    def _starved(self) -> dict[RequestId, float]:
        now_s = self._clock()
        if self._watch is None or not self._watch.is_due(now_s):
            return {}
        self._take_stats()
        return self._watch.look(self._scheduler.unfinished_ids, self._last_stats, now_s=now_s)

    def _end(self, request_id: RequestId, kind: FaultKind, what: str) -> Failed:
        self._counts[kind] += 1
        message = f"the scheduler {self._options.plugin} {what}"
        logger.error("request %d: %s", request_id, message)
        if self._watch is not None:
            self._watch.forget(request_id)
        self.abort(request_id)  # in case it has something of it after all
        return Failed(request_id, FailureKind.INTERNAL, message)

    # --- faults -----------------------------------------------------------------------------------------

    def _raised(self, call: str, error: BaseException) -> PluginFault:
        return self._fault(FaultKind.RAISED, f"raised {type(error).__name__} in {call}")

    def _fault(self, kind: FaultKind, what: str) -> PluginFault:
        self._counts[kind] += 1
        return PluginFault(f"the scheduler {self._options.plugin} {what}; the engine ends")

    # --- from any thread --------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The scheduler's, with what was seen here; its last ones while it is in a slow call and may hold locks."""
        slow_call = self._slow_call()
        if slow_call is None:
            self._take_stats()
        faults = [PluginFaults(group=SCHEDULERS, plugin=self._options.plugin, counts=_by_name(self._counts))]
        if self._policy is not None and self._slow_policy_calls:
            counts = _by_name({FaultKind.SLOW_CALL: self._slow_policy_calls})
            faults.append(PluginFaults(group=QUEUE_POLICIES, plugin=self._policy.policy, counts=counts))
        return msgspec.structs.replace(self._last_stats, plugin_faults=tuple(faults), slow_call=slow_call)

    def _slow_call(self) -> SlowCall | None:
        call = self._call
        if call is None:
            return None
        age_s = self._clock() - call[1]
        if age_s <= SLOW_CALL_S:
            return None
        slow = SlowCall(plugin=self._options.plugin, call=call[0], age_s=age_s)
        policy = self._policy
        if policy is not None and (by_policy_s := policy.spent_s - self._policy_before_s) > age_s / 2:
            slow = SlowCall(plugin=policy.policy, call=policy.name, age_s=by_policy_s, group=QUEUE_POLICIES)
        if self._told_call != call:
            self._told_call = call
            part = "scheduler" if slow.group == SCHEDULERS else "queue policy"
            logger.warning("the %s %s has been in %s for %.1f s", part, slow.plugin, slow.call, slow.age_s)
        return slow

    def _take_stats(self) -> None:
        try:
            stats = cast("object", self._scheduler.stats())
        except PLUGIN_ERRORS:
            if not self._has_told_stats:
                self._has_told_stats = True
                logger.exception("the scheduler %s raised in stats; its last ones are shown", self._options.plugin)
            self._counts[FaultKind.RAISED] += 1
            return
        if isinstance(stats, EngineStats):
            self._last_stats = stats


def _by_name(counts: Mapping[FaultKind, int]) -> dict[str, int]:
    return {str(kind): count for kind, count in counts.items()}
