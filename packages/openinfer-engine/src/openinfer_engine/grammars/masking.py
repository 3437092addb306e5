"""`MaskedRequests`: requests with a grammar or restrictions, from the compiler to their last token.

    begin ─► compiling ─► compiled ─► scheduled │ mask(plan) ─► step ─► follow(events) │ ended

A matcher is asked for masks when a step that samples its request is planned, and told the tokens when that step is
applied; the scheduler plans no row in between. Restrictions need no compiler (`restrictions.py`). A row with drafts has
a mask at each position that it may reach (`row_masks.py`).
"""

import logging
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from openinfer_core import (
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    TokenEvent,
    Tokens,
    Unavailable,
)
from openinfer_core.engine import GrammarStats
from openinfer_core.grammars import CountsGrammars, GrammarCompiler, MaskWords, TokenMatcher, mask_words
from openinfer_core.scheduling import StepPlan
from openinfer_engine.grammars.restrictions import RestrictedMatcher
from openinfer_engine.grammars.row_masks import row_masks

logger = logging.getLogger("openinfer.engine")

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


@dataclass(frozen=True, slots=True)
class _Running:
    matcher: TokenMatcher
    stop_token_ids: frozenset[int]


class MaskedRequests:
    """See the module. Without a compiler there are none with a grammar."""

    def __init__(self, compiler: GrammarCompiler | None, *, num_token_ids: int) -> None:
        self._compiler = compiler
        self._num_token_ids = num_token_ids
        self._num_words = mask_words(num_token_ids)
        self._compiling: dict[RequestId, _Compiling] = {}
        self._running: dict[RequestId, _Running] = {}
        self._slots: dict[int, RequestId] = {}  # slots whose present owner has a matcher

    @property
    def takes_grammars(self) -> bool:
        return self._compiler is not None

    def stats(self) -> GrammarStats | None:
        return self._compiler.stats() if isinstance(self._compiler, CountsGrammars) else None

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def compiling_ids(self) -> AbstractSet[RequestId]:
        return self._compiling.keys()

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
        return self._compiler.compile(request)

    def withdraw(self, request_id: RequestId) -> GenerateRequest | None:
        compiling = self._compiling.pop(request_id, None)
        if compiling is None:
            return None
        compiling.matcher.cancel()
        return compiling.request

    def take_compiled(self) -> list[CompiledRequest]:
        """Those whose grammar is ready, or will never be."""
        done = [request_id for request_id, compiling in self._compiling.items() if compiling.matcher.done()]
        return [self._finish(self._compiling.pop(request_id)) for request_id in done]

    def wait(self, timeout_s: float) -> None:
        wait([compiling.matcher for compiling in self._compiling.values()], timeout_s, "FIRST_COMPLETED")

    def _finish(self, compiling: _Compiling) -> CompiledRequest:
        request, failure = compiling.request, None
        try:
            stop_token_ids = frozenset(request.sampling.stop_token_ids)
            matcher = compiling.matcher.result()
            if request.sampling.grammar is not None and request.sampling.is_restricted:
                matcher = self._restricted(request, matcher)
            self._running[request.request_id] = _Running(matcher, stop_token_ids)
        except InvalidRequest as refusal:
            failure = Failed(request.request_id, FailureKind.INVALID, str(refusal))
        except Unavailable as fault:
            failure = Failed(request.request_id, FailureKind.UNAVAILABLE, str(fault))
        except Exception:
            logger.exception("the grammar of request %d could not be compiled", request.request_id)
            failure = Failed(request.request_id, FailureKind.INTERNAL, _COMPILER_FAULT)
        return CompiledRequest(request, compiling.arrived_s, failure)

    def _restricted(self, request: GenerateRequest, grammar: TokenMatcher | None) -> TokenMatcher:
        return RestrictedMatcher(request.sampling, num_token_ids=self._num_token_ids, grammar=grammar)

    # --- while they run ---------------------------------------------------------------------------------

    def mask(self, plan: StepPlan) -> tuple[StepPlan, list[Failed]]:
        """A plan with the masks of its sampled rows; the failures of requests that cannot go on, to be ended."""
        for start in plan.started:
            if start.request.request_id in self._running:
                self._slots[start.slot] = start.request.request_id
            else:
                self._slots.pop(start.slot, None)
        if not self._slots:
            return plan, []
        masks: dict[tuple[int, int], MaskWords] = {}
        failures: list[Failed] = []
        ends = plan.num_host_tokens.cumsum()
        for row in plan.max_new.nonzero()[0].tolist():
            request_id = self._slots.get(int(plan.slots[row]))
            running = None if request_id is None else self._running.get(request_id)
            if request_id is not None and running is not None:
                found = self._row_masks(request_id, running, _host_drafts(plan, row, ends))
                if isinstance(found, Failed):
                    failures.append(found)
                else:
                    masks.update(((row, position), words) for position, words in enumerate(found))
        return (replace(plan, token_masks=masks) if masks else plan), failures

    def _row_masks(self, request_id: RequestId, running: _Running, drafts: list[int]) -> list[MaskWords] | Failed:
        try:
            masks = row_masks(running.matcher, drafts, stop_token_ids=running.stop_token_ids, num_words=self._num_words)
        except InvalidRequest as refusal:
            return Failed(request_id, FailureKind.INVALID, str(refusal))
        except Exception:
            logger.exception(_LOGGED_FAULT, request_id)
            return Failed(request_id, FailureKind.INTERNAL, _FAULT)
        return masks if masks[0].any() else Failed(request_id, FailureKind.INVALID, _DEAD_END)

    def follow(self, events: Iterable[TokenEvent]) -> list[Failed]:
        """Tells matchers what was sampled and forgets those of ended requests; returns as `mask` does."""
        if not self._running:
            return []
        failures: list[Failed] = []
        for event in events:
            if isinstance(event, Finished | Failed):
                self.forget(event.request_id)
            elif isinstance(event, Tokens) and (running := self._running.get(event.request_id)) is not None:
                failure = _accept(running.matcher, event)
                if failure is not None:
                    failures.append(failure)
        return failures

    def forget(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)

    def close(self) -> None:
        self._compiling.clear()
        self._running.clear()
        if self._compiler is not None:
            self._compiler.close()


def _host_drafts(plan: StepPlan, row: int, ends: NDArray[np.int64]) -> list[int]:
    """A row's drafts that are host ids; `ends` [rows] is where each row's host ids end."""
    num_drafts = int(plan.max_new[row]) - 1 - int(plan.draft_counts[row])
    end = int(ends[row])
    return plan.token_ids[end - num_drafts : end].tolist()


def _accept(matcher: TokenMatcher, event: Tokens) -> Failed | None:
    try:
        for token_id in event.token_ids:
            matcher.accept(token_id)
    except InvalidRequest as refusal:
        return Failed(event.request_id, FailureKind.INVALID, str(refusal))
    except Exception:
        logger.exception(_LOGGED_FAULT, event.request_id)
        return Failed(event.request_id, FailureKind.INTERNAL, _FAULT)
    return None
