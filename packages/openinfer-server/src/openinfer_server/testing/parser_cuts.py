"""The property of all parsers, by hypothesis: what they say does not depend on how the text is cut.

    python -m openinfer_server.testing.parser_cuts --cuts 60000 --json FILE

feeds so many cut texts, shared out over all formats that come with the server, each alone and after its reasoning
parser, and writes what was fed. Needs hypothesis.
"""

import argparse
import itertools
import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from openinfer_core.plugins import find_plugin
from openinfer_server.parsers import ParserContext
from openinfer_server.parsers.choose import REASONING_PARSERS, TOOL_PARSERS
from openinfer_server.testing.parser_texts import PAIRS, REASONING_PROMPTS, REASONING_TEXTS, TOOL_TEXTS, TOOLS
from openinfer_server.testing.parsers import MakeParser, answer_maker, check_cut, check_text

_FRAGMENT = re.compile(r"<[^<>\s]*>?|\w+|\s+|[^\w\s]")
_WAYS = 4  # random ways of cutting each text; a fifth is one character at a time


@dataclass(frozen=True, slots=True)
class Subject:
    """A parser, or a pair, and texts that it knows."""

    name: str
    make: MakeParser
    texts: tuple[str, ...]


def subjects() -> list[Subject]:
    """All formats that come with the server."""
    tools = [Subject(f"tool parser {name}", _tool_maker(name), texts) for name, texts in TOOL_TEXTS.items()]
    reasoning = [
        Subject(f"reasoning parser {name} after {prompt!r}", _reasoning_maker(name, prompt), texts)
        for name, texts in REASONING_TEXTS.items()
        for prompt in REASONING_PROMPTS
    ]
    pairs = [
        Subject(f"{first} and {second}", _pair_maker(first, second), _both(first, second)) for first, second in PAIRS
    ]
    return [*tools, *reasoning, *pairs]


def check_subject(subject: Subject, *, num_texts: int) -> int:
    """Checks texts that hypothesis makes out of a format's own; returns how many cut texts were fed."""
    fed = 0

    @settings(
        max_examples=num_texts,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=(HealthCheck.too_slow,),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal fed
        text = data.draw(texts_like(subject.texts), label="text")
        expected = check_text(subject.make, text)
        check_cut(subject.make, text, range(1, len(text)), expected)
        place = st.integers(0, len(text))
        for _ in range(_WAYS):
            check_cut(subject.make, text, sorted(data.draw(st.lists(place, max_size=12), label="cuts")), expected)
        fed += 1 + _WAYS

    check()
    return fed


def texts_like(texts: Sequence[str]) -> SearchStrategy[str]:
    """A format's own texts with pieces left out, doubled and put in, and free mixtures of their pieces."""
    fragments = sorted({fragment for text in texts for fragment in _FRAGMENT.findall(text)})
    piece = st.one_of(st.sampled_from(fragments), st.text(max_size=4))
    return st.one_of(st.lists(piece, max_size=40).map("".join), st.sampled_from(texts).flatmap(_edited(piece)))


def _edited(piece: SearchStrategy[str]):
    def edit(text: str) -> SearchStrategy[str]:
        place = st.integers(0, len(text))
        edits = st.lists(st.tuples(place, place, piece), max_size=3)
        return edits.map(lambda several: _apply(text, several))

    return edit


def _apply(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, piece in edits:
        text = text[:start] + piece + text[end:]
    return text


def _context(prompt: str) -> ParserContext:
    numbers = itertools.count()
    return ParserContext(prompt, TOOLS, lambda: f"call_{next(numbers)}")


def _tool_maker(name: str) -> MakeParser:
    parser = find_plugin(TOOL_PARSERS, name).load()
    return lambda: parser(_context(""))


def _reasoning_maker(name: str, prompt: str) -> MakeParser:
    parser = find_plugin(REASONING_PARSERS, name).load()
    return lambda: parser(_context(prompt))


def _pair_maker(reasoning: str, tools: str) -> MakeParser:
    first = find_plugin(REASONING_PARSERS, reasoning).load()
    return answer_maker(first, find_plugin(TOOL_PARSERS, tools).load(), TOOLS, by_text=True)


def _both(reasoning: str, tools: str) -> tuple[str, ...]:
    """Answers with reasoning that is closed, and with calls inside it."""
    closed = tuple(f"<think>\nWhat now?\n</think>\n\n{text}" for text in TOOL_TEXTS[tools])
    unclosed = tuple(f"<think>\nWhat now?\n\n{text}\n</think>\n\nDone." for text in TOOL_TEXTS[tools])
    return closed + unclosed + REASONING_TEXTS[reasoning]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    found = subjects()
    num_texts = -(-arguments.cuts // (len(found) * (1 + _WAYS)))
    begin_s = time.monotonic()
    rows = {subject.name: check_subject(subject, num_texts=num_texts) for subject in found}
    report = {
        "cuts": sum(rows.values()),
        "violations": 0,
        "seconds": round(time.monotonic() - begin_s, 1),
        "python": platform.python_version(),
        "commit": arguments.commit,
        "cuts_by_subject": rows,
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    if arguments.json is not None:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=60_000, metavar="N")
    parser.add_argument("--commit", metavar="ID", help="what is checked, for the report")
    parser.add_argument("--json", metavar="FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
