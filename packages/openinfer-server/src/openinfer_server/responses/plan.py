"""From the body of a response to what the engine is asked."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from openinfer_core.sampling_defaults import SamplingDefaults
from openinfer_server.chat.prompt import chat_prompt, prompt_end
from openinfer_server.chat.variables import effort_variables
from openinfer_server.http.api_errors import invalid, renamed
from openinfer_server.http.request import HttpRequest
from openinfer_server.limits.conversation import read_conversation
from openinfer_server.openai.types import SystemTurn, Turn
from openinfer_server.output.logprobs import ScoredToken, chat_format
from openinfer_server.request.generation_fields import GenerationFields, SamplingFields
from openinfer_server.request.plan import Plan, Prompt, Scoring, make_plan
from openinfer_server.request.structured import OutputConstraint, output_constraint
from openinfer_server.responses.items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    read_items,
)
from openinfer_server.responses.objects import (
    OutputFunctionCall,
    OutputItem,
    OutputLogprob,
    OutputMessage,
    OutputReasoning,
    ReasoningSettings,
    ResponseObject,
    TextSettings,
)
from openinfer_server.responses.offered import OfferedFunctions
from openinfer_server.responses.store import ResponseRecord
from openinfer_server.responses.turns import turns_of
from openinfer_server.responses.types import LOGPROBS, Conversation, PlainFormat, ResponseRequest, ToolChoice
from openinfer_server.service import Service
from openinfer_server.text.tokenizer import Tokenizer
from openinfer_server.tools.available import AvailableTools, Fields, ToolMode, ToolRequest, available_tools
from openinfer_server.tools.dropped import kept_tools

# What errors of shared code call a field, and what this API calls it.
FIELD_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "logprobs": "top_logprobs"}
_ITEM_BYTES = 128  # a body that takes as long to decode as an item to make a turn of
_ID_PREFIXES: dict[type, str] = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionOutputItem: "fco",
    ReasoningItem: "rs",
}


async def conversation_items(request: Conversation, previous: ResponseRecord | None) -> list[InputItem]:
    """Everything the prompt is made of, but the instructions; each item has an id.

    Raises:
        ApiError: 400; an item is malformed, or the previous response has not ended well.
    """
    items: list[InputItem] = []
    if previous is not None:
        if previous.response.status not in ("completed", "incomplete"):
            message = f"the previous response is {previous.response.status}; only one that has ended can be continued"
            raise invalid("previous_response_id", message)
        items += [*previous.items, *map(_as_input, previous.response.output)]
    pieces = request.input if isinstance(request.input, list) else []
    return items + await read_conversation(pieces, "input", lambda: _given_items(request))


def conversation_tools(service: Service, request: Conversation, offered: OfferedFunctions) -> AvailableTools:
    """The functions that may be called."""
    mode, only = _tool_choice(request.tool_choice)
    parallel = request.parallel_tool_calls is not False
    return available_tools(service, ToolRequest(offered.functions, mode, only, parallel, Fields(function="")))


def _tool_choice(choice: str | ToolChoice | None) -> tuple[ToolMode, Sequence[str] | None]:
    """Mode, and the functions it is limited to."""
    if choice is None:
        return ToolMode.AUTO, None
    if isinstance(choice, str):
        return ToolMode(choice), None
    if choice.type == "function" and choice.name is not None:
        return ToolMode.REQUIRED, [choice.name]
    names = [tool.get("name") for tool in choice.tools or [] if tool.get("type") == "function"]
    if choice.type == "allowed_tools" and choice.mode is not None and len(names) == len(choice.tools or []):
        return ToolMode(choice.mode), [str(name) for name in names]
    raise invalid("tool_choice", "tool_choice is a word, a function with its name, or allowed_tools with functions")


def _given_items(request: Conversation) -> list[InputItem]:
    return [_with_id(item) for item in read_items(request.input)]


async def conversation_prompt(
    http_request: HttpRequest,
    service: Service,
    request: Conversation,
    items: Sequence[InputItem],
    available: AvailableTools,
) -> Prompt:
    """The prompt of a conversation."""
    turns: list[Turn] = [] if request.instructions is None else [SystemTurn(content=request.instructions)]
    turns += await http_request.aside(lambda: turns_of(items), num_bytes=_ITEM_BYTES * len(items))
    if not items:
        raise invalid("input", "input is required")
    effort = None if request.reasoning is None else request.reasoning.effort
    variables = {**effort_variables(service, effort, "reasoning.effort"), **available.variables}
    end = prompt_end(
        turns,
        continue_final_message=request.continue_final_message,
        add_generation_prompt=request.add_generation_prompt,
    )
    salt = request.cache_salt if isinstance(request, ResponseRequest) else None
    with renamed(FIELD_NAMES):
        return await chat_prompt(http_request, service, turns, variables, end=end, cache_salt=salt)


def response_plan(http_request: HttpRequest, service: Service, request: ResponseRequest, prompt: Prompt) -> Plan:
    given = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
    fields = GenerationFields(**given, model=request.model)
    scoring = Scoring(output=(request.top_logprobs or 0) if LOGPROBS in (request.include or []) else None)
    with renamed(FIELD_NAMES):
        return make_plan(
            service,
            fields,
            [prompt],
            tenant=http_request.tenant,
            owner=http_request.owner,
            max_tokens=request.max_output_tokens,
            scoring=scoring,
        )


def response_constraint(request: ResponseRequest) -> OutputConstraint:
    """What the text of a response must be."""
    text_format = None if request.text is None else request.text.format
    return output_constraint(
        request, schema=None if text_format is None else text_format.wanted, schema_field="text.format"
    )


def new_response(request: ResponseRequest, model: str, defaults: SamplingDefaults) -> ResponseObject:
    """The response before its first event, with the settings that are in force."""
    reasoning, text = request.reasoning, request.text
    sampled = defaults.resolve(request.sampling_numbers)
    return ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=ReasoningSettings(effort=None if reasoning is None else reasoning.effort),
        store=request.store is not False,
        temperature=sampled["temperature"],
        text=TextSettings(format=PlainFormat() if text is None or text.format is None else text.format),
        tool_choice="auto" if request.tool_choice is None else msgspec.to_builtins(request.tool_choice),
        tools=list(map(_kept, kept_tools(request.tools).values())),
        top_logprobs=request.top_logprobs or 0,
        top_p=sampled["top_p"],
    )


def _kept(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    # As text, which is written as it is: a response may be kept, and garbage is looked for among all containers.
    return cast("Mapping[str, Any]", msgspec.Raw(msgspec.json.encode(tool)))


def score_format(tokenizer: Tokenizer) -> Callable[[Sequence[ScoredToken]], list[OutputLogprob]]:
    build = chat_format(tokenizer)

    def scores(tokens: Sequence[ScoredToken]) -> list[OutputLogprob]:
        entries = build(tokens).content
        return [OutputLogprob(entry.token, entry.logprob, entry.bytes, entry.top_logprobs) for entry in entries]

    return scores


def _with_id(item: InputItem) -> InputItem:
    item_id = item.id or f"{_ID_PREFIXES[type(item)]}_{secrets.token_hex(16)}"
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        text = item.content
        part = OutputText(text=text, annotations=[]) if item.role == "assistant" else InputText(text=text)
        return msgspec.structs.replace(item, id=item_id, content=[part])
    return msgspec.structs.replace(item, id=item_id)


def _as_input(item: OutputItem) -> InputItem:
    """An item of a response as the next request would bring it."""
    match item:
        case OutputMessage():
            parts = [OutputText(text=part.text, annotations=[], logprobs=[]) for part in item.content]
            return MessageItem(id=item.id, role="assistant", content=[*parts], status=item.status)
        case OutputReasoning():
            texts = [ReasoningText(text=part.text) for part in item.content]
            return ReasoningItem(id=item.id, summary=[], content=texts, status=item.status)
        case OutputFunctionCall():
            return FunctionCallItem(
                id=item.id,
                call_id=item.call_id,
                name=item.name,
                namespace=None if item.namespace is msgspec.UNSET else item.namespace,
                arguments=item.arguments,
                status=item.status,
            )
