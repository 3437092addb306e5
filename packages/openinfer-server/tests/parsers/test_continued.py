"""Parsers of answers whose beginning the client has written: nothing of it is said again, and all that follows is."""

import json

import pytest

from openinfer_server.parsers.choose import choose_parsers
from openinfer_server.parsers.continued import CallBegun
from openinfer_server.parsers.contract import ModelTraits
from openinfer_server.parsers.deltas import CallArguments, CallStart, ContentDelta, ReasoningDelta, merge

PARSERS = choose_parsers(ModelTraits("", ""), tool_parser="hermes", reasoning_parser="qwen3")
TOOLS = {"find": {"type": "object"}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'


def rest(begun: str, further: str, prompt: str = "", size: int = 1) -> list[object]:
    parser = PARSERS.open(prompt, TOOLS, begun=begun)
    pieces = [further[place : place + size] for place in range(0, len(further), size)]
    return merge([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("begun", "further", "said"),
    [
        ("Sure, ", "I can.", [ContentDelta("I can.")]),
        ("Sure,", " I can.", [ContentDelta(" I can.")]),
        ("a <", "b", [ContentDelta("b")]),
        ("a </th", "e", [ContentDelta("e")]),
        ("<think>\nLet", " me</think>\n\nHi", [ReasoningDelta(" me"), ContentDelta("Hi")]),
        ("<think>\nLet\n", "me</think>Hi", [ReasoningDelta("me"), ContentDelta("Hi")]),
        ("<think>\nLet\n", "\n</think>Hi", [ContentDelta("Hi")]),
        ("<think>Let</th", "ink>Hi", [ContentDelta("Hi")]),
        ("<think>Let</th", "e", [ReasoningDelta("e")]),
        ("<think>a</think>b", "c", [ContentDelta("c")]),
        ("<thi", "nk>a</think>b", [ReasoningDelta("a"), ContentDelta("b")]),
        ("<thi", "s", [ContentDelta("s")]),
    ],
)
def test_beginning_is_not_said_again(begun, further, said, size):
    assert rest(begun, further, size=size) == said


def test_reasoning_that_the_template_has_opened_is_continued():
    assert rest("Let", " me</think>Hi", prompt="<think>\n") == [ReasoningDelta(" me"), ContentDelta("Hi")]


def test_a_call_may_follow_the_beginning_and_begin_in_it():
    for length in (0, 12, 40):
        start, arguments, _ = rest(f"Let me look.\n{CALL[:length]}", CALL[length:])
        assert isinstance(start, CallStart)
        assert (start.index, start.name) == (0, "find")
        assert isinstance(arguments, CallArguments)
        assert json.loads(arguments.text) == {"a": 1}


def test_a_call_in_reasoning_that_was_begun_ends_it():
    parser = PARSERS.open("", TOOLS, begun="<think>\nLet")
    said = merge(parser.feed(f" me. {CALL}", [(len(" me. "), "<tool_call>")]) + parser.finish())
    assert [type(delta) for delta in said[:2]] == [ReasoningDelta, CallStart]


def test_what_only_looked_like_a_call_is_not_said_again():
    assert rest(CALL[:20], "]") == [ContentDelta("]")]


@pytest.mark.parametrize("begun", [CALL, CALL[:44]])
def test_a_call_in_the_beginning_is_refused(begun):
    with pytest.raises(CallBegun):
        PARSERS.open("", TOOLS, begun=begun)
