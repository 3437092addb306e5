"""What structured output asks of the engine: grammars, and what comes before the constrained part."""

import json
from types import SimpleNamespace

import pytest

from openinfer_core.sampling import GrammarKind, Preamble
from openinfer_server import ServerOptions
from openinfer_server.http.api_errors import ApiError
from openinfer_server.parsers import CallParser
from openinfer_server.parsers.deepseek_v3 import DeepSeekV3Parser
from openinfer_server.parsers.deepseek_v4 import DeepSeekV4Parser
from openinfer_server.parsers.hermes import HermesParser
from openinfer_server.parsers.kimi_k2 import KimiK2Parser
from openinfer_server.parsers.qwen3_coder import Qwen3CoderParser
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, CallWriter, LarkTexts
from openinfer_server.testing import ParrotLoop
from openinfer_server.tools.available import AvailableTools
from openinfer_server.tools.grammar import required_calls

THINKS = "{#- <tool_call>, </think> -#}{{ messages[-1].content }}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
CODER = "{#- <tool_call><function= -#}{{ messages[-1].content }}{{ tools }}"


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory, tokenizer):
    def make(template):
        folder = tmp_path_factory.mktemp("structured")
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture
def asked(info, make_folder, start, call):
    """The engine's request that a chat became, or its refusal."""

    def ask(said, template=THINKS + "{{ tools }}", options=None, **fields):
        server = start(ParrotLoop(info), options or ServerOptions(port=0), make_folder(template))
        body = {"messages": [{"role": "user", "content": said}], "max_tokens": 3, **fields}
        status, _, answer = call(server, "POST", "/v1/chat/completions", body)
        if status != 200:
            return json.loads(answer)["error"]
        return server.engine.submitted[-1].sampling.grammar

    return ask


@pytest.mark.parametrize(
    ("said", "preamble"),
    [
        ("a question", Preamble(opening="<think>", closing="</think>")),
        ("a question <think>\n", Preamble(closing="</think>")),
        ("a question <think>\n\n</think>\n\n", None),
    ],
)
def test_reasoning_is_not_constrained(asked, said, preamble):
    grammar = asked(said, THINKS, guided_regex="a+")
    assert (grammar.kind, grammar.text, grammar.preamble) == (GrammarKind.REGEX, "a+", preamble)


def test_reasoning_before_calls_that_are_constrained_has_none(asked):
    assert asked("?", tools=[TOOL], tool_choice="required").preamble.without == ("<tool_call>",)
    coder = asked("?", CODER.replace("#}", "</think> #}", 1), tools=[STRICT])
    assert coder.preamble.without == ("<tool_call>",)


def test_without_a_reasoning_parser_there_is_no_preamble(asked):
    options = ServerOptions(port=0, reasoning_parser="none")
    assert asked("a <think>", THINKS, options, guided_regex="a").preamble is None


def test_a_budget_that_is_used_up_leaves_the_grammar_without_its_preamble(info, make_folder, start, call):
    server = start(ParrotLoop(info), ServerOptions(port=0), make_folder(THINKS))
    turns = [{"role": "user", "content": "<think>" + "stone " * 20}]
    body = {"messages": turns, "max_tokens": 40, "thinking_token_budget": 5, "guided_regex": "a"}
    call(server, "POST", "/v1/chat/completions", body)
    first, second = [request.sampling.grammar for request in server.engine.submitted[-2:]]
    assert first.preamble is not None
    assert (second.text, second.preamble) == ("a", None)


@pytest.mark.parametrize(
    ("fields", "start_rule"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "start: calls"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "start: calls"),
        ({"tools": [STRICT]}, "start: FREE calls?"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "start: calls | answer"),
    ],
)
def test_tools_become_a_grammar_where_they_must(asked, fields, start_rule):
    grammar = asked("?", **fields)
    assert grammar.kind is GrammarKind.LARK
    assert grammar.text.split("\n")[0] == start_rule
    assert "%json {" in grammar.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": {"type": "array"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_json": {"type": "array"}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_structured_outputs_beside_a_call_that_must_come_are_refused_by_name(asked, choice, fields, param):
    assert asked("?", tools=[TOOL], tool_choice=choice, **fields)["param"] == param
    assert asked("?", **fields).text  # without tools it is taken


def test_a_format_of_text_goes_with_a_call_that_must_come(asked):
    fields = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
    assert asked("?", tools=[TOOL], **fields).text.startswith("start: calls\n")


@pytest.mark.parametrize("fields", [{"tools": [TOOL]}, {"tools": [STRICT], "tool_choice": "none"}, {}])
def test_free_answers_have_no_grammar(asked, fields):
    assert asked("?", **fields) is None


def test_one_call_only_if_calls_are_not_parallel(asked):
    several = asked("?", tools=[TOOL], tool_choice="required").text
    one = asked("?", tools=[TOOL], tool_choice="required", parallel_tool_calls=False).text
    assert ")*" in several.split("\n")[1]
    assert one.split("\n")[1] == "calls: call"


def test_formats_whose_calls_cannot_be_constrained_are_refused_by_name():
    plain = SimpleNamespace(plugin=SimpleNamespace(name="plain"), parser=CallParser)
    service = SimpleNamespace(parsers=SimpleNamespace(tools=plain))
    with pytest.raises(ApiError, match="tool parser plain cannot be constrained") as refusal:
        required_calls(service, AvailableTools(), "tool_choice")
    assert refusal.value.body.param == "tool_choice"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"city": {"type": "string", "pattern": "a+"}}}, "pattern of the string city"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf of its parameters as a whole"),
    ],
)
def test_strict_schemas_that_tags_cannot_be_held_to_are_refused_by_name(asked, parameters, message):
    function = {"name": "look", "parameters": {"type": "object", **parameters}, "strict": True}
    refusal = asked("?", CODER, tools=[{"type": "function", "function": function}])
    assert message in refusal["message"]
    lenient = {"type": "function", "function": {**function, "strict": False}}
    assert asked("?", CODER, tools=[lenient], tool_choice="required").kind is GrammarKind.LARK


@pytest.mark.parametrize("parser", [HermesParser, DeepSeekV3Parser, DeepSeekV4Parser, KimiK2Parser, Qwen3CoderParser])
def test_every_parser_of_ours_writes_calls(parser):
    assert issubclass(parser, CallWriter)


def test_markers_are_tokens_where_the_vocabulary_has_them():
    lark = LarkTexts({"<a>": 7, "<b>": None}.get, ["<a>", "<b>"])
    assert lark.text('x<a>"<b>') == '"x" <[7]> "\\"<b>"'
    assert lark.text("") == ""


@pytest.mark.parametrize("parser", [HermesParser, DeepSeekV3Parser, KimiK2Parser])
def test_calls_of_a_format_are_what_its_parser_reads(parser, read_calls):
    functions = [CallableFunction("look", {"const": {"a": [1]}}, strict=True), CallableFunction("go", {}, strict=False)]
    syntax = parser.call_syntax(functions, LarkTexts(lambda _: None, ()))
    written = [call.replace("/[0-9]{1,4}/", '"0"') for call in syntax.calls]
    values = ['{"a":[1]}', "{}"]
    texts = [_text_of(call, value) for call, value in zip(written, values, strict=True)]
    whole = _text_of(syntax.before) + _text_of(syntax.between).join(texts) + _text_of(syntax.after)
    assert read_calls(parser, whole) == [("look", {"a": [1]}), ("go", {})]
    assert any(whole.startswith(trigger) for trigger in syntax.triggers)


@pytest.fixture
def read_calls():
    from openinfer_server.parsers.contract import ParserContext
    from openinfer_server.parsers.deltas import CallArguments, CallStart, ContentDelta

    def read(parser, text):
        made = parser(ParserContext("", {"look": {}, "go": {}}, lambda: "id"))
        deltas = [*made.feed(text), *made.finish()]
        assert not any(isinstance(delta, ContentDelta) for delta in deltas)
        starts = [delta for delta in deltas if isinstance(delta, CallStart)]
        arguments = [
            "".join(delta.text for delta in deltas if isinstance(delta, CallArguments) and delta.index == start.index)
            for start in starts
        ]
        return [(start.name, json.loads(text)) for start, text in zip(starts, arguments, strict=True)]

    return read


def _text_of(lark, value=""):
    """The text that a rule of literals and one `%json` stands for."""
    text, decoder = "", json.JSONDecoder()
    while lark := lark.strip():
        if lark.startswith("%json "):
            _, end = decoder.raw_decode(lark[6:])
            text, lark = text + value, lark[6 + end :]
        else:
            piece, end = decoder.raw_decode(lark)
            text, lark = text + piece, lark[end:]
    return text
