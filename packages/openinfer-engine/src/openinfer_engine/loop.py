"""The step loop: plan, run, apply, with one step of overlap.

    step():  plan N+1 ─► launch N+1 ─► wait for N ─► apply N ─► events of N

While the device runs step N, the host plans N + 1 and queues it after N, so the device never waits for Python.
A stop that step N brings to light leaves one row of N + 1 wasted, never a wrong token. A request with a grammar
(or `allowed_token_ids`, `bad_words`) has no row in N + 1 while N samples it: its mask is begun when N is applied, in a
thread (`grammars/masking.py`), and it has a row once that is there. Others keep their overlap.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec

from openinfer_core import (
    EngineCapability,
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    TokenEvent,
)
from openinfer_core.control import CAPABILITY_OF, ControlCommand, FlushCache, LoadAdapter, UnloadAdapter, refusal_of
from openinfer_core.engine import EngineState
from openinfer_core.grammars import GrammarCompiler
from openinfer_core.request import token_id_beyond, with_fields
from openinfer_core.scheduling import FlushesCache, PlacesAdapters, Scheduler, StepPlan
from openinfer_core.scheduling.draft_counter import DraftCounter
from openinfer_engine.adapters import AdapterTable
from openinfer_engine.drafting import DrafterFaults
from openinfer_engine.grammars.masking import MASK_WAIT_S, MaskedRequests
from openinfer_engine.guard import GuardOptions, SchedulerGuard
from openinfer_engine.kv_events.recorder import KvEventRecorder
from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.kv_tiers.remote_port import RemoteTierPort
from openinfer_engine.kv_transfer import KvTransfer
from openinfer_engine.lifecycle.lifecycle import Lifecycle, WeightsInUse
from openinfer_engine.lifecycle.orders import ObeysOrders
from openinfer_engine.tracing.step_trace import StepTrace
from openinfer_engine.tracing.trace import LOOP, NoTrace, Tracer
from openinfer_engine.worker.runner import PendingStep, Runner

# of a step that has nothing to run and a grammar or a KV tier to wait for; commands are heard after it
_GRAMMAR_WAIT_S, _TIER_WAIT_S, _ADAPTER_WAIT_S = 0.005, 0.001, 0.005


@dataclass(frozen=True, slots=True)
class BegunStep:
    """An iteration whose plan was launched and that has not waited for the step before it."""

    events: list[TokenEvent]
    failures: list[Failed]
    before: "_InFlight | None"
    is_idle: bool
    """Whether there is nothing to run and nothing to wait for on the device."""
    is_still: bool = False
    """Whether the loop plans no steps at the moment."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    planned: StepPlan  # by the scheduler; the runner has it with masks, and without drafts that these forbid
    pending: PendingStep


class StepLoop:
    """Implements `openinfer_core.process.host.EngineLoop` with a scheduler and a runner.

    The scheduler is called through its guard alone; without options its plans and rows are not watched. The runner,
    the port, the grammar compiler, the recorder of KV events, the tracer and the step trace are closed with it.

    Args:
        weights: where the runner's come from; None: they cannot change, and the engine neither sleeps nor pauses.
        mask_wait_s: that a step waits for masks at most, before it goes on without the rows that need them.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        guard: GuardOptions | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        mask_wait_s: float = MASK_WAIT_S,
        kv_events: KvEventRecorder | None = None,
        port: PoolTierPort | RemoteTierPort | None = None,
        kv_transfer: KvTransfer | None = None,
        adapters: AdapterTable | None = None,
        weights: WeightsInUse | None = None,
        max_drafts: int = 0,
        drafter_faults: DrafterFaults | None = None,
        tracer: Tracer | None = None,
        step_trace: StepTrace | None = None,
        clock: Callable[[], float] = time.monotonic,  # seconds
    ) -> None:
        self._info = info
        if isinstance(scheduler, FlushesCache):
            can = (*info.capabilities, EngineCapability.FLUSH_CACHE)
            self._info = msgspec.structs.replace(info, capabilities=can)
        self._scheduler = scheduler
        self._step_trace = step_trace
        called = scheduler if step_trace is None else step_trace.recorded(scheduler)
        self._guard = SchedulerGuard(called, guard or GuardOptions(plugin=type(scheduler).__name__), clock=clock)
        self._runner = runner
        self._clock = clock
        self._kv_events = kv_events
        self._port = port
        self._transfer = kv_transfer
        if kv_transfer is not None:
            can = (*self._info.capabilities, EngineCapability.KV_TRANSFER)
            self._info = msgspec.structs.replace(self._info, capabilities=can)
        self._adapters = adapters
        # The adapters' content of requests that wait for a grammar or the tiers, and are not the scheduler's yet.
        self._coming: dict[RequestId, bytes] = {}
        if adapters is not None:
            adapters.count_waiting_by(self._num_waiting)
        self._drafts = DraftCounter(max_drafts) if max_drafts else None
        self._drafter_faults = drafter_faults or DrafterFaults()
        self._tracer = tracer or NoTrace()
        self._in_flight: _InFlight | None = None
        self._unsaid: list[TokenEvent] = []  # of a command, whose refusal has no place for them
        # Copies of KV ended while no steps were planned: the scheduler takes their blocks back in a plan.
        self._owes_plan = False
        self._masked = MaskedRequests(grammar_compiler, num_token_ids=info.num_token_ids, wait_s=mask_wait_s)
        self._lifecycle: Lifecycle | None = None
        if weights is not None and isinstance(runner, ObeysOrders) and self._guard.changes_weights:
            self._lifecycle = Lifecycle(runner, self, weights, clock=clock)
            can = (*self._info.capabilities, *self._lifecycle.capabilities)
            self._info = msgspec.structs.replace(self._info, capabilities=can)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def busy(self) -> bool:
        """Whether there is work: requests, a step in flight, blocks on their way from or to tiers, or a dead rank."""
        is_moving = self._port is not None and self._port.is_moving
        is_loading = self._adapters is not None and self._adapters.is_loading
        if not self._runs:
            is_kept = self._transfer is not None and self._transfer.is_handing_over
            return bool(self._unsaid) or is_moving or is_kept or is_loading or self._runner.failure is not None
        return (
            self._guard.num_unfinished > 0
            or self._owes_plan
            or bool(self._unsaid)
            or self._in_flight is not None
            or self._masked.num_compiling > 0
            or is_moving
            or (self._transfer is not None and self._transfer.is_busy)
            or is_loading
            or self._runner.failure is not None
        )

    @property
    def _runs(self) -> bool:
        """Whether steps are planned."""
        return self._lifecycle is None or self._lifecycle.state is EngineState.SERVING

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        self._tracer.submitted(request)
        events = self._withheld(self._take(request))
        self._tracer.told(events)
        return events

    def _take(self, request: GenerateRequest) -> list[TokenEvent]:
        if self._lifecycle is not None and (reason := self._lifecycle.refusal) is not None:
            return [Failed(request.request_id, FailureKind.UNAVAILABLE, reason)]
        refusal = self._refusal(request)
        if refusal is not None:
            return [Failed(request.request_id, FailureKind.INVALID, refusal)]
        found = self._with_adapter(request)
        if found is None:
            return [Failed(request.request_id, FailureKind.NOT_FOUND, _no_adapter(request))]
        if found.transfer is not None and self._transfer is not None:
            return self._take_transfer(found, self._transfer)
        return self._admit(found, arrived_s=self._clock())

    def _take_transfer(self, request: GenerateRequest, transfer: KvTransfer) -> list[TokenEvent]:
        if transfer.num_waiting >= self._info.max_waiting:
            message = f"{transfer.num_waiting} requests wait for what other engines have left; no more are taken"
            return [Failed(request.request_id, FailureKind.OVERLOADED, message)]
        try:
            is_waiting = transfer.take(request)
        except InvalidRequest as error:
            return [Failed(request.request_id, FailureKind.INVALID, str(error))]
        if not is_waiting:
            return self._admit(request, arrived_s=self._clock())
        self._note_coming(request)
        return []

    def _admit(self, request: GenerateRequest, *, arrived_s: float) -> list[TokenEvent]:
        if request.sampling.is_masked:
            if self._masked.num_compiling >= self._info.max_waiting:
                self._has_come(request.request_id)
                message = f"{self._masked.num_compiling} requests wait for their grammar; no more are taken"
                return [Failed(request.request_id, FailureKind.OVERLOADED, message)]
            self._masked.begin(request, now_s=arrived_s)
            self._note_coming(request)
            return self._add_compiled()
        return self._add(request, arrived_s=arrived_s)

    def _add(self, request: GenerateRequest, *, arrived_s: float) -> list[TokenEvent]:
        events = self._guard.add(request, now_s=arrived_s)
        self._has_come(request.request_id)  # from now on the scheduler counts it
        return events

    def _note_coming(self, request: GenerateRequest) -> None:
        if request.adapter is not None:
            self._coming[request.request_id] = request.adapter.digest

    def _has_come(self, request_id: RequestId) -> None:
        """It is the scheduler's, or has ended; the content that it may have kept is free to go."""
        digest = self._coming.pop(request_id, None)
        if digest is not None and self._adapters is not None:
            self._adapters.forget(digest)

    def _num_waiting(self, digest: bytes) -> int:
        users = self._scheduler.adapter_users() if isinstance(self._scheduler, PlacesAdapters) else {}
        return users.get(digest, (0, 0))[1] + sum(each == digest for each in self._coming.values())

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        events = self._end(request_id)
        self._tracer.told(events)
        return events

    def _end(self, request_id: RequestId) -> list[TokenEvent]:
        if self._transfer is not None and (ended := self._transfer.withdraw(request_id)) is not None:
            self._has_come(request_id)
            return [ended]
        withdrawn = self._masked.withdraw(request_id)
        if withdrawn is not None:
            self._has_come(request_id)
            return [Finished(request_id, FinishReason.ABORT, len(withdrawn.prompt_token_ids), 0, 0)]
        self._masked.forget(request_id)
        return self._guard.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Plans and launches a step, then waits for the one before it.

        Raises:
            PluginFault: the scheduler raised, planned what cannot be, or has unfinished requests and nothing to run.
            GroupBroken: a rank is gone.
        """
        begun = self.begin_step()
        if begun.is_idle:
            self.rest()
        return self.end_step(begun)

    def begin_step(self) -> BegunStep:
        """Plans and launches a step; `end_step` follows. Raises as `step`."""
        if self._runner.failure is not None:
            raise self._runner.failure
        events, self._unsaid = self._unsaid, []
        if not self._runs:
            return BegunStep(events + self._stand_still(), [], None, is_idle=False, is_still=True)
        with self._tracer.span(LOOP, "masks"):
            failures = self._masked.settle()
        events += self._ended(failures)
        events += self._add_compiled()
        if self._adapters is not None:
            events += self._settle_adapters(self._adapters)
        events += self._take_looked_up()
        # Before the plan, which uses what has come from tiers.
        if self._port is not None:
            self._port.settle()
        with self._tracer.span(LOOP, "plan"):
            self._guard.hold(self._masked.held_ids)
            plan = self._guard.plan()
        self._owes_plan = False
        before, self._in_flight = self._in_flight, None
        failures = []
        if plan is not None:
            masked, failures = self._masked.mask(plan)
            # Launched before the last step's result is read: the device has work while the host applies that.
            self._in_flight = _InFlight(plan, self._runner.launch(masked))
        return BegunStep(events, failures, before, is_idle=plan is None and before is None)

    def end_step(self, begun: BegunStep) -> list[TokenEvent]:
        """Waits for the step before the one that was begun; returns all events. Raises as `step`."""
        if begun.is_still:
            return begun.events
        finished = [] if begun.before is None else self._finish(begun.before)
        return self._follow([*begun.events, *finished], begun.failures)

    def _take_looked_up(self) -> list[TokenEvent]:
        """What comes of requests for which the tiers have been asked."""
        ready = [] if self._transfer is None else self._transfer.take_ready()
        return [event for request, arrived_s in ready for event in self._admit(request, arrived_s=arrived_s)]

    def _withheld(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Without the ends that wait for their KV to land, and with those that need not any longer."""
        if self._transfer is None:
            return events
        return [*self._transfer.withhold(events), *self._transfer.settle()]

    def _ended(self, failures: Iterable[Failed]) -> list[TokenEvent]:
        """The failures of requests that were still there to be ended."""
        return [failure for failure in failures if self._end(failure.request_id)]

    def _follow(self, events: list[TokenEvent], failures: list[Failed]) -> list[TokenEvent]:
        events = self._withheld([*events, *self._ended(failures)])
        # Before the next plan, which has rows with masks that follow from these tokens.
        self._masked.follow(events)
        self._tracer.told(events)
        if self._kv_events is not None:
            self._kv_events.flush()
        return events

    def begin_control(self, command: ControlCommand, answer: Callable[[str | None], None]) -> bool:
        """Takes the loading of an adapter, whose files are read in a thread; see `DefersControl`."""
        if not isinstance(command, LoadAdapter) or self._adapters is None:
            return False
        self._adapters.begin_load(command, answer)
        return True

    def _settle_adapters(self, adapters: AdapterTable) -> list[TokenEvent]:
        """Answers what was loaded, and ends what waits for an adapter that cannot be had again."""
        lost = [self._drop_adapter(each.digest, FailureKind.INTERNAL, each.message) for each in adapters.settle()]
        return [event for events in lost for event in events]

    def _drop_adapter(self, digest: bytes, kind: FailureKind, message: str) -> list[TokenEvent]:
        if not isinstance(self._scheduler, PlacesAdapters):
            return []
        events = self._scheduler.drop_adapter(digest, kind, message)
        if self._step_trace is not None:
            self._step_trace.dropped(digest, kind, events)
        return events

    def _unload(self, command: UnloadAdapter, adapters: AdapterTable) -> list[TokenEvent]:
        digest = adapters.unload(command.name)
        if digest is None:
            return []
        # Without the name: one that waits may have asked for this content under another, and not know of this one.
        message = "the adapter that was asked for was unloaded"
        events = self._drop_adapter(digest, FailureKind.NOT_FOUND, message)
        coming = [request_id for request_id, each in self._coming.items() if each == digest]
        events += self._ended(Failed(request_id, FailureKind.NOT_FOUND, message) for request_id in coming)
        adapters.forget(digest)
        events = self._withheld(events)
        self._tracer.told(events)
        return events

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        """Takes the result of the step in flight first, so that nothing is under way.

        What that and the command mean for requests is said by the next step if the command is refused.
        """
        if CAPABILITY_OF[type(command)] not in self._info.capabilities:
            raise refusal_of(command, self._info.capabilities)
        if isinstance(command, UnloadAdapter) and self._adapters is not None:
            return self._unload(command, self._adapters)
        before, self._in_flight = self._in_flight, None
        if before is not None:
            self._unsaid += self._follow(self._finish(before), [])
        if isinstance(command, FlushCache) and isinstance(self._scheduler, FlushesCache):
            self._flush_cache(self._scheduler)
        elif self._lifecycle is not None:
            self._lifecycle.obey(command)
        else:
            raise refusal_of(command, self._info.capabilities)
        if self._kv_events is not None:
            self._kv_events.flush()
        events, self._unsaid = self._unsaid, []
        return events

    def _flush_cache(self, scheduler: FlushesCache) -> None:
        scheduler.flush_cache()
        if self._step_trace is not None:
            self._step_trace.flushed()

    def _stand_still(self) -> list[TokenEvent]:
        """Of a loop that plans no steps: copies between pool and tiers end all the same, and what waits for them.

        Adapters are read, too: that needs host memory alone.
        """
        if self._port is not None:
            self._owes_plan |= self._port.is_moving
            self._port.settle()
            if self._port.is_moving:
                self._port.wait(_TIER_WAIT_S)
        lost: list[TokenEvent] = []
        if self._adapters is not None and self._adapters.is_loading:
            self._adapters.wait(_ADAPTER_WAIT_S)
            lost = self._settle_adapters(self._adapters)
        events = self._withheld(lost)
        self._tracer.told(events)
        return events

    # --- what a `Lifecycle` asks, with no step in flight ------------------------------------------------

    def park(self) -> bool:
        """Takes the slots and blocks of all requests; whether nothing has any, and no copy is under way."""
        self._unsaid += self._stand_still()
        is_kept = self._transfer is not None and self._transfer.is_handing_over
        is_moving = self._port is not None and self._port.is_moving
        return self._guard.park() and not (is_moving or is_kept)

    def renew_cache(self, kv_version: str) -> None:
        self._guard.renew_cache(kv_version)
        if self._transfer is not None:
            self._transfer.renew(kv_version)

    def wait_for_copies(self, timeout_s: float) -> None:
        if self._port is not None:
            self._port.wait(timeout_s)

    def end_all(self, failure: str | None) -> None:
        """Ends all requests, as aborted, or with `UNAVAILABLE` and a reason. No step is in flight."""
        elsewhere = frozenset[RequestId]() if self._transfer is None else self._transfer.open_ids
        for request_id in sorted(self._guard.unfinished_ids | self._masked.compiling_ids | elsewhere):
            ended = self._end(request_id)
            if failure is not None:
                ended = [Failed(request_id, FailureKind.UNAVAILABLE, failure)]
            self._tracer.told(ended)
            self._unsaid += ended

    def reconcile(self, open_ids: AbstractSet[RequestId]) -> list[TokenEvent]:
        """Ends what the scheduler has lost or starves; requests that wait for a grammar are the loop's own."""
        if not self._runs:
            return []
        open_ids = open_ids - self._masked.compiling_ids
        if self._transfer is not None:
            open_ids -= self._transfer.open_ids
        events = self._withheld([*self._guard.reconcile(open_ids)])
        for event in events:
            self._masked.forget(event.request_id)
        self._tracer.told(events)
        return events

    def _finish(self, step: _InFlight) -> list[TokenEvent]:
        with self._tracer.span(LOOP, "wait", step=step.planned.step):
            result = step.pending.result()
        if self._drafts is not None:
            self._drafts.count(result)
            self._masked.take_drafts(step.planned, result)
        if self._adapters is not None:
            self._adapters.applied(step.planned)
        with self._tracer.span(LOOP, "apply", step=step.planned.step):
            return self._guard.apply(step.planned, result)

    def stats(self) -> EngineStats:
        stats = self._guard.stats()
        stats = msgspec.structs.replace(
            stats,
            drafter_faults=self._drafter_faults.count,
            grammars=self._masked.stats(),
            slow_call=stats.slow_call or self._masked.slow_call(),
        )
        if self._transfer is not None:
            waiting = stats.waiting + self._transfer.num_waiting
            stats = msgspec.structs.replace(stats, waiting=waiting, kv_transfer=self._transfer.stats())
        if self._drafts is not None:
            stats = self._drafts.told_in(stats)
        if self._lifecycle is not None:
            stats = self._lifecycle.told_in(stats)
        if self._adapters is not None and isinstance(self._scheduler, PlacesAdapters):
            told = self._adapters.stats(self._scheduler.adapter_users())
            stats = msgspec.structs.replace(stats, adapters=told)
        if self._port is None:
            return stats
        # What the tiers did is told here, so that no scheduler has to.
        return msgspec.structs.replace(stats, kv_tier_faults=self._port.faults, kv_tiers=self._port.stats())

    def close(self) -> None:
        self._in_flight = None
        self._masked.close()
        if self._transfer is not None:
            self._transfer.close()
        if self._kv_events is not None:
            self._kv_events.close()
        # Before the runner, whose memory its copies read and write.
        if self._port is not None:
            self._port.close()
        if self._adapters is not None:
            self._adapters.close()
        self._runner.close()
        self._tracer.close()
        if self._step_trace is not None:
            self._step_trace.close()

    def rest(self, *, waits: bool = True) -> None:
        """There is nothing to plan and nothing in flight: blocks move, masks or grammars are due, or it is wedged.

        Args:
            waits: for a few milliseconds, for what is due; else it only looks whether anything is.

        Raises:
            PluginFault: the scheduler has unfinished requests, and nothing is due.
        """
        if self._port is not None and self._port.is_moving:
            self._port.wait(waits * _TIER_WAIT_S)
            return
        if self._transfer is not None and self._transfer.is_busy:
            self._transfer.wait(waits * _TIER_WAIT_S)
            return
        if self._masked.num_pending > 0:
            self._masked.wait(waits * _GRAMMAR_WAIT_S)
            return
        if self._adapters is not None and self._adapters.is_loading:
            self._adapters.wait(waits * _ADAPTER_WAIT_S)
            return
        if unfinished := self._guard.num_unfinished:
            raise self._guard.wedged(unfinished)
        if self._masked.num_compiling > 0:
            self._masked.wait(waits * _GRAMMAR_WAIT_S)

    def _add_compiled(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for compiled in self._masked.take_compiled():
            if compiled.failure is not None:
                self._has_come(compiled.request.request_id)
                events.append(compiled.failure)
            else:
                events += self._add(compiled.request, arrived_s=compiled.arrived_s)
        return events

    def _refusal(self, request: GenerateRequest) -> str | None:
        limit = self._info.num_token_ids
        if token_id_beyond(request, limit) is not None:
            return f"the prompt has a token id beyond the model's {limit} tokens"
        if (field := request.sampling.field_beyond(limit)) is not None:
            return f"{field} names a token id beyond the model's {limit} tokens"
        if request.sampling.grammar is not None and not self._masked.takes_grammars:
            return "this engine has no grammar compiler (its log says why); send no grammar"
        if request.adapter is not None:
            return "adapter is what the engine finds for lora; a request names lora alone"
        return self._missing_capability(request)

    def _missing_capability(self, request: GenerateRequest) -> str | None:
        can, limit = self._info.capabilities, self._info.num_token_ids
        if request.transfer is not None and EngineCapability.KV_TRANSFER not in can:
            return "this engine hands no KV to other engines and takes none from them (--kv-transfer); send no transfer"
        if request.prediction_token_ids and EngineCapability.PREDICTIONS not in can:
            return "this engine drafts nothing from a prediction (with --speculative ngram it does); send none"
        if max(request.prediction_token_ids, default=0) >= limit:
            return f"the prediction has a token id beyond the model's {limit} tokens"
        return None

    def _with_adapter(self, request: GenerateRequest) -> GenerateRequest | None:
        """The request with the adapter that it names, by content; None if no such one is loaded."""
        if request.lora is None:
            return request
        adapter = None if self._adapters is None else self._adapters.find(request.lora, tenant=request.tenant)
        return None if adapter is None else with_fields(request, adapter=adapter)


def _no_adapter(request: GenerateRequest) -> str:
    return f"the model {(request.lora or '')[:200]!r} is not served here"
