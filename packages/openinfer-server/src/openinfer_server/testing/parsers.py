"""Conformance of tool and reasoning parsers. No test framework is needed.

A parser's author gives texts as their model writes them. From each the kit makes further texts, cut short, with pieces
left out, doubled and put in, and checks for all of them, over random ways of cutting each into pieces:

- what is said, put together, does not depend on the pieces, down to single characters and empty pieces (of the
  author's own texts every way of cutting them in two is tried);
- nothing raises, and the deltas keep their order (a call begins, gets arguments, ends; numbers rise from 0);
- no word of the text is lost: words put in anywhere come out as content, reasoning, name, id or argument;
- text that cannot be markup does not wait: prose comes out while it goes in.

Of a tool parser with `begin_tokens` the kit also checks, with the same cuts, that a whole call inside reasoning ends it
where it begins with such a token, and that all else is reasoning to the last character: the same text in other tokens,
calls of functions that are not on offer, and words about the token.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from openinfer_core.testing.errors import require
from openinfer_server.parsers.choose import answer_parser
from openinfer_server.parsers.contract import ParserContext, ReasoningParser, ToolParser
from openinfer_server.parsers.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    merge,
)
from openinfer_server.parsers.output import OutputParser
from openinfer_server.parsers.reasoning_calls import CallsInReasoning, begin_tokens_of, is_object
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.thinking import OPEN, Qwen3Thinking


class TextFed(Protocol):
    """What is checked: a parser of either kind, or several in sequence."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class ReasoningFed(TextFed, Protocol):
    """What is checked of a reasoning parser in addition."""

    @property
    def closing_text(self) -> str: ...

    @property
    def reasoning(self) -> bool: ...

    @property
    def done(self) -> bool: ...


MakeParser = Callable[[], TextFed]

MAX_HELD_PROSE = 4096  # characters of prose that may be held at a time
_PROSE = "The quick brown fox jumps over the lazy dog, 3 < 4 and 5 > 4 {not} [json]. "


def check_tool_parser(
    parser: Callable[[ParserContext], TextFed],
    texts: Sequence[str],
    *,
    tools: Mapping[str, Mapping[str, Any]],
    cuts_per_text: int = 20,
    variants_per_text: int = 20,
    seed: int = 0,
) -> int:
    """Checks a tool parser; returns how many cut texts it was fed.

    Args:
        parser: the class.
        texts: whole answers as the model writes them, with calls and without.
        tools: functions on offer -> JSON Schema of their parameters.
        cuts_per_text: random ways of cutting each text.
        variants_per_text: damaged texts made from each.
        seed: of all of it.

    Raises:
        ConformanceError: it does not conform.
    """
    make = _maker(parser, "", tools)
    _check_says(make, texts, ReasoningDelta, "a tool parser says no reasoning")
    require(
        any(isinstance(delta, CallStart) for text in texts for delta in whole(make, text)),
        "none of the texts has a call: nothing would be checked",
    )
    fed = check_cuts(make, texts, cuts_per_text=cuts_per_text, variants_per_text=variants_per_text, seed=seed)
    if begin_tokens_of(cast("type[ToolParser]", parser)):
        fed += _check_calls_in_reasoning(parser, texts, tools, cuts_per_text=cuts_per_text, seed=seed)
    return fed


def check_reasoning_parser(
    parser: Callable[[ParserContext], ReasoningFed],
    texts: Sequence[str],
    *,
    prompts: Sequence[str],
    cuts_per_text: int = 20,
    variants_per_text: int = 20,
    seed: int = 0,
) -> int:
    """Checks a reasoning parser after each of some prompts; returns how many cut texts it was fed.

    `prompts` are ends of prompts, with the reasoning opened and not; the rest is as for `check_tool_parser`.

    Raises:
        ConformanceError: it does not conform.
    """
    fed = 0
    for prompt in prompts:
        make = _maker(parser, prompt, {})
        _check_says(make, texts, CallStart, "a reasoning parser says no calls")
        fed += check_cuts(make, texts, cuts_per_text=cuts_per_text, variants_per_text=variants_per_text, seed=seed)
        for text in texts:
            _check_done(parser, prompt, text)
    _check_closing(parser, prompts)
    return fed


class BeginTokensByText:
    """Feeds both parsers of one answer with begin tokens wherever their text stands, as encoding a text gives them.

    Each is announced with its first character, and the rest of it comes later, as behind a stop string.
    """

    def __init__(self, parser: OutputParser, begin_tokens: Iterable[str]) -> None:
        self._parser = parser
        self._markers = Markers(*begin_tokens)
        self._held = ""
        self._offset = 0

    def feed(self, text: str) -> list[Delta]:
        text = self._held + text
        said: list[Delta] = []
        while found := self._markers.find(text):
            said += self._pass(text[: found.start()])
            begun = (self._offset, found.group())
            said += self._parser.feed(found.group()[0], [begun])
            self._offset += 1
            said += self._pass(found.group()[1:])
            text = text[found.end() :]
        held = self._markers.num_held(text)
        self._held = text[len(text) - held :]
        return said + self._pass(text[: len(text) - held])

    def finish(self) -> list[Delta]:
        return self._pass(self._held) + self._parser.finish()

    def _pass(self, text: str) -> list[Delta]:
        self._offset += len(text)
        return self._parser.feed(text)


def answer_maker(
    reasoning: type[ReasoningParser],
    parser: Callable[[ParserContext], TextFed],
    tools: Mapping[str, Mapping[str, Any]],
    *,
    prompt: str = "",
    by_text: bool = False,
) -> MakeParser:
    """Makes both parsers of an answer; `by_text` is as for `BeginTokensByText`, otherwise no begin token has its id."""

    def make() -> TextFed:
        context = ParserContext(prompt, tools, lambda: "call")  # what is tried may take ids, too
        both = answer_parser(context, reasoning, cast("type[ToolParser]", parser))
        names = begin_tokens_of(cast("type[ToolParser]", parser))
        return BeginTokensByText(both, names) if by_text and names else both

    return make


def check_cuts(make: MakeParser, texts: Iterable[str], *, cuts_per_text: int, variants_per_text: int, seed: int) -> int:
    """What both kinds of parsers are checked for; returns how many cut texts were fed."""
    rng = random.Random(seed)  # noqa: S311 - no secrets here
    fed = 0
    for text in texts:
        check_prose_flows(make, text)
        fed += check_single_cuts(make, text)
        for variant, words in itertools.chain([(text, ())], damaged(text, variants_per_text, rng)):
            expected = check_text(make, variant, words)
            ways = itertools.chain([range(1, len(variant))], _random_cuts(variant, cuts_per_text, rng))
            for cuts in ways:
                check_cut(make, variant, cuts, expected)
                fed += 1
    return fed


def check_single_cuts(make: MakeParser, text: str) -> int:
    """Checks every way of cutting a text into two; returns how many there are."""
    expected = check_text(make, text)
    for place in range(1, len(text)):
        check_cut(make, text, (place,), expected)
    return max(0, len(text) - 1)


def check_text(make: MakeParser, text: str, words: Sequence[str] = ()) -> list[Delta]:
    """Feeds a text at once and checks order and words; returns what was said, put together."""
    deltas = whole(make, text)
    _check_order(deltas, text)
    said = "\n".join(_words_of(deltas))
    for word in words:
        require(word in said, f"the word {word!r} of {text!r} is lost: {deltas}")
    return deltas


def check_cut(make: MakeParser, text: str, cuts: Iterable[int], expected: Sequence[Delta]) -> None:
    """Checks that a text cut at these places says the same."""
    pieces = _pieces(text, cuts)
    said = merge(feed(make(), pieces))
    require(said == expected, f"fed as {pieces!r} it says {said}, at once {list(expected)}")


def whole_of(
    parser: Callable[[ParserContext], TextFed], text: str, *, tools: Mapping[str, Mapping[str, Any]], prompt: str = ""
) -> list[Delta]:
    """What a parser says of a text, put together; ids it asks for are `call_0`, `call_1`, …."""
    return whole(_maker(parser, prompt, tools), text)


def whole(make: MakeParser, text: str) -> list[Delta]:
    return merge(feed(make(), [text]))


def feed(parser: TextFed, pieces: Iterable[str]) -> list[Delta]:
    said: list[Delta] = []
    for piece in pieces:
        said += parser.feed(piece)
    return said + parser.finish()


def check_prose_flows(make: MakeParser, text: str) -> None:
    """Checks that prose after a text is not held back: a long answer must neither wait nor fill the memory."""
    parser = make()
    parser.feed(text)
    said = 0
    prose = _PROSE * (4 * MAX_HELD_PROSE // len(_PROSE))
    for piece in _pieces(prose, range(7, len(prose), 7)):
        said += sum(len(delta.text) for delta in parser.feed(piece) if not isinstance(delta, CallStart | CallEnd))
    held = len(prose) - said
    require(held <= MAX_HELD_PROSE, f"after {text!r}, {held} characters of prose are held back")


def damaged(text: str, count: int, rng: random.Random) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Texts made from one, as models and length limits damage them, with words put in that must not be lost."""
    for number in range(count):
        start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        word = f"w{number}q{rng.randrange(10**6)}"
        match number % 5:
            case 0:
                yield text[:end], ()
            case 1:
                yield text[:start] + word + text[start:], (word,)
            case 2:
                yield text[:start] + word + text[end:], (word,)
            case 3:
                yield text[:end] + text[start:], ()
            case _:
                yield text[:start] + word + text[start:end], (word,)


def _maker(
    parser: Callable[[ParserContext], TextFed], prompt: str, tools: Mapping[str, Mapping[str, Any]]
) -> MakeParser:
    def make() -> TextFed:
        numbers = itertools.count()
        return parser(ParserContext(prompt, tools, lambda: f"call_{next(numbers)}"))

    return make


def _check_calls_in_reasoning(
    parser: Callable[[ParserContext], TextFed],
    texts: Iterable[str],
    tools: Mapping[str, Mapping[str, Any]],
    *,
    cuts_per_text: int,
    seed: int,
) -> int:
    """Checks calls of a tool parser with `begin_tokens` inside reasoning; returns how many cut texts were fed."""
    begin_tokens = begin_tokens_of(cast("type[ToolParser]", parser))
    others: Mapping[str, Mapping[str, Any]] = {"another function": {}}
    make, spelled, unknown = (
        answer_maker(cast("type[ReasoningParser]", Qwen3Thinking), parser, offered, prompt=OPEN, by_text=by_text)
        for offered, by_text in ((tools, True), (tools, False), (others, True))
    )
    thought = "I think."
    fed = found = 0
    for call, alone in _whole_calls(parser, begin_tokens, texts, tools):
        found += 1
        text = f"{thought}\n{call}"
        expected = [ReasoningDelta(thought), *alone]
        said = check_text(make, text)
        require(said == expected, f"a call in the reasoning of {text!r} is said as {said}, by itself as {expected}")
        fed += check_cuts(make, [text], cuts_per_text=cuts_per_text, variants_per_text=cuts_per_text, seed=seed)
        for why, kept in (("begins with no begin token", spelled), ("names no function on offer", unknown)):
            said = whole(kept, text)
            require(said == [ReasoningDelta(text)], f"what {why} in {text!r} is said as {said}; it is reasoning")
    require(found, f"none of the texts has a whole call that begins with one of {list(begin_tokens)}")
    for name, before in begin_tokens.items():
        text = f"{thought} Calls begin with {before}{name} and have a name."
        said = whole(make, text)
        require(said == [ReasoningDelta(text)], f"words about a begin token, {text!r}, are said as {said}")
    return fed


def _whole_calls(
    parser: Callable[[ParserContext], TextFed],
    begin_tokens: Mapping[str, str],
    texts: Iterable[str],
    tools: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, list[Delta]]]:
    """Ends of texts that begin with a begin token and a whole call, and what is said of them."""
    for text in texts:
        places = [text.find(before + name) for name, before in begin_tokens.items() if before + name in text]
        if not places:
            continue
        call = text[min(places) :].rstrip()
        reader = parser(ParserContext("", tools, lambda: "call"))
        said = merge(feed(reader, [call]))
        match said:
            case [CallStart(name=name), CallArguments(text=arguments), CallEnd(), *_]:
                is_closed = 0 in cast("CallsInReasoning", reader).closed_calls
                if is_closed and name in tools and is_object(arguments):
                    yield call, said
            case _:
                continue


def _check_says(make: MakeParser, texts: Iterable[str], kind: type[Delta], violation: str) -> None:
    for text in texts:
        require(not any(isinstance(delta, kind) for delta in whole(make, text)), violation)


def _check_closing(parser: Callable[[ParserContext], ReasoningFed], prompts: Sequence[str]) -> None:
    """A prompt must open the reasoning, and the closing text must end it."""
    opened = [reader for reader in (parser(ParserContext(prompt, {}, str)) for prompt in prompts) if reader.reasoning]
    require(opened, f"after none of the prompts {list(prompts)} the parser is reasoning")
    for reader in opened:
        reader.feed("I think ")
        require(not reader.done, "it says that it is done, and is reasoning")
        reader.feed(reader.closing_text)
        require(not reader.reasoning, f"after its closing_text {reader.closing_text!r} it is still reasoning")


def _check_done(parser: Callable[[ParserContext], ReasoningFed], prompt: str, text: str) -> None:
    """Once it says that it is done, what comes is content as it stands, and nothing is held."""
    reader = parser(ParserContext(prompt, {}, str))
    for character in text:
        was_done = reader.done
        said = merge(reader.feed(character))
        require(
            not was_done or said == [ContentDelta(character)],
            f"it was done, and says {said} of {character!r} in {text!r}",
        )
    require(not reader.done or not reader.finish(), f"it was done, and held something of {text!r}")


def _check_order(deltas: Iterable[Delta], text: str) -> None:
    """One call at a time, numbered from 0; nothing else inside it; no empty text."""
    open_call, calls = None, 0
    for delta in deltas:
        match delta:
            case CallStart(index=index, name=name, call_id=call_id):
                require(open_call is None and index == calls, f"call {index} begins out of order in {text!r}")
                require(name and call_id, f"a call without name or id in {text!r}")
                open_call, calls = index, calls + 1
            case CallArguments(index=index) | CallEnd(index=index):
                require(index == open_call, f"{delta} while call {open_call} is open in {text!r}")
                open_call = None if isinstance(delta, CallEnd) else open_call
            case ContentDelta() | ReasoningDelta():
                require(open_call is None, f"{delta} while call {open_call} is open in {text!r}")
        require(getattr(delta, "text", "x"), f"an empty {delta} in {text!r}")
    require(open_call is None, f"call {open_call} does not end in {text!r}")


def _words_of(deltas: Iterable[Delta]) -> Iterator[str]:
    for delta in deltas:
        if isinstance(delta, CallStart):
            yield delta.name
            yield delta.call_id
        elif not isinstance(delta, CallEnd):
            yield delta.text


def _random_cuts(text: str, count: int, rng: random.Random) -> Iterator[list[int]]:
    """Places to cut at, some of them twice, which makes empty pieces."""
    for _ in range(count):
        yield sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(1, 12)))


def _pieces(text: str, cuts: Iterable[int]) -> list[str]:
    places = [0, *cuts, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]
