"""Request bodies as msgspec types: every field the OpenAI SDK can send is here, honoured or refused by name.

`null` means absent. Fields of type `object` are known and refused (see `REFUSED`); fields that are not here are
refused by the decoder.
"""

from typing import Literal

import msgspec

from openinfer_server.api_errors import refused


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both generation routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    user: str | None = None
    """Whom the request is for; taken and not used."""
    # ours and vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    priority: int | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: object = None
    suffix: object = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a turn's content."""

    type: Literal["text"]
    text: str


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


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call the model made."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call of an earlier assistant turn."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantTurn(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"
):
    """What the model said."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: object = None
    audio: object = None
    function_call: object = None


class ToolTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a tool returned."""

    content: Content
    tool_call_id: str


Turn = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn


class ChatTemplateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The template's variables that a request may set; the list is closed on purpose."""

    enable_thinking: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer."""

    type: Literal["text"]


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Turn]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: ChatTemplateOptions | None = None
    response_format: object = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    """There is one tier."""
    store: bool | None = None
    prompt_cache_key: str | None = None
    """A hint for routing between machines; there is one cache."""
    safety_identifier: str | None = None
    """Whom the request is for; taken and not used."""
    audio: object = None
    function_call: object = None
    functions: object = None
    metadata: object = None
    moderation: object = None
    parallel_tool_calls: object = None
    prediction: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: object = None
    reasoning_effort: object = None
    tool_choice: object = None
    tools: object = None
    verbosity: object = None
    web_search_options: object = None


_NO_TOOLS = "this server does not parse tool calls yet"
_TEXT_ONLY = "this server serves text only"
REFUSED = {
    "audio": _TEXT_ONLY,
    "best_of": "ask for n choices and choose yourself",
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "metadata": "this server stores no completions",
    "moderation": "this server does not moderate",
    "parallel_tool_calls": _NO_TOOLS,
    "prediction": "this server does not decode against predicted outputs",
    "prompt_cache_options": "the prefix cache has no options; cache_salt separates its users",
    "prompt_cache_retention": "the prefix cache keeps what fits",
    "reasoning_effort": "the model has no such control; chat_template_kwargs.enable_thinking may be what you want",
    "refusal": "a refusal is given as content here",
    "suffix": "the model does not fill in the middle",
    "tool_choice": _NO_TOOLS,
    "tools": _NO_TOOLS,
    "verbosity": "the model has no such control",
    "web_search_options": "this server does not search the web",
}
"""Fields that are known and cannot be honoured, and why."""


def check_refused(request: msgspec.Struct, where: str = "") -> None:
    """Refuses fields that cannot be honoured.

    Raises:
        ApiError: 400; its `param` names the field.
    """
    for name in request.__struct_fields__:
        if name in REFUSED and getattr(request, name) is not None:
            raise refused(where + name, REFUSED[name])
