"""Tool calls and reasoning end to end: the tiny model, trained to call functions, behind the official SDK."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from openinfer.models import find_family, find_model_dir
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_server import ServerOptions
from openinfer_server.testing import ThreadedServer

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Name of the city."}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": {**CITY, "required": ["city"]}}}
    for name, text in (
        ("get_weather", "Get the current weather of a city."),
        ("get_time", "Get the current time in a city."),
    )
]
THOUGHT = "The function get_weather fits this request."


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    loop = build_loop(resolve(family.definition, model_dir, EngineOptions(num_blocks=256, max_num_seqs=8)))
    with (
        ThreadedServer(loop, model_dir, ServerOptions(port=0, model_name=["tiny"])) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as sdk,
    ):
        yield sdk


def ask(text: str, **further: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": turns, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **further}


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.parametrize(
    ("question", "calls"),
    [
        ("What is the weather in Paris?", [("get_weather", {"city": "Paris"})]),
        (
            "What is the weather in Paris and in Rome?",
            [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})],
        ),
    ],
)
def test_sdk_sees_the_models_calls_whole_and_streamed(client: openai.OpenAI, question: str, calls: list[Any]) -> None:
    answer = client.chat.completions.create(**ask(question))
    choice = answer.choices[0]
    assert calls_of(choice.message) == calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert getattr(choice.message, "reasoning_content", None) == THOUGHT
    assert answer.usage is not None
    with client.chat.completions.stream(**ask(question)) as stream:
        reasoning = [
            getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
            for event in stream
            if event.type == "chunk" and event.chunk.choices
        ]
        streamed = stream.get_final_completion().choices[0]
    assert calls_of(streamed.message) == calls
    assert (streamed.finish_reason, streamed.message.content or "") == ("tool_calls", "")
    assert "".join(reasoning) == THOUGHT


def test_a_conversation_goes_on_with_what_the_tool_returned(client: openai.OpenAI) -> None:
    asked = ask("What is the weather in Paris?")
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 21 degrees"}
    turns = [*asked["messages"], message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**{**asked, "messages": turns}).choices[0]
    assert answer.finish_reason == "stop"
    assert "sunny" in (answer.message.content or "")
    assert not answer.message.tool_calls


def test_one_call_only_where_calls_may_not_be_parallel(client: openai.OpenAI) -> None:
    asked = ask("What is the weather in Paris and in Rome?", parallel_tool_calls=False)
    assert calls_of(client.chat.completions.create(**asked).choices[0].message) == [("get_weather", {"city": "Paris"})]


def test_a_budget_of_reasoning_is_kept_and_the_model_still_calls(client: openai.OpenAI) -> None:
    asked = ask("What is the weather in Paris?", extra_body={"thinking_token_budget": 3})
    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert getattr(message, "reasoning_content", None) == "The"
    assert calls_of(message) == [("get_weather", {"city": "Paris"})]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


def test_without_tools_the_model_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ask("What is the capital of France?", tools=[]))
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
