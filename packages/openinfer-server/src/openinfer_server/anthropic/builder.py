"""`MessageBuilder`: deltas of an answer become blocks, and each step of theirs an event.

    message_start, (content_block_start, content_block_delta*, content_block_stop)*, message_delta, message_stop

A streamed message and a whole one come out of the same builder; the latter's events go nowhere.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from openinfer_core.events import FinishReason
from openinfer_server.anthropic.objects import (
    BlockDelta,
    BlockStart,
    BlockStop,
    CacheCreation,
    ContentBlock,
    InputDelta,
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    Stop,
    StopReason,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from openinfer_server.http.named_events import NamedEvent
from openinfer_server.http.writers import StreamWriter
from openinfer_server.output.delta_choice import DeltaChoice, Sink
from openinfer_server.output.logprobs import ScoredToken
from openinfer_server.parsers.deltas import CallArguments, CallEnd, CallStart, ContentDelta, Delta, ReasoningDelta
from openinfer_server.request.retention import KeptPrompt

# The key under which a call's input is given that is no JSON object; Anthropic's name for it.
INVALID_JSON = "INVALID_JSON"


class MessageBuilder(Sink):
    """The sink of a message.

    Args:
        message: without content.
        writer: gets the events; None for a response in one body.
        shows_thinking: whether the text of thinking is shown, and not only that there was some.
        full_context: whether the end of the model's context comes before `max_tokens`.
        kept: what of the prompt the client asks to keep.
    """

    def __init__(
        self,
        message: MessageObject,
        writer: StreamWriter | None,
        *,
        shows_thinking: bool,
        full_context: bool,
        kept: KeptPrompt,
    ) -> None:
        self._kept = kept
        self.message = message
        self._full_context = full_context
        self._open: ContentBlock | None = None
        self._pieces: list[str] = []
        self._shows_thinking = shows_thinking
        self._writer = writer
        self._dirty: list[StreamWriter] = []

    def begin(self, choice: DeltaChoice) -> None:
        self._dirty = choice.response.link.dirty
        self.message.usage = self._usage(choice)
        self._emit(MessageStart(message=self.message))

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        del scores
        for delta in deltas:
            match delta:
                case ContentDelta():
                    self._text(delta.text)
                case ReasoningDelta():
                    self._thinking(delta.text)
                case CallStart():
                    self._start(ToolUseContent(id=delta.call_id, name=delta.name))
                case CallArguments():
                    self._pieces.append(delta.text)
                    self._delta(InputDelta(partial_json=delta.text))
                case CallEnd():
                    self._stop_block()

    def _usage(self, choice: DeltaChoice) -> MessageUsage:
        shorter, longer = self._kept.created(choice.prompt_tokens, choice.cached_tokens)
        return MessageUsage(
            input_tokens=choice.prompt_tokens - choice.cached_tokens - shorter - longer,
            cache_read_input_tokens=choice.cached_tokens,
            cache_creation_input_tokens=shorter + longer,
            cache_creation=CacheCreation(ephemeral_5m_input_tokens=shorter, ephemeral_1h_input_tokens=longer),
            output_tokens=choice.completion_tokens,
        )

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        self._stop_block()
        message = self.message
        message.usage = self._usage(choice)
        message.stop_reason, message.stop_sequence = self._why(choice, reason)
        stop = Stop(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        self._emit(MessageDelta(delta=stop, usage=message.usage))
        self._emit(MessageStop())

    def _why(self, choice: DeltaChoice, reason: FinishReason) -> tuple[StopReason, str | None]:
        if reason is FinishReason.LENGTH:
            return ("model_context_window_exceeded" if self._full_context else "max_tokens"), None
        if choice.stop_string is not None:
            return "stop_sequence", choice.stop_string
        return ("tool_use" if choice.called else "end_turn"), None

    def _text(self, text: str) -> None:
        if not isinstance(self._open, TextContent):
            self._start(TextContent())
        self._pieces.append(text)
        self._delta(TextDelta(text=text))

    def _thinking(self, text: str) -> None:
        if not isinstance(self._open, ThinkingContent):
            self._start(ThinkingContent())
        if self._shows_thinking:
            self._pieces.append(text)
            self._delta(ThinkingDelta(thinking=text))

    def _start(self, block: ContentBlock) -> None:
        self._stop_block()
        self._open = block
        self.message.content.append(block)
        self._emit(BlockStart(index=self._index, content_block=block))

    def _stop_block(self) -> None:
        block, self._open = self._open, None
        if block is None:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        match block:
            case TextContent():
                block.text = text
            case ThinkingContent():
                block.thinking = text
            case ToolUseContent():
                block.input = _input(text)
        self._emit(BlockStop(index=self._index))

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _delta(self, delta: TextDelta | ThinkingDelta | InputDelta) -> None:
        self._emit(BlockDelta(index=self._index, delta=delta))

    def _emit(self, event: NamedEvent) -> None:
        writer = self._writer
        if writer is None:
            return
        writer.events.append(event.frame())
        writer.mark_dirty(self._dirty)


def _input(arguments: str) -> dict[str, Any]:
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {INVALID_JSON: arguments}
