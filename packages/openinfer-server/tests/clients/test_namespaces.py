"""Functions in namespaces, as Codex offers those of MCP servers: for the model one name, for the client two."""

import openai
import pytest

ASK = {"role": "user", "content": "How is the weather?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
LIST = {"type": "function", "name": "list", "description": "Lists cities.", "parameters": {"type": "object"}}
WEATHER = {"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
NAMESPACE = {"type": "namespace", "name": "mcp__sky", "description": "What the sky does.", "tools": [WEATHER]}
CALL = '<tool_call>{"name": "mcp__sky__weather", "arguments": {"city": "Paris"}}</tool_call>'


def ask(agent, **fields):
    return agent.openai.responses.create(**{"model": "parrot", "input": [ASK], "tools": [LIST, NAMESPACE], **fields})


def test_model_sees_one_function_with_both_names_and_the_namespaces_description(agent, says) -> None:
    says("Fine.")
    answer = ask(agent)
    assert '"name": "mcp__sky__weather", "description": "What the sky does.\\n\\nTells the weather."' in agent.prompt
    assert '"name": "list", "description": "Lists cities."' in agent.prompt
    assert answer.tools[1].to_dict() == NAMESPACE


def test_call_names_the_function_as_the_client_does_whole_and_streamed(agent, says) -> None:
    says(CALL)
    (call,) = ask(agent).output
    assert (call.namespace, call.name, call.arguments) == ("mcp__sky", "weather", '{"city": "Paris"}')
    with agent.openai.responses.stream(model="parrot", input=[ASK], tools=[LIST, NAMESPACE]) as stream:
        events = list(stream)
    told = [each.item for each in events if each.type.startswith("response.output_item.")]
    assert [(item.namespace, item.name) for item in told] == [("mcp__sky", "weather")] * 2
    assert [each.name for each in events if each.type == "response.function_call_arguments.done"] == ["weather"]


def test_function_outside_a_namespace_is_called_without_one(agent, says) -> None:
    says('<tool_call>{"name": "list", "arguments": {}}</tool_call>')
    (call,) = ask(agent).output
    assert call.name == "list"
    assert "namespace" not in call.to_dict()


@pytest.mark.parametrize("stored", [True, False])
def test_call_comes_back_as_the_model_wrote_it(agent, says, stored: bool) -> None:
    says(CALL)
    first = ask(agent)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"}
    says("It rains.")
    if stored:
        ask(agent, input=[{**result, "namespace": "mcp__sky", "name": "weather"}], previous_response_id=first.id)
    else:
        ask(agent, input=[ASK, first.output[0].model_dump(), result])
    assert '<tool_call>{"name": "mcp__sky__weather", "arguments": {"city": "Paris"}}</tool_call>' in agent.prompt


def test_choice_of_a_function_in_a_namespace_is_by_its_name_for_the_model(agent, says) -> None:
    says(CALL)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "mcp__sky__weather"}]}
    assert ask(agent, tool_choice=allowed).output[0].name == "weather"
    assert "Lists cities." not in agent.prompt


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**NAMESPACE, "tools": [WEATHER, {"type": "custom", "name": "free"}]}, "tools[1].tools[1].type"),
        ({**NAMESPACE, "tools": [{**WEATHER, "output_schema": {}}]}, "tools[1].tools[0].output_schema"),
        ({**NAMESPACE, "tools": [{**WEATHER, "name": "a b"}]}, "tools[1].tools[0].name"),
        ({**NAMESPACE, "tools": [WEATHER, WEATHER]}, "tools[1].tools[1].name"),
        ({**NAMESPACE, "tools": [NAMESPACE]}, "tools[1].tools[0].type"),
        ({**NAMESPACE, "colour": 1}, "tools[1].colour"),
        ({**NAMESPACE, "tools": [{**WEATHER, "name": f"f{index}"} for index in range(128)]}, "tools"),
    ],
)
def test_what_is_wrong_in_a_namespace_is_named_where_it_stands(agent, tool, param) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(agent, tools=[LIST, tool])
    assert error.value.param == param
