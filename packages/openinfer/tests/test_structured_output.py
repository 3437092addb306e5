"""Structured output end to end: the tiny model behind the official SDKs, whose answers always fit what was asked."""

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from openinfer.models import find_family, find_model_dir
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_server import ServerOptions
from openinfer_server.testing import ThreadedServer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "degrees": {"type": "integer", "minimum": -40, "maximum": 50},
        "sky": {"enum": ["clear", "cloudy"]},
    },
    "required": ["city", "degrees", "sky"],
    "additionalProperties": False,
}
STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["north", "south"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": STRICT, "strict": True}}
LOOK = {"type": "function", "function": {"name": "look"}}
QUESTION = "What is the weather in Paris?"
TURNS: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    loop = build_loop(resolve(family.definition, model_dir, EngineOptions(num_blocks=256, max_num_seqs=8)))
    with ThreadedServer(loop, model_dir, ServerOptions(port=0, model_name=["tiny"])) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


def ask(**further: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": TURNS, "max_tokens": 300, "seed": 3, **further}


def schema_format(**further: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True, **further}}


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("thinking", [False, True])
def test_chat_answers_follow_the_schema_after_any_reasoning(
    client: openai.OpenAI, temperature: float, thinking: bool
) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": thinking}, "thinking_token_budget": 40}
    asked = ask(response_format=schema_format(), temperature=temperature, n=3, extra_body=extra)
    answer = client.chat.completions.create(**asked)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_streamed_answer_is_the_whole_one(client: openai.OpenAI) -> None:
    asked = ask(response_format=schema_format(), temperature=0)
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole
    jsonschema.validate(json.loads(whole), SCHEMA)


def test_any_json_object(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_object"}
    answer = client.chat.completions.create(**ask(response_format=schema, temperature=0, max_tokens=400))
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[A-Z][a-z]{3,6}!"}, "[A-Z][a-z]{3,6}!"),
        ({"guided_choice": ["yes", "no", "maybe so"]}, "yes|no|maybe so"),
        ({"guided_grammar": 'start: "x" A\nA: /[0-9]{2}/'}, "x[0-9]{2}"),
        ({"guided_json": {"enum": [7, 8]}}, "[78]"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"structured_outputs": {"choice": ["é", "🙂"]}}, "é|🙂"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [bc]'}}, "a[bc]"),
        ({"structured_outputs": {"json": '{"const": "fixed"}'}}, '"fixed"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}}, "1"),
    ],
)
def test_completions_follow_what_is_asked(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["Once upon", "The"], max_tokens=60, n=2, temperature=2.0, seed=3, extra_body=extra
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text)


def test_log_probabilities_are_the_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Once upon", max_tokens=5, temperature=0, logprobs=2, extra_body={"guided_choice": ["zzz"]}
    )
    scores = answer.choices[0].logprobs
    assert "".join(scores.tokens) == "zzz"
    assert scores.token_logprobs[0] < min(scores.top_logprobs[0].values()) + 1e-6 or len(scores.top_logprobs[0]) == 3


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_come_and_follow_their_schema(client: openai.OpenAI, parallel: bool, stream: bool) -> None:
    asked = ask(tools=[FORECAST, LOOK], tool_choice="required", parallel_tool_calls=parallel, temperature=1.0)
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    calls = calls_of(choice.message)
    assert calls
    assert not choice.message.content
    if choice.finish_reason == "tool_calls":
        for name, arguments in calls:
            jsonschema.validate(arguments, STRICT if name == "forecast" else {"type": "object", "maxProperties": 0})
    assert parallel or len(calls) == 1


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "forecast"}}
    answer = client.chat.completions.create(**ask(tools=[FORECAST, LOOK], tool_choice=choice, temperature=0))
    calls = calls_of(answer.choices[0].message)
    assert {name for name, _ in calls} == {"forecast"}
    jsonschema.validate(calls[0][1], STRICT)


def test_strict_arguments_follow_their_schema_and_text_stays_free(client: openai.OpenAI) -> None:
    weather = {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    asked = ask(tools=[{"type": "function", "function": weather}], temperature=0)
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(**asked)
    ((name, arguments),) = calls_of(answer.choices[0].message)
    assert (name, arguments["city"] in {"Rome", "Oslo"}) == ("get_weather", True)
    asked["messages"] = [{"role": "user", "content": "Tell me a story."}]
    told = client.chat.completions.create(**asked)
    assert not told.choices[0].message.tool_calls
    assert told.choices[0].message.content


def test_a_format_leaves_calls_possible(client: openai.OpenAI) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "description": "Get the current weather of a city.", "parameters": city}
    asked = ask(tools=[{"type": "function", "function": weather}], response_format=schema_format(), temperature=0)
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    message = client.chat.completions.create(**asked).choices[0].message
    assert calls_of(message) or jsonschema.validate(json.loads(message.content), SCHEMA) is None


def test_responses_have_formats_and_required_calls(client: openai.OpenAI) -> None:
    formatted: Any = {"format": {"type": "json_schema", "name": "report", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(
        model="tiny", input=QUESTION, text=formatted, max_output_tokens=300, reasoning={"effort": "none"}
    )
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.text.format.type == "json_schema"
    tool: Any = {"type": "function", **FORECAST["function"]}  # type: ignore[dict-item]
    called = client.responses.create(
        model="tiny", input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=300
    )
    calls = [item for item in called.output if item.type == "function_call"]
    jsonschema.validate(json.loads(calls[0].arguments), STRICT)


def test_messages_have_formats_and_required_tools(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        told = client.messages.create(model="tiny", max_tokens=300, messages=TURNS, output_config=config)
        jsonschema.validate(json.loads(told.content[0].text), SCHEMA)
        tool: Any = {"name": "forecast", "input_schema": STRICT, "strict": True}
        called = client.messages.create(
            model="tiny", max_tokens=300, messages=TURNS, tools=[tool], tool_choice={"type": "any"}
        )
        jsonschema.validate(called.content[0].input, STRICT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"guided_regex": "(("}, "unclosed group"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"guided_regex": "a", "ignore_eos": True}, "no stop token"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_400_before_any_token(
    client: openai.OpenAI, extra: dict[str, Any], message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model="tiny", prompt="a", max_tokens=5, stream=stream, extra_body=extra)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text


def test_a_grammar_over_before_min_tokens_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="min_tokens is 9"):
        client.completions.create(
            model="tiny", prompt="a", max_tokens=20, extra_body={"guided_regex": "ab", "min_tokens": 9}
        )


@pytest.mark.parametrize("stream", [False, True])
def test_allowed_tokens_and_bad_words_hold_with_and_without_a_grammar(
    client: openai.OpenAI, url: str, *, stream: bool
) -> None:
    def token_id(text: str) -> int:
        answer = httpx.post(f"{url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        (found,) = answer["tokens"]
        return found

    letters = [token_id(text) for text in ("q", "x", "z")]
    extra = {"allowed_token_ids": letters, "bad_words": ["qx", "z"], "chat_template_kwargs": {"enable_thinking": False}}

    def texts(**further: Any) -> list[str]:
        asked = ask(n=3, max_tokens=12, temperature=2.0, extra_body={**extra, **further})
        if not stream:
            return [choice.message.content for choice in client.chat.completions.create(**asked).choices]
        said = ["", "", ""]
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
        return said

    for text in texts():
        assert re.fullmatch("x*q*", text)
        assert len(text) == 12
    for text in texts(structured_outputs={"regex": "[qx]{2}"}, allowed_token_ids=[*letters, token_id("<|im_end|>")]):
        assert text in {"qq", "xq", "xx"}


def test_prompt_logprobs_are_those_of_an_echo(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    asked = {"prompt": QUESTION, "max_tokens": 3, "echo": True, "logprobs": 1, "extra_body": extra}
    (choice,) = client.completions.create(model="tiny", **asked).choices
    (none, *shown), token_ids = choice.prompt_logprobs, choice.prompt_token_ids
    assert none is None
    echoed = choice.logprobs.token_logprobs[1 : len(token_ids)]
    assert [entry[str(each)]["logprob"] for entry, each in zip(shown, token_ids[1:], strict=True)] == echoed
    for entry, each in zip(shown, token_ids[1:], strict=True):
        ranks = {name: value["rank"] for name, value in entry.items()}
        assert set(ranks.values()) == {1, 2, ranks[str(each)]}
