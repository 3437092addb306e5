"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from openinfer_server.request.fields import Count, RequestFields, Stops
from openinfer_server.request.generation_fields import SamplingFields
from openinfer_server.request.neutral_fields import USER
from openinfer_server.request.retention import CacheControl
from openinfer_server.request.rules import ANY, Neutral, Refused, Rule
from openinfer_server.tools.types import DROPPED_TOOL_SCHEMA

NO_THREADS = "messages are not kept; send the whole conversation"
THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's code
FUNCTIONS_ONLY = "the only tools are those that the client runs"
_NO_ACCOUNTS = Refused("this server has no accounts")

_BLOCKS = {"items": {"type": "object", "description": "A block of text, thinking, tool_use or tool_result."}}
Blocks = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=_BLOCKS)]


class MessageParam(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ClientTool(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]  # JSON Schema of its input
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: object = None
    defer_loading: object = None
    input_examples: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "allowed_callers": Neutral((["direct"],), "tools are called by the model alone"),
        "defer_loading": Neutral((False,), "every tool is in the prompt"),
        "eager_input_streaming": Neutral(ANY, "a tool's input is always streamed as it comes"),
        "input_examples": Neutral(([],), "templates have no place for them; put them into the description"),
    }


class ThinkingEnabled(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="enabled"
):
    """Think, for so many tokens at most."""

    budget_tokens: Count
    display: Literal["omitted"] | None = None


class ThinkingAdaptive(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"
):
    """Think as the model's template has it."""

    display: Literal["omitted"] | None = None


class ThinkingDisabled(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"
):
    """Do not think."""


Thinking: TypeAlias = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class ToolChoiceAuto(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"
):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    """Some tool must be called."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"
):
    """This tool must be called."""

    name: str
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"
):
    """No tool is called."""


ToolChoice: TypeAlias = ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone


class Metadata(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """About the request."""

    user_id: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"user_id": USER}


class JsonOutput(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that follows a schema."""

    schema: dict[str, Any]


class OutputConfig(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


_TOOL = {"items": {"anyOf": [{"$ref": "#/components/schemas/ClientTool"}, DROPPED_TOOL_SCHEMA]}}
Tools = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=_TOOL)]
_SYSTEM = {"items": {"$ref": "#/components/schemas/TextBlock"}}
System = str | Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=_SYSTEM)]

_KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # what Claude Code sends
_NO_COMPACTION = Refused("nothing of a conversation is left out")
_PROMPT_RULES: Mapping[str, Rule] = {
    "billing_policy": _NO_ACCOUNTS,
    "compaction": _NO_COMPACTION,
    "context_management": Neutral(({"edits": []}, _KEEP_THINKING), _NO_COMPACTION.why),
    "mcp_servers": Neutral(([],), FUNCTIONS_ONLY),
    "speed": Neutral(("standard",), "standard is what is always so, and there is nothing faster"),
    "user_profile_id": _NO_ACCOUNTS,
    "workspace_id": _NO_ACCOUNTS,
}


class MessagesRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages`."""

    model: str | None = None
    messages: list[MessageParam]
    max_tokens: Count  # at most; less if the model's context ends before
    system: System | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    thinking: Thinking | None = None  # absent is disabled
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    speed: str | None = None
    cache_control: CacheControl | None = None
    container: object = None
    diagnostics: object = None
    fallback_credit_token: object = None
    fallbacks: object = None
    inference_geo: object = None
    thread: object = None
    billing_policy: object = None
    compaction: object = None
    context_management: object = None
    mcp_servers: object = None
    user_profile_id: object = None
    workspace_id: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **SamplingFields.RULES,
        **_PROMPT_RULES,
        "container": Refused("this server runs no code"),
        "diagnostics": Refused("the answer's usage says what was cached"),
        "fallback_credit_token": _NO_ACCOUNTS,
        "fallbacks": Refused("this server has one model"),
        "inference_geo": Refused("the server is where it is"),
        "service_tier": Neutral(("auto", "default", "standard_only"), "there is one tier, which these name"),
        "stop": Refused("it is named stop_sequences here"),
        "thread": Refused(NO_THREADS),
    }


class CountTokensRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[MessageParam]
    system: System | None = None
    thinking: Thinking | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    speed: str | None = None
    cache_control: CacheControl | None = None
    billing_policy: object = None
    compaction: object = None
    context_management: object = None
    mcp_servers: object = None
    user_profile_id: object = None
    workspace_id: object = None

    RULES: ClassVar[Mapping[str, Rule]] = _PROMPT_RULES


Prompting: TypeAlias = MessagesRequest | CountTokensRequest  # what makes a prompt
