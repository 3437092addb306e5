"""`EngineLink`: the one task that hands the engine's events to the choices they belong to.

    for each wake-up:
        for each event:     choices[event.request_id].tokens(event)      bytes appended to a writer's events
        for each dirty writer:  flush                                    one write, however many tokens came

No task, queue, event or future per token. Aborted requests are forgotten at once; what the engine still says of them
finds no choice and is dropped. A fault in one choice (a template of bytes, a stop scanner) fails that request alone.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from openinfer_core.engine import EngineHandle, EngineStats
from openinfer_core.errors import EngineClosed
from openinfer_core.events import Failed, FailureKind, Finished, FinishReason, Scheduled, TokenEvent, Tokens
from openinfer_core.request import GenerateRequest, RequestId, with_fields
from openinfer_server.http.writers import StreamWriter
from openinfer_server.limits.admission import AdmissionControl
from openinfer_server.limits.loop_turns import LoopTurns
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.tracing import Tracing
from openinfer_server.output.response import Choice, choices_of_request, internal_failure

logger = logging.getLogger("openinfer.server")

ENGINE_ENDED = "the engine has ended"
_DRAIN_POLL_S = 0.02
_LEAST_DEADLINE_S = 1e-6  # of a request that goes on when its time is over: the engine says so


class EngineLink:
    """Requests to the engine and events from it.

    Attributes:
        admission: what the engine has not begun.
        tracing: makes spans of requests; None makes none.
        turns: where requests with much to hand over wait between two slices.
        dirty: writers with something to flush at the end of this wake-up.
        dead: whether the engine has ended.
        died: whether it did so by itself.
        ended_because: why, for clients and operators; it names a plug-in that was the reason.
    """

    def __init__(
        self,
        handle: EngineHandle,
        metrics: ServerMetrics,
        *,
        admission: AdmissionControl | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handle = handle
        self.metrics = metrics
        self.admission = AdmissionControl() if admission is None else admission
        self.tracing: Tracing | None = None
        self.dirty: list[StreamWriter] = []
        self.dead = False
        self.died = False
        self.ended_because = ENGINE_ENDED
        self._clock = clock
        self.turns = LoopTurns()
        self._ids = itertools.count(1)
        self._choices: dict[RequestId, Choice] = {}
        self._previous_s = -1.0
        self._num_unread = 0

    @property
    def num_open(self) -> int:
        return len(self._choices)

    async def run(self) -> None:
        try:
            async for events in self.handle.events():
                self.dispatch(events)
        except EngineClosed as error:
            self.died = True
            self.ended_because = str(error)
            logger.critical("the engine died: %s", error)
        except Exception:
            self.died = True
            logger.exception("the link to the engine failed")
        finally:
            self.dead = True
            self.fail_all(FailureKind.SHUTDOWN, self.ended_because)

    def new_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def enter(self, choices: Sequence[Choice], requests: Sequence[GenerateRequest]) -> None:
        """Takes room in the queue for requests of one owner, which are handed over next.

        Raises:
            ApiError: 429 or 503; there is none.
        """
        self.admission.check_room(requests[0].tenant, sum(len(request.prompt_token_ids) for request in requests))
        for choice, request in zip(choices, requests, strict=True):
            self._enter(choice, request)

    def submit(self, choice: Choice, request: GenerateRequest) -> None:
        """Hands a request that has entered to the engine; its events go to the choice. A dead engine fails it."""
        choice.submitted_s = self._clock()
        if (choices := choices_of_request.get()) is not None:
            choices.append(choice)
        self.metrics.request_max_tokens.observe(request.sampling.max_tokens)
        if self.tracing is not None:
            request = self.tracing.submit(choice, request)
        self._hand_over(choice, request)

    def _enter(self, choice: Choice, request: GenerateRequest) -> None:
        choice.request_id = request.request_id
        self.admission.enter(request.request_id, request.tenant, len(request.prompt_token_ids))

    def _hand_over(self, choice: Choice, request: GenerateRequest) -> None:
        self._choices[request.request_id] = choice
        try:
            self.handle.submit(request)
        except EngineClosed:
            self._failed(choice, Failed(request.request_id, FailureKind.SHUTDOWN, self.ended_because))

    def replace(self, choice: Choice, request: GenerateRequest) -> None:
        """Goes on with another request in place of the choice's own; for the counters it is one. Not if it ended.

        Its deadline is that of the first.
        """
        if self._forget(choice) is not None:
            if request.deadline_s is not None:
                left_s = max(_LEAST_DEADLINE_S, request.deadline_s - (self._clock() - choice.submitted_s))
                request = with_fields(request, deadline_s=left_s)
            self.handle.abort(choice.request_id)
            self._enter(choice, request)
            self._hand_over(choice, request)

    def abort(self, choice: Choice) -> None:
        """Ends a choice whose client has left; does nothing if it has ended."""
        if self._forget(choice) is not None:
            self._count(choice, FinishReason.ABORT)  # counted here: the engine's own event finds no choice
            self.handle.abort(choice.request_id)

    def stopped(self, choice: Choice) -> None:
        """Ends a choice whose text reached a stop string: the engine need not go on."""
        if self._forget(choice) is not None:
            self._count(choice, FinishReason.STOP)
            self.handle.abort(choice.request_id)

    def unread(self, num_tokens: int) -> None:
        """Leaves so many tokens of the event that is dispatched out of the count: they are no part of an answer."""
        self._num_unread += num_tokens

    def fail_all(self, kind: FailureKind, message: str) -> None:
        """Fails every open answer; a living engine is told to stop."""
        for choice in list(self._choices.values()):
            # one choice that fails ends its whole response, and takes the others out of the table
            if choice.request_id in self._choices:
                self._failed(choice, Failed(choice.request_id, kind, message))
                self.handle.abort(choice.request_id)
        self._flush()

    async def drained(self) -> None:
        """Returns when no choice is open: of those that go on without a connection, too."""
        while self._choices:  # noqa: ASYNC110 - once, at the end; an event would cost every request
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stats(self) -> EngineStats | None:
        """The engine's numbers; None if it has ended."""
        try:
            return None if self.dead else await self.handle.stats()
        except EngineClosed:
            return None

    def dispatch(self, events: list[TokenEvent]) -> None:
        choices = self._choices
        now_s, previous_s = self._clock(), self._previous_s
        tokens = same_gap = 0
        for event in events:
            choice = choices.get(event.request_id)
            if choice is None:  # aborted here, and the engine had said this before it knew
                continue
            try:
                if type(event) is Tokens:  # nearly every event is one
                    if event.token_ids:
                        tokens += len(event.token_ids)
                        # streams that run together have one gap: it is observed once, times their number
                        if choice.last_token_s == previous_s:
                            same_gap += 1
                        else:
                            self._observe(choice, now_s)
                        choice.last_token_s = now_s
                    choice.tokens(event)
                else:
                    self._dispatch_rare(choice, event)
            except Exception as error:  # noqa: BLE001 - the fault boundary; `_fault` logs it
                self._fault(choice, error)
        self.metrics.generated_tokens.value += tokens - self._num_unread
        self._num_unread = 0
        if same_gap:
            self.metrics.inter_token_s.observe(now_s - previous_s, same_gap)
        self._previous_s = now_s
        self._flush()

    def _dispatch_rare(self, choice: Choice, event: TokenEvent) -> None:
        if isinstance(event, Finished):
            self._forget(choice)  # first: `finished` may raise, and the engine has nothing left to abort
            # A stop token comes with the end alone; it was sampled as the others were, and usage counts it.
            self.metrics.generated_tokens.value += event.stop_token_id is not None
            choice.finished(event)
            self._count(choice, event.reason)
        elif isinstance(event, Failed):
            self._failed(choice, event)
        elif isinstance(event, Scheduled):
            self.admission.leave(choice.request_id)
            self._scheduled(choice, event)
            choice.scheduled(event)

    def _failed(self, choice: Choice, event: Failed) -> None:
        self._forget(choice)
        self.metrics.failures[event.kind] += 1
        if self.tracing is not None:
            self.tracing.ended(choice, event.kind, now_s=self._clock())
        choice.response.fail(event)

    def _forget(self, choice: Choice) -> Choice | None:
        """Its further events are dropped; returns it if it was open."""
        self.admission.leave(choice.request_id)
        return self._choices.pop(choice.request_id, None)

    def _fault(self, choice: Choice, error: Exception) -> None:
        logger.error("request %d failed inside the server", choice.request_id, exc_info=error)
        self.metrics.count_fault(error)
        if choice.request_id in self._choices:
            self.handle.abort(choice.request_id)
        self._failed(choice, internal_failure(choice.request_id))

    def _scheduled(self, choice: Choice, event: Scheduled) -> None:
        # counted once: a request that replaces another is no new one
        if choice.queued_s is None:
            choice.queued_s = event.queued_s
            self.metrics.count_scheduled(
                prompt_tokens=choice.prompt_tokens, cached_tokens=event.cached_tokens, queued_s=event.queued_s
            )

    def _observe(self, choice: Choice, now_s: float) -> None:
        """A token whose gap is not this wake-up's: the first of its request, or one after a pause."""
        if choice.last_token_s:
            self.metrics.inter_token_s.observe(now_s - choice.last_token_s)
        else:
            choice.first_token_s = now_s
            self.metrics.count_first_token(
                since_submission_s=now_s - choice.submitted_s, queued_s=choice.queued_s or 0.0
            )

    def _count(self, choice: Choice, outcome: FinishReason) -> None:
        metrics = self.metrics
        now_s = self._clock()
        metrics.ended[outcome] += 1
        if self.tracing is not None:
            self.tracing.ended(choice, outcome, now_s=now_s)
        if outcome is FinishReason.ABORT:
            return
        total_s = now_s - choice.submitted_s
        metrics.count_complete(
            prompt_tokens=choice.prompt_tokens, generated_tokens=choice.completion_tokens, total_s=total_s
        )
        if choice.first_token_s:  # the last token, which may be a stop token, came in this wake-up
            metrics.count_generated(
                generated_tokens=choice.completion_tokens,
                decode_s=now_s - choice.first_token_s,
                inference_s=total_s - (choice.queued_s or 0.0),
            )

    def _flush(self) -> None:
        for writer in self.dirty:
            try:
                writer.flush()
            except Exception:
                # one broken connection must not keep the other streams from their tokens
                logger.exception("a stream's connection failed; it is dropped")
                writer.drop()
        self.dirty.clear()
