"""Tool and reasoning parsers: what each format becomes, whole, damaged and cut short."""

import itertools
import json

import pytest

from openinfer_core.plugins import find_plugin
from openinfer_server.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Markers,
    ModelTraits,
    OutputParser,
    ParserContext,
    ParserFault,
    ReasoningDelta,
    choose_parsers,
    merge,
)
from openinfer_server.parsers.choose import REASONING_PARSERS, TOOL_PARSERS
from openinfer_server.parsers.hermes import HermesParser
from openinfer_server.parsers.syntax.typed_values import ANYTHING, as_json, types_of
from openinfer_server.parsers.thinking import KimiThinking, Qwen3Thinking
from openinfer_server.testing.parser_cuts import check_subject, subjects
from openinfer_server.testing.parser_texts import REASONING_PROMPTS, REASONING_TEXTS, TOOL_TEXTS, TOOLS
from openinfer_server.testing.parsers import answer_maker, check_reasoning_parser, check_tool_parser, feed


def context(prompt="", tools=TOOLS) -> ParserContext:
    numbers = itertools.count()
    return ParserContext(prompt, tools, lambda: f"call_{next(numbers)}")


def tool_parser(name):
    return find_plugin(TOOL_PARSERS, name).load()


def said(parser, *pieces):
    """Content, reasoning, and calls as (id, name, arguments)."""
    deltas = merge(feed(parser, pieces))
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    arguments = {d.index: d.text for d in deltas if isinstance(d, CallArguments)}
    calls = [(d.call_id, d.name, arguments.get(d.index, "")) for d in deltas if isinstance(d, CallStart)]
    assert len(calls) == sum(isinstance(d, CallEnd) for d in deltas)
    return content, reasoning, calls


@pytest.mark.parametrize("name", TOOL_TEXTS)
def test_tool_parser_conforms(name):
    assert check_tool_parser(tool_parser(name), TOOL_TEXTS[name], tools=TOOLS, cuts_per_text=4) > 0


@pytest.mark.parametrize("name", REASONING_TEXTS)
def test_reasoning_parser_conforms(name):
    parser = find_plugin(REASONING_PARSERS, name).load()
    assert check_reasoning_parser(parser, REASONING_TEXTS[name], prompts=REASONING_PROMPTS, cuts_per_text=4) > 0


@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.name)
def test_every_way_of_cutting_says_the_same(subject):
    assert check_subject(subject, num_texts=25) > 100


@pytest.mark.parametrize(
    ("name", "place", "expected"),
    [
        ("hermes", 0, ["get_weather"]),
        ("hermes", 1, ["now", "write_file"]),
        ("hermes", 2, ["get_weather"]),
        ("hermes", 3, []),
        ("qwen3-coder", 0, ["get_weather"]),
        ("qwen3-coder", 1, ["write_file", "now"]),
        ("qwen3-coder", 2, ["get_weather"]),
        ("qwen3-coder", 3, []),
        ("deepseek-v3", 0, ["get_weather", "now"]),
        ("deepseek-v3", 2, []),
        ("deepseek-v4", 0, ["get_weather", "now"]),
        ("deepseek-v4", 1, ["write_file"]),
        ("deepseek-v4", 2, []),
        ("kimi-k2", 0, ["get_weather", "now"]),
        ("kimi-k2", 2, []),
    ],
)
def test_calls_of_a_well_formed_answer_have_json_arguments(name, place, expected):
    text = TOOL_TEXTS[name][place]
    content, _, calls = said(tool_parser(name)(context()), text)
    assert [call[1] for call in calls] == expected
    assert all(isinstance(json.loads(call[2]), dict) for call in calls)
    if not expected:
        assert content == text


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4", "hermes", "kimi-k2", "qwen3-coder"])
def test_the_same_call_is_the_same_in_every_format(name):
    _, _, calls = said(tool_parser(name)(context()), TOOL_TEXTS[name][0])
    arguments = json.loads(calls[0][2])
    assert arguments["city"].startswith("Zürich")
    assert arguments["days"] == 3


def test_hermes_arguments_are_handed_on_as_they_come_and_as_they_stand():
    parser = HermesParser(context())
    assert parser.feed('<tool_call>\n{"name": "now", "arg') == []
    assert parser.feed('uments": {"a":  [1,') == [CallStart(0, "call_0", "now"), CallArguments(0, '{"a":  [1,')]
    assert parser.feed(' "}]"') == [CallArguments(0, ' "}]"')]
    assert parser.feed("]}") == [CallArguments(0, "]}")]
    assert parser.feed("}\n</tool_call>") == [CallEnd(0)]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "now"}</tool_call>', "{}", ""),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "{}", ""),
        ('<tool_call>{"name": "now", "parameters": {"a": 1}}</tool_call>', '{"a": 1}', ""),
        ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}', ""),
        ('<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>', '{"a": 1}', ""),
        ('<tool_call>{"name": "now", "arguments": {"a": {"b": 1}</tool_call>', '{"a": {"b": 1}', ""),
        ('<tool_call>{"name": "now", "arguments": {"a": 1}}', '{"a": 1}', ""),
        ('<tool_call>{"name": "now", "arguments": {"a": "tru', '{"a": "tru', ""),
        (
            '<tool_call>{"name": "now", "arguments": {"a": 1}, "id": 7}</tool_call>',
            '{"a": 1}',
            ', "id": 7}</tool_call>',
        ),
        ('<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>', '{"a": "x\ny"}', ""),
    ],
)
def test_hermes_what_models_get_wrong_is_a_call_still(text, arguments, content):
    assert said(HermesParser(context()), text) == (content, "", [("call_0", "now", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "Say <tool_call> to call.",
        '<tool_call>["now"]</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": true}</tool_call>',
        '<tool_call>{"name": "' + 300 * "x" + '", "arguments": {}}</tool_call>',
        "<tool_call>" + 300 * " " + '{"name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "no',
        "Half a tag: <tool_c",
        "  white space around is kept \n\n",
    ],
)
def test_hermes_what_is_no_call_is_content_to_the_last_character(text):
    assert said(HermesParser(context()), text) == (text, "", [])


def test_hermes_a_call_after_one_that_was_none_is_found():
    text = 'As <tool_call> says: <tool_call>{"name": <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    content, _, calls = said(HermesParser(context()), text)
    assert content == 'As <tool_call> says: <tool_call>{"name":'
    assert [call[1] for call in calls] == ["now"]


def test_white_space_beside_calls_is_markup_and_elsewhere_is_not():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    content, _, calls = said(HermesParser(context()), f"\n One \n\n{call}\n{call}\n\n Two \n")
    assert content == "\n OneTwo \n"
    assert len(calls) == 2


def test_qwen3_coder_values_have_the_type_their_schema_says():
    content, _, calls = said(tool_parser("qwen3-coder")(context()), TOOL_TEXTS["qwen3-coder"][0])
    assert content == ""
    assert json.loads(calls[0][2]) == {"city": "Zürich", "days": 3, "metric": True, "note": None}


def test_qwen3_coder_strings_are_handed_on_as_they_come():
    parser = tool_parser("qwen3-coder")(context())
    parser.feed("<tool_call>\n<function=write_file>\n<parameter=content>\n")
    assert parser.feed('one "') == [CallArguments(0, 'one \\"')]
    assert parser.feed("line\n") == [CallArguments(0, "line")]  # the newline may be the tag's
    assert parser.feed("two") == [CallArguments(0, "\\ntwo")]
    assert merge(parser.feed("\n</parameter>\n</function>\n</tool_call>")) == [CallArguments(0, '"}'), CallEnd(0)]


def test_qwen3_coder_newlines_of_a_value_are_kept_but_for_the_tags_own():
    _, _, calls = said(tool_parser("qwen3-coder")(context()), TOOL_TEXTS["qwen3-coder"][1])
    written = json.loads(calls[0][2])
    assert written["content"] == 'if a < b:\n    print("\\n🙂")\n'
    assert written["options"] == {"modes": [1, "x"]}


@pytest.mark.parametrize(
    "end", ["", "\n</param", "\n</parameter>\n", "\n</parameter>\n</func", "\n</parameter>\n<param"]
)
def test_tagged_arguments_that_were_cut_are_never_whole_json(end):
    text = "<tool_call>\n<function=write_file>\n<parameter=content>\nhalf a fi" + end
    content, _, calls = said(tool_parser("qwen3-coder")(context()), text)
    assert content == ""
    assert "half a fi" in calls[0][2]
    with pytest.raises(json.JSONDecodeError):
        json.loads(calls[0][2])


def test_qwen3_coder_what_stands_between_parameters_ends_the_call_and_is_content():
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\nand so on\n</function>"
    content, _, calls = said(tool_parser("qwen3-coder")(context()), text)
    assert json.loads(calls[0][2]) == {"city": "Rome"}
    assert content == "and so on\n</function>"


def test_qwen3_coder_a_function_without_its_wrapper_must_be_on_offer():
    text = "<function=delete_all>\n</function>"
    assert said(tool_parser("qwen3-coder")(context()), text) == (text, "", [])


def test_a_value_longer_than_may_be_held_is_a_string(monkeypatch):
    monkeypatch.setattr("openinfer_server.parsers.tagged_arguments.MAX_HELD", 10)
    parser = tool_parser("qwen3-coder")(context())
    text = '<tool_call>\n<function=write_file>\n<parameter=options>\n{"modes": ["a", "b"]}\n</parameter>\n</function>'
    _, _, calls = said(parser, *text)
    assert json.loads(calls[0][2]) == {"options": '{"modes": ["a", "b"]}'}


def test_deepseek_v4_values_are_text_or_json_as_marked():
    _, _, calls = said(tool_parser("deepseek-v4")(context()), TOOL_TEXTS["deepseek-v4"][0])
    assert [json.loads(call[2]) for call in calls] == [{"city": 'Zürich "old"\ntown', "days": 3}, {}]
    text = TOOL_TEXTS["deepseek-v4"][0].replace('"false">3', '"false">three')
    assert json.loads(said(tool_parser("deepseek-v4")(context()), text)[2][0][2])["days"] == "three"


def test_kimi_ids_are_the_models_own():
    content, _, calls = said(tool_parser("kimi-k2")(context()), TOOL_TEXTS["kimi-k2"][0])
    assert content == "I look it up."
    assert [call[:2] for call in calls] == [("functions.get_weather:0", "get_weather"), ("functions.now:1", "now")]


def test_deepseek_v3_both_spellings():
    old, new = TOOL_TEXTS["deepseek-v3"][:2]
    assert [call[1:] for call in said(tool_parser("deepseek-v3")(context()), old)[2]] == [
        ("get_weather", '{"city": "Zürich", "days": 3}'),
        ("now", "{}"),
    ]
    content, _, calls = said(tool_parser("deepseek-v3")(context()), new)
    assert content == "Let me see.Done."
    assert calls[0][1] == "write_file"


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("", "\n<think>hm</think>Yes.", "hm", "Yes."),
        ("", "Yes <think>no</think>.", "", "Yes <think>no</think>."),
        ("", "\n\nYes.", "", "\n\nYes."),
        ("<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
        ("<think>\n", "hm\n</think>\n</think>\n\nYes.", "hm", "Yes."),
        ("<think>\n", "hm</think>Yes.</think>", "hm", "Yes.</think>"),
        ("<think>\n\n</think>\n\n", "\n</think>\n\nYes.", "", "Yes."),
        ("", "</think>\n\nYes.", "", "</think>\n\nYes."),
        ("<think>\n", "<think>hm</think>Yes.", "hm", "Yes."),
        ("<think>\n", "cut sho", "cut sho", ""),
        ("<think>\n", "cut short</thi", "cut short</thi", ""),
        ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ],
)
def test_reasoning_is_told_from_the_answer(prompt, text, reasoning, content):
    assert said(Qwen3Thinking(context(prompt)), text) == (content, reasoning, [])


def test_kimi_calls_end_the_reasoning():
    parser = OutputParser(KimiThinking(context()), tool_parser("kimi-k2")(context()))
    content, reasoning, calls = said(parser, REASONING_TEXTS["kimi-k2"][1])
    assert (content, reasoning) == ("", "I need the weather.")
    assert [call[1] for call in calls] == ["now"]


UNCLOSED = {
    "hermes": ("qwen3", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    "qwen3-coder": ("qwen3", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    "deepseek-v3": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek-v4": (
        "deepseek",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
}


def answer(name, *, by_text=True):
    reasoning = find_plugin(REASONING_PARSERS, UNCLOSED[name][0]).load()
    return answer_maker(reasoning, tool_parser(name), TOOLS, prompt="<think>\n", by_text=by_text)()


@pytest.mark.parametrize("name", UNCLOSED)
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "num_calls"),
    [
        ("hm\n{}", "", "hm", 1),
        ("{}", "", "", 1),
        ("hm {} {}\n</think>\n\nDone.", "Done.", "hm", 2),
        ("hm {} Done </think> at {} last.", "Doneatlast.", "hm", 2),
        ("hm</think>{}", "", "hm", 1),
    ],
)
def test_calls_end_the_reasoning(name, text, content, reasoning, num_calls):
    for pieces in ([text.format(*2 * [UNCLOSED[name][1]])], [*text.format(*2 * [UNCLOSED[name][1]])]):
        said_content, said_reasoning, calls = said(answer(name), *pieces)
        assert (said_content.replace(" ", ""), said_reasoning) == (content, reasoning)
        assert [call[1:] for call in calls] == num_calls * [("now", "{}")]


@pytest.mark.parametrize("name", UNCLOSED)
def test_what_is_no_whole_call_of_an_offered_function_stays_reasoning(name):
    call = UNCLOSED[name][1]
    begin = call[: call.index("now")]
    for text in (f"{begin}", f"I may write {begin} or not", call.replace("now", "then"), call[:-26] + " …"):
        assert said(answer(name), f"hm {text}\n</think>So.") == ("So.", f"hm {text}", [])
        assert said(answer(name), *f"hm {text}\n</think>So.") == ("So.", f"hm {text}", [])
    assert said(answer(name, by_text=False), f"hm {call}</think>So.") == ("So.", f"hm {call}", [])


def test_a_call_after_one_that_was_none_ends_the_reasoning():
    call = UNCLOSED["hermes"][1]
    text = f'As <tool_call>{{"name": "now", "arguments": {{"a": "<tool_call> is {call}'
    for pieces in ([text], [*text]):
        assert said(answer("hermes"), *pieces)[1:] == (text.removesuffix(call).rstrip(), [("call", "now", "{}")])


def test_a_call_that_may_begin_before_the_reasoning_ended_is_reasoning_if_it_is_none():
    call = UNCLOSED["hermes"][1]
    text = f'As <tool_call>{{"name": "now", "arguments": {{"a": "</think>So {call}'
    for pieces in ([text], [*text]):
        content, reasoning, calls = said(answer("hermes"), *pieces)
        assert (content, reasoning) == ("So", text[: text.index("</think>")])
        assert [name for _, name, _ in calls] == ["now"]


def test_arguments_in_reasoning_that_are_too_long_are_reasoning(monkeypatch):
    monkeypatch.setattr("openinfer_server.parsers.reasoning_calls.MAX_ARGUMENTS", 10)
    call = UNCLOSED["hermes"][1].replace("{}", '{"a": "' + 10 * "x" + '"}')
    for pieces in ([call], [*call]):
        assert said(answer("hermes"), *pieces) == ("", call, [])


def test_begin_tokens_inside_a_call_are_its_own(monkeypatch):
    monkeypatch.setattr("openinfer_server.parsers.reasoning_calls.MAX_TRIALS", 2)
    inner = 4 * "<tool_call>"
    call = f'<tool_call>{{"name": "now", "arguments": {{"a": "{inner}"}}}}</tool_call>'
    for pieces in ([call], [*call]):
        assert said(answer("hermes"), *pieces) == ("", "", [("call", "now", f'{{"a": "{inner}"}}')])


@pytest.mark.parametrize("says", [lambda: (ContentDelta("x") for _ in range(3)), lambda: ["x"]])
@pytest.mark.parametrize("hook", ["feed", "finish"])
def test_what_is_no_list_of_deltas_is_a_fault_inside_the_reasoning_too(hook, says):
    faulty = type("Faulty", (HermesParser,), {hook: lambda self, *text: says()})
    make = answer_maker(Qwen3Thinking, faulty, TOOLS, prompt="<think>\n", by_text=True)
    with pytest.raises(ParserFault, match=r"the tool parser .*Faulty failed"):
        said(make(), "hm <tool_call>", "{")


def test_reasoning_is_not_known_while_it_may_be_a_call():
    parser = answer("hermes", by_text=False)
    seen = []
    for piece, begun in (("hm ", []), ("<tool_call>", [(3, "<tool_call>")]), ("{", []), ("no", []), (" more", [])):
        parser.feed(piece, begun)
        seen.append(parser.reasoning)
    assert seen == [True, False, False, True, True]


@pytest.mark.parametrize("name", ["hermes", "kimi-k2", "deepseek-v3"])
@pytest.mark.parametrize(
    ("function", "written", "told"),
    [
        ("get_weather", '{"arguments": {"city": "Rome"}}', '{"city": "Rome"}'),
        ("get_weather", '{ "arguments" : {"city": "}"} }', '{"city": "}"}'),
        ("get_weather", '{"arguments": {"city": "Rome"}, "days": 3}', None),
        ("get_weather", '{"arguments": "Rome"}', None),
        ("get_weather", '{"argument": {"city": "Rome"}}', None),
        ("get_weather", '{"arguments": {"city": Rome}}', None),
        ("has_arguments", '{"arguments": {"city": "Rome"}}', None),
        ("refers", '{"arguments": {"city": "Rome"}}', None),
        ("unknown", '{"arguments": {"city": "Rome"}}', None),
    ],
)
def test_arguments_in_a_wrapper_are_taken_out_where_it_is_none_of_the_functions(name, function, written, told):
    tools = {
        **TOOLS,
        "has_arguments": {"properties": {"arguments": {"type": "object"}}},
        "refers": {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"properties": {"arguments": {}}}}},
    }
    text = {
        "hermes": f'<tool_call>{{"name": "{function}", "arguments": {written}}}</tool_call>',
        "kimi-k2": f"<|tool_call_begin|>{function}<|tool_call_argument_begin|>{written}<|tool_call_end|>",
        "deepseek-v3": f"<｜tool▁call▁begin｜>{function}<｜tool▁sep｜>{written}<｜tool▁call▁end｜>",
    }[name]
    for pieces in ([text], [*text]):
        assert said(tool_parser(name)(context(tools=tools)), *pieces)[2][0][2] == (told or written)


def test_only_arguments_that_begin_with_a_wrapper_are_held():
    parser = HermesParser(context())
    assert parser.feed('<tool_call>{"name": "now", "arguments": {"ar') == [CallStart(0, "call_0", "now")]
    assert parser.feed('ea": 1') == [CallArguments(0, '{"area": 1')]


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ('<｜DSML｜parameter name="city">5</｜DSML｜parameter>', {"city": "5"}),
        ('<｜DSML｜parameter name="days">5</｜DSML｜parameter>', {"days": 5}),
        (
            '<｜DSML｜parameter name="city" string="true">Rome\n<｜DSML｜parameter name="days" string="false">3\n',
            {"city": "Rome", "days": 3},
        ),
        ('<｜DSML｜parameter name="city" string="true">Rome\n</｜DSML｜parameter>', {"city": "Rome\n"}),
        ('<｜DSML｜parameter name="arguments">{"city": "Rome"}</｜DSML｜parameter>', {"city": "Rome"}),
    ],
)
def test_deepseek_v4_what_models_get_wrong_is_a_call_still(parameters, arguments):
    text = f'<｜DSML｜invoke name="get_weather">\n{parameters}</｜DSML｜invoke>'
    content, _, calls = said(tool_parser("deepseek-v4")(context()), text)
    assert (content, json.loads(calls[0][2])) == ("", arguments)


@pytest.mark.parametrize(
    ("inside", "content"),
    [
        ("I call:<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "I call:"),
        ("<|tool_call_begin|>functions.now:0 it is<|tool_call_argument_begin|>{}<|tool_call_end|>", "it is"),
        ("<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{} so<|tool_call_end|>", "so"),
        ("<|tool_call_end|><|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>", ""),
    ],
)
def test_kimi_noise_in_a_section_is_content_without_its_tokens(inside, content):
    text = f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"
    said_content, _, calls = said(tool_parser("kimi-k2")(context()), text)
    assert (said_content, [call[1:] for call in calls]) == (content, [("now", "{}")])


def test_reasoning_is_known_piece_by_piece():
    parser = Qwen3Thinking(context())
    seen = [parser.reasoning]
    for piece in ("<thi", "nk>", "\nhm", "</think", ">", "x"):
        parser.feed(piece)
        seen.append(parser.reasoning)
    assert seen == [False, False, True, True, True, False, False]


SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": ["integer", "null"]},
        "level": {"enum": ["low", 3]},
        "any": {},
        "list": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Name"}]},
        "loop": {"$ref": "#/$defs/Loop"},
        "float": {"type": ["float", "int"]},
        "dict": {"type": "dict"},
        "str": {"type": "str"},
    },
    "$defs": {"Name": {"const": "x"}, "Loop": {"$ref": "#/$defs/Loop"}},
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("text", "5", '"5"'),
        ("text", "true", '"true"'),
        ("count", "5", "5"),
        ("count", " 5 ", "5"),
        ("count", "five", '"five"'),
        ("count", "None", "null"),
        ("level", "3", "3"),
        ("level", "low", '"low"'),
        ("any", '{"a": 1}', '{"a": 1}'),
        ("any", "{'a': 1}", "\"{'a': 1}\""),
        ("any", "1e400", '"1e400"'),
        ("any", 1500 * "[", '"' + 1500 * "[" + '"'),
        ("list", "[1]", "[1]"),
        ("list", "True", '"True"'),
        ("loop", "7", "7"),
        ("unknown", "7", "7"),
        ("float", "0.5", "0.5"),
        ("float", "half", '"half"'),
        ("dict", '{"a": 1}', '{"a": 1}'),
        ("str", "5", '"5"'),
    ],
)
def test_values_become_json_of_their_type(name, text, expected):
    assert as_json(text, types_of(SCHEMA, name)) == expected
    json.loads(expected)


@pytest.mark.parametrize(
    "schema", [{}, {"properties": []}, {"properties": {"a": "x"}}, {"properties": {"a": {"type": 5}}}]
)
def test_odd_schemas_allow_anything(schema):
    assert types_of(schema, "a") == ANYTHING


def test_schemas_that_refer_to_each_other_without_end_are_bounded():
    web = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{j}"} for j in range(300)]} for i in range(300)}
    schema = {"properties": {"a": {"$ref": "#/$defs/n0"}}, "$defs": web}
    assert types_of(schema, "a") == ANYTHING
    assert types_of({**schema, "$defs": {"n0": {"anyOf": [{"$ref": "#/$defs/n0"}, {"type": "null"}]}}}, "a") == {"null"}


def test_markers_that_contain_each_other_are_refused():
    with pytest.raises(ValueError, match="contain"):
        Markers("<a>", "x<a>")


TEMPLATES = {
    "<tool_call> </think>": ("hermes", "qwen3"),
    "<tool_call> <function= </think>": ("qwen3-coder", "qwen3"),
    "<｜Assistant｜> <｜tool▁calls▁begin｜> </think>": ("deepseek-v3", "deepseek"),
    "<｜Assistant｜> ｜DSML｜ </think>": ("deepseek-v4", "deepseek"),
    "<|im_middle|> <|tool_calls_section_begin|> </think>": ("kimi-k2", "kimi-k2"),
    "<|im_middle|> <|tool_calls_section_begin|>": ("kimi-k2", None),
    "<|im_middle|> tools": ("kimi-k2", None),
    "<tool_call> <arg_key> </think>": (None, "qwen3"),
    "<seed:tool_call> <function=": (None, None),
    "": (None, None),
}


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.items())
def test_auto_goes_by_what_the_template_shows(template, expected):
    chosen = choose_parsers(ModelTraits("anything", template))
    names = tuple(None if part is None else part.plugin.name for part in (chosen.tools, chosen.reasoning))
    assert names == expected


def test_auto_goes_by_the_family_where_there_is_no_template():
    chosen = choose_parsers(ModelTraits("deepseek_v4", ""))
    assert chosen.parts["tool_parser"].startswith("deepseek-v4 (openinfer-server ")
    assert chosen.parts["reasoning_parser"].startswith("deepseek (openinfer-server ")
