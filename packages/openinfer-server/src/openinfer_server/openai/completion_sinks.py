"""Sinks of `/v1/completions`: text as events, and text that is kept."""

from collections.abc import Sequence

import msgspec

from openinfer_core.events import FinishReason
from openinfer_server.openai.event_frames import EventFrame, NewTokenIds, ids_field
from openinfer_server.openai.event_stream import EventStream
from openinfer_server.output.delta_choice import DeltaChoice, Sink
from openinfer_server.output.logprobs import LogprobFormat, ScoredToken
from openinfer_server.parsers.deltas import ContentDelta, Delta
from openinfer_server.text.byte_table import escape_json


def text_of(deltas: Sequence[Delta]) -> str:
    """The text of deltas that are content and nothing else."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


class TextStreamSink(Sink):
    """Writes an event per token, also when its text is still held back."""

    __slots__ = ("_events", "_format", "_frame", "_ids", "_prompt_token_ids")

    def __init__(
        self, frame: EventFrame, events: EventStream, logprob_format: LogprobFormat, *, tells_token_ids: bool = False
    ) -> None:
        self._events = events
        self._format = logprob_format
        self._frame = frame
        self._ids = NewTokenIds() if tells_token_ids else None
        self._prompt_token_ids: Sequence[int] | None = None  # until the first event has told them

    def begin(self, choice: DeltaChoice) -> None:
        self._prompt_token_ids = choice.prompt_token_ids

    def take_token_id(self, token_id: int) -> None:
        if self._ids is not None:
            self._ids.append(token_id)

    def take_prompt(self, text: str, scores: Sequence[ScoredToken]) -> None:
        event = self._event(text, scores)
        self._events.writer.max_buffered_bytes += len(event)  # the client need not read it faster than any other event
        self._events.write(event)

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        self._events.write(self._event(text_of(deltas), scores))

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        self._events.write(self._frame.finish_event(reason, choice.stop_reason, self._further()))

    def _event(self, text: str, scores: Sequence[ScoredToken]) -> bytes:
        frame = self._frame
        if not scores and self._ids is None:
            return frame.before + escape_json(text) + frame.after
        logprobs = msgspec.json.encode(self._format(scores)) if scores else b"null"
        return frame.text_event(escape_json(text), logprobs, self._further())

    def _further(self) -> bytes:
        if self._ids is None:
            return b""
        prompt, self._prompt_token_ids = self._prompt_token_ids, None
        if prompt is None:
            return self._ids.field()
        further = ids_field("prompt_token_ids", prompt)
        self._events.writer.max_buffered_bytes += len(further)
        return further + self._ids.field()


class TextSink(Sink):
    """Keeps text and scores for one body.

    Attributes:
        scores: of the tokens shown, if they were asked for.
        token_ids: that were sampled, if they were asked for.
    """

    __slots__ = ("_texts", "scores", "token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.scores: list[ScoredToken] = []
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take_token_id(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def take_prompt(self, text: str, scores: Sequence[ScoredToken]) -> None:
        self._texts.append(text)
        self.scores += scores

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        self._texts.append(text_of(deltas))
        self.scores += scores

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        pass
