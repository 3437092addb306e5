"""The parser passes the kit, is found by its name and by a template, and reads what it should."""

import json

from openinfer_core.plugins import find_plugin
from openinfer_mistral_calls import MistralParser
from openinfer_server.parsers import CallArguments, CallEnd, CallStart, ContentDelta, ModelTraits, choose_parsers
from openinfer_server.parsers.choose import TOOL_PARSERS
from openinfer_server.testing.parsers import check_tool_parser, whole_of

TOOLS = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "now": {}}
TEXTS = (
    'I look it up.\n[TOOL_CALLS]get_weather[ARGS]{"city": "Z\u00fcrich"}[TOOL_CALLS]now[ARGS]{}',
    '[TOOL_CALLS]get_weather[ARGS]{"city": "a \\"[TOOL_CALLS]\\" {"} Done.',
    "Calls begin with [TOOL_CALLS], lists with [.",
)


def test_parser_conforms() -> None:
    assert check_tool_parser(MistralParser, TEXTS, tools=TOOLS) > 1000


def test_parser_is_found_by_its_name_and_by_what_a_template_shows() -> None:
    assert find_plugin(TOOL_PARSERS, "mistral").load() is MistralParser
    chosen = choose_parsers(ModelTraits("mistral", "{{ '[TOOL_CALLS]' }} {{ '[ARGS]' }}"))
    assert chosen.parts["tool_parser"].startswith("mistral (openinfer-mistral-calls ")


def test_calls_and_content_are_told_apart() -> None:
    first, *calls = whole_of(MistralParser, TEXTS[0], tools=TOOLS)
    assert first == ContentDelta("I look it up.")
    assert calls == [
        CallStart(0, "call_0", "get_weather"),
        CallArguments(0, '{"city": "Zürich"}'),
        CallEnd(0),
        CallStart(1, "call_1", "now"),
        CallArguments(1, "{}"),
        CallEnd(1),
    ]


def test_arguments_may_say_anything() -> None:
    _, arguments, _, rest = whole_of(MistralParser, TEXTS[1], tools=TOOLS)
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"city": 'a "[TOOL_CALLS]" {'}
    assert rest == ContentDelta("Done.")


def test_what_is_no_call_is_content() -> None:
    for text in (TEXTS[2], "[TOOL_CALLS]", "[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS]now[ARGS] no"):
        assert whole_of(MistralParser, text, tools=TOOLS) == [ContentDelta(text)]
