"""Tool calls and reasoning in `/v1/chat/completions`, as the official SDK reads them, whole and streamed."""

import json

import msgspec
import openai
import pytest
from tokenizers import AddedToken

from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, ThreadedServer, wait_until


def spoken(*tokens: str) -> str:
    """The last turn, in which the template writes these tokens anew: in a client's text they would be text."""
    return "{{ messages[-1].content" + "".join(f".replace('{token}', '{token}')" for token in tokens) + " }}"


END = "<|im_end|>"
TEMPLATE = (
    "{#- tools: <tool_call>, reasoning: </think> -#}{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor -%}"
) + spoken(END, "<think>", "<tool_call>")
"""The parrot says its prompt: what the last turn of a test says, the model says, after the tools it was told of."""
SAID = TEMPLATE.replace("{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor -%}", "")
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Zürich 🙂"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nI look at the clock …\n</think>\n\n"
TOOLS = [
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "look"}},
]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory, tokenizer):
    def make(template: str):
        folder = tmp_path_factory.mktemp("chatty")
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture(scope="module", params=[1, 7], ids=["1-token", "7-tokens"])
def server(request, info, make_folder):
    """Tokens come singly, or several in one event as with speculative decoding."""
    parrot = ParrotLoop(info, tokens_per_event=request.param)
    with ThreadedServer(parrot, make_folder(SAID), ServerOptions(port=0)) as running:
        yield running


@pytest.fixture
def client(server, connect) -> openai.OpenAI:
    return connect(server)


def ask(text, **further):
    turns = [{"role": "user", "content": text + END}]
    return {"model": "parrot", "messages": turns, "max_tokens": 400, "tools": TOOLS, **further}


def streamed(client, asked):
    """The whole message, put together by the SDK's own accumulator, and the events."""
    with client.chat.completions.stream(**asked) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        return stream.get_final_completion().choices[0], chunks


def reasoning_of(chunks):
    """What the SDK's accumulator does not know."""
    return "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices)


def plain(message):
    """A message without ids, which are made anew for every answer."""
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.content or "", getattr(message, "reasoning_content", None), calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names"),
    [
        (CALL, None, None, ["now"]),
        (THOUGHT + CALL, None, "I look at the clock …", ["now"]),
        (THOUGHT + "I call.\n\n" + CALL + "\n" + SECOND, "I call.", "I look at the clock …", ["now", "look"]),
        (THOUGHT + "No call.", "No call.", "I look at the clock …", []),
        ("As <tool_call> says, no call.", "As <tool_call> says, no call.", None, []),
        ("", "", None, []),
    ],
)
def test_answer_is_told_apart_whole_and_streamed_alike(client, text, content, reasoning, names):
    whole = client.chat.completions.create(**ask(text)).choices[0]
    assert whole.message.content == content
    assert getattr(whole.message, "reasoning_content", None) == reasoning
    calls = whole.message.tool_calls or []
    assert [call.function.name for call in calls] == names
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    assert whole.finish_reason == ("tool_calls" if names else "stop")
    if "now" in names:
        assert json.loads(calls[0].function.arguments) == {"zone": "Zürich 🙂"}
    again, chunks = streamed(client, ask(text))
    assert reasoning_of(chunks) == (reasoning or "")
    assert plain(again.message)[::2] == plain(whole.message)[::2]
    assert again.message.content == content
    assert again.finish_reason == whole.finish_reason


@pytest.mark.parametrize("further", [{}, {"logprobs": True}, {"extra_body": {"return_token_ids": True}}, {"n": 2}])
@pytest.mark.parametrize(
    ("text", "content"),
    [(CALL, None), (THOUGHT + CALL, None), ("Yes." + CALL, "Yes."), (THOUGHT, ""), ("", ""), ("Yes.", "Yes.")],
)
def test_content_is_null_in_a_stream_where_it_is_in_a_whole_answer(client, text, content, further):
    whole = client.chat.completions.create(**ask(text, **further)).choices
    assert [choice.message.content for choice in whole] == [content] * len(whole)
    with client.chat.completions.stream(**ask(text, **further)) as stream:
        assert [choice.message.content for choice in stream.get_final_completion().choices] == [content] * len(whole)


def test_content_is_never_null_in_a_stream_without_tools(client):
    asked = ask("Yes.", stream=True)
    del asked["tools"]
    for further in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        first, *_ = client.chat.completions.create(**asked, **further)
        assert first.choices[0].delta.content == ""


def test_a_stream_has_an_event_for_every_token(client):
    asked = ask(THOUGHT + CALL, stream=True, stream_options={"include_usage": True})
    first, *events, last, usage = client.chat.completions.create(**asked)
    assert first.choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "tool_calls"
    assert len(events) == usage.usage.completion_tokens - 1  # the stop token shows nothing
    starts = [c for e in events for c in e.choices[0].delta.tool_calls or [] if c.id]
    assert [(c.index, c.type, c.function.name) for c in starts] == [(0, "function", "now")]


def test_reasoning_tokens_are_counted(client):
    usage = client.chat.completions.create(**ask(THOUGHT + "Yes.")).usage
    assert 5 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert client.chat.completions.create(**ask("Yes.")).usage.completion_tokens_details.reasoning_tokens == 0


def test_an_answer_that_was_cut_says_so_and_its_arguments_are_half(client):
    num_tokens = client.chat.completions.create(**ask(CALL)).usage.completion_tokens
    asked = ask(CALL, max_tokens=num_tokens * 6 // 10)
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length"
    arguments = choice.message.tool_calls[0].function.arguments
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    pieces = client.chat.completions.create(**asked, stream=True)
    said = [c.function.arguments for p in pieces for c in p.choices[0].delta.tool_calls or []]
    assert "".join(said) == arguments


def test_choices_have_calls_of_their_own(client):
    choices = client.chat.completions.create(**ask(CALL), n=3).choices
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3
    starts = [
        (c.index, call.id)
        for chunk in client.chat.completions.create(**ask(CALL), n=3, stream=True)
        for c in chunk.choices
        for call in c.delta.tool_calls or []
        if call.id
    ]
    assert sorted(index for index, _ in starts) == [0, 1, 2]
    assert len({call_id for _, call_id in starts}) == 3


def test_logprobs_are_those_of_all_tokens(client):
    asked = ask(THOUGHT + CALL, logprobs=True, top_logprobs=2)
    answer = client.chat.completions.create(**asked)
    scores = answer.choices[0].logprobs.content
    assert len(scores) == answer.usage.completion_tokens - 1
    pieces = client.chat.completions.create(**asked, stream=True)
    assert [s for p in pieces if p.choices[0].logprobs for s in p.choices[0].logprobs.content] == scores


def test_a_stop_string_ends_the_text_wherever_it_is(client):
    choice = client.chat.completions.create(**ask(THOUGHT + CALL), stop=["Zürich"]).choices[0]
    assert choice.message.tool_calls[0].function.arguments == '{"zone": "'
    assert choice.finish_reason == "tool_calls"


def test_without_parallel_calls_the_answer_ends_with_the_first(client, server):
    asked = ask("I call. " + CALL + SECOND + "And so on, and on.", parallel_tool_calls=False)
    answer = client.chat.completions.create(**asked)
    assert plain(answer.choices[0].message)[::2] == ("I call.", [("now", '{"zone": "Zürich 🙂"}')])
    assert answer.choices[0].finish_reason == "tool_calls"
    request = server.engine.submitted[-1]
    assert answer.usage.completion_tokens < len(request.prompt_token_ids) - 10
    wait_until(lambda: request.request_id in server.engine.aborted, "the engine is told to stop")
    again, _ = streamed(client, asked)
    assert plain(again.message) == plain(answer.choices[0].message)


CALLS_UNCLOSED = "<think>\nI look at the clock …\n" + CALL + "\n" + SECOND + "\n</think>\n\nDone."
BEGIN = "<tool_call>"


@pytest.fixture(scope="module", params=[1, 7], ids=["1-token", "7-tokens"])
def marked(request, info, make_folder, tokenizer):
    """A server whose vocabulary has the format's own tokens."""
    folder = make_folder(SAID)
    known = type(tokenizer).from_str(tokenizer.to_str())
    known.add_tokens([AddedToken(BEGIN, normalized=False)])
    known.save(str(folder / "tokenizer.json"))
    larger = msgspec.structs.replace(info, num_token_ids=known.get_vocab_size())
    parrot = ParrotLoop(larger, tokens_per_event=request.param)
    with ThreadedServer(parrot, folder, ServerOptions(port=0)) as running:
        yield running


@pytest.mark.parametrize("further", [{}, {"stop": ["<tool_box>", "call it"]}])
def test_calls_end_reasoning_that_is_not_closed(marked, connect, further):
    client = connect(marked)
    whole = client.chat.completions.create(**ask(CALLS_UNCLOSED, **further)).choices[0]
    calls = [("now", '{"zone": "Zürich 🙂"}'), ("look", "{}")]
    assert plain(whole.message) == ("Done.", "I look at the clock …", calls)
    assert whole.finish_reason == "tool_calls"
    again, chunks = streamed(client, ask(CALLS_UNCLOSED, **further))
    assert (plain(again.message)[::2], reasoning_of(chunks)) == (("Done.", calls), "I look at the clock …")


def test_a_call_in_the_reasoning_is_written_to_its_end_when_the_budget_is_used_up_in_it(marked, connect, tokenizer):
    budget = len(tokenizer.encode("<think>\nI look at the clock …\n").ids) + 9
    asked = ask(CALLS_UNCLOSED, extra_body={"thinking_token_budget": budget})
    message = connect(marked).chat.completions.create(**asked).choices[0].message
    assert plain(message)[1:] == ("I look at the clock …", [("now", '{"zone": "Zürich 🙂"}'), ("look", "{}")])


def test_calls_in_reasoning_are_of_functions_that_may_be_called(marked, connect):
    client = connect(marked)
    asked = ask(CALLS_UNCLOSED, tool_choice=named("now"))
    message = client.chat.completions.create(**asked).choices[0].message
    assert plain(message)[2][0] == ("now", '{"zone": "Zürich 🙂"}')
    message = client.chat.completions.create(**ask("<think>" + CALL, tool_choice=named("look"))).choices[0].message
    assert plain(message) == ("", CALL, [])


def test_without_parallel_calls_the_answer_ends_with_the_first_in_the_reasoning(marked, connect):
    answer = connect(marked).chat.completions.create(**ask(CALLS_UNCLOSED, parallel_tool_calls=False))
    assert plain(answer.choices[0].message)[::2] == ("", [("now", '{"zone": "Zürich 🙂"}')])
    thought = connect(marked).chat.completions.create(**ask("<think>\nI look at the clock …\n"))
    tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert tokens == thought.usage.completion_tokens - 1  # all but the stop token


def test_a_call_in_reasoning_is_one_by_its_own_token_only(client):
    message = client.chat.completions.create(**ask(CALLS_UNCLOSED)).choices[0].message
    assert plain(message) == ("Done.", f"I look at the clock …\n{CALL}\n{SECOND}", [])


@pytest.mark.parametrize("text", [f"<think>A {BEGIN} begins calls.", f"<think>{CALL[:-20]}", f"<think>{BEGIN}"])
def test_reasoning_about_calls_is_reasoning(marked, connect, text):
    answer = connect(marked).chat.completions.create(**ask(text))
    assert plain(answer.choices[0].message) == ("", text.removeprefix("<think>"), [])
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens - 1


@pytest.fixture(scope="module")
def telling(info, make_folder):
    """A server whose template tells the tools."""
    with ThreadedServer(ParrotLoop(info), make_folder(TEMPLATE), ServerOptions(port=0)) as running:
        yield running


def prompt_of(server, tokenizer):
    return tokenizer.decode(list(server.engine.submitted[-1].prompt_token_ids), skip_special_tokens=False)


def test_tools_reach_the_template_as_they_were_given(telling, connect, tokenizer):
    connect(telling).chat.completions.create(**ask("?", max_tokens=1))
    first, second, last = prompt_of(telling, tokenizer).split("\n")
    assert json.loads(first) == TOOLS[0]
    assert list(json.loads(first)["function"]) == ["name", "description", "parameters"]
    assert json.loads(second) == TOOLS[1]
    assert last == "?" + END


def test_allowed_tools_are_the_ones_that_are_told(telling, connect, tokenizer):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    connect(telling).chat.completions.create(**ask("?", max_tokens=1, tool_choice=choice))
    assert [json.loads(line) for line in prompt_of(telling, tokenizer).split("\n")[:-1]] == [TOOLS[1]]


@pytest.mark.parametrize("further", [{"tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "auto"}])
def test_tools_that_may_not_be_called_are_not_told_and_not_looked_for(telling, connect, tokenizer, further):
    answer = connect(telling).chat.completions.create(**ask(SECOND, **further))
    assert prompt_of(telling, tokenizer) == SECOND + END
    assert answer.choices[0].message.content == SECOND
    assert answer.choices[0].finish_reason == "stop"


def named(name, **further):
    return {"type": "function", "function": {"name": name, **further}}


@pytest.mark.parametrize(
    ("further", "param", "message"),
    [
        ({"guided_regex": "a"}, "guided_regex", "without tools"),
        ({"tool_choice": named("then")}, "tool_choice", "no tool is named 'then'"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice.custom",
            "only tools are functions",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "object function with its details"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
            "tool_choice",
            "allows no tool",
        ),
        ({"tool_choice": "maybe"}, "tool_choice", "Invalid"),
        ({"tools": [named("a"), named("a")]}, "tools[1].function.name", "two functions"),
        ({"tools": [named("a b")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [named("<x>")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].custom", "only tools are functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "type function and a function"),
        ({"tools": [named(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [named("a", parameters=[])]}, "tools[0].function.parameters", "Expected"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [], "parallel_tool_calls": True}, "parallel_tool_calls", "only for requests with tools"),
        ({"functions": [{"name": "a"}]}, "functions", "tools has taken its place"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "at least 0"),
    ],
)
def test_what_cannot_be_guaranteed_is_refused_by_name(telling, call, further, param, message):
    status, _, body = call(telling, "POST", "/v1/chat/completions", ask("?", **further))
    error = json.loads(body)["error"]
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_model_without_a_known_format_refuses_tools_and_budgets(shared, start, info, make_folder, call):
    cases = [
        (shared, ask("?"), "tools", "does not take tools"),
        (start(ParrotLoop(info), folder=make_folder("{{ tools }}")), ask("?"), "tools", "--tool-parser NAME"),
        (
            start(ParrotLoop(info), ServerOptions(port=0, reasoning_parser="none"), make_folder(SAID)),
            ask("?", thinking_token_budget=5),
            "thinking_token_budget",
            "--reasoning-parser NAME",
        ),
    ]
    for server, asked, param, message in cases:
        status, _, body = call(server, "POST", "/v1/chat/completions", asked)
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, param)
        assert message in error["message"]


def test_parsers_are_chosen_by_name(start, connect, info, make_folder):
    options = ServerOptions(port=0, tool_parser="qwen3-coder", reasoning_parser="none")
    client = connect(start(ParrotLoop(info), options, make_folder(SAID)))
    call = "<tool_call>\n<function=now>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>"
    message = client.chat.completions.create(**ask(THOUGHT + call)).choices[0].message
    assert message.content == THOUGHT.rstrip()
    assert json.loads(message.tool_calls[0].function.arguments) == {"zone": "UTC"}


def test_special_tokens_of_a_format_reach_its_parser_and_no_others_show(start, connect, info, tmp_path, tokenizer):
    markers = ("section_begin", "section_end")
    names = [f"<|tool_calls_{name}|>" for name in markers]
    names += [f"<|tool_call{name}|>" for name in ("_begin", "_argument_begin", "_end")]
    from_file = type(tokenizer).from_str(tokenizer.to_str())
    from_file.add_special_tokens(names)
    from_file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{#- tools " + names[0] + " -#}" + spoken(END, "<|im_start|>", *names)
    )
    described = info.__class__(
        **{f: getattr(info, f) for f in info.__struct_fields__} | {"num_token_ids": from_file.get_vocab_size()}
    )
    client = connect(start(ParrotLoop(described), folder=tmp_path))
    begin, end, call_begin, arguments, call_end = names
    text = f"Yes<|im_start|>.{begin}{call_begin}functions.now:0{arguments}{{}}{call_end}{end}"
    for stream in (False, True):
        asked = ask(text)
        choice = streamed(client, asked)[0] if stream else client.chat.completions.create(**asked).choices[0]
        assert choice.message.content == "Yes."
        assert [(c.id, c.function.name) for c in choice.message.tool_calls] == [("functions.now:0", "now")]
    without = client.chat.completions.create(**{**ask(text), "tools": []}).choices[0].message
    assert without.content == "Yes.functions.now:0{}"


FAULTY = """
OPENINFER_CONTRACT = 1
from openinfer_server.parsers.hermes import HermesParser

class Faulty(HermesParser):
    def __init__(self, context):
        if "refuse" in context.tools:
            raise ValueError("not this one")
        super().__init__(context)

    def feed(self, text):
        if "%" in text:
            raise ZeroDivisionError("a parser's own fault")
        if "exit" in self.context.tools:
            raise SystemExit(3)
        if "text" in self.context.tools:
            return [text]
        if "endless" in self.context.tools:
            return (text for _ in iter(int, 1))
        return super().feed(text)

    def finish(self):
        if "last" in self.context.tools:
            raise ZeroDivisionError("at the very end")
        return super().finish()
"""


def test_a_parser_that_raises_fails_its_request_alone_and_is_counted(
    tmp_path, monkeypatch, caplog, start, connect, call, info, make_folder
):
    (tmp_path / "faulty_parser.py").write_text(FAULTY)
    distribution = tmp_path / "faulty_parser-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-parser\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[openinfer.tool_parsers]\nfaulty = faulty_parser:Faulty\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = start(ParrotLoop(info), ServerOptions(port=0, tool_parser="faulty"), make_folder(SAID))
    client = connect(server)
    with pytest.raises(openai.InternalServerError, match="its log says why"):
        client.chat.completions.create(**ask("50 % of it"))
    with pytest.raises(openai.APIError, match="its log says why"):
        list(client.chat.completions.create(**ask("50 % of it"), stream=True))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**ask("?", tools=[named("refuse")]))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**ask("?", tools=[named("last")]))
    for fault in ("exit", "text", "endless"):
        with pytest.raises(openai.InternalServerError, match="its log says why"):
            client.chat.completions.create(**ask("?", tools=[named(fault)]))
    assert "the tool parser faulty_parser:Faulty failed on this answer" in caplog.text
    assert client.chat.completions.create(**ask(CALL)).choices[0].finish_reason == "tool_calls"
    metrics = call(server, "GET", "/metrics")[2].decode()
    assert 'openinfer_parser_faults_total{kind="tool"} 7' in metrics
    assert 'openinfer_parser_faults_total{kind="reasoning"} 0' in metrics


# the budget of reasoning: the parrot begins its prompt again when it is asked to go on


def test_reasoning_beyond_its_budget_is_closed_and_the_answer_goes_on(client, server, tokenizer):
    asked = ask(THOUGHT + "Yes.", max_tokens=300, extra_body={"thinking_token_budget": 9})
    answer = client.chat.completions.create(**asked)
    first, second = server.engine.submitted[-2:]
    assert first.request_id in server.engine.aborted
    told = tokenizer.decode(list(second.prompt_token_ids), skip_special_tokens=False)
    given = tokenizer.decode(list(first.prompt_token_ids), skip_special_tokens=False)
    said = tokenizer.decode(list(first.prompt_token_ids[:9]), skip_special_tokens=False)
    assert told == given + said + "\n</think>\n\n"
    message = answer.choices[0].message
    assert "<think>\n" + message.reasoning_content == said.rstrip()
    assert message.content == THOUGHT + "Yes."  # the parrot again, and now it is no reasoning
    assert second.sampling.max_tokens == 300 - 9
    assert answer.usage.prompt_tokens == len(first.prompt_token_ids)
    assert answer.usage.completion_tokens == 9 + len(first.prompt_token_ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 9
    again, chunks = streamed(client, asked)
    assert plain(again.message)[::2] == plain(message)[::2]
    assert reasoning_of(chunks) == message.reasoning_content


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_beyond_a_budget_are_those_that_usage_counts(client, server, stream):
    further = {"thinking_token_budget": 9, "return_token_ids": True}
    if stream:
        asked = ask(THOUGHT + "Yes.", max_tokens=300, extra_body=further)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        told = [each for chunk in chunks for choice in chunk.choices for each in getattr(choice, "token_ids", [])]
        usage = chunks[-1].usage
    else:
        asked = ask(THOUGHT + "Yes.", max_tokens=300, extra_body={**further, "prompt_logprobs": 0})
        answer = client.chat.completions.create(**asked)
        told, usage = answer.choices[0].token_ids, answer.usage
        assert len(answer.prompt_logprobs) == usage.prompt_tokens
    first, second = (list(request.prompt_token_ids) for request in server.engine.submitted[-2:])
    assert told == first[:9] + second[: len(told) - 9]
    assert len(told) == usage.completion_tokens


def test_reasoning_within_its_budget_is_left_alone(client, server):
    before = len(server.engine.submitted)
    asked = ask(THOUGHT + "Yes.", extra_body={"thinking_token_budget": 100})
    assert client.chat.completions.create(**asked).choices[0].message.content == "Yes."
    assert len(server.engine.submitted) == before + 1


def test_a_budget_that_leaves_no_room_ends_the_answer(client, server):
    before = len(server.engine.submitted)
    asked = ask(THOUGHT + "Yes.", max_tokens=9, extra_body={"thinking_token_budget": 9})
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    assert choice.message.reasoning_content
    assert len(server.engine.submitted) == before + 1


def test_no_budget_at_all_closes_reasoning_that_the_template_opened(client, server, tokenizer):
    asked = ask("Yes." + END + "<think>\n", extra_body={"thinking_token_budget": 0})
    asked["messages"][0]["content"] = "Yes." + END + "<think>\n"
    answer = client.chat.completions.create(**asked)
    assert prompt_of(server, tokenizer) == "Yes." + END + "<think>\n\n</think>\n\n"
    assert answer.choices[0].message.content == "Yes."
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_that_the_template_opened_is_known_from_the_prompt(client):
    asked = ask("?")
    asked["messages"][0]["content"] = "I wonder.</think>Yes." + END + "<think>"
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("I wonder.", "Yes.")


def test_a_client_that_leaves_after_the_budget_aborts_what_goes_on(info, start, connect, make_folder):
    parrot = ParrotLoop(info)
    server = start(parrot, folder=make_folder(SAID))
    asked = ask(THOUGHT + "Yes.", stream=True, extra_body={"thinking_token_budget": 4, "ignore_eos": True})
    stream = connect(server).chat.completions.create(**asked)
    wait_until(lambda: len(server.engine.submitted) == 2, "the answer goes on")
    parrot.hold()
    stream.close()
    last = server.engine.submitted[-1].request_id
    wait_until(lambda: last in server.engine.aborted, "what goes on is aborted")


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_is_switched_under_either_templates_name(start, connect, info, make_folder, tokenizer, name):
    server = start(
        ParrotLoop(info), folder=make_folder("{{ enable_thinking }} {{ thinking }} {{ messages[0].content }}")
    )
    further = {"tools": [], "max_tokens": 1, "extra_body": {"chat_template_kwargs": {name: False}}}
    connect(server).chat.completions.create(**ask("?", **further))
    assert prompt_of(server, tokenizer) == "False False ?" + END


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ call.function.arguments | tojson }}", '{"a": 1}'),
        ("{{ '<' + call.function.arguments + '>' }}", '<{"a":1}>'),
        ("{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}", "a=1"),
        ("{{ call.function.arguments if call.function.arguments is string else 'object' }}", "object"),
    ],
)
def test_arguments_of_earlier_calls_reach_a_template_as_it_takes_them(
    start, connect, info, make_folder, tokenizer, written, expected
):
    source = "{% for turn in messages %}{% for call in turn.tool_calls or [] %}" + written + "{% endfor %}{% endfor %}."
    server = start(ParrotLoop(info), folder=make_folder(source))
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    connect(server).chat.completions.create(model="parrot", messages=turns, max_tokens=1)
    assert prompt_of(server, tokenizer) == expected + "."
