"""`ResponseRun`: one response in the making, from the engine's tokens to the readers of its events.

DeltaChoice ─► ResponseRun ─► ResponseBuilder ─► events ─► the client's stream, later readers of a background response
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from openinfer_core.events import FinishReason
from openinfer_server.http.api_errors import ApiError, from_failed
from openinfer_server.http.writers import StreamWriter
from openinfer_server.output.delta_choice import DeltaChoice, Sink
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.output.logprobs import ScoredToken
from openinfer_server.output.response import Response
from openinfer_server.parsers.deltas import Delta
from openinfer_server.responses.builder import ResponseBuilder
from openinfer_server.responses.events import ArgumentsDelta, ReasoningDeltaEvent, ResponseEvent, TextDelta
from openinfer_server.responses.objects import (
    InputTokensDetails,
    OutputLogprob,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
)
from openinfer_server.responses.offered import CallName

MAX_EVENT_BYTES = 8 * 2**20  # events of one background response that are kept for later readers; beyond that none are
_SMALL = (TextDelta, ReasoningDeltaEvent, ArgumentsDelta)

ScoreFormat = Callable[[Sequence[ScoredToken]], list[OutputLogprob]]


class ResponseRun(Sink):
    """The sink of a response.

    Attributes:
        answer: what the engine was asked.
        builder: what has come of it.
        ended: resolved when nothing more can happen to the response.
        events: frames so far, if they are kept.
    """

    def __init__(
        self,
        link: EngineLink,
        response: ResponseObject,
        *,
        names: Mapping[str, CallName],
        scores: ScoreFormat,
        events: list[bytes] | None,
    ) -> None:
        self.response = Response(link)
        self.response.done.add_done_callback(self._answered)
        self.builder = ResponseBuilder(response, self._emit, names)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = events
        self.num_event_bytes = 0
        self._link = link
        self._scores = scores
        self._waiting: list[ScoredToken] = []
        self._writers: list[StreamWriter] = []

    @property
    def response_object(self) -> ResponseObject:
        return self.builder.response

    def attach(self, writer: StreamWriter, *, after: int = -1) -> None:
        """Sends events to a writer, from the one after this number on.

        Raises:
            ApiError: 400; the events before now are not kept.
        """
        if self.events is None and self.builder.numbered:
            raise ApiError(400, "the events of this response are not kept; retrieve it without stream", param="stream")
        for frame in (self.events or [])[after + 1 :]:
            _append(writer, frame, large=True)
        self._writers.append(writer)

    def detach(self, writer: StreamWriter) -> None:
        if writer in self._writers:
            self._writers.remove(writer)

    def cancel(self) -> None:
        """Ends it before its time; does nothing if it has ended."""
        if not self.builder.ended:
            self.response.abort()
            self.builder.cancel()
            self._end()

    # Sink

    def begin(self, choice: DeltaChoice) -> None:
        del choice
        if not self.builder.ended:
            self.builder.begin()

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        self._waiting += scores
        if deltas:
            self.builder.take(deltas, self._scores(self._waiting) if self._waiting else ())
            self._waiting.clear()

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        self.builder.finish(reason, _usage(choice))
        self._end()

    def _answered(self, done: "asyncio.Future[None]") -> None:
        del done
        if self.response.failure is not None and not self.builder.ended:
            error = from_failed(self.response.failure)
            self.builder.fail("rate_limit_exceeded" if error.status == 429 else "server_error", str(error))
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _emit(self, event: ResponseEvent) -> None:
        if self.events is None and not self._writers:
            return
        frame, large = event.frame(), not isinstance(event, _SMALL)
        if self.events is not None:
            self.events.append(frame)
            self.num_event_bytes += len(frame)
            if self.num_event_bytes > MAX_EVENT_BYTES:
                self.events, self.num_event_bytes = None, 0
        for writer in self._writers:
            _append(writer, frame, large=large)
            writer.mark_dirty(self._link.dirty)


def _append(writer: StreamWriter, frame: bytes, *, large: bool) -> None:
    # large events, which come at once, need not be read faster than any other
    writer.events.append(frame)
    if large:
        writer.max_buffered_bytes += len(frame)


def _usage(choice: DeltaChoice) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=choice.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=choice.cached_tokens),
        output_tokens=choice.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=choice.reasoning_tokens),
        total_tokens=choice.prompt_tokens + choice.completion_tokens,
    )
