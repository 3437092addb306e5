"""Bodies and queries of `/v1/responses`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from openinfer_server.openai.types import CACHE_OPTIONS, NOT_TEXT, VERBOSITY, Effort
from openinfer_server.parsers.syntax.call_syntax import JsonSchema
from openinfer_server.request.fields import (
    Count,
    Int64,
    Logprobs,
    NonNegative,
    RequestFields,
    between,
)
from openinfer_server.request.generation_fields import SamplingFields
from openinfer_server.request.neutral_fields import NO_OBFUSCATION
from openinfer_server.request.rules import ANY, Neutral, Refused, Rule
from openinfer_server.request.structured_types import ANY_OBJECT, NamedSchema
from openinfer_server.tools.types import DROPPED_TOOL_SCHEMA

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
MAX_ITEMS = 100  # of a page; OpenAI's bound
FUNCTIONS_ONLY = "the only tools are functions that the client runs"
_NO_CONTROL = Refused("the model has no such control")
_SUMMARY = Neutral(("auto",), "reasoning is given whole, and auto leaves the choice")
_FUNCTIONS = {"items": {"$ref": "#/components/schemas/FunctionTool"}}


class FunctionTool(
    RequestFields,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"asynchronous": "async"},
):
    """A function the model may call."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None  # JSON Schema of its arguments
    strict: bool | None = None
    description: str | None = None
    asynchronous: object = None
    allowed_callers: object = None
    defer_loading: object = None
    output_schema: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "allowed_callers": Neutral((["direct"],), "functions are called by the model alone"),
        "asynchronous": Neutral((False,), "every call is waited for"),
        "defer_loading": Neutral((False,), "every tool is in the prompt"),
        "output_schema": Refused("what a function returns is given to the model as it is"),
    }


class NamespaceTool(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Functions under a name that is part of theirs: `offered.py` says how the model sees them."""

    type: Literal["namespace"]
    name: str
    description: str | None = None  # put before each function's own
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=_FUNCTIONS)]


class ReasoningOptions(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to think."""

    effort: Effort | None = None
    summary: str | None = None
    context: object = None
    generate_summary: object = None
    mode: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "context": Refused("what of earlier reasoning is kept is the chat template's choice"),
        "generate_summary": _SUMMARY,
        "mode": _NO_CONTROL,
        "summary": _SUMMARY,
    }


class PlainFormat(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""

    @property
    def wanted(self) -> JsonSchema | None:
        return None


class ObjectFormat(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """A JSON object."""

    @property
    def wanted(self) -> JsonSchema | None:
        return ANY_OBJECT


class SchemaFormat(
    NamedSchema, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that follows a schema."""

    @property
    def wanted(self) -> JsonSchema | None:
        return self.schema


class TextOptions(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the text is to be."""

    format: PlainFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"verbosity": VERBOSITY}


class ResponseStreamOptions(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream says beside its text."""

    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "continuous_usage_stats": Neutral((False,), "the response that ends the stream has the usage"),
        "include_obfuscation": NO_OBFUSCATION,
    }


class ToolChoice(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


_ITEM = {"items": {"type": "object", "description": "An InputItem; its type may be left out where it has a role."}}
_TOOL = {"items": {"anyOf": [_FUNCTIONS["items"], {"$ref": "#/components/schemas/NamespaceTool"}, DROPPED_TOOL_SCHEMA]}}
Tools = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=_TOOL)]
Input = str | Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=_ITEM)]


_CONVERSATION_RULES: Mapping[str, Rule] = {
    "conversation": Refused("there are no conversations; continue with previous_response_id"),
    "truncation": Neutral(("disabled",), "disabled is what is always so; nothing of a conversation is left out"),
}


class ResponseRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses`."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    conversation: object = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Count | None = None
    thinking_token_budget: NonNegative | None = None  # tokens of reasoning at most; vLLM's name in chats
    metadata: dict[str, str] | None = None
    top_logprobs: Logprobs | None = None
    max_tool_calls: Int64 | None = None
    access_programs: object = None
    background_options: object = None
    context_management: object = None
    image: object = None
    moderation: object = None
    prompt: object = None
    prompt_cache_options: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **SamplingFields.RULES,
        **_CONVERSATION_RULES,
        "access_programs": Refused("there are none here"),
        "background_options": Refused("a background response begins as soon as the engine has room"),
        "context_management": Refused("nothing of a conversation is left out"),
        "image": NOT_TEXT,
        "max_tool_calls": Neutral(ANY, "it bounds tools that the server runs, and there are none"),
        "moderation": Refused("this server does not moderate"),
        "prompt": Refused("this server stores no prompts; send instructions and input"),
        "prompt_cache_options": CACHE_OPTIONS,
    }


class InputTokensRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses/input_tokens`: what makes the prompt of a response."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    conversation: object = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    personality: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {**_CONVERSATION_RULES, "personality": _NO_CONTROL}


Conversation: TypeAlias = ResponseRequest | InputTokensRequest  # what makes a prompt


class RetrieveQuery(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query of `GET /v1/responses/{response_id}`."""

    stream: bool | None = None
    starting_after: Annotated[int, between(-1)] | None = None  # the last event the client has seen
    include: list[str] | None = None
    include_obfuscation: bool | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "include": Neutral(ANY, "what was asked for when the response was created is there"),
        "include_obfuscation": NO_OBFUSCATION,
    }


class ItemsQuery(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query of `GET /v1/responses/{response_id}/input_items`."""

    after: str | None = None
    limit: Annotated[int, between(1, MAX_ITEMS)] | None = None
    order: Literal["asc", "desc"] | None = None
    include: list[str] | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"include": Neutral(ANY, "items are given whole")}
