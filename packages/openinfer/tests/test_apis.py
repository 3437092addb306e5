"""Responses and messages end to end: the tiny model behind both official SDKs, an agent's loop through each."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from openinfer.models import find_family, find_model_dir
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_server import ServerOptions
from openinfer_server.testing import ThreadedServer

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Name of the city."}}}
SCHEMA = {**CITY, "required": ["city"]}
ABOUT = {"name": "get_weather", "description": "Get the current weather of a city."}
QUESTION = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    loop = build_loop(resolve(family.definition, model_dir, EngineOptions(num_blocks=256, max_num_seqs=8)))
    with ThreadedServer(loop, model_dir, ServerOptions(port=0, model_name=["tiny"])) as server:
        yield server.url


def test_responses_loop(url: str) -> None:
    tool: Any = {"type": "function", **ABOUT, "parameters": SCHEMA, "strict": False}
    ask: dict[str, Any] = {"model": "tiny", "tools": [tool], "temperature": 0, "max_output_tokens": 200}
    ask["reasoning"] = {"effort": "none"}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        first = client.responses.create(input=QUESTION, **ask)
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
        with client.responses.stream(input=QUESTION, **ask) as stream:
            (streamed,) = stream.get_final_response().output
        assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'}
        second = client.responses.create(input=[output], previous_response_id=first.id, **ask)
        assert "sunny" in second.output_text
        assert second.usage.input_tokens_details.cached_tokens > 0  # the first turn's KV is found again


def test_messages_loop(url: str) -> None:
    tool: Any = {**ABOUT, "input_schema": SCHEMA}
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [tool], "extra_body": {"temperature": 0}}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        first = client.messages.create(messages=turns, **ask)
        (call,) = first.content
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
        assert first.stop_reason == "tool_use"
        with client.messages.stream(messages=turns, **ask) as stream:
            (streamed,) = stream.get_final_message().content
        assert (streamed.name, streamed.input) == (call.name, call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny"}'}
        turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(messages=turns, **ask)
        assert "sunny" in second.content[0].text
        assert second.stop_reason == "end_turn"


def test_thinking_is_told_apart(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        message = client.messages.create(
            model="tiny",
            max_tokens=200,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"temperature": 0},
        )
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert "Paris" in message.content[1].text
