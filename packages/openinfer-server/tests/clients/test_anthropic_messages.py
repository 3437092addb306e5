"""`client.messages` and `client.models` of Anthropic's official SDK, every call of it that makes sense for text."""

import asyncio
import json

import anthropic
import pytest

HELLO = [{"role": "user", "content": "naïve 🙂?"}]
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def ask(agent):
    def create(**fields):
        return agent.anthropic.messages.create(**{"model": "parrot", "max_tokens": 200, "messages": HELLO, **fields})

    return create


def test_message_is_answered(agent, ask, says):
    says("A stone 🙂.")
    message = ask(system="Be brief.")
    assert agent.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nnaïve 🙂?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "parrot")
    assert [(block.type, block.text) for block in message.content] == [("text", "A stone 🙂.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    request = agent.server.engine.submitted[-1]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(request.prompt_token_ids)
    assert usage.cache_read_input_tokens == len(request.prompt_token_ids) // 2
    assert usage.output_tokens > 0


def test_text_has_no_citations_whole_or_streamed(agent, call, says):
    says("A stone.")
    body = {"model": "parrot", "max_tokens": 20, "messages": HELLO}
    _, _, whole = call(agent.server, "POST", "/v1/messages", body)
    assert json.loads(whole)["content"] == [{"type": "text", "text": "A stone."}]
    _, _, streamed = call(agent.server, "POST", "/v1/messages", {**body, "stream": True})
    assert b'"content_block":{"type":"text","text":""}' in streamed


def test_sampling_fields_reach_the_engine(agent, ask, says):
    says("a")
    ask(
        max_tokens=7,
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 9, "min_p": 0.125},
        stop_sequences=["x"],
    )
    sampling = agent.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.25, 3)
    assert (sampling.seed, sampling.min_p) == (9, 0.125)


def test_reasons_to_stop(agent, ask, says):
    says("one two three")
    message = ask(stop_sequences=["zero", " three"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
    assert message.content[0].text == "one two"
    assert ask(max_tokens=2).stop_reason == "max_tokens"
    endless = {"extra_body": {"ignore_eos": True}}
    assert ask(max_tokens=10**5, stream=False, timeout=20, **endless).stop_reason == "model_context_window_exceeded"
    says("")
    empty = ask()
    assert (empty.content, empty.stop_reason) == ([], "end_turn")


def test_stream_tells_what_the_whole_message_is(agent, ask, says):
    says("A stone that wanted to be a mountain 🙂🙃.")
    whole = ask()
    events = list(ask(stream=True))
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text
    assert events[0].message.content == []
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


def test_sdks_stream_helper_puts_the_message_together(agent, says):
    says("A stone.")
    with agent.anthropic.messages.stream(model="parrot", max_tokens=99, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "A stone."
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == ("A stone.", "end_turn")


def test_thinking_is_a_block_of_its_own(agent, ask, says):
    says("<think>\nhm, a stone\n</think>\n\nA mountain.")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = ask(thinking=thinking)
    assert agent.prompt.endswith("<|im_start|>assistant\n")
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[0].signature) == ("hm, a stone", "")
    assert message.content[1].text == "A mountain."
    with agent.anthropic.messages.stream(model="parrot", max_tokens=99, messages=HELLO, thinking=thinking) as stream:
        streamed = stream.get_final_message().content
    assert (streamed[0].thinking, streamed[1].text) == ("hm, a stone", "A mountain.")
    hidden = ask(thinking={**thinking, "display": "omitted"})
    assert (hidden.content[0].thinking, hidden.content[1].text) == ("", "A mountain.")
    adaptive = ask(thinking={"type": "adaptive"})
    assert adaptive.content == message.content


def test_thinking_ends_with_its_budget(agent, ask, says):
    says("<think>\n" + "stone " * 40 + "</think>A mountain.")
    message = ask(thinking={"type": "enabled", "budget_tokens": 9}, max_tokens=60)
    assert message.content[0].type == "thinking"
    assert len(message.content[0].thinking) < len("stone " * 9)
    assert len(agent.server.engine.submitted) >= 2
    assert agent.prompt.endswith("\n</think>\n\n")


def test_thinking_goes_back_into_the_prompt(agent, ask, says):
    says("a")
    answer = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "A."}]
    ask(messages=[*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}])
    assert "<|im_start|>assistant\n<think>hm</think>A.<|im_end|>\n<|im_start|>user\nAnd?" in agent.prompt


def test_tools_are_called(agent, ask, says):
    says(f"Let me see.\n{CALL}\n{CALL}")
    message = ask(tools=[TOOL])
    assert '"name": "weather", "description": "Tells the weather.", "parameters": {"type": "object"}' in agent.prompt
    text, first, second = message.content
    assert text.text == "Let me see."
    assert (first.type, first.name, first.input) == ("tool_use", "weather", {"city": "Paris"})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    with agent.anthropic.messages.stream(model="parrot", max_tokens=200, messages=HELLO, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in final.content] == [
        ("text", None),
        ("tool_use", {"city": "Paris"}),
        ("tool_use", {"city": "Paris"}),
    ]
    one = ask(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]


def test_input_that_is_no_json_is_not_lost(agent, ask, says):
    says('<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    message = ask(tools=[TOOL])
    assert message.content[-1].input == {"INVALID_JSON": '{"city": "Par'}


def test_tool_choice_none_offers_nothing(agent, ask, says):
    says(CALL)
    message = ask(tools=[TOOL], tool_choice={"type": "none"})
    assert "# Tools" not in agent.prompt
    assert message.content[0].type == "text"


def test_tool_results_become_turns(agent, ask, says):
    says("Sunny.")
    ask(
        tools=[TOOL],
        messages=[
            *HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "And Rome?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
    )
    assert (
        '<|im_start|>assistant\nLet me see.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nAnd Rome?<|im_end|>\n"
    ) in agent.prompt


def test_system_may_be_blocks_and_turns(agent, ask, says):
    says("a")
    system = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    ask(system=system, messages=[*HELLO, {"role": "system", "content": "Now."}, *HELLO])
    assert agent.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "<|im_start|>system\nNow.<|im_end|>\n" in agent.prompt


def test_tokens_are_counted_as_they_are_used(agent, ask, says):
    says("a")
    asked = {"system": "Be brief.", "tools": [TOOL]}
    counted = agent.anthropic.messages.count_tokens(model="parrot", messages=HELLO, **asked)
    usage = ask(**asked).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_fields_with_nothing_to_do_are_taken(ask, says):
    says("a")
    message = ask(
        metadata={"user_id": "u"},
        service_tier="standard_only",
        speed="standard",
        cache_control={"type": "ephemeral"},
        output_config={"effort": "high"},
        tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
    )
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "no text that could be continued"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "cannot",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "Expected `str`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]},
            "no tool_use before its result has the tool_use_id 't1'",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 5}, "stop_sequences has 5 strings"),
        ({"container": "c"}, "container is not supported"),
        ({"speed": "fast"}, "fast"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}, "the client runs"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "wether"}}, "wether"),
        ({"extra_body": {"stop": "x"}}, "stop_sequences"),
        ({"extra_body": {"colour": 1}}, "unknown field: colour"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(ask, fields, word):
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(**fields)
    assert error.value.body["type"] == "error"
    assert error.value.type == "invalid_request_error"
    assert word in error.value.body["error"]["message"]


def test_errors_have_the_sdks_classes(agent):
    with pytest.raises(anthropic.NotFoundError) as error:
        agent.anthropic.messages.create(model="eagle", max_tokens=1, messages=HELLO)
    assert error.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError) as error:
        agent.anthropic.post("/v1/messages/batches", cast_to=object, body={})
    assert error.value.type == "not_found_error"


def test_failure_in_a_stream_is_raised(start, info, agent_dir, tokenizer):
    from openinfer_server.testing import ParrotLoop

    loop = ParrotLoop(info, step_s=0.002)
    server = start(loop, folder=agent_dir)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        stream = client.messages.create(
            model="parrot", max_tokens=1500, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        loop.die()
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            list(stream)


def test_full_queue_is_429_in_anthropics_shape(start, info, agent_dir):
    import msgspec

    from openinfer_server.testing import ParrotLoop

    server = start(ParrotLoop(msgspec.structs.replace(info, max_waiting=0)), folder=agent_dir)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        with pytest.raises(anthropic.RateLimitError) as error:
            client.messages.create(model="parrot", max_tokens=5, messages=HELLO)
        assert error.value.type == "rate_limit_error"


def test_models_are_in_anthropics_shape(agent):
    page = agent.anthropic.models.list()
    assert [model.id for model in page] == ["parrot", "bird"]
    assert [model.id for model in agent.anthropic.models.list(limit=1)] == ["parrot", "bird"]
    assert [model.id for model in agent.anthropic.models.list(after_id="parrot")] == ["bird"]
    model = agent.anthropic.models.retrieve("parrot")
    assert (model.type, model.display_name, model.lifecycle) == ("model", "parrot", "active")
    assert model.created_at.year >= 2024
    assert model.max_input_tokens == 2048
    assert agent.anthropic.models.list(lifecycle=["retired"]).data == []
    with pytest.raises(anthropic.NotFoundError):
        agent.anthropic.models.retrieve("eagle")


def test_asynchronous_client_streams_many(agent, says):
    says("A stone.")

    async def ask_one(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(model="parrot", max_tokens=99, messages=HELLO) as stream:
            return await stream.get_final_text()

    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=agent.server.url, api_key="none", max_retries=0, timeout=20
        ) as client:
            return await asyncio.gather(*[ask_one(client) for _ in range(8)])

    assert asyncio.run(ask_all()) == ["A stone."] * 8


def test_beta_calls_are_the_same_messages(agent, says):
    says("A stone.")
    beta = agent.anthropic.beta.messages
    assert beta.create(model="parrot", max_tokens=99, messages=HELLO).content[0].text == "A stone."
    with beta.stream(model="parrot", max_tokens=99, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "A stone."
    assert beta.count_tokens(model="parrot", messages=HELLO).input_tokens > 0
    assert [model.id for model in agent.anthropic.beta.models.list()] == ["parrot", "bird"]


def test_sdks_tool_runner_goes_round(agent, says):
    asked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: which.
        """
        asked.append(city)
        says("Sunny.")
        return "sunny"

    says(CALL)
    runner = agent.anthropic.beta.messages.tool_runner(model="parrot", max_tokens=200, messages=HELLO, tools=[weather])
    last = runner.until_done()
    assert asked == ["Paris"]
    assert last.content[0].text == "Sunny."
    assert "<|im_start|>tool\nsunny<|im_end|>" in agent.prompt
