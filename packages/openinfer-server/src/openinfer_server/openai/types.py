"""Request bodies as msgspec types: every field the OpenAI SDK can send is here, honoured or refused by name.

`null` means absent. A type's `RULES` say what becomes of fields that are known and not honoured; fields that are not
here are refused by the decoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.request.fields import (
    Count,
    Logprobs,
    NonNegative,
    RequestFields,
    check_rules,
)
from openinfer_server.request.generation_fields import TokenDetailFields
from openinfer_server.request.rules import ANY, Neutral, Refused, Rule
from openinfer_server.tools.types import Tool, ToolChoice

TEXT_ONLY = "this server serves text only"
NOT_TEXT = Refused(TEXT_ONLY)
CACHE_OPTIONS = Refused("the prefix cache has no options; cache_salt separates its users")
CACHED_ANYWAY = Neutral(ANY, "the prefix cache keeps every block that fits, asked or not")
CACHE_RETENTION = Refused("the prefix cache keeps what fits")
VERBOSITY = Neutral(("medium",), "medium is what the model does anyway, which has no such control")
PARSED = Neutral(ANY, "it is the text, as the SDK has read it")
PARSED_ARGUMENTS = Neutral(ANY, "they are the arguments, as the SDK has read them")
_MADE_BY_CLIENT = Neutral(ANY, "the client's library made it of an answer")


# How much to think. Models here think or do not: `none` and `minimal` turn it off, every other effort on.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def thinks(effort: Effort | None) -> bool | None:
    """Whether the template is told to think; None leaves it the choice."""
    return None if effort is None else effort not in ("none", "minimal")


class CompletionRequest(TokenDetailFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: int | None = None
    suffix: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **TokenDetailFields.RULES,
        "best_of": Neutral(ANY, "as many as n is what is always so; more is refused"),
        "suffix": Refused("the model does not fill in the middle"),
    }


class TextPart(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a turn's content."""

    type: str
    text: str | None = None
    cache_control: object = None
    prompt_cache_breakpoint: object = None
    audio_url: object = None
    file: object = None
    image_url: object = None
    input_audio: object = None
    refusal: object = None
    video_url: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "audio_url": NOT_TEXT,
        "cache_control": CACHED_ANYWAY,
        "file": NOT_TEXT,
        "image_url": NOT_TEXT,
        "input_audio": NOT_TEXT,
        "prompt_cache_breakpoint": CACHED_ANYWAY,
        "refusal": Refused("a refusal is given as text here"),
        "video_url": NOT_TEXT,
    }


Content = str | list[TextPart]


class SystemTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """What the operator says."""

    content: Content
    name: str | None = None


class DeveloperTurn(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="developer"
):
    """What the application says; a system turn for templates that do not know developers."""

    content: Content
    name: str | None = None


class UserTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: str | None = None


class FunctionCall(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call the model made."""

    name: str
    # As JSON text or as an object. A call that was cut off has half of it, and is taken back as it was.
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {"parsed_arguments": PARSED_ARGUMENTS}


class ToolCall(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call of an earlier assistant turn."""

    id: str
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None
    provider_specific_fields: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "index": Neutral(ANY, "the order of the list says it, and a stream's events have it"),
        "provider_specific_fields": _MADE_BY_CLIENT,
    }


class AssistantTurn(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"
):
    """What the model said."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its newer name
    annotations: list[object] | None = None
    parsed: object = None
    provider_specific_fields: object = None
    refusal: object = None
    audio: object = None
    function_call: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "annotations": Neutral(ANY, "they describe the text of an answer"),
        "audio": NOT_TEXT,
        "function_call": Refused("tool_calls has taken its place"),
        "parsed": PARSED,
        "provider_specific_fields": _MADE_BY_CLIENT,
        "refusal": Refused("a refusal is given as content here"),
    }


class ToolTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a tool returned."""

    content: Content
    tool_call_id: str
    name: str | None = None


Turn = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn


def check_turns(turns: Sequence[Turn], field: str) -> None:
    """Refuses what cannot be honoured of turns, by name."""
    for index, turn in enumerate(turns):
        if isinstance(turn, AssistantTurn):
            check_rules(turn, f"{field}[{index}].")
        if isinstance(turn.content, list):
            for place, part in enumerate(turn.content):
                _check_part(part, f"{field}[{index}].content[{place}]")


def _check_part(part: TextPart, where: str) -> None:
    if part.type != "text":
        raise refused(f"{where}.type", f"{TEXT_ONLY}, whose parts are text; not {part.type[:100]!r}")
    check_rules(part, f"{where}.")
    if part.text is None:
        raise invalid(f"{where}.text", f"{where}.text is required")


class ChatTemplateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The template's variables that a request may set; the list is closed on purpose."""

    enable_thinking: bool | None = None
    thinking: bool | None = None  # the same under DeepSeek's name; either sets both


class ChatRequest(TokenDetailFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Turn]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    chat_template_kwargs: ChatTemplateOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: NonNegative | None = None  # tokens of reasoning at most; vLLM's name
    modalities: list[str] | None = None
    store: bool | None = None
    audio: object = None
    function_call: object = None
    functions: object = None
    moderation: object = None
    prediction: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: object = None
    verbosity: object = None
    web_search_options: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **TokenDetailFields.RULES,
        "audio": NOT_TEXT,
        "function_call": Refused("tool_choice has taken its place"),
        "functions": Refused("tools has taken its place"),
        "modalities": Neutral((["text"], []), TEXT_ONLY),
        "moderation": Refused("this server does not moderate"),
        "prediction": Refused("this server does not decode against predicted outputs"),
        "prompt_cache_options": CACHE_OPTIONS,
        "prompt_cache_retention": CACHE_RETENTION,
        "store": Neutral((False,), "false asks for what is always so; this server stores no completions"),
        "verbosity": VERBOSITY,
        "web_search_options": Refused("this server does not search the web"),
    }
