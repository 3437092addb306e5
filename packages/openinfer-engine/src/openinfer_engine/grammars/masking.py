"""`MaskedRequests`: requests with a grammar or restrictions, from the compiler to their last token.

    begin ─► compiling ─► first mask ─► scheduled │ settle ─► mask(plan) ─► step ─► follow(events) │ ended

A mask depends on the token before it. It is begun when that token is known, in a thread (`mask_queue.py`); a request
whose mask is not there when a step is planned sits that step out, if the scheduler can do without it (`HoldsRows`).
Requests in equal states share one computation. Restrictions need no compiler (`restrictions.py`). A row with drafts has
a mask at each position that it may reach (`row_masks.py`).
"""

import logging
import time
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from openinfer_core import (
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SlowCall,
    TokenEvent,
    Tokens,
    Unavailable,
)
from openinfer_core.engine import GrammarStats
from openinfer_core.grammars import (
    CountsGrammars,
    FillsInParallel,
    GrammarCompiler,
    MaskWords,
    TokenMatcher,
    mask_words,
)
from openinfer_core.plugins import GRAMMAR_COMPILERS, PLUGIN_ERRORS, place_of
from openinfer_core.process.processors import usable_processors
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.grammars.mask_cache import MaskCache
from openinfer_engine.grammars.mask_queue import MaskJob, MaskQueue
from openinfer_engine.grammars.restrictions import RestrictedMatcher
from openinfer_engine.grammars.row_masks import FollowedOutput, with_rows_cut

logger = logging.getLogger("openinfer.engine")

MASK_WAIT_S = 0.004  # that a step waits for masks; as much as a request's masks may take for each of its tokens
MAX_THREADS = 8
SLOW_MASK_S = 1.0
_FAULT = "the grammar matcher failed on this request"
_LOGGED_FAULT = "the matcher of request %d failed; the others live"
_COMPILER_FAULT = "the grammar compiler failed on this request"
_DEAD_END = "the grammar allows no token after what was generated"


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request that waits for its grammar no longer."""

    request: GenerateRequest
    arrived_s: float
    failure: Failed | None


@dataclass(frozen=True, slots=True)
class _Compiling:
    request: GenerateRequest
    arrived_s: float
    matcher: "Future[TokenMatcher]"


@dataclass(slots=True, eq=False)
class _Running:
    request_id: RequestId
    tenant: str
    group: bytes | RequestId
    output: FollowedOutput
    stop_token_ids: frozenset[int]
    drafts: tuple[int, ...] = ()  # that its next row may have
    job: MaskJob | None = None  # its next masks, until a step has a row with them
    owns_job: bool = False  # whether its own matcher computes them


class MaskedRequests:
    """See the module. Without a compiler there are none with a grammar.

    Args:
        wait_s: that a step waits for masks at most.
    """

    def __init__(self, compiler: GrammarCompiler | None, *, num_token_ids: int, wait_s: float = MASK_WAIT_S) -> None:
        self._compiler = compiler
        self._num_token_ids = num_token_ids
        self._num_words = mask_words(num_token_ids)
        self._wait_s = wait_s
        self._queue = MaskQueue(_num_threads(compiler))
        self._cache = MaskCache()
        self._compiling: dict[RequestId, _Compiling] = {}
        self._starting: dict[RequestId, CompiledRequest] = {}  # compiled, without their first mask
        self._running: dict[RequestId, _Running] = {}  # those that are starting among them
        self._pending: dict[RequestId, _Running] = {}  # those of them whose masks are not there yet
        self._shared: dict[tuple[bytes, tuple[int, ...], frozenset[int]], MaskJob] = {}  # pending, by state
        self._slots: dict[int, RequestId] = {}  # slots whose present owner has a matcher
        self._num_computed = self._num_shared = self._num_sat_out = 0
        self._waited_s = 0.0

    @property
    def takes_grammars(self) -> bool:
        return self._compiler is not None

    def stats(self) -> GrammarStats | None:
        """Numbers of the compiler, if it has any, and of masks; for any thread."""
        stats = self._compiler.stats() if isinstance(self._compiler, CountsGrammars) else GrammarStats()
        return msgspec.structs.replace(
            stats,
            mask_s=dict(self._queue.mask_s),
            masks_computed=self._num_computed,
            masks_shared=self._num_shared,
            mask_wait_s=self._waited_s,
            rows_sat_out=self._num_sat_out,
            masks_pending=self._queue.num_pending,
        )

    def slow_call(self) -> SlowCall | None:
        """A mask that has been computed for longer than a second: its requests sit out, and cannot go on."""
        age_s = self._queue.oldest_s()
        if age_s <= SLOW_MASK_S:
            return None
        return SlowCall(plugin=place_of(type(self._compiler)), call="fill", age_s=age_s, group=GRAMMAR_COMPILERS)

    @property
    def num_compiling(self) -> int:
        """Requests that are not scheduled yet."""
        return len(self._compiling) + len(self._starting)

    @property
    def compiling_ids(self) -> AbstractSet[RequestId]:
        return self._compiling.keys() | self._starting.keys()

    @property
    def num_pending(self) -> int:
        """Requests whose next masks are not there."""
        return len(self._pending)

    # --- before they are scheduled ----------------------------------------------------------------------

    def begin(self, request: GenerateRequest, *, now_s: float) -> None:
        self._compiling[request.request_id] = _Compiling(request, now_s, self._compile(request))

    def _compile(self, request: GenerateRequest) -> "Future[TokenMatcher]":
        if request.sampling.grammar is None:
            restricted: Future[TokenMatcher] = Future()
            restricted.set_result(self._restricted(request, None))
            return restricted
        if self._compiler is None:
            raise InvalidRequest("there is no grammar compiler", field="grammar")
        try:
            return _as_future(self._compiler.compile(request))
        except PLUGIN_ERRORS as error:  # told like what the future raises: it costs this request alone
            failed: Future[TokenMatcher] = Future()
            failed.set_exception(error)
            return failed

    def withdraw(self, request_id: RequestId) -> GenerateRequest | None:
        """Takes out a request that is not scheduled yet; None if there is no such one."""
        compiling = self._compiling.pop(request_id, None)
        if compiling is not None:
            compiling.matcher.cancel()
            return compiling.request
        starting = self._starting.pop(request_id, None)
        if starting is None:
            return None
        self.forget(request_id)
        return starting.request

    def take_compiled(self) -> list[CompiledRequest]:
        """Those that have their first mask, or will never have."""
        self._begin_masks([request_id for request_id, each in self._compiling.items() if each.matcher.done()])
        done = [request_id for request_id in self._starting if request_id not in self._pending]
        return [self._started(request_id, self._starting.pop(request_id)) for request_id in done]

    def _begin_masks(self, compiled: Iterable[RequestId]) -> None:
        running: list[_Running] = []
        for request_id in compiled:
            compiling = self._compiling.pop(request_id)
            found = self._follower(compiling)
            failure = found if isinstance(found, Failed) else None
            self._starting[request_id] = CompiledRequest(compiling.request, compiling.arrived_s, failure)
            if not isinstance(found, Failed):
                self._running[request_id] = found
                running.append(found)
        self._ask(running)

    def _follower(self, compiling: _Compiling) -> _Running | Failed:
        request = compiling.request
        try:
            matcher = compiling.matcher.result()
            if request.sampling.grammar is not None and request.sampling.is_restricted:
                matcher = self._restricted(request, matcher)
            output = FollowedOutput(matcher, self._cache, num_words=self._num_words)
        except InvalidRequest as refusal:
            return Failed(request.request_id, FailureKind.INVALID, str(refusal))
        except Unavailable as fault:
            return Failed(request.request_id, FailureKind.UNAVAILABLE, str(fault))
        except PLUGIN_ERRORS:
            place = place_of(type(self._compiler))
            logger.exception("the grammar of request %d could not be compiled by %s", request.request_id, place)
            return Failed(request.request_id, FailureKind.INTERNAL, _COMPILER_FAULT)
        group = request.request_id if output.state is None else output.state
        stop_token_ids = frozenset(request.sampling.stop_token_ids)
        return _Running(request.request_id, request.tenant, group, output, stop_token_ids)

    def _restricted(self, request: GenerateRequest, grammar: TokenMatcher | None) -> TokenMatcher:
        return RestrictedMatcher(request.sampling, num_token_ids=self._num_token_ids, grammar=grammar)

    def _started(self, request_id: RequestId, starting: CompiledRequest) -> CompiledRequest:
        running = self._running.get(request_id)
        failure = None if running is None else _failure(running)
        if failure is None:
            return starting
        self.forget(request_id)
        return replace(starting, failure=failure)

    # --- masks ------------------------------------------------------------------------------------------

    def _ask(self, running: Iterable[_Running], *, shares: bool = True) -> None:
        """Begins the next masks of requests, or finds them, where they may be those of others."""
        jobs: list[MaskJob] = []
        for each in running:
            job = each.job = self._known(each) if shares else None
            if job is None:
                job = each.job = self._new_job(each, shares=shares)
                jobs.append(job)
            if not job.is_done:
                self._pending[each.request_id] = each
        if jobs:
            self._num_computed += len(jobs)
            self._queue.submit(jobs)

    def _known(self, running: _Running) -> MaskJob | None:
        """The masks of a request that stands in the same state, or that did."""
        state = running.output.state
        running.owns_job = False
        if state is None:
            return None
        shared = self._shared.get((state, running.drafts, running.stop_token_ids))
        if shared is not None:
            shared.num_wanted += 1
            self._num_shared += 1
            return shared
        words = None if running.drafts else self._cache.get(state)
        if words is None:
            return None
        self._num_shared += 1
        return MaskJob.done([words])

    def _new_job(self, running: _Running, *, shares: bool) -> MaskJob:
        output, drafts, stop_token_ids = running.output, running.drafts, running.stop_token_ids
        compute = partial(output.masks_along, drafts, stop_token_ids=stop_token_ids)
        job = MaskJob(running.tenant, running.group, compute)
        running.owns_job = True
        if shares and output.state is not None:
            self._shared[output.state, drafts, stop_token_ids] = job
        return job

    def settle(self) -> list[Failed]:
        """Waits for masks as long as a step may; the failures of requests that cannot go on, to be ended."""
        if not self._pending:
            return []
        begin_s = time.monotonic()
        self._queue.wait_for_fresh(self._wait_s)
        self._waited_s += time.monotonic() - begin_s
        return self._take_done()

    def _take_done(self) -> list[Failed]:
        done = [running for running in self._pending.values() if running.job is None or running.job.is_done]
        for running in done:
            self._settle_one(running)
        scheduled = [
            each for each in done if each.request_id not in self._pending and each.request_id not in self._starting
        ]
        return [failure for each in scheduled if (failure := _failure(each)) is not None]

    def _settle_one(self, running: _Running) -> None:
        """Its masks are there, or it asks for its own: what another's matcher raised ends that one's request alone."""
        del self._pending[running.request_id]
        self._unshare(running)
        if running.job is not None and running.job.error is not None and not running.owns_job:
            self._ask([running], shares=False)

    def _unshare(self, running: _Running) -> None:
        state = running.output.state
        if state is None:
            return
        key = (state, running.drafts, running.stop_token_ids)
        if self._shared.get(key) is running.job:
            self._shared.pop(key, None)

    @property
    def held_ids(self) -> AbstractSet[RequestId]:
        """Requests that a scheduler has and whose masks are not there."""
        return self._pending.keys() - self._starting.keys()

    def wait(self, timeout_s: float) -> None:
        """Waits until one goes on."""
        jobs = [running.job for running in self._pending.values() if running.job is not None]
        if jobs:
            self._queue.wait_for_any(jobs, timeout_s)
        else:
            wait([compiling.matcher for compiling in self._compiling.values()], timeout_s, "FIRST_COMPLETED")

    def mask(self, plan: StepPlan) -> tuple[StepPlan, list[Failed]]:
        """A plan with the masks of its sampled rows; the failures of requests that cannot go on, to be ended.

        Rows are cut before the first draft that has no mask.
        Waits for those that are not there: a scheduler that is no `HoldsRows` plans their rows all the same.
        """
        for start in plan.started:
            if start.request.request_id in self._running:
                self._slots[start.slot] = start.request.request_id
            else:
                self._slots.pop(start.slot, None)
        if not self._slots:
            return plan, []
        masks: dict[tuple[int, int], MaskWords] = {}
        num_positions: dict[int, int] = {}
        failures: list[Failed] = []
        ends = plan.num_host_tokens.cumsum()
        for row, running in self._sampled(plan):
            found = self._take_masks(running, _host_drafts(plan, row, ends))
            if isinstance(found, Failed):
                failures.append(found)
            else:
                masks.update(((row, position), words) for position, words in enumerate(found))
                num_positions[row] = len(found)
        self._note_sat_out()
        return (replace(with_rows_cut(plan, num_positions), token_masks=masks) if masks else plan), failures

    def _sampled(self, plan: StepPlan) -> Iterator[tuple[int, _Running]]:
        """The rows that sample for requests with masks."""
        for row in plan.max_new.nonzero()[0].tolist():
            request_id = self._slots.get(int(plan.slots[row]))
            running = None if request_id is None else self._running.get(request_id)
            if running is not None:
                yield row, running

    def _take_masks(self, running: _Running, drafts: tuple[int, ...]) -> list[MaskWords] | Failed:
        if running.job is not None:
            self._wait_for(running)
        if running.job is None or running.drafts[: len(drafts)] != drafts:
            running.drafts = drafts
            self._ask([running])
            self._wait_for(running)
        failure = _failure(running)
        if failure is not None or running.job is None:
            return failure or Failed(running.request_id, FailureKind.INTERNAL, _FAULT)
        masks, running.job = running.job.masks, None
        return list(masks[: len(drafts) + 1])

    def _wait_for(self, running: _Running) -> None:
        while running.request_id in self._pending and running.job is not None:
            begin_s = time.monotonic()
            self._queue.wait_for(running.job)
            self._waited_s += time.monotonic() - begin_s
            self._settle_one(running)

    def _note_sat_out(self) -> None:
        for request_id in self.held_ids:
            self._num_sat_out += 1
            if (job := self._pending[request_id].job) is not None:
                job.sat_out = True

    # --- after a step -----------------------------------------------------------------------------------

    def take_drafts(self, plan: StepPlan, result: StepResult) -> None:
        """Notes the drafts that the next rows of a step's requests may have, for `follow`."""
        if self._slots:
            for row, running in self._sampled(plan):
                running.drafts = result.next_drafts.get(row, ())

    def follow(self, events: Iterable[TokenEvent]) -> None:
        """Begins the masks that follow from what was sampled, and forgets requests that have ended."""
        if not self._running:
            return
        sampled: dict[RequestId, _Running] = {}
        for event in events:
            if isinstance(event, Finished | Failed):
                sampled.pop(event.request_id, None)
                self.forget(event.request_id)
            elif isinstance(event, Tokens) and event.token_ids:
                running = self._running.get(event.request_id)
                if running is not None:
                    running.output.follow(event.token_ids)
                    sampled[event.request_id] = running
        self._ask(sampled.values())

    def forget(self, request_id: RequestId) -> None:
        running = self._running.pop(request_id, None)
        if running is not None and self._pending.pop(request_id, None) is not None and running.job is not None:
            running.job.drop()
            if not running.job.num_wanted:
                self._unshare(running)

    def close(self) -> None:
        self._queue.close()
        for state in (self._compiling, self._starting, self._running, self._pending, self._shared):
            state.clear()
        if self._compiler is not None:
            self._compiler.close()


def _num_threads(compiler: GrammarCompiler | None) -> int:
    """Half of the processors: the others are the model's, the loop's and the frontend's."""
    if isinstance(compiler, FillsInParallel) and compiler.fills_in_parallel:
        return max(1, min(MAX_THREADS, usable_processors() // 2))
    return 1


def _as_future(returned: object) -> "Future[TokenMatcher]":
    if not isinstance(returned, Future):
        raise TypeError(f"compile returned a {type(returned).__name__}, not a Future")
    return cast("Future[TokenMatcher]", returned)


def _failure(running: _Running) -> Failed | None:
    """Why a request cannot go on, whose masks are there."""
    job, request_id = running.job, running.request_id
    if job is None:
        return None
    if isinstance(job.error, InvalidRequest):
        return Failed(request_id, FailureKind.INVALID, str(job.error))
    if job.error is not None:
        logger.error(_LOGGED_FAULT, request_id, exc_info=job.error)
        return Failed(request_id, FailureKind.INTERNAL, _FAULT)
    return None if job.masks[0].any() else Failed(request_id, FailureKind.INVALID, _DEAD_END)


def _host_drafts(plan: StepPlan, row: int, ends: NDArray[np.int64]) -> tuple[int, ...]:
    """A row's drafts that are host ids; `ends` [rows] is where each row's host ids end."""
    num_drafts = int(plan.max_new[row]) - 1 - int(plan.draft_counts[row])
    end = int(ends[row])
    return tuple(plan.token_ids[end - num_drafts : end].tolist())
