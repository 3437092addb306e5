"""Tools and reasoning through OpenAI's official SDK: `client.responses` and `client.chat.completions`."""

import json

import openai
import pytest

FUNCTION = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL = {"type": "function", "strict": False, **FUNCTION}
CALLS = (
    "<think>\nhm\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
)
TURNS = [{"role": "user", "content": "Weather?"}]


def test_response_has_reasoning_text_and_calls(agent, says):
    says(CALLS)
    response = agent.openai.responses.create(model="parrot", input="Weather?", tools=[TOOL])
    reasoning, message, first, second = response.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], "hm")
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "weather", {"city": "Paris"})
    assert json.loads(second.arguments) == {"city": "東京"}
    assert first.call_id != second.call_id
    assert all(item.status == "completed" for item in response.output)
    assert response.status == "completed"
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.tools[0].name == "weather"
    assert '"name": "weather", "description": "Tells the weather."' in agent.prompt


def test_streamed_response_with_calls_is_the_whole_one(agent, says):
    says(CALLS)
    ask = {"model": "parrot", "input": "Weather?", "tools": [TOOL]}
    whole = agent.openai.responses.create(**ask)
    with agent.openai.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()

    def content(response):
        unequal = {"id", "call_id", "parsed", "parsed_arguments"}  # made anew, or the helper's own
        parts = [part for item in response.output for part in (item, *(getattr(item, "content", None) or ()))]
        return [{k: v for k, v in p.to_dict().items() if k not in {*unequal, "content"}} for p in parts]

    assert content(final) == content(whole)
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    deltas = dict.fromkeys(range(4), "")
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.output_index] += event.delta
    assert [deltas[0], deltas[1]] == ["hm", "Let me see."]
    assert [json.loads(deltas[2]), json.loads(deltas[3])] == [{"city": "Paris"}, {"city": "東京"}]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, json.loads(event.arguments)["city"]) for event in done] == [
        ("weather", "Paris"),
        ("weather", "東京"),
    ]


def test_agent_loop_goes_on_with_what_the_tool_returned(agent, says):
    says(CALLS)
    first = agent.openai.responses.create(model="parrot", input="Weather?", tools=[TOOL])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    says("Sunny.")
    second = agent.openai.responses.create(
        model="parrot", input=outputs, tools=[TOOL], previous_response_id=first.id, reasoning={"effort": "none"}
    )
    assert second.output_text == "Sunny."
    assert (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<think>hm</think>Let me see."
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "東京"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n"
    ) in agent.prompt
    says("Sunny.")
    agent.openai.responses.create(model="parrot", input=[*TURNS, *first.output, *outputs], tools=[TOOL])
    assert "Let me see.<tool_call>" in agent.prompt  # a client that keeps the conversation itself


def test_call_that_is_cut_short_is_incomplete(agent, says):
    says(CALLS)
    whole = agent.openai.responses.create(model="parrot", input="?", tools=[TOOL]).usage.output_tokens
    response = agent.openai.responses.create(model="parrot", input="?", tools=[TOOL], max_output_tokens=whole - 20)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["completed", "completed", "completed", "incomplete"]
    assert response.output[-1].arguments.startswith("{")


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ("none", False),
        ("auto", True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}, True),
    ],
)
def test_tool_choice_says_what_is_offered(agent, says, choice, offered):
    says("a")
    agent.openai.responses.create(model="parrot", input="?", tools=[TOOL], tool_choice=choice)
    assert ("# Tools" in agent.prompt) is offered


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "wether"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "name": "two words"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "async": True}]}, "tools[0].async"),
        ({"tools": [{**TOOL, "colour": 1}]}, "tools[0].colour"),
    ],
)
def test_what_cannot_be_guaranteed_of_tools_is_refused_by_name(agent, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        agent.openai.responses.create(**{"model": "parrot", "input": "?", "tools": [TOOL], **fields})
    assert error.value.param == param, error.value


def test_chats_stream_helper_puts_calls_together(agent, says):
    says(CALLS)
    tools = [{"type": "function", "function": FUNCTION}]
    whole = agent.openai.chat.completions.create(model="parrot", messages=TURNS, tools=tools).choices[0]
    with agent.openai.chat.completions.stream(model="parrot", messages=TURNS, tools=tools) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert whole.finish_reason == final.finish_reason == "tool_calls"
    assert whole.message.content == final.message.content == "Let me see."
    for choice in (whole, final):
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("weather", {"city": "Paris"}), ("weather", {"city": "東京"})]
    assert whole.message.reasoning_content == "hm"
