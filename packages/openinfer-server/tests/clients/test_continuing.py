"""An assistant's turn at the end: gone on with, followed by a new one, or refused; by every API, streamed and whole."""

import json

import pytest

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = {"role": "user", "content": "stone"}
BEGUN = {"role": "assistant", "content": "It is "}
NEEDED = {CHATS: {}, RESPONSES: {"store": False}, MESSAGES: {"max_tokens": 50}}
PROMPT = "<|im_start|>user\nstone<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def ask(agent, call):
    """Posts turns: status, and the answer's content and reasoning, streamed and whole, or the error."""

    def post(path, turns, says="", stream=False, **fields):
        agent.loop.says = says
        body = {**NEEDED[path], "input" if path == RESPONSES else "messages": turns, "stream": stream, **fields}
        status, _, answer = call(agent.server, "POST", path, body)
        return status, answer.decode() if stream and status == 200 else json.loads(answer)

    return post


def content(path, answer):
    """Text of a whole answer."""
    if path == CHATS:
        return answer["choices"][0]["message"]["content"]
    items = answer["output"][-1]["content"] if path == RESPONSES else answer["content"]
    return items[-1]["text"]


@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES])
def test_last_turn_is_continued(agent, ask, path):
    status, answer = ask(path, [ASK, BEGUN], says="a stone.", continue_final_message=True)
    assert status == 200, answer
    assert agent.prompt == PROMPT + "It is "
    assert content(path, answer) == "a stone."
    status, events = ask(path, [ASK, BEGUN], says="a stone.", continue_final_message=True, stream=True)
    assert status == 200
    assert "It is" not in events
    assert "stone" in events


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_request_has_to_say_what_becomes_of_the_last_turn(agent, ask, path):
    before = len(agent.server.engine.submitted)
    status, answer = ask(path, [ASK, BEGUN])
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")
    assert len(agent.server.engine.submitted) == before
    assert ask(path, [ASK, BEGUN], continue_final_message=False)[0] == 200
    assert agent.prompt == PROMPT + "It is <|im_end|>\n<|im_start|>assistant\n"


def test_anthropics_messages_are_continued_unasked_and_counted_so(agent, ask, call):
    status, answer = ask(MESSAGES, [ASK, BEGUN], says="a stone.")
    assert (status, content(MESSAGES, answer)) == (200, "a stone.")
    assert agent.prompt == PROMPT + "It is "
    _, _, counted = call(agent.server, "POST", "/v1/messages/count_tokens", {"messages": [ASK, BEGUN]})
    assert json.loads(counted)["input_tokens"] == len(agent.server.engine.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("turns", "fields", "param"),
    [
        ([ASK, BEGUN], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ([ASK], {"continue_final_message": True}, "continue_final_message"),
        ([ASK, {"role": "assistant", "content": ""}], {"continue_final_message": True}, "messages"),
        (
            [ASK, {**BEGUN, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}],
            {"continue_final_message": True},
            "messages",
        ),
        (
            [ASK, BEGUN],
            {"continue_final_message": True, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ([ASK, BEGUN], {"continue_final_message": True, "guided_regex": "a"}, "guided_regex"),
        ([ASK], {"include_reasoning": False, "logprobs": True}, "include_reasoning"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(ask, turns, fields, param):
    status, answer = ask(CHATS, turns, **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    "begun",
    [
        {"role": "assistant", "content": "<think>Let"},
        {"role": "assistant", "content": None, "reasoning": "Let"},
        {"role": "assistant", "reasoning_content": "Let"},
    ],
)
def test_reasoning_that_was_begun_goes_on_as_reasoning(agent, ask, begun):
    says = " me see.</think>\n\nA stone."
    _, answer = ask(CHATS, [ASK, begun], says=says, continue_final_message=True)
    assert agent.prompt == PROMPT + "<think>Let"
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" me see.", "A stone.")
    assert message["reasoning_content"] == message["reasoning"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_thinking_block_that_was_begun_goes_on_as_thinking(agent, ask):
    block = {"type": "thinking", "thinking": "Let"}
    _, answer = ask(MESSAGES, [ASK, {"role": "assistant", "content": [block]}], says=" me.</think>A stone.")
    assert agent.prompt == PROMPT + "<think>Let"
    assert [part.get("thinking", part.get("text")) for part in answer["content"]] == [" me.", "A stone."]


def test_a_constraint_holds_after_reasoning_that_was_begun(agent, ask):
    begun = {"role": "assistant", "reasoning": "Let"}
    ask(CHATS, [ASK, begun], says="</think>{}", continue_final_message=True, response_format={"type": "json_object"})
    preamble = agent.sampling.grammar.preamble
    assert (preamble.opening, preamble.closing) == (None, "</think>")


def test_budget_counts_what_follows_and_none_closes_reasoning_that_was_begun(agent, ask):
    begun = {"role": "assistant", "reasoning": "Let"}
    _, answer = ask(CHATS, [ASK, begun], says="A stone.", continue_final_message=True, thinking_token_budget=0)
    assert agent.prompt == PROMPT + "<think>Let\n</think>\n\n"
    message = answer["choices"][0]["message"]
    assert (message["content"], message.get("reasoning")) == ("A stone.", None)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_shown_under_both_names_or_not_at_all(ask, stream):
    says = "<think>why</think>A stone."
    _, answer = ask(CHATS, [ASK], says=says, stream=stream)
    text = answer if stream else json.dumps(answer)
    assert text.count('"reasoning"') == text.count('"reasoning_content"') > 0
    _, answer = ask(CHATS, [ASK], says=says, stream=stream, include_reasoning=False)
    text = answer if stream else json.dumps(answer)
    assert "reasoning_content" not in text
    assert "why" not in text
    assert "stone" in text


def test_reasonings_of_one_turn_that_differ_are_refused(ask):
    turn = {"role": "assistant", "content": "a", "reasoning": "x", "reasoning_content": "y"}
    status, answer = ask(CHATS, [ASK, turn, ASK])
    assert (status, answer["error"]["param"]) == (400, "messages[1].reasoning")


def test_tokenize_renders_a_chat_as_for_its_answer(agent, ask, call):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    for turns, fields in (
        ([ASK], {"tools": [tool], "documents": [{"text": "a"}], "reasoning_effort": "none"}),
        ([ASK], {"add_generation_prompt": False, "chat_template_kwargs": {"thinking": False}}),
        ([ASK, BEGUN], {"continue_final_message": True}),
        ([ASK, BEGUN], {"continue_final_message": False}),
    ):
        ask(CHATS, turns, **fields)
        status, _, answer = call(agent.server, "POST", "/tokenize", {"messages": turns, **fields})
        assert status == 200, answer
        assert tuple(json.loads(answer)["tokens"]) == agent.server.engine.submitted[-1].prompt_token_ids
    for fields in ({"tools": [tool]}, {"add_generation_prompt": True}, {"documents": []}):
        status, _, answer = call(agent.server, "POST", "/tokenize", {"prompt": "a", **fields})
        assert (status, json.loads(answer)["error"]["param"]) == (400, *fields)


def test_parts_that_are_not_text_are_refused_as_such(agent, call):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for path, body in (
        (CHATS, {"messages": [{"role": "user", "content": [image]}]}),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}],
                    }
                ],
                "max_tokens": 1,
            },
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 1}),
    ):
        status, _, answer = call(agent.server, "POST", path, body)
        error = json.loads(answer)["error"]
        assert status == 400, answer
        assert "this server serves text only" in error["message"], error
