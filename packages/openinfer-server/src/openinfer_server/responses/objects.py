"""What clients of `/v1/responses` get: the response and its items."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from openinfer_server.openai.objects import TopLogprob
from openinfer_server.responses.types import ObjectFormat, PlainFormat, SchemaFormat

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ENDED: frozenset[Status] = frozenset(("completed", "incomplete", "failed", "cancelled"))


class OutputLogprob(msgspec.Struct, frozen=True):
    """A token of the text."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class TextContent(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[str] = []  # always empty: nothing here cites
    logprobs: list[OutputLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Text for the user."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[TextContent] = []


class ReasoningContent(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str = ""


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought; whole, never summarised."""

    id: str
    summary: list[str] = []  # always empty
    content: list[ReasoningContent] = []
    status: ItemStatus = "in_progress"
    encrypted_content: None = None


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call the model makes."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET  # of functions that were offered in one
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Where input tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What output tokens were."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response is not whole."""

    reason: Literal["max_output_tokens"]


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the text."""

    format: PlainFormat | ObjectFormat | SchemaFormat = PlainFormat()


class ReasoningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the reasoning."""

    effort: str | None = None
    summary: None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """Response of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningSettings = ReasoningSettings()
    service_tier: Literal["default"] = "default"
    store: bool = True
    temperature: float = 1.0
    text: TextSettings = TextSettings()
    tool_choice: str | Mapping[str, Any] = "auto"
    tools: list[Mapping[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
