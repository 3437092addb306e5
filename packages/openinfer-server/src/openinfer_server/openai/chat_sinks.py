"""Sinks of `/v1/chat/completions`: deltas as events, and a message that is kept."""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from openinfer_core.events import FinishReason
from openinfer_server.openai.event_frames import EventFrame, NewTokenIds
from openinfer_server.openai.event_stream import EventStream
from openinfer_server.openai.objects import ChatMessage, MessageFunction, MessageToolCall
from openinfer_server.output.delta_choice import DeltaChoice, Sink
from openinfer_server.output.logprobs import LogprobFormat, ScoredToken
from openinfer_server.parsers.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
)
from openinfer_server.text.byte_table import escape_json

TOOL_CALLS = "tool_calls"  # why an answer ended that calls tools
_AFTER_ARGUMENTS = b'"}}]'
_NO_CONTENT = b'"delta":{"content":""}'


def finish_reason(choice: DeltaChoice, reason: FinishReason) -> str:
    """OpenAI's word for why an answer ended; one that was cut short says so, calls or not."""
    return TOOL_CALLS if choice.called and reason is FinishReason.STOP else str(reason)


class ChatStreamSink(Sink):
    """A sink that writes an event per token, also when nothing came of it yet.

    With `may_call` the first event has no content. An answer that ends without any, and without a call, has an empty
    one, as its whole body has.
    """

    __slots__ = (
        "_after_arguments",
        "_after_text",
        "_before_content",
        "_format",
        "_frame",
        "_ids",
        "_lacks_content",
        "_write",
        "_writer",
    )

    def __init__(
        self,
        frame: EventFrame,
        events: EventStream,
        logprob_format: LogprobFormat,
        *,
        tells_token_ids: bool = False,
        may_call: bool = False,
    ) -> None:
        self._after_arguments = _AFTER_ARGUMENTS + frame.after
        self._after_text = b'"' + frame.after
        self._before_content = frame.before + b'"content":"'
        self._format = logprob_format
        self._frame = frame
        self._ids = NewTokenIds() if tells_token_ids else None
        self._lacks_content = may_call
        self._write = events.write
        self._writer = events.writer

    def begin(self, choice: DeltaChoice) -> None:
        first = self._frame.first
        if self._ids is not None:
            first = self._frame.first_event(choice.prompt_token_ids)
            self._writer.max_buffered_bytes += len(first)  # it need not be read faster than any other
        self._write(first)

    def take_token_id(self, token_id: int) -> None:
        if self._ids is not None:
            self._ids.append(token_id)

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        if self._lacks_content and any(type(delta) is ContentDelta for delta in deltas):
            self._lacks_content = False
        if scores or self._ids is not None:
            logprobs = msgspec.json.encode(self._format(scores)) if scores else b"null"
            self._write(self._frame.text_event(delta_json(deltas), logprobs, self._further()))
            return
        if len(deltas) == 1:
            delta = deltas[0]
            if type(delta) is ContentDelta:
                self._write(self._before_content + escape_json(delta.text) + self._after_text)
                return
            if type(delta) is ReasoningDelta:
                self._write(self._frame.before + _reasoning_json(delta.text) + self._frame.after)
                return
            if type(delta) is CallArguments:
                before = self._frame.before + _before_arguments(delta.index)
                self._write(before + escape_json(delta.text) + self._after_arguments)
                return
        self._write(self._frame.before + delta_json(deltas) + self._frame.after)

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        came = _NO_CONTENT if self._lacks_content and not choice.called else None
        why = finish_reason(choice, reason)
        self._write(self._frame.finish_event(why, choice.stop_reason, self._further(), came=came))

    def _further(self) -> bytes:
        return b"" if self._ids is None else self._ids.field()


class ChatMessageSink(Sink):
    """A sink that keeps a message.

    Attributes:
        finish_reason: OpenAI's word; empty until the end.
        scores: of all tokens, if they were asked for.
        token_ids: that were sampled, if they were asked for.
    """

    def __init__(self) -> None:
        self.finish_reason = ""
        self.scores: list[ScoredToken] = []
        self.token_ids: list[int] = []
        self._arguments: list[list[str]] = []
        self._calls: list[CallStart] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def take_token_id(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        self.scores += scores
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case CallStart():
                    self._calls.append(delta)
                    self._arguments.append([])
                case CallArguments(index, text):
                    self._arguments[index].append(text)
                case CallEnd():
                    pass

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        self.finish_reason = finish_reason(choice, reason)

    @property
    def message(self) -> ChatMessage:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [
            MessageToolCall(call.call_id, MessageFunction(call.name, "".join(arguments)))
            for call, arguments in zip(self._calls, self._arguments, strict=True)
        ]
        return ChatMessage(
            content=None if calls and not content else content,
            reasoning=reasoning or msgspec.UNSET,
            reasoning_content=reasoning or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )


def delta_json(deltas: Sequence[Delta]) -> bytes:
    """Inside of the `delta` object of one event. Nearly every token makes one delta, or none."""
    if len(deltas) != 1:
        return _several(deltas) if deltas else b""
    delta = deltas[0]
    if isinstance(delta, ContentDelta):
        return b'"content":"' + escape_json(delta.text) + b'"'
    if isinstance(delta, ReasoningDelta):
        return _reasoning_json(delta.text)
    if isinstance(delta, CallArguments):
        return _before_arguments(delta.index) + escape_json(delta.text) + _AFTER_ARGUMENTS
    return _several(deltas)


def _reasoning_json(text: str) -> bytes:
    """Under both names that clients read: vLLM's newer one and DeepSeek's."""
    escaped = escape_json(text)
    return b'"reasoning":"%b","reasoning_content":"%b"' % (escaped, escaped)


@lru_cache(maxsize=64)
def _before_arguments(index: int) -> bytes:
    return b'"tool_calls":[{"index":%d,"function":{"arguments":"' % index


def _several(deltas: Sequence[Delta]) -> bytes:
    """Several deltas in one event: each kind of text as one, each call once."""
    content, reasoning = "", ""
    calls: dict[int, _CallDelta] = {}
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case CallStart(index, call_id, name):
                calls[index] = _CallDelta(index, _FunctionDelta("", name), call_id, "function")
            case CallArguments(index, text):
                call = calls.setdefault(index, _CallDelta(index, _FunctionDelta("")))
                call.function.arguments += text
            case CallEnd():
                pass
    parts = [_reasoning_json(reasoning)] if reasoning else []
    if content:
        parts.append(b'"content":"' + escape_json(content) + b'"')
    if calls:
        parts.append(b'"tool_calls":' + msgspec.json.encode(list(calls.values())))
    return b",".join(parts)


class _FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class _CallDelta(msgspec.Struct):
    index: int
    function: _FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
