"""Objects of the SDKs' response types are taken back as history, with each of their optional fields absent or there."""

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
import pytest
from anthropic import types as anthropic_types
from anthropic.types import beta as anthropic_beta
from openai.types import chat, responses
from openai.types.chat import ParsedChatCompletionMessage, ParsedFunctionToolCall
from openai.types.responses import parsed_response

ASK = {"role": "user", "content": "stone"}
DEPTH = 4
"""Objects inside objects that an example has."""


def example(annotation: Any, depth: int = 0) -> Any:
    """A value of a type, of a union the first that is not None; its objects have what they must."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return example(arguments[0], depth)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return example(next(kind for kind in arguments if kind is not type(None)), depth)
    if origin is list:
        return [example(arguments[0], depth + 1)] if depth < DEPTH else []
    if origin is dict or annotation is object or annotation is Any:
        return {}
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        required = {name: field for name, field in annotation.model_fields.items() if field.is_required()}
        return {field.alias or name: example(field.annotation, depth + 1) for name, field in required.items()}
    return {str: "weather", int: 1, float: 1.0, bool: False}.get(annotation, {})


def variants(kind: type[pydantic.BaseModel], given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of an optional field and an object that has it beside what it must have; first one without any."""
    must = {name for name, field in kind.model_fields.items() if field.is_required()}
    base = {**example(kind), **given}
    yield "", kind.model_construct(**base).model_dump(mode="json", warnings=False)
    for name in kind.model_fields:
        if name not in must and name not in given:
            field = kind.model_fields[name]
            there = {**base, field.alias or name: example(field.annotation)}
            yield name, kind.model_construct(**there).model_dump(mode="json", warnings=False)


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}


def in_chat(message: dict[str, Any]) -> dict[str, Any]:
    results = [CHAT_RESULT] if message.get("tool_calls") else []
    return {"messages": [ASK, message, *results, ASK]}


def in_call(call: dict[str, Any]) -> dict[str, Any]:
    return in_chat({"role": "assistant", "tool_calls": [call]})


def in_input(item: dict[str, Any]) -> dict[str, Any]:
    return {"input": [ASK, item, ASK]}


def in_result(item: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    return {"input": [ASK, call, item, ASK]}


def in_output(part: dict[str, Any]) -> dict[str, Any]:
    return in_input({"type": "message", "role": "assistant", "content": [part]})


def in_message(block: dict[str, Any]) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    results = [result] if block["type"] == "tool_use" else []
    return {
        "messages": [ASK, {"role": "assistant", "content": [block]}, {"role": "user", "content": [*results, TEXT]}],
        "max_tokens": 9,
    }


TEXT = {"type": "text", "text": "stone"}
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = {"content": "a stone"}
ARGUMENTS = {"arguments": "{}", "call_id": "c"}
USED = {"id": "c", "input": {"city": None}}
TYPES: list[tuple[str, type[pydantic.BaseModel], Any, dict[str, Any], set[str]]] = [
    (CHATS, chat.ChatCompletionMessage, in_chat, SAID, {"audio", "function_call", "refusal"}),
    (CHATS, chat.ChatCompletionMessage, in_chat, {"tool_calls": [CALL]}, {"audio", "function_call", "refusal"}),
    (CHATS, ParsedChatCompletionMessage, in_chat, SAID, {"audio", "function_call", "refusal"}),
    (CHATS, chat.ChatCompletionMessageFunctionToolCall, in_call, CALL, set()),
    (CHATS, ParsedFunctionToolCall, in_call, CALL, set()),
    (RESPONSES, responses.ResponseOutputMessage, in_input, {}, set()),
    (RESPONSES, parsed_response.ParsedResponseOutputText, in_output, {}, set()),
    (RESPONSES, responses.ResponseOutputRefusal, in_output, {}, set()),
    (RESPONSES, responses.ResponseFunctionToolCall, in_input, ARGUMENTS, {"async_"}),
    (RESPONSES, parsed_response.ParsedResponseFunctionToolCall, in_input, ARGUMENTS, {"async_"}),
    (RESPONSES, responses.ResponseFunctionToolCallItem, in_input, ARGUMENTS, {"async_"}),
    (RESPONSES, responses.ResponseFunctionToolCallOutputItem, in_result, {"call_id": "c"}, set()),
    (RESPONSES, responses.ResponseReasoningItem, in_input, {}, {"encrypted_content"}),
    (MESSAGES, anthropic_types.TextBlock, in_message, {}, set()),
    (MESSAGES, anthropic_types.ThinkingBlock, in_message, {}, set()),
    (MESSAGES, anthropic_types.ToolUseBlock, in_message, USED, {"toolset_name"}),
    (MESSAGES, anthropic_beta.BetaTextBlock, in_message, {}, set()),
    (MESSAGES, anthropic_beta.BetaThinkingBlock, in_message, {}, set()),
    (MESSAGES, anthropic_beta.BetaToolUseBlock, in_message, USED, {"toolset_name"}),
]
"""Route, the SDK's type, the body it is sent in, what it has, and fields that cannot be honoured, refused by name."""


@pytest.mark.parametrize(
    ("path", "kind", "body", "given", "refused"), TYPES, ids=lambda each: getattr(each, "__name__", "")
)
def test_object_of_a_response_is_taken_back_with_each_optional_field(agent, call, path, kind, body, given, refused):
    for name, history in variants(kind, given):
        status, _, answer = call(agent.server, "POST", path, body(history))
        if name in refused:
            error = json.loads(answer)["error"]
            assert (status, name.rstrip("_") in error["message"]) == (400, True), (name, answer)
        else:
            assert status == 200, (name, history, answer)
    assert refused <= {name for name, _ in variants(kind, given)}
