"""Fields that are not honoured: neutral ones and labels change nothing, and what is not neutral is refused by name.

Each is sent on each route that takes it, alone, under several defaults of the model; the engine must be asked the same
as without it, and the answer must be the same.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
import pytest

from openinfer_core.request import GenerateRequest
from openinfer_server.anthropic import blocks
from openinfer_server.anthropic import types as messages
from openinfer_server.openai import types as chats
from openinfer_server.request import structured_types
from openinfer_server.request.fields import RequestFields
from openinfer_server.request.generation_fields import StreamOptions
from openinfer_server.request.rules import Label, Neutral
from openinfer_server.responses import items
from openinfer_server.responses import types as responses
from openinfer_server.tokens import types as tokens
from openinfer_server.tools import types as tools

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/inference/v1/generate"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ASK = {"role": "user", "content": "stone"}
Fields = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """An object of a request.

    Attributes:
        path: of the route.
        kind: the object's type.
        body: a whole body, in which the object has further fields.
    """

    path: str
    kind: type[RequestFields]
    body: Callable[[Fields], Fields]


def chat(*turns: Fields) -> Fields:
    """A body that ends with a question."""
    return {"messages": [*turns, ASK]}


def called(**fields: Any) -> Fields:
    """A chat with an earlier call."""
    return chat(
        {"role": "assistant", "tool_calls": [CALL | fields]}, {"role": "tool", "tool_call_id": "c", "content": "x"}
    )


def item(**fields: Any) -> Fields:
    """A response to one item, and a question."""
    return {"input": [fields, ASK]}


def message(role: str, **block: Any) -> Fields:
    """A message to one block, and a question."""
    return {"messages": [{"role": role, "content": [block]}, ASK], "max_tokens": 9}


CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
PLACES = [
    Place(COMPLETIONS, chats.CompletionRequest, lambda f: {"prompt": "stone", **f}),
    Place(COMPLETIONS, StreamOptions, lambda f: {"prompt": "stone", "stream": True, "stream_options": f}),
    Place(CHATS, chats.ChatRequest, lambda f: {**chat(), **f}),
    Place(CHATS, StreamOptions, lambda f: {**chat(), "stream": True, "stream_options": f}),
    Place(CHATS, chats.AssistantTurn, lambda f: chat({"role": "assistant", "content": "a", **f})),
    Place(CHATS, chats.ToolCall, lambda f: called(**f)),
    Place(CHATS, chats.FunctionCall, lambda f: called(function={**CALL["function"], **f})),
    Place(CHATS, chats.TextPart, lambda f: chat({"role": "user", "content": [{"type": "text", "text": "a", **f}]})),
    Place(CHATS, tools.Tool, lambda f: {**chat(), "tools": [{"type": "function", "function": FUNCTION, **f}]}),
    Place(
        CHATS,
        structured_types.NamedSchema,
        lambda f: {**chat(), "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, **f}}},
    ),
    Place(CHATS, structured_types.StructuredOutputs, lambda f: {**chat(), "structured_outputs": {"regex": "a", **f}}),
    Place(RESPONSES, responses.ResponseRequest, lambda f: {"input": "stone", **f}),
    Place(RESPONSES, responses.ResponseStreamOptions, lambda f: {**item(**ASK), "stream": True, "stream_options": f}),
    Place(RESPONSES, responses.ReasoningOptions, lambda f: {"input": "stone", "reasoning": f}),
    Place(RESPONSES, responses.TextOptions, lambda f: {"input": "stone", "text": f}),
    Place(RESPONSES, items.MessageItem, lambda f: item(**ASK, type="message", **f)),
    Place(
        RESPONSES,
        items.FunctionCallItem,
        lambda f: {"input": [{"type": "function_call", "call_id": "c", "name": "w", **f}, OUTPUT]},
    ),
    Place(RESPONSES, items.FunctionOutputItem, lambda f: {"input": [CALL_ITEM, {**OUTPUT, **f}, ASK]}),
    Place(
        RESPONSES,
        items.ReasoningItem,
        lambda f: item(type="reasoning", content=[{"type": "reasoning_text", "text": "hm"}], **f),
    ),
    Place(RESPONSES, items.InputText, lambda f: item(role="user", content=[{"type": "input_text", "text": "a", **f}])),
    Place(
        RESPONSES,
        items.OutputText,
        lambda f: item(role="assistant", content=[{"type": "output_text", "text": "a", **f}]),
    ),
    Place(MESSAGES, messages.MessagesRequest, lambda f: {**chat(), "max_tokens": 9, **f}),
    Place(MESSAGES, messages.Metadata, lambda f: {**chat(), "max_tokens": 9, "metadata": f}),
    Place(MESSAGES, messages.OutputConfig, lambda f: {**chat(), "max_tokens": 9, "output_config": f}),
    Place(
        MESSAGES,
        messages.ClientTool,
        lambda f: {**chat(), "max_tokens": 9, "tools": [{"name": "weather", "input_schema": SCHEMA, **f}]},
    ),
    Place(MESSAGES, blocks.TextBlock, lambda f: message("user", type="text", text="a", **f)),
    Place(
        MESSAGES,
        blocks.ThinkingBlock,
        lambda f: message("assistant", **{"type": "thinking", "thinking": "hm", "signature": "", **f}),
    ),
    Place(
        MESSAGES,
        blocks.ToolUseBlock,
        lambda f: {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "w", "input": {}, **f}]},
                {"role": "user", "content": [RESULT]},
            ],
            "max_tokens": 9,
        },
    ),
    Place(
        MESSAGES,
        blocks.ToolResultBlock,
        lambda f: {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "w", "input": {}}]},
                {"role": "user", "content": [{**RESULT, **f}]},
            ],
            "max_tokens": 9,
        },
    ),
    Place(GENERATE, tokens.TokenRequest, lambda f: {"token_ids": [1, 2], **f}),
    Place(GENERATE, tokens.TokenSampling, lambda f: {"token_ids": [1, 2], "sampling_params": f}),
    Place(GENERATE, StreamOptions, lambda f: {"token_ids": [1, 2], "stream": True, "stream_options": f}),
]
VALUES: Mapping[str, Any] = {
    "annotations": [{"type": "url_citation"}],
    "best_of": 1,
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "caller": {"type": "direct"},
    "citations": [],
    "created_by": "me",
    "description": "d",
    "disable_fallback": True,
    "eager_input_streaming": True,
    "id": "i",
    "index": 0,
    "is_error": True,
    "logprobs": [],
    "max_tool_calls": 3,
    "name": "n",
    "namespace": "n",
    "parsed": {"a": None},
    "parsed_arguments": {"a": None},
    "phase": "commentary",
    "prompt_cache_breakpoint": {"mode": "explicit"},
    "provider_specific_fields": {"a": 1},
    "signature": "s",
    "spaces_between_special_tokens": False,
    "status": "completed",
    "strict": True,
    "summary": [{"type": "summary_text", "text": "s"}],
}
"""Of fields that are neutral whatever they say."""
_VARYING = re.compile(r'"(?:\w*id|created|created_at|completed_at)":(?:"[^"]*"|\d+)')


def id_of(place: Place) -> str:
    """A test's name."""
    return f"{place.path}-{place.kind.__name__}"


def taken(kind: type[RequestFields]) -> Iterator[tuple[str, Any]]:
    """Each neutral field and label with each value that it is taken with."""
    for name, rule in kind.RULES.items():
        sent = kind.__struct_encode_fields__[kind.__struct_fields__.index(name)]
        match rule:
            case Neutral(values=()):
                yield sent, VALUES[sent]
            case Neutral():
                yield from ((sent, value) for value in rule.values)
            case Label():
                text = "l" * rule.max_length
                yield sent, {"k" * rule.max_key_length: text} if is_pairs(kind, name) else text
            case _:
                pass


def not_taken(kind: type[RequestFields]) -> Iterator[tuple[str, Any]]:
    """Each neutral field with a value that means something, and each label beyond its bounds."""
    for name, rule in kind.RULES.items():
        sent = kind.__struct_encode_fields__[kind.__struct_fields__.index(name)]
        match rule:
            case Neutral() if rule.values:
                yield sent, OTHERS[type(rule.values[0])]
                if isinstance(rule.values[0], bool):
                    yield from ((sent, not rule.values[0]), (sent, int(rule.values[0])))
                elif rule.values[0] == 1:
                    yield sent, True
            case Label() if not is_pairs(kind, name):
                yield sent, "l" * (rule.max_length + 1)
            case Label():
                yield sent, {"k" * (rule.max_key_length + 1): "v"}
                yield sent, {"k": "v" * (rule.max_length + 1)}
                yield sent, {str(index): "v" for index in range(rule.max_pairs + 1)}
            case _:
                pass


OTHERS: Mapping[type, Any] = {bool: "yes", int: 2, str: "other", list: ["other"], dict: {"type": "other"}}
"""Values that no rule takes, by the type of those it takes."""


def is_pairs(kind: type[RequestFields], name: str) -> bool:
    """Whether a label is pairs of texts."""
    return "dict" in str(get_type_hints(kind)[name])


@pytest.mark.parametrize("place", PLACES, ids=id_of)
def test_neutral_fields_and_labels_change_neither_what_is_asked_nor_the_answer(agent_with_defaults, call, place):
    agent = agent_with_defaults
    agent.loop.says = "A stone."

    def told(fields: Fields) -> tuple[GenerateRequest, str]:
        status, _, answer = call(agent.server, "POST", place.path, place.body(fields))
        assert status == 200, (fields, answer)
        (asked,) = agent.server.engine.submitted[-1:]
        return msgspec.structs.replace(asked, request_id=0), _VARYING.sub("", answer.decode())

    needed = {"include_usage": True} if place.kind is StreamOptions else {}
    without = told(needed)
    for name, value in taken(place.kind):
        assert told({**needed, name: value}) == without, (name, value)
        assert told({**needed, name: None}) == without, name


@pytest.mark.parametrize("place", PLACES, ids=id_of)
def test_what_is_not_neutral_and_labels_beyond_their_bounds_are_refused_by_name(agent, call, place):
    before = len(agent.server.engine.submitted)
    for name, value in not_taken(place.kind):
        status, _, answer = call(agent.server, "POST", place.path, place.body({name: value}))
        assert status == 400, (name, value, answer)
        assert name in json.loads(answer)["error"]["message"], (name, answer)
    assert len(agent.server.engine.submitted) == before


def test_fields_that_clients_send_to_every_route_are_taken_by_every_route(agent, call):
    sampling = {
        "top_k": -1,
        "best_of": 1,
        "use_beam_search": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "length_penalty": 1,
    }
    labels = {"client_metadata": {"originator": "codex"}, "service_tier": "auto", "kv_transfer_params": None}
    turn = {"add_generation_prompt": True, "continue_final_message": False}
    for path, body in (
        (COMPLETIONS, {"prompt": "stone", **sampling, **labels, **turn}),
        (CHATS, {**chat(), **sampling, **labels, **turn}),
        (RESPONSES, {"input": "stone", **sampling, **labels, **turn}),
        (MESSAGES, {**chat(), "max_tokens": 9, **sampling, **labels, **turn}),
        (GENERATE, {"token_ids": [1, 2], "sampling_params": sampling, **labels}),
    ):
        status, _, answer = call(agent.server, "POST", path, body)
        assert status == 200, (path, answer)
