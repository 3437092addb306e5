"""What clients of `/v1/messages` get: the message and its blocks, and the events of a stream."""

from typing import Any, Literal, TypeAlias

import msgspec

from openinfer_server.http.api_errors import AnthropicErrorBody
from openinfer_server.http.named_events import NamedEvent

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text for the user. Without `citations`: nothing here cites, and Vercel's AI SDK takes a list or none at all."""

    text: str = ""


class ThinkingContent(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought."""

    thinking: str = ""
    signature: str = ""  # always empty: thinking is not signed here


class ToolUseContent(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call the model makes."""

    id: str
    name: str
    input: dict[str, Any] = {}


ContentBlock: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt that stay in the cache, by the time for which its client asked."""

    ephemeral_5m_input_tokens: int = 0  # for less than an hour
    ephemeral_1h_input_tokens: int = 0  # for an hour, or more by OpenAI's field


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of a message."""

    input_tokens: int = 0  # of the prompt, without those below
    cache_read_input_tokens: int = 0  # of the prompt, found in the prefix cache
    cache_creation_input_tokens: int = 0  # of the others, those up to the last mark: they stay in the cache
    cache_creation: CacheCreation = CacheCreation()  # the same, by time
    output_tokens: int = 0
    service_tier: Literal["standard"] = "standard"


class MessageObject(msgspec.Struct, kw_only=True):
    """Response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = msgspec.field(default_factory=MessageUsage)


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageStart(NamedEvent, frozen=True, kw_only=True, tag="message_start"):
    """The message, without content."""

    message: MessageObject


class BlockStart(NamedEvent, frozen=True, kw_only=True, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thinking."""

    thinking: str


class InputDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON."""

    partial_json: str


class BlockDelta(NamedEvent, frozen=True, kw_only=True, tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(NamedEvent, frozen=True, kw_only=True, tag="content_block_stop"):
    """A block has ended."""

    index: int


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Why a message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(NamedEvent, frozen=True, kw_only=True, tag="message_delta"):
    """The message has ended."""

    delta: Stop
    usage: MessageUsage


class MessageStop(NamedEvent, frozen=True, kw_only=True, tag="message_stop"):
    """The last event."""


class ErrorEvent(NamedEvent, frozen=True, kw_only=True, tag="error"):
    """The last event of a message that failed."""

    error: AnthropicErrorBody


Event: TypeAlias = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | ErrorEvent
