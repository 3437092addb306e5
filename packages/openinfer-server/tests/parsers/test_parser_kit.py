"""The conformance kit of parsers finds parsers that do not conform; the choice refuses what is none."""

from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from openinfer_core.errors import UnknownPlugin
from openinfer_core.testing import ConformanceError
from openinfer_server.errors import UnusableParser
from openinfer_server.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    ModelTraits,
    ReasoningDelta,
    choose_parsers,
)
from openinfer_server.parsers.hermes import HermesParser
from openinfer_server.parsers.thinking import Qwen3Thinking
from openinfer_server.testing.parser_texts import REASONING_PROMPTS, REASONING_TEXTS, TOOL_TEXTS, TOOLS
from openinfer_server.testing.parsers import check_reasoning_parser, check_tool_parser

TEXTS = TOOL_TEXTS["hermes"]


class LosesText(HermesParser):
    """Drops what turns out to be no call."""

    def give_up(self):
        self.commit()


class SeesPieces(HermesParser):
    """Knows a tag only if it comes in one piece."""

    def feed(self, text):
        return [ContentDelta(text)] if text and "<" not in text and "{" not in text else super().feed(text)


class Raises(HermesParser):
    """Cannot bear half a tag at the end."""

    def finish(self):
        if self._buffer:
            raise RuntimeError("half a tag")
        return super().finish()


class Hoards(HermesParser):
    """Says everything at the end."""

    def feed(self, text):
        self.kept = [*getattr(self, "kept", []), *super().feed(text)]
        return []

    def finish(self):
        return [*self.kept, *super().finish()]


class NeverEnds(HermesParser):
    """Leaves calls open."""

    def end_call(self, **_):
        pass


class MiscountsCalls(HermesParser):
    """Every call is the first."""

    def begin_call(self, name, call_id=None):
        self._index = -1
        super().begin_call(name, call_id)


class Thinks(HermesParser):
    """Takes content for reasoning."""

    def feed(self, text):
        return [ReasoningDelta(d.text) if isinstance(d, ContentDelta) else d for d in super().feed(text)]


class FindsNothing(HermesParser):
    """Finds no calls."""

    def feed(self, text):
        return [ContentDelta(text)] if text else []


@pytest.mark.parametrize(
    ("parser", "violation"),
    [
        (LosesText, "is lost"),
        (SeesPieces, "at once"),
        (Hoards, "held back"),
        (NeverEnds, "does not end|out of order|while call"),
        (MiscountsCalls, "out of order"),
        (Thinks, "no reasoning"),
        (FindsNothing, "none of the texts has a call"),
    ],
)
def test_kit_refuses_a_tool_parser_that(parser, violation):
    with pytest.raises(ConformanceError, match=violation):
        check_tool_parser(parser, TEXTS, tools=TOOLS)


class ClosesNothing(HermesParser):
    """Does not say that a call ended with its tag."""

    def end_call(self, **_):
        super().end_call()


class BeginsWithWords(HermesParser):
    """Names a token that begins no calls."""

    begin_tokens: ClassVar = {"</tool_call>": ""}


@pytest.mark.parametrize("parser", [ClosesNothing, BeginsWithWords])
def test_kit_refuses_begin_tokens_of_which_no_call_is_seen(parser):
    with pytest.raises(ConformanceError, match="none of the texts has a whole call"):
        check_tool_parser(parser, TEXTS, tools=TOOLS)


def test_kit_lets_what_a_parser_raises_through():
    with pytest.raises(RuntimeError, match="half a tag"):
        check_tool_parser(Raises, TEXTS, tools=TOOLS)


class NeverCloses(Qwen3Thinking):
    closing_text = "</thought>"


def test_kit_refuses_a_reasoning_parser_whose_closing_text_does_not_close():
    with pytest.raises(ConformanceError, match="still reasoning"):
        check_reasoning_parser(NeverCloses, REASONING_TEXTS["qwen3"], prompts=REASONING_PROMPTS)


class IsDoneTooSoon(Qwen3Thinking):
    @property
    def done(self):
        return not self.reasoning

    @done.setter
    def done(self, value):
        pass


def test_kit_refuses_a_reasoning_parser_that_is_done_before_it_is():
    with pytest.raises(ConformanceError, match="it was done"):
        check_reasoning_parser(IsDoneTooSoon, REASONING_TEXTS["qwen3"], prompts=REASONING_PROMPTS)


class CallsOut(Qwen3Thinking):
    def finish(self):
        return [*super().finish(), CallStart(0, "a", "b"), CallArguments(0, "{}"), CallEnd(0)]


def test_kit_refuses_a_reasoning_parser_that_calls():
    with pytest.raises(ConformanceError, match="no calls"):
        check_reasoning_parser(CallsOut, REASONING_TEXTS["qwen3"], prompts=REASONING_PROMPTS)


def lister(*entries):
    return lambda group: [EntryPoint(name, f"{__name__}:{value}", group) for name, value in entries if group == GROUP]


GROUP = "openinfer.tool_parsers"


def test_parsers_that_both_claim_a_model_are_refused():
    both = lister(("one", "x"), ("two", "y"))
    entries = {"one": HermesParser, "two": LosesText}

    def list_both(group):
        return [_Loaded(entry, entries[entry.name]) for entry in both(group)]

    with pytest.raises(UnusableParser, match=r"one .*, two .*--tool-parser"):
        choose_parsers(ModelTraits("", "<tool_call>"), lister=list_both)
    chosen = choose_parsers(ModelTraits("", "<tool_call>"), tool_parser="two", lister=list_both)
    assert chosen.tools.parser is LosesText
    assert choose_parsers(ModelTraits("", "<tool_call>"), tool_parser="none", lister=list_both).tools is None


def test_what_is_no_parser_is_refused():
    for value, lack in ((object, "lacks visible_tokens"), (HermesParser, "closing_text")):
        group = "openinfer.tool_parsers" if value is object else "openinfer.reasoning_parsers"
        entry = EntryPoint("odd", "odd:odd", group)

        def list_one(asked, group=group, entry=entry, value=value):
            return [_Loaded(entry, value)] if asked == group else []

        with pytest.raises(UnusableParser, match=lack):
            choose_parsers(ModelTraits("", ""), lister=list_one)


def test_a_parser_whose_texts_are_none_is_refused_where_it_is_chosen():
    class ClosesWithANumber(HermesParser):
        closing_text = 5

        @classmethod
        def claims(cls, traits):
            return "closes" in traits.template

    entry = EntryPoint("odd", "odd:odd", "openinfer.reasoning_parsers")

    def list_one(asked):
        return [_Loaded(entry, ClosesWithANumber)] if asked == entry.group else []

    for template, name in (("closes", "auto"), ("", "odd")):
        with pytest.raises(UnusableParser, match=r"the parser odd .* its closing_text is no text"):
            choose_parsers(ModelTraits("", template), reasoning_parser=name, lister=list_one)
    assert choose_parsers(ModelTraits("", ""), lister=list_one).reasoning is None


def test_a_name_that_nobody_offers_is_refused():
    with pytest.raises(UnknownPlugin, match="hermes"):
        choose_parsers(ModelTraits("", ""), tool_parser="hermse")


class _Loaded:
    """An entry point whose object is already there."""

    def __init__(self, entry, found):
        self.name, self.value, self.group, self.dist = entry.name, entry.value, entry.group, None
        self.module = HermesParser.__module__  # one that says its contract
        self._found = found

    def load(self):
        return self._found
