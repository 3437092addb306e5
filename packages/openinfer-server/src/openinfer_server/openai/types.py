"""Request bodies as msgspec types: every field the OpenAI SDK can send is here, honoured or refused by name.

`null` means absent. A type's `RULES` say what becomes of fields that are known and not honoured; fields that are not
here are refused by the decoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import msgspec

from openinfer_server.http.api_errors import ApiError, invalid, refused
from openinfer_server.request.fields import (
    Count,
    Int64,
    Logprobs,
    NonNegative,
    RequestFields,
    TokenId,
    check_rules,
)
from openinfer_server.request.generation_fields import TokenDetailFields
from openinfer_server.request.neutral_fields import NO_TURNS
from openinfer_server.request.rules import ANY, Neutral, Refused, Rule
from openinfer_server.tools.types import Tool, ToolChoice

TEXT_ONLY = "this server serves text only"
NOT_TEXT = Refused(TEXT_ONLY)
_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "reasoning_text", "refusal", "summary_text"))
CACHE_OPTIONS = Refused("the prefix cache has no options; cache_salt separates its users")
CACHED_ANYWAY = Neutral(ANY, "the prefix cache keeps every block that fits, asked or not")
VERBOSITY = Neutral(("medium",), "medium is what the model does anyway, which has no such control")
PARSED = Neutral(ANY, "it is the text, as the SDK has read it")
PARSED_ARGUMENTS = Neutral(ANY, "they are the arguments, as the SDK has read them")
_MADE_BY_CLIENT = Neutral(ANY, "the client's library made it of an answer")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # how much to think


class CompletionRequest(TokenDetailFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    max_completion_tokens: Count | None = None  # the same as max_tokens, under the name that chats have for it
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Int64 | None = None
    suffix: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **TokenDetailFields.RULES,
        **NO_TURNS,
        "add_special_tokens": Neutral(
            (True,), "text begins as its tokenizer says; give token ids for another beginning"
        ),
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
    index: Int64 | None = None
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
            if None not in (turn.reasoning, turn.reasoning_content) and turn.reasoning != turn.reasoning_content:
                where = f"{field}[{index}].reasoning"
                raise invalid(where, f"{where} and reasoning_content are two names of one text, and differ")
        if isinstance(turn.content, list):
            for place, part in enumerate(turn.content):
                check_part(part, f"{field}[{index}].content[{place}]")


def refuse_other_parts(given: Mapping[str, Any], where: str, *fields: str) -> None:
    """Refuses parts that are not text, by their type, before their own fields are looked at.

    Args:
        given: an object of the request as it came.
        where: it stands.
        fields: of it that may have a list of parts.
    """
    for field in fields:
        parts: object = given.get(field)
        for index, part in enumerate(cast("list[object]", parts) if isinstance(parts, list) else ()):
            kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in _TEXT_PARTS:
                raise _no_text(kind, f"{where}.{field}[{index}]")


def _no_text(kind: str, where: str) -> ApiError:
    return refused(f"{where}.type", f"{TEXT_ONLY}, whose parts are text; not {kind[:100]!r}")


def check_part(part: TextPart, where: str) -> None:
    """Raises `ApiError`: the part is not text."""
    if part.type != "text":
        raise _no_text(part.type, where)
    check_rules(part, f"{where}.")
    if part.text is None:
        raise invalid(f"{where}.text", f"{where}.text is required")


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What much of the answer is expected to be."""

    type: Literal["content"]
    content: Content


class ChatRequest(TokenDetailFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Turn]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables that the chat template reads
    documents: list[dict[str, Any]] | None = None  # for templates that read them
    include_reasoning: bool | None = None  # whether the answer shows it; true if absent
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: NonNegative | None = None  # tokens of reasoning at most; vLLM's name
    modalities: list[str] | None = None
    store: bool | None = None
    audio: object = None
    echo: object = None
    function_call: object = None
    functions: object = None
    moderation: object = None
    prediction: Prediction | None = None  # drafts come from it; the answer is as without
    prompt_cache_options: object = None
    verbosity: object = None
    web_search_options: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **TokenDetailFields.RULES,
        "add_special_tokens": Neutral((False,), "the chat template says which special tokens a prompt has"),
        "audio": NOT_TEXT,
        "echo": Neutral((False,), "an answer has no prompt; /v1/completions has it"),
        "function_call": Refused("tool_choice has taken its place"),
        "functions": Refused("tools has taken its place"),
        "modalities": Neutral((["text"], []), TEXT_ONLY),
        "moderation": Refused("this server does not moderate"),
        "prompt_cache_options": CACHE_OPTIONS,
        "store": Neutral((False,), "false asks for what is always so; this server stores no completions"),
        "verbosity": VERBOSITY,
        "web_search_options": Refused("this server does not search the web"),
    }


def field_names(request: CompletionRequest | ChatRequest) -> Mapping[str, str]:
    """What errors of shared code call a field, and what the request calls it: two have another name in chats."""
    names = {} if request.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    scores = isinstance(request, ChatRequest) and request.top_logprobs is not None
    return names | {"logprobs": "top_logprobs"} if scores else names
