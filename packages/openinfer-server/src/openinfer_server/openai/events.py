"""Events of OpenAI's two older streams as types: what `event_frames.py` and `chat_sinks.py` write, for the document.

The bytes are put together by hand, one event per token; Schemathesis holds them to these types
(`tests/test_api_fuzz.py`).
"""

from typing import Literal

import msgspec

from openinfer_server.openai.objects import ChatLogprobs, LegacyLogprobs, Usage


class CompletionEventChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More of one completion."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET  # in the last one
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in the first one, if token ids are wanted
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionEventChoice]  # one, or none in the event that has the usage
    usage: Usage | None = None


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More of a call."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class CallDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call begins, where it has an id, or goes on."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More of one answer."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatEventChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET  # in the last one
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatEventChoice]  # one, or none in the event that has the usage
    usage: Usage | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in the first of each choice, if wanted
