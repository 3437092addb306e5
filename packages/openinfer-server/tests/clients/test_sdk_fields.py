"""Every field that the official SDKs can send is honoured, or has a rule (`test_field_rules.py`).

A field counts as honoured only if a probe shows what it does: `PROBES` holds, for each body, what to send and what must
be so with the field and not without it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from anthropic import types as anthropic_types
from anthropic.types import message_count_tokens_params, message_create_params, model_list_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import chat, completion_create_params, responses, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    input_item_list_params,
    input_token_count_params,
    response_create_params,
    response_input_param,
    response_input_text_param,
    response_retrieve_params,
)

from openinfer_core.request import GenerateRequest
from openinfer_core.sampling_parameters import PARAMETERS, SamplingParameter
from openinfer_server.anthropic import blocks
from openinfer_server.anthropic import types as messages
from openinfer_server.openai import types as api_types
from openinfer_server.openai.models import ModelQuery
from openinfer_server.request import structured_types
from openinfer_server.request.fields import RequestFields
from openinfer_server.request.generation_fields import StreamOptions
from openinfer_server.request.rules import Refused
from openinfer_server.responses import items
from openinfer_server.responses import types as response_types
from openinfer_server.tools import types as tool_types

BODIES: Mapping[str, tuple[type, tuple[Any, ...], dict[str, Any]]] = {
    "/v1/completions": (
        api_types.CompletionRequest,
        (completion_create_params.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsStreaming),
        {"prompt": "stone"},
    ),
    "/v1/chat/completions": (
        api_types.ChatRequest,
        (chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsStreaming),
        {"messages": [{"role": "user", "content": "stone"}]},
    ),
    "/v1/responses": (
        response_types.ResponseRequest,
        (response_create_params.ResponseCreateParamsBase, response_create_params.ResponseCreateParamsStreaming),
        {"input": "stone"},
    ),
    "/v1/messages": (
        messages.MessagesRequest,
        (
            message_create_params.MessageCreateParamsBase,
            message_create_params.MessageCreateParamsStreaming,
            beta_create_params.MessageCreateParamsBase,
        ),
        {"max_tokens": 100, "messages": [{"role": "user", "content": "stone"}]},
    ),
    "/v1/responses/input_tokens": (
        response_types.InputTokensRequest,
        (input_token_count_params.InputTokenCountParams,),
        {"input": "stone"},
    ),
    "/v1/messages/count_tokens": (
        messages.CountTokensRequest,
        (message_count_tokens_params.MessageCountTokensParams, beta_count_params.MessageCountTokensParams),
        {"messages": [{"role": "user", "content": "stone"}]},
    ),
}
"""Path -> our type, the SDK's, and a body that has what is needed."""

PARTS: list[tuple[Any, type]] = [
    (chat.ChatCompletionStreamOptionsParam, StreamOptions),
    (chat.ChatCompletionSystemMessageParam, api_types.SystemTurn),
    (chat.ChatCompletionDeveloperMessageParam, api_types.DeveloperTurn),
    (chat.ChatCompletionUserMessageParam, api_types.UserTurn),
    (chat.ChatCompletionAssistantMessageParam, api_types.AssistantTurn),
    (chat.ChatCompletionToolMessageParam, api_types.ToolTurn),
    (chat.ChatCompletionContentPartTextParam, api_types.TextPart),
    (chat.ChatCompletionMessageFunctionToolCallParam, api_types.ToolCall),
    (chat.ChatCompletionFunctionToolParam, tool_types.Tool),
    (shared_params.FunctionDefinition, tool_types.FunctionDefinition),
    (chat.ChatCompletionNamedToolChoiceParam, tool_types.ToolChoice),
    (chat.ChatCompletionAllowedToolChoiceParam, tool_types.ToolChoice),
    (response_create_params.StreamOptions, response_types.ResponseStreamOptions),
    (shared_params.Reasoning, response_types.ReasoningOptions),
    (responses.ResponseTextConfigParam, response_types.TextOptions),
    (responses.FunctionToolParam, response_types.FunctionTool),
    (responses.NamespaceToolParam, response_types.NamespaceTool),
    (responses.ToolChoiceFunctionParam, response_types.ToolChoice),
    (responses.ToolChoiceAllowedParam, response_types.ToolChoice),
    (responses.EasyInputMessageParam, items.MessageItem),
    (response_input_param.Message, items.MessageItem),
    (responses.ResponseOutputMessageParam, items.MessageItem),
    (responses.ResponseFunctionToolCallParam, items.FunctionCallItem),
    (response_input_param.FunctionCallOutput, items.FunctionOutputItem),
    (responses.ResponseReasoningItemParam, items.ReasoningItem),
    (response_input_text_param.ResponseInputTextParam, items.InputText),
    (responses.ResponseOutputTextParam, items.OutputText),
    (response_retrieve_params.ResponseRetrieveParamsBase, response_types.RetrieveQuery),
    (response_retrieve_params.ResponseRetrieveParamsStreaming, response_types.RetrieveQuery),
    (input_item_list_params.InputItemListParams, response_types.ItemsQuery),
    (anthropic_types.UserMessageParam, messages.MessageParam),
    (anthropic_types.AssistantMessageParam, messages.MessageParam),
    (anthropic_types.SystemMessageParam, messages.MessageParam),
    (anthropic_types.TextBlockParam, blocks.TextBlock),
    (anthropic_types.ThinkingBlockParam, blocks.ThinkingBlock),
    (anthropic_types.ToolUseBlockParam, blocks.ToolUseBlock),
    (anthropic_types.ToolResultBlockParam, blocks.ToolResultBlock),
    (anthropic_types.ToolParam, messages.ClientTool),
    (anthropic_types.ThinkingConfigEnabledParam, messages.ThinkingEnabled),
    (anthropic_types.ThinkingConfigAdaptiveParam, messages.ThinkingAdaptive),
    (anthropic_types.ThinkingConfigDisabledParam, messages.ThinkingDisabled),
    (anthropic_types.ToolChoiceAutoParam, messages.ToolChoiceAuto),
    (anthropic_types.ToolChoiceAnyParam, messages.ToolChoiceAny),
    (anthropic_types.ToolChoiceToolParam, messages.ToolChoiceTool),
    (anthropic_types.ToolChoiceNoneParam, messages.ToolChoiceNone),
    (anthropic_types.MetadataParam, messages.Metadata),
    (anthropic_types.OutputConfigParam, messages.OutputConfig),
    (anthropic_types.JSONOutputFormatParam, messages.JsonOutput),
    (shared_params.ResponseFormatText, structured_types.TextFormat),
    (shared_params.ResponseFormatJSONObject, structured_types.JsonObjectFormat),
    (shared_params.ResponseFormatJSONSchema, structured_types.JsonSchemaFormat),
    (shared_params.response_format_json_schema.JSONSchema, structured_types.NamedSchema),
    (responses.ResponseFormatTextJSONSchemaConfigParam, response_types.SchemaFormat),
    (model_list_params.ModelListParams, ModelQuery),
]
"""Smaller objects of the SDKs, and ours."""


IN_HEADERS = {"betas"}
"""Names that are sent as headers; `anthropic-beta` opens nothing here."""


def fields_of(theirs: Any) -> set[str]:
    """Names that a TypedDict of an SDK sends."""
    bases = (*getattr(theirs, "__mro__", ()), theirs)
    return {name for base in bases for name in getattr(base, "__annotations__", {})} - IN_HEADERS


def known(ours: type) -> set[str]:
    """Names that a type of ours takes."""
    return {*ours.__struct_encode_fields__, ours.__struct_config__.tag_field}


@pytest.mark.parametrize(("theirs", "ours"), PARTS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_part_is_known(theirs, ours):
    assert fields_of(theirs) - known(ours) == set()


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_a_body_is_known(path):
    ours, theirs, _ = BODIES[path]
    assert set().union(*map(fields_of, theirs)) - known(ours) == set()


def every_type() -> list[type[RequestFields]]:
    """All request objects."""
    found = [*RequestFields.__subclasses__()]
    for kind in found:
        found += kind.__subclasses__()
    return found


@pytest.mark.parametrize("kind", every_type(), ids=lambda kind: f"{kind.__module__.rsplit('.', 1)[-1]}.{kind.__name__}")
def test_rules_are_of_the_types_own_fields_and_say_why(kind):
    assert set(kind.RULES) <= set(kind.__struct_fields__)
    assert all(rule.why and rule.why[0].islower() and rule.why[-1] != "." for rule in kind.RULES.values())


@dataclass(frozen=True)
class Told:
    """What came of a body."""

    request: GenerateRequest | None
    prompt: str
    body: str
    num_choices: int

    @property
    def sampling(self):
        """What the engine was asked to sample."""
        return self.request.sampling

    @property
    def grammar(self):
        """Its grammar: kind and text."""
        grammar = self.sampling.grammar
        return None if grammar is None else (str(grammar.kind), grammar.text)


@dataclass(frozen=True)
class Probe:
    """A value for a field, and what must be so with it alone."""

    value: Any
    shows: Callable[[Told], bool]
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Fields that it needs; the comparison has them too."""
    says: str = "A stone."


FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL = {"type": "function", **FUNCTION}
CLIENT_TOOL = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
USER = {"role": "user"}


def number_probe(parameter: SamplingParameter) -> Probe:
    value = parameter.kind(parameter.low + 0.75 * (parameter.high - parameter.low))
    assert value != parameter.default
    return Probe(value, lambda told: getattr(told.sampling, parameter.name) == value)


SAMPLING = {
    **{each.name: number_probe(each) for each in PARAMETERS},
    "seed": Probe(7, lambda told: told.sampling.seed == 7),
    "stop": Probe([" sto"], lambda told: "A" in told.body and "ne." not in told.body),
    "logit_bias": Probe({"5": 2}, lambda told: told.sampling.logit_bias == {5: 2.0}),
    "min_tokens": Probe(2, lambda told: told.sampling.min_tokens == 2),
    "ignore_eos": Probe(True, lambda told: told.sampling.stop_token_ids == ()),
    "stop_token_ids": Probe([9], lambda told: 9 in told.sampling.stop_token_ids),
    "include_stop_str_in_output": Probe(True, lambda told: "A sto" in told.body, {"stop": [" sto"]}),
    "allowed_token_ids": Probe([9], lambda told: told.sampling.allowed_token_ids == (9,)),
    "bad_words": Probe(["stone"], lambda told: len(told.sampling.bad_words) == 2),
    "cache_salt": Probe("s", lambda told: told.request.cache_salt == "s"),
    "prompt_cache_key": Probe(
        "k", lambda told: (told.request.retain_s, len(told.request.cache_key or "")) == (600, 64)
    ),
    "prompt_cache_retention": Probe("24h", lambda told: told.request.retain_s == 86_400),
    "priority": Probe(3, lambda told: told.request.priority == 3),
    "deadline_s": Probe(90.5, lambda told: told.request.deadline_s == 90.5),
    "hints": Probe({"session": "a"}, lambda told: told.request.hints == {"session": "a"}),
    "structured_outputs": Probe({"regex": "a+"}, lambda told: told.grammar == ("regex", "a+")),
    "guided_json": Probe({"enum": [1]}, lambda told: told.grammar == ("json_schema", '{"enum":[1]}')),
    "guided_regex": Probe("a+", lambda told: told.grammar == ("regex", "a+")),
    "guided_choice": Probe(["a", "b"], lambda told: told.grammar == ("choice", '["a","b"]')),
    "guided_grammar": Probe('start: "a"', lambda told: told.grammar == ("lark", 'start: "a"')),
}
ANY_OBJECT = ("json_schema", '{"type":"object"}')
BEGUN = [{**USER, "content": "stone"}, {"role": "assistant", "content": "It is "}]
CHATS = {
    **SAMPLING,
    "add_generation_prompt": Probe(False, lambda told: told.prompt.endswith("stone<|im_end|>\n")),
}
OPENAI = {
    **SAMPLING,
    "model": Probe("bird", lambda told: '"model":"bird"' in told.body),
    "stream": Probe(True, lambda told: told.body.startswith("data: ")),
    "stream_options": Probe({"include_usage": True}, lambda told: '"total_tokens"' in told.body, {"stream": True}),
    "n": Probe(2, lambda told: told.num_choices == 2),
    "max_tokens": Probe(3, lambda told: told.sampling.max_tokens == 3),
    "response_format": Probe({"type": "json_object"}, lambda told: told.grammar == ANY_OBJECT),
    "truncate_prompt_tokens": Probe(1, lambda told: len(told.request.prompt_token_ids) == 1),
    "prompt_logprobs": Probe(1, lambda told: '"decoded_token"' in told.body),
    "return_token_ids": Probe(True, lambda told: '"token_ids"' in told.body),
}
PROBES: Mapping[str, Mapping[str, Probe]] = {
    "/v1/completions": {
        **OPENAI,
        "prompt": Probe("mountain", lambda told: told.prompt == "mountain"),
        "echo": Probe(True, lambda told: '"stoneA stone."' in told.body),
        "logprobs": Probe(2, lambda told: '"token_logprobs"' in told.body),
        "max_completion_tokens": Probe(3, lambda told: told.sampling.max_tokens == 3),
    },
    "/v1/chat/completions": {
        **OPENAI,
        **CHATS,
        "continue_final_message": Probe(
            True,
            lambda told: told.prompt.endswith("assistant\nIt is "),
            {"messages": BEGUN, "add_generation_prompt": False},
        ),
        "messages": Probe([{**USER, "content": "mountain"}], lambda told: "mountain" in told.prompt),
        "max_completion_tokens": Probe(3, lambda told: told.sampling.max_tokens == 3),
        "logprobs": Probe(True, lambda told: '"logprob":-1.5' in told.body),
        "top_logprobs": Probe(1, lambda told: '"logprob":-0.5' in told.body, {"logprobs": True}),
        "chat_template_kwargs": Probe({"enable_thinking": False}, lambda told: "</think>" in told.prompt),
        "documents": Probe([{"text": "Pebbles."}], lambda told: "document\nPebbles." in told.prompt),
        "include_reasoning": Probe(False, lambda told: "why" not in told.body, says="<think>why</think>A stone."),
        "tools": Probe([CHAT_TOOL], lambda told: '"tool_calls":[' in told.body, says=CALL),
        "tool_choice": Probe("none", lambda told: "# Tools" not in told.prompt, {"tools": [CHAT_TOOL]}),
        "parallel_tool_calls": Probe(
            False, lambda told: told.body.count('"weather"') == 1, {"tools": [CHAT_TOOL]}, says=CALL + CALL
        ),
        "reasoning_effort": Probe("minimal", lambda told: "</think>" in told.prompt),
        "thinking_token_budget": Probe(
            4, lambda told: told.prompt.endswith("</think>\n\n"), says="<think>" + "stone " * 20
        ),
    },
    "/v1/responses": {
        **CHATS,
        "continue_final_message": Probe(
            True,
            lambda told: told.prompt.endswith("assistant\nIt is "),
            {"input": BEGUN, "add_generation_prompt": False},
        ),
        "model": OPENAI["model"],
        "input": Probe("mountain", lambda told: "mountain" in told.prompt),
        "instructions": Probe("Be brief.", lambda told: "system\nBe brief." in told.prompt),
        "max_output_tokens": Probe(3, lambda told: told.sampling.max_tokens == 3),
        "metadata": Probe({"a": "b"}, lambda told: '"metadata":{"a":"b"}' in told.body),
        "stream": Probe(True, lambda told: told.body.startswith("event: response.created")),
        "background": Probe(True, lambda told: '"status":"queued"' in told.body),
        "store": Probe(False, lambda told: '"store":false' in told.body),
        "include": Probe(["message.output_text.logprobs"], lambda told: '"logprob":-1.5' in told.body),
        "top_logprobs": Probe(
            1, lambda told: '"logprob":-0.5' in told.body, {"include": ["message.output_text.logprobs"]}
        ),
        "reasoning": Probe({"effort": "none"}, lambda told: "</think>" in told.prompt),
        "thinking_token_budget": Probe(
            4, lambda told: told.prompt.endswith("</think>\n\n"), says="<think>" + "stone " * 20
        ),
        "text": Probe({"format": {"type": "json_object"}}, lambda told: told.grammar == ANY_OBJECT),
        "tools": Probe([RESPONSE_TOOL], lambda told: '"function_call"' in told.body, says=CALL),
        "tool_choice": Probe("none", lambda told: "# Tools" not in told.prompt, {"tools": [RESPONSE_TOOL]}),
        "parallel_tool_calls": Probe(
            False, lambda told: told.body.count('"call_id"') == 1, {"tools": [RESPONSE_TOOL]}, says=CALL + CALL
        ),
    },
    "/v1/messages": {
        "cache_control": Probe(
            {"type": "ephemeral", "ttl": "1h"},
            lambda told: [prefix.retain_s for prefix in told.request.retained_prefixes] == [3600],
        ),
        **{name: probe for name, probe in CHATS.items() if name != "stop"},
        "continue_final_message": Probe(False, lambda told: "It is <|im_end|>" in told.prompt, {"messages": BEGUN}),
        "include_stop_str_in_output": Probe(True, lambda told: "A sto" in told.body, {"stop_sequences": [" sto"]}),
        "model": OPENAI["model"],
        "messages": Probe([{**USER, "content": "mountain"}], lambda told: "mountain" in told.prompt),
        "max_tokens": Probe(3, lambda told: told.sampling.max_tokens == 3),
        "system": Probe("Be brief.", lambda told: "system\nBe brief." in told.prompt),
        "stop_sequences": Probe([" sto"], lambda told: '"stop_sequence":" sto"' in told.body),
        "stream": Probe(True, lambda told: told.body.startswith("event: message_start")),
        "thinking": Probe({"type": "adaptive"}, lambda told: "</think>" not in told.prompt),
        "output_config": Probe(
            {"format": {"type": "json_schema", "schema": {"type": "object"}}}, lambda told: told.grammar == ANY_OBJECT
        ),
        "tools": Probe([CLIENT_TOOL], lambda told: '"tool_use"' in told.body, says=CALL),
        "tool_choice": Probe({"type": "none"}, lambda told: "# Tools" not in told.prompt, {"tools": [CLIENT_TOOL]}),
    },
}
NONE_HONOURED = {"/v1/responses": {"stream_options"}, "/v1/messages": {"metadata"}}
"""Objects no field of which is honoured; `test_field_rules.py` shows what is taken."""
ELSEWHERE = {"previous_response_id", "kv_transfer_params", "prediction"}
"""`test_openai_responses.py`, `request/test_kv_transfer.py` and `openai/test_prediction.py` show what they do."""


@pytest.fixture
def tell(agent, says, call):
    """Posts a body and tells what came of it."""

    def post(path: str, body: dict[str, Any], text: str = "A stone.") -> tuple[int, Told]:
        says(text)
        before = len(agent.server.engine.submitted)
        status, _, answer = call(agent.server, "POST", path, body)
        asked = agent.server.engine.submitted[before:]
        prompt = agent.prompt if asked else ""
        return status, Told(asked[0] if asked else None, prompt, answer.decode(), len(asked))

    return post


def probes():
    for path, table in PROBES.items():
        for name, probe in table.items():
            yield pytest.param(path, name, probe, id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "name", "probe"), list(probes()))
def test_honoured_field_does_what_it_says_and_nothing_else_does(tell, path, name, probe):
    base = {**BODIES[path][2], **probe.beside}
    status, told = tell(path, {**base, name: probe.value}, probe.says)
    assert status == 200, told.body
    assert probe.shows(told), told
    status, told = tell(path, base, probe.says)
    assert status == 200, told.body
    assert not probe.shows(told), told


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_field_of_ours_is_probed_or_has_a_rule(path):
    kind = BODIES[path][0]
    honoured = set(kind.__struct_fields__) - set(kind.RULES) - NONE_HONOURED.get(path, set()) - ELSEWHERE
    assert honoured == set(PROBES[path])


def refusals():
    for path, (kind, _, needed) in BODIES.items():
        for name in (name for name, rule in kind.RULES.items() if isinstance(rule, Refused)):
            yield pytest.param(path, needed, name, id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "needed", "name"), list(refusals()))
def test_refused_field_is_named_with_what_to_do(tell, path, needed, name):
    value = "x" if name == "stop" else {"x": 1}
    status, told = tell(path, {**needed, name: value})
    assert status == 400
    message = json.loads(told.body)["error"]["message"]
    assert message.startswith(f"{name} is not supported: ")
    assert told.request is None
